"""Large values in the output stage. `test_operations.py` compares it with its definition."""

import pytest
import torch
from tests.kernels.rows import output
from tests.kernels.table import F32

from bedouin.kernels.output import gated_output

PLAIN = pytest.param("reference", "cpu")
INTERPRETED = pytest.param("triton", "cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("triton", "cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("backend", "device"), [PLAIN, INTERPRETED, COMPILED])
@pytest.mark.parametrize("norm", [True, False])
def test_large_gates_do_not_overflow(norm: bool, backend: str, device: str) -> None:
    tensors = output(1, 2, 3, norm=norm).given(F32, device)
    large = {
        name: 1e4 * v for name, v in tensors.items() if name in ("y", "gate") and v is not None
    }
    leaves = {k: v if v is None else v.requires_grad_() for k, v in (tensors | large).items()}
    out = gated_output(**leaves, backend=backend)  # type: ignore[arg-type]
    grads = torch.autograd.grad(out.sum(), [v for v in leaves.values() if v is not None])
    assert all(v.isfinite().all() for v in (out, *grads))

"""W^y with rows for the first raw values only, against the same matrix with rows of zeros below.

Letters: b batch, t time, d channels, n state per channel, r raw values, f those of them with
feedback, H heads.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.kernels.backend import Backend
from bedouin.kernels.direct import direct_sweep
from bedouin.kernels.direct.layout import choose_bind
from bedouin.kernels.feedback import padded_rows, with_feedback
from bedouin.kernels.operands import Operands, Parameterization, RawLayout
from bedouin.testing import assert_close

D, N = 4, 3
LAYOUT = RawLayout("softplus", True, 2, 1.0)
OPTIONS = Parameterization(LAYOUT, "bounded_delta", "positive", 1e-5)
R = LAYOUT.size(D, N)
BACKENDS: tuple[Backend, ...] = ("triton", "reference")
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 2e-2}
rows_of_W_y = pytest.mark.parametrize("f", [1, D, D + N, R - 1])
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
all_heads = pytest.mark.parametrize("heads", [1, 2])


def draw(f: int, heads: int, dtype: torch.dtype, t: int = 3) -> Operands:
    """One sample of each head; in bfloat16 the state and A are float32."""
    generator = torch.Generator().manual_seed(1)
    lead = () if heads == 1 else (heads,)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    b, W_y = heads, 0.3 * normal(*lead, R, D)[..., :f, :]
    state = normal(b, D, N).to(wide), normal(b, D).to(wide)
    A = -normal(*lead, D, N).exp().to(wide)
    return Operands(normal(b, t, D), normal(b, t, R) - 0.5, W_y.contiguous(), A, *state)


def results(operands: Operands, known: bool, **how: Any) -> list[Tensor]:
    """y, the last h, and the gradients, for the fixed point or for values given as one."""
    inputs = [v.clone().requires_grad_() for v in operands if v is not None]
    y_star = operands.x.to(operands.A.dtype).cos() if known else None
    sweep = direct_sweep(Operands(*inputs), y_star=y_star, **how)
    loss = (sweep.y * sweep.y.detach().cos()).sum() + sweep.h.sin().sum()
    return [sweep.y, sweep.h, *torch.autograd.grad(loss, inputs)]


def check_rows(operands: Operands, **how: Any) -> None:
    """Equal results with rows of zeros, whose gradient is not asked for."""
    assert operands.W_y is not None
    f, tolerance = operands.W_y.shape[-2], TOLERANCE[operands.x.dtype]
    whole = operands._replace(W_y=padded_rows(operands.W_y, R))
    for known in (False, True):
        ours, theirs = results(operands, known, **how), results(whole, known, **how)
        theirs[4] = theirs[4][..., :f, :]
        for i, (a, e) in enumerate(zip(ours, theirs, strict=True)):
            assert a.dtype == e.dtype
            assert_close(f"result {i}", a.double(), e.double(), tolerance, atol=tolerance)


@rows_of_W_y
@dtypes
@all_heads
def test_the_sweep_in_buffers(f: int, dtype: torch.dtype, heads: int) -> None:
    check_rows(draw(f, heads, dtype), parameterization=OPTIONS)


@rows_of_W_y
@all_heads
def test_the_plain_loop(f: int, heads: int) -> None:
    """Without a layout the sweep is that of the plain loop."""
    operands = draw(f, heads, torch.float64)
    bind = choose_bind(None, OPTIONS, operands.A)
    options = Parameterization(None, "bounded_delta", "positive", 1e-5)
    check_rows(operands, parameterization=options, bind=bind)


@pytest.mark.interpreter
@pytest.mark.parametrize(("heads", "dtype"), [(1, torch.bfloat16), (2, torch.float32)], ids=str)
def test_the_kernels(heads: int, dtype: torch.dtype) -> None:
    """Against the plain sweep of the same W^y."""
    operands, tolerance = draw(D, heads, dtype, t=2), 5 * TOLERANCE[dtype]
    found = (results(operands, False, parameterization=OPTIONS, backend=name) for name in BACKENDS)
    for i, (ours, theirs) in enumerate(zip(*found, strict=True)):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert_close(f"result {i}", ours.double(), theirs.double(), tolerance, atol=tolerance)


def test_the_raw_values_of_all_tokens() -> None:
    operands = draw(D, 1, torch.float64).wide()
    x, raw = with_feedback(operands.x, operands, replace(OPTIONS, feedback_norm_eps=None))
    assert x is operands.x
    assert torch.equal(raw[..., D:], operands.raw[..., D:])
    assert not torch.isclose(raw[..., :D], operands.raw[..., :D]).any()


@pytest.mark.parametrize("f", [0, R + 1])
def test_a_number_of_rows_that_does_not_fit(f: int) -> None:
    operands = draw(R, 1, torch.float64)
    W_y = torch.zeros(f, D, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"W_y must have from 1 to {R} rows.*got shape"):
        direct_sweep(operands._replace(W_y=W_y), OPTIONS)

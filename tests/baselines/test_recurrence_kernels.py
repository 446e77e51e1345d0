"""The Triton kernels of the sequential baselines against their recurrences in plain PyTorch."""

from functools import partial
from typing import Any

import pytest
import torch

from bedouin.baselines import DeltaNet, DeltaProduct

layers = pytest.mark.parametrize(
    "make",
    [
        DeltaNet,
        partial(DeltaProduct, gated=True, num_householder=3),
    ],
    ids=["delta_net", "gated_delta_product"],
)


@pytest.mark.interpreter
@layers
def test_triton_equals_the_reference(make: Any) -> None:
    check_backends(make, "cpu", 2e-5)


@pytest.mark.gpu
@layers
def test_triton_equals_the_reference_on_a_gpu(make: Any) -> None:
    check_backends(make, "cuda", 1e-3)  # the reference's products may be in TensorFloat32


def check_backends(make: Any, device: str, tolerance: float) -> None:
    """Outputs, state and gradients, through a second chunk."""
    options: dict[str, Any] = {"num_heads": 2, "head_dim": 32, "expand_v": 0.5, "device": device}
    pair = [make(8, **options, backend="triton"), make(8, **options)]
    pair[1].backend = "torch"
    pair[1].load_state_dict(pair[0].state_dict())
    x, results = torch.randn(2, 9, 8, device=device), []
    for layer in pair:
        u = x.clone().requires_grad_()
        first, state = layer(u[:, :5], return_state=True)
        y, state = layer(u[:, 5:], state, return_state=True)
        loss = torch.stack([v.square().sum() for v in (first, y, *state.tensors)]).sum()
        inputs = [u, *layer.parameters()]
        results.append((first, y, *state.tensors, *torch.autograd.grad(loss, inputs)))
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)

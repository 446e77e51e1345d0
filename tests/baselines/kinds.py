"""A mark for all baselines, and the comparison with a recurrence that is written out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.layer_cases import BASELINES
from torch import Tensor

from bedouin.baselines import Attention

Kind = Callable[..., Any]
every_kind = pytest.mark.parametrize("kind", BASELINES.values(), ids=BASELINES)


def assert_written_out(
    layer: Any, expected: Callable[..., Tensor], shape: tuple[int, ...], tolerance: float = 1e-9
) -> None:
    """The layer's outputs and gradients in float64 are those of expected(layer, x, state)."""
    x, state = torch.randn(shape, dtype=torch.float64, requires_grad=True), None
    if not isinstance(layer, Attention):  # whose state holds tokens
        empty = layer.init_state(shape[0])
        state = empty._make(torch.randn_like(v) for v in empty.tensors)
    outputs = layer(x, state), expected(layer, x, state)
    inputs = [x, *layer.parameters()]
    grads = [torch.autograd.grad(v.square().sum(), inputs) for v in outputs]
    for pair in (outputs, *zip(*grads, strict=True)):
        torch.testing.assert_close(*pair, rtol=tolerance, atol=tolerance)

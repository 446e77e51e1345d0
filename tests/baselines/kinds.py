"""The baselines that are tested, and the comparison with a recurrence that is written out."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.baselines import LSTM, Attention, DeltaNet, DeltaProduct, Mamba

Kind = Callable[..., Any]

KINDS: dict[str, Kind] = {
    "lstm": LSTM,
    "lstm_conv": partial(LSTM, d_conv=3),
    "mamba": Mamba,
    "mamba_plain": partial(Mamba, d_conv=None, eigenvalues="full"),
    "delta_net": DeltaNet,
    "delta_net_gated": partial(DeltaNet, gated=True, d_conv=None),
    "delta_product": DeltaProduct,
    "delta_product_gated": partial(DeltaProduct, gated=True, num_householder=3, expand_v=1.5),
    "attention": Attention,
    "attention_conv": partial(Attention, d_conv=4, rope_base=None, head_dim=3),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


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

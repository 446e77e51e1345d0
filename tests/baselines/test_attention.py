"""Attention: equal to the sum written out; rotary positions are relative."""

import math

import pytest
import torch
from tests.baselines.kinds import assert_written_out
from torch import Tensor

from bedouin.baselines import Attention, AttentionState
from bedouin.baselines.attention import rotate


def turned(x: Tensor, position: int, base: float | None) -> Tensor:
    """The rotary position applied to x (b, h, p) as complex numbers."""
    if base is None:
        return x
    first, second = x.chunk(2, -1)
    i = torch.arange(first.shape[-1], dtype=x.dtype)
    angle = position * base ** (-i / first.shape[-1])
    z = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def written_out(layer: Attention, x: Tensor, state: None) -> Tensor:
    """The outputs (b, t, m) of inputs (b, t, m), token by token, from the definition."""
    h, p = layer.num_heads, layer.head_dim
    window = layer.init_state(x.shape[0]).conv
    q, k, v = layer.conv(layer.in_proj(x), window)[0].unflatten(-1, (3, h, p)).unbind(2)
    keys = [turned(k[:, s], s, layer.rope_base) for s in range(x.shape[1])]
    outputs = []
    for t in range(x.shape[1]):
        query = turned(q[:, t], t, layer.rope_base)
        scores = torch.stack([(query * key).sum(-1) for key in keys[: t + 1]], -1) / math.sqrt(p)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        o = torch.einsum("bhs,bshp->bhp", weights, v[:, : t + 1])
        outputs.append(layer.out_proj(o.flatten(1)))
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("rope_base", [None, 100.0])
@pytest.mark.parametrize("d_conv", [None, 3])
def test_equals_the_definition(rope_base: float | None, d_conv: int | None) -> None:
    layer = Attention(8, num_heads=2, rope_base=rope_base, d_conv=d_conv, dtype=torch.float64)
    assert_written_out(layer, written_out, (2, 6, 8))


def test_rotary_positions_are_relative() -> None:
    q, k = torch.randn(2, 1, 1, 3, 8, dtype=torch.float64)
    q, k = q.expand(1, 5, 3, 8), k.expand(1, 5, 3, 8)
    near, far = ((rotate(q, s + 3, 1e4) * rotate(k, s, 1e4)).sum(-1) for s in (0, 700))
    torch.testing.assert_close(near, far)
    assert torch.equal(rotate(q, 0, 1e4)[:, 0], q[:, 0])
    torch.testing.assert_close(rotate(q, 9, 1e4).norm(dim=-1), q.norm(dim=-1))


def test_cache_of_unequal_lengths() -> None:
    state = AttentionState(torch.zeros(2, 0, 24), torch.zeros(2, 3, 4, 2), torch.zeros(2, 2, 4, 2))
    with pytest.raises(ValueError, match="state.keys and state.values must have one shape, got"):
        Attention(8)(torch.randn(2, 3, 8), state)

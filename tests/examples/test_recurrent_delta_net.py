"""Recurrent Delta Net: equal to its equations, head by head."""

import pytest
import torch
from torch import Tensor

from research.rivals import RecurrentDeltaNet, RecurrentDeltaState


def recurrence(layer: RecurrentDeltaNet, x: Tensor, state: RecurrentDeltaState) -> Tensor:
    """The outputs (b, t, m) of inputs (b, t, m), sample by sample and head by head."""
    h, p, v = layer.num_heads, layer.head_dim, layer.value_dim
    qkv, _ = layer.conv(layer.qkv_proj(x), state.conv)
    b_raw = layer.b_proj(x)
    rows = []
    for i in range(len(x)):
        heads = []
        for j in range(h):
            S, y, R, outputs = state.memory[i, j], state.y[i, j], layer.y_proj[j], []
            for t in range(x.shape[1]):
                own = torch.cat([qkv[i, t].view(h, -1)[j], b_raw[i, t, j : j + 1]])
                q, k, value, beta = (own + torch.tanh(y) @ R).split([p, p, v, 1])
                k = torch.softmax(k, 0)
                S = S + torch.sigmoid(beta) * torch.outer(k, value - S.T @ k)
                y = S.T @ torch.softmax(q, 0)
                outputs.append(y)
            heads.append(torch.stack(outputs))
        rows.append(torch.cat(heads, dim=-1))
    return torch.stack(rows) @ layer.out_proj.weight.T


@pytest.mark.parametrize("d_conv", [None, 3])
def test_equals_the_recurrence(d_conv: int | None) -> None:
    layer = RecurrentDeltaNet(
        6, num_heads=2, expand_v=2 / 3, d_conv=d_conv, feedback_init=2.0, dtype=torch.float64
    )
    assert (layer.head_dim, layer.value_dim) == (3, 2)
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    state = RecurrentDeltaState(*(torch.randn_like(v) for v in layer.init_state(2)))
    expected, y = recurrence(layer, x, state), layer(x, state)
    torch.testing.assert_close(y, expected)
    inputs = [x, *layer.parameters()]
    grads = [torch.autograd.grad(v.square().sum(), inputs) for v in (y, expected)]
    torch.testing.assert_close(*grads)

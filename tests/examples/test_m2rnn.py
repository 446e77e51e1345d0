"""M2RNN: equal to its equations, head by head."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from research.rivals import M2RNN, M2RNNState


def recurrence(layer: M2RNN, x: Tensor, state: M2RNNState) -> Tensor:
    """The outputs (b, t, m) of inputs (b, t, m), sample by sample and head by head."""
    h, p, v = layer.num_heads, layer.head_dim, layer.value_dim
    qkv = F.silu(layer.conv(layer.qkv_proj(x), state.conv)[0])
    dt = F.softplus(layer.f_proj(x) + layer.dt_bias)
    f, gate = torch.exp(-layer.A_log.exp() * dt), F.silu(layer.g_proj(x))
    rows = []
    for i in range(len(x)):
        heads = []
        for j in range(h):
            S, W, outputs = state.memory[i, j], layer.state_weight[j], []
            for t in range(x.shape[1]):
                q, k, value = qkv[i, t].view(h, -1)[j].split([p, p, v])
                new = torch.tanh(S @ W + torch.outer(k, value))
                S = f[i, t, j] * S + (1 - f[i, t, j]) * new
                o = (S.T @ q + layer.D[j] * value) * gate[i, t].view(h, v)[j]
                o = o * torch.rsqrt(o.square().mean() + layer.norm_eps) * layer.norm_weight[j]
                outputs.append(o)
            heads.append(torch.stack(outputs))
        rows.append(torch.cat(heads, dim=-1))
    return torch.stack(rows) @ layer.out_proj.weight.T


@pytest.mark.parametrize("d_conv", [None, 3])
def test_equals_the_recurrence(d_conv: int | None) -> None:
    layer = M2RNN(6, num_heads=2, expand_v=2 / 3, d_conv=d_conv, dtype=torch.float64)
    assert (layer.head_dim, layer.value_dim) == (3, 2)
    with torch.no_grad():
        for parameter in (layer.state_weight, layer.D, layer.norm_weight):
            parameter.add_(torch.randn_like(parameter))
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    state = M2RNNState(*(torch.randn_like(v) for v in layer.init_state(2)))
    expected, y = recurrence(layer, x, state), layer(x, state)
    torch.testing.assert_close(y, expected)
    inputs = [x, *layer.parameters()]
    grads = [torch.autograd.grad(v.square().sum(), inputs) for v in (y, expected)]
    torch.testing.assert_close(*grads)


def test_decay_and_skip_are_not_decayed() -> None:
    marked = {n for n, p in M2RNN(8).named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {"A_log", "dt_bias", "D"}

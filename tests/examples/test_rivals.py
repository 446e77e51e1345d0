"""M2RNN and Recurrent Delta Net: equal to their equations, head by head."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.baselines.kinds import assert_written_out
from torch import Tensor
from torch.nn import functional as F

from research.rivals import M2RNN, M2RNNState, RecurrentDeltaNet, RecurrentDeltaState


def m2rnn(layer: M2RNN, x: Tensor, state: M2RNNState) -> Tensor:
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


def recurrent_delta_net(layer: RecurrentDeltaNet, x: Tensor, state: RecurrentDeltaState) -> Tensor:
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
@pytest.mark.parametrize(
    ("kind", "equations"),
    [(M2RNN, m2rnn), (partial(RecurrentDeltaNet, feedback_init=2.0), recurrent_delta_net)],
)
def test_equals_the_recurrence(kind: Any, equations: Callable[..., Tensor], d_conv: Any) -> None:
    layer = kind(6, num_heads=2, expand_v=2 / 3, d_conv=d_conv, dtype=torch.float64)
    assert (layer.head_dim, layer.value_dim) == (3, 2)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in ("state_weight", "D", "norm_weight"):
                parameter.add_(torch.randn_like(parameter))
    assert_written_out(layer, equations, (2, 7, 6), 1e-7)


def test_decay_and_skip_are_not_decayed() -> None:
    marked = {n for n, p in M2RNN(8).named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {"A_log", "dt_bias", "D"}

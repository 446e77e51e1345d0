"""Gated DeltaNet-2 and Kimi Delta Attention: equal to their equations, token by token."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.layers.delta_net import DeltaState
from research.rivals import GatedDeltaNet2, KimiDeltaAttention
from research.rivals.key_decay import NORM_EPS, key_decay_rule


def loop(q: Tensor, k: Tensor, erased: Tensor, value: Tensor, decay: Tensor, S: Tensor) -> Tensor:
    """The outputs (b, t, h, p) of `key_decay_rule` by its definition, and the last S after them."""
    outputs = []
    for t in range(q.shape[1]):
        S = decay[:, t].exp().unsqueeze(-1) * S
        error = value[:, t] - torch.einsum("bhp,bhpv->bhv", erased[:, t], S)
        S = S + k[:, t].unsqueeze(-1) * error.unsqueeze(-2)
        outputs.append(torch.einsum("bhp,bhpv->bhv", q[:, t], S))
    return torch.cat([torch.stack(outputs, 1).flatten(), S.flatten()])


@pytest.mark.parametrize("t", [1, 4, 5, 18])
def test_chunks_equal_the_loop(t: int) -> None:
    """Outputs, states and gradients, also behind decays so strong that their products are 0."""
    q, k, strength, value, decay = torch.randn(5, 2, t, 2, 3, dtype=torch.float64)
    k = F.normalize(k, dim=-1)
    inputs = [q, k, 2 * torch.sigmoid(strength) * k, value, -torch.exp(3 * decay + 1)]
    inputs = [v.requires_grad_() for v in (*inputs, torch.randn(2, 2, 3, 3, dtype=torch.float64))]
    expected = loop(*inputs)
    found = torch.cat([v.flatten() for v in key_decay_rule(*inputs, chunk=4)])
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    grads = [torch.autograd.grad((weight * v).sum(), inputs) for v in (found, expected)]
    torch.testing.assert_close(*grads)


def by_equations(layer: GatedDeltaNet2, x: Tensor, state: DeltaState) -> Tensor:  # (b, t, m)
    """The outputs, sample by sample and head by head."""
    h, p = layer.num_heads, layer.head_dim
    qkv = F.silu(layer.conv(layer.qkv_proj(x), state.conv)[0])
    raw, low = torch.sigmoid(layer.strength_proj(x)), layer.low_proj(x)
    f, g = layer.f_proj(low[..., :p]), torch.sigmoid(layer.g_proj(low[..., p:]))
    rows = []
    for i in range(len(x)):
        heads = []
        for j in range(h):
            S, outputs = state.memory[i, j], []
            for t in range(x.shape[1]):
                q, k, value = (u.view(h, p)[j] for u in qkv[i, t].split(h * p))
                q, k = q / q.norm(), k / k.norm()
                dt = F.softplus(f[i, t] + layer.dt_bias).view(h, p)[j]
                b = w = 2 * raw[i, t, j]
                if not isinstance(layer, KimiDeltaAttention):
                    b, w = (u.view(h, p)[j] for u in raw[i, t].split(h * p))
                    b = 2 * b
                S = torch.diag(torch.exp(-layer.A_log[j].exp() * dt)) @ S
                S = S - torch.outer(k, b * k) @ S + torch.outer(k, w * value)
                o = S.T @ q / p**0.5
                o = o * torch.rsqrt(o.square().mean() + NORM_EPS) * layer.norm_weight
                outputs.append(o * g[i, t].view(h, p)[j])
            heads.append(torch.stack(outputs))
        rows.append(torch.cat(heads, dim=-1))
    return torch.stack(rows) @ layer.out_proj.weight.T


@pytest.mark.parametrize("kind", [GatedDeltaNet2, KimiDeltaAttention])
def test_layers_equal_their_equations(kind: type[GatedDeltaNet2]) -> None:
    layer = kind(6, num_heads=2, d_conv=3).double()
    with torch.no_grad():
        layer.norm_weight.add_(torch.randn_like(layer.norm_weight))
    x = torch.randn(2, 18, 6, dtype=torch.float64, requires_grad=True)
    state = DeltaState(*(torch.randn_like(v) for v in layer.init_state(2)))
    y, expected = layer(x, state), by_equations(layer, x, state)
    torch.testing.assert_close(y, expected)
    inputs = [x, *layer.parameters()]
    grads = [torch.autograd.grad(v.square().sum(), inputs) for v in (y, expected)]
    torch.testing.assert_close(*grads)
    mask = torch.arange(18) < torch.tensor([[18], [7]])
    padded, after = layer(x, state, True, mask=mask)
    torch.testing.assert_close(padded[mask], y[mask])
    torch.testing.assert_close(after[1].memory, layer(x[1:, :7], state[1:2], True)[1].memory[0])


def test_rates_are_not_decayed_and_begin_as_asked() -> None:
    layer = GatedDeltaNet2(8, rate_scale=0.01)
    marked = {n for n, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert marked == {"A_log", "dt_bias"}
    assert ((layer.A_log.exp() >= 0.01) & (layer.A_log.exp() <= 0.16001)).all()

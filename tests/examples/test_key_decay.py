"""Gated DeltaNet-2 and Kimi Delta Attention: equal to their equations, token by token."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from research.rivals import GatedDeltaNet2, KimiDeltaAttention
from research.rivals.key_decay import KeyDecayState, Written, key_decay_rule


def loop(written: Written, S: Tensor) -> tuple[Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v)
    """`key_decay_rule` by its definition."""
    outputs = []
    for q, k, erased, value, decay in zip(*(v.unbind(1) for v in written), strict=True):
        S = decay.exp().unsqueeze(-1) * S
        error = value - torch.einsum("bhp,bhpv->bhv", erased, S)
        S = S + k.unsqueeze(-1) * error.unsqueeze(-2)
        outputs.append(torch.einsum("bhp,bhpv->bhv", q, S))
    return torch.stack(outputs, 1), S


@pytest.mark.parametrize("t", [1, 4, 5, 18])
def test_chunks_equal_the_loop(t: int) -> None:
    """Outputs, states and gradients, also behind decays so strong that their products are 0."""
    sizes = {"query": 3, "key": 3, "erased": 3, "value": 2, "log_decay": 3}
    given = {name: torch.randn(2, t, 2, n, dtype=torch.float64) for name, n in sizes.items()}
    given["key"] = F.normalize(given["key"], dim=-1)
    given["erased"] = 2 * torch.rand_like(given["key"]) * given["key"]
    given["log_decay"] = -torch.exp(3 * given["log_decay"] + 1)
    S = torch.randn(2, 2, 3, 2, dtype=torch.float64)
    inputs = [v.requires_grad_() for v in (*given.values(), S)]
    found = [
        run(Written(*inputs[:5]), inputs[5]) for run in (loop, lambda *v: key_decay_rule(*v, 4))
    ]
    torch.testing.assert_close(found[1], found[0])
    weights = [torch.randn_like(v) for v in found[0]]
    losses = [sum((w * v).sum() for w, v in zip(weights, pair, strict=True)) for pair in found]
    grads = [torch.autograd.grad(loss, inputs) for loss in losses]
    torch.testing.assert_close(grads[1], grads[0])


def by_equations(layer: GatedDeltaNet2, x: Tensor, state: KeyDecayState) -> Tensor:  # (b, t, m)
    """The outputs, sample by sample and head by head."""
    h, p, v = layer.num_heads, layer.head_dim, layer.value_dim
    qkv = F.silu(layer.conv(layer.qkv_proj(x), state.conv)[0])
    raw, low = torch.sigmoid(layer.strength_proj(x)), layer.low_proj(x)
    f, g = layer.f_proj(low[..., :v]), torch.sigmoid(layer.g_proj(low[..., v:]))
    rows = []
    for i in range(len(x)):
        heads = []
        for j in range(h):
            S, outputs = state.memory[i, j], []
            for t in range(x.shape[1]):
                q, k, value = (u.view(h, -1)[j] for u in qkv[i, t].split([h * p, h * p, h * v]))
                q, k = q / q.norm(), k / k.norm()
                dt = F.softplus(f[i, t] + layer.dt_bias).view(h, p)[j]
                if isinstance(layer, KimiDeltaAttention):
                    b = w = 2 * raw[i, t, j]
                else:
                    b = 2 * raw[i, t, : h * p].view(h, p)[j]
                    w = raw[i, t, h * p :].view(h, v)[j]
                S = torch.diag(torch.exp(-layer.A_log[j].exp() * dt)) @ S
                S = S - torch.outer(k, b * k) @ S + torch.outer(k, w * value)
                o = S.T @ q / p**0.5
                o = o * torch.rsqrt(o.square().mean() + layer.norm_eps) * layer.norm_weight
                outputs.append(o * g[i, t].view(h, v)[j])
            heads.append(torch.stack(outputs))
        rows.append(torch.cat(heads, dim=-1))
    return torch.stack(rows) @ layer.out_proj.weight.T


@pytest.mark.parametrize("kind", [GatedDeltaNet2, KimiDeltaAttention])
@pytest.mark.parametrize("d_conv", [None, 3])
def test_layers_equal_their_equations(kind: type[GatedDeltaNet2], d_conv: int | None) -> None:
    layer = kind(6, num_heads=2, expand_v=2 / 3, d_conv=d_conv, dtype=torch.float64)
    with torch.no_grad():
        layer.norm_weight.add_(torch.randn_like(layer.norm_weight))
    x = torch.randn(2, 18, 6, dtype=torch.float64, requires_grad=True)
    state = KeyDecayState(*(torch.randn_like(v) for v in layer.init_state(2)))
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

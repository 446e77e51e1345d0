"""The published layers of the table: equal to their equations, token by token."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from research.rivals import M2RNN, GatedDeltaNet2, KimiDeltaAttention, Mamba3, RecurrentDeltaNet
from research.rivals.key_decay import NORM_EPS

Outputs = list[Tensor]  # of every token, (b, h, v)


def convolved(layer: Any, x: Tensor) -> Tensor:  # (b, t, m) -> (b, t, h, r)
    weight = layer.conv.weight.unsqueeze(1)
    padded = F.pad(layer.qkv_proj(x).mT, (weight.shape[-1] - 1, 0))
    return F.conv1d(padded, weight, groups=len(weight)).mT


def outer(k: Tensor, v: Tensor) -> Tensor:  # (b, h, p), (b, h, v) -> (b, h, p, v)
    return torch.einsum("bhp,bhv->bhpv", k, v)


def read(S: Tensor, k: Tensor) -> Tensor:  # (b, h, p, v), (b, h, p) -> (b, h, v)
    return torch.einsum("bhpv,bhp->bhv", S, k)


def m2rnn(layer: M2RNN, x: Tensor) -> Outputs:
    h, p, v = layer.num_heads, layer.head_dim, layer.value_dim
    qkv = F.silu(convolved(layer, x)).unflatten(-1, (h, -1))
    dt = F.softplus(layer.f_proj(x) + layer.dt_bias)
    f, gate = torch.exp(-layer.A_log.exp() * dt), F.silu(layer.g_proj(x)).unflatten(-1, (h, -1))
    S, outputs = x.new_zeros(len(x), h, p, v), []
    for t in range(x.shape[1]):
        q, k, value = qkv[:, t].split([p, p, v], -1)
        new = torch.tanh(S @ layer.state_weight + outer(k, value))
        S = torch.lerp(new, S, f[:, t, :, None, None])
        o = (read(S, q) + layer.D * value) * gate[:, t]
        outputs.append(F.rms_norm(o, (v,), None, NORM_EPS) * layer.norm_weight)
    return outputs


def recurrent_delta_net(layer: RecurrentDeltaNet, x: Tensor) -> Outputs:
    h, p, v = layer.num_heads, layer.head_dim, layer.value_dim
    raw = torch.cat([convolved(layer, x).unflatten(-1, (h, -1)), layer.b_proj(x).unsqueeze(-1)], -1)
    S, y, outputs = x.new_zeros(len(x), h, p, v), x.new_zeros(len(x), h, v), []
    for t in range(x.shape[1]):
        fed = raw[:, t] + torch.einsum("bhv,hvr->bhr", torch.tanh(y), layer.y_proj)
        q, k, value, beta = fed.split([p, p, v, 1], -1)
        k = torch.softmax(k, -1)
        S = S + outer(k, torch.sigmoid(beta) * (value - read(S, k)))
        y = read(S, torch.softmax(q, -1))
        outputs.append(y)
    return outputs


def key_decay(layer: GatedDeltaNet2, x: Tensor) -> Outputs:
    h, p, is_kimi = layer.num_heads, layer.head_dim, isinstance(layer, KimiDeltaAttention)
    qkv = F.silu(convolved(layer, x)).unflatten(-1, (-1, h, p))
    raw, low = torch.sigmoid(layer.strength_proj(x)), layer.low_proj(x)
    f = layer.f_proj(low[..., :p]) + layer.dt_bias
    g = torch.sigmoid(layer.g_proj(low[..., p:]))
    S, outputs = x.new_zeros(len(x), h, p, p), []
    for t in range(x.shape[1]):
        q, k, value = qkv[:, t].unbind(1)
        q, k = (u / u.norm(dim=-1, keepdim=True) for u in (q, k))
        gates = raw[:, t].unflatten(-1, (-1, h, 1 if is_kimi else p))
        b, w = 2 * gates[:, 0], 2 * gates[:, 0] if is_kimi else gates[:, 1]
        dt = F.softplus(f[:, t]).unflatten(-1, (h, p))
        S = torch.exp(-layer.A_log.exp()[:, None] * dt).unsqueeze(-1) * S
        S = S - outer(k, read(S, b * k)) + outer(k, w * value)
        o = F.rms_norm(read(S, q) / p**0.5, (p,), layer.norm_weight, NORM_EPS)
        outputs.append(o * g[:, t].unflatten(-1, (h, p)))
    return outputs


def mamba3(layer: Mamba3, x: Tensor) -> Outputs:
    h, n, d = layer.num_heads, layer.biases.shape[-1], layer.out_proj.in_features
    memory = before = x.new_zeros(len(x), h, n, d // h)
    angle, outputs = x.new_zeros(len(x), h, n // 4), []
    for raw in layer.in_proj(x).unbind(1):
        z, v, *BC, dt, A, trap, theta = raw.split([d, d, n, n, h, h, h, n // 4], -1)
        D_t, lam = F.softplus(dt + layer.dt_bias), torch.sigmoid(trap)
        angle = angle + torch.pi * torch.tanh(theta).unsqueeze(1) * D_t.unsqueeze(-1)
        turned = []
        for i, u in enumerate(BC):
            u = (F.rms_norm(u, (n,)) * layer.norm_weights[i]).unsqueeze(1) + layer.biases[i]
            number = torch.view_as_complex(u[..., : n // 2].unflatten(-1, (-1, 2)))
            number = number * torch.polar(torch.ones_like(angle), angle)
            turned.append(torch.cat([torch.view_as_real(number).flatten(-2), u[..., n // 2 :]], -1))
        v, alpha = v.unflatten(-1, (h, -1)), torch.exp(-F.softplus(A) * D_t)[..., None, None]
        now, own = outer(turned[0], v), (lam * D_t)[..., None, None]
        memory = alpha * (memory + (D_t[..., None, None] - own) * before) + own * now
        o, before = read(memory, turned[1]) + layer.D[:, None] * v, now
        outputs.append(o * F.silu(z).unflatten(-1, (h, -1)))
    return outputs


VALUES: dict[str, Any] = {"num_heads": 2, "head_dim": 3, "expand_v": 2 / 3}
KEYS: dict[str, Any] = {"num_heads": 2, "head_dim": 3, "d_conv": 3}


@pytest.mark.parametrize(
    ("make", "equations", "t"),
    [
        (partial(M2RNN, **VALUES, d_conv=3), m2rnn, 7),
        (partial(RecurrentDeltaNet, **VALUES, d_conv=3), recurrent_delta_net, 7),
        *((partial(GatedDeltaNet2, **KEYS), key_decay, t) for t in (1, 16, 34)),
        (partial(KimiDeltaAttention, **KEYS), key_decay, 34),
        (partial(Mamba3, d_state=8, head_dim=3, expand=1), mamba3, 67),
    ],
)
def test_equals_the_recurrence(make: Any, equations: Callable[..., Outputs], t: int) -> None:
    """Outputs and gradients, also behind decays so strong that their products are 0."""
    layer = make(6).double()
    parameters = dict(layer.named_parameters())
    marked = {n for n, p in parameters.items() if getattr(p, "_no_weight_decay", False)}
    exempt = {"A_log", "dt_bias", "D", "norm_weight", "norm_weights"}
    assert marked == exempt & parameters.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name in ("state_weight", "D", "norm_weight", "norm_weights", "biases", "A_log"):
                parameter.add_(2 * torch.randn_like(parameter))
    x = torch.randn(2, t, 6, dtype=torch.float64, requires_grad=True)
    expected = torch.stack(equations(layer, x), 1).flatten(-2) @ layer.out_proj.weight.T
    outputs, inputs = (layer(x), expected), [x, *layer.parameters()]
    grads = [torch.autograd.grad(v.square().sum(), inputs) for v in outputs]
    for pair in (outputs, *zip(*grads, strict=True)):
        torch.testing.assert_close(*pair, rtol=1e-7, atol=1e-7)

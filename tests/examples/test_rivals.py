"""The published layers of the table: equal to their equations, head by head."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from research.rivals import M2RNN, GatedDeltaNet2, KimiDeltaAttention, Mamba3, RecurrentDeltaNet
from research.rivals.key_decay import NORM_EPS, key_decay_rule


def convolved(layer: Any, x: Tensor) -> Tensor:  # (b, t, m) -> (b, t, c)
    qkv = layer.qkv_proj(x)
    if layer.conv.weight is None:
        return qkv
    weight = layer.conv.weight
    padded = F.pad(qkv.mT, (weight.shape[1] - 1, 0))
    return F.conv1d(padded, weight.unsqueeze(1), groups=len(weight)).mT


def written_out(
    layer: Any, x: Tensor, head: Callable[[int, int], list[Tensor]]
) -> Tensor:  # (b, t, m) -> (b, t, m)
    """out_proj of what `head` gives of sample i and head j: a list of t outputs (v,)."""
    rows = [
        torch.cat([torch.stack(head(i, j)) for j in range(layer.num_heads)], -1)
        for i in range(len(x))
    ]
    return torch.stack(rows) @ layer.out_proj.weight.T


def m2rnn(layer: M2RNN, x: Tensor) -> Tensor:
    h, p, v = layer.num_heads, layer.head_dim, layer.value_dim
    qkv = F.silu(convolved(layer, x))
    dt = F.softplus(layer.f_proj(x) + layer.dt_bias)
    f, gate = torch.exp(-layer.A_log.exp() * dt), F.silu(layer.g_proj(x))

    def head(i: int, j: int) -> list[Tensor]:
        S, W, outputs = x.new_zeros(p, v), layer.state_weight[j], []
        for t in range(x.shape[1]):
            q, k, value = qkv[i, t].view(h, -1)[j].split([p, p, v])
            new = torch.tanh(S @ W + torch.outer(k, value))
            S = f[i, t, j] * S + (1 - f[i, t, j]) * new
            o = (S.T @ q + layer.D[j] * value) * gate[i, t].view(h, v)[j]
            o = o * torch.rsqrt(o.square().mean() + NORM_EPS) * layer.norm_weight[j]
            outputs.append(o)
        return outputs

    return written_out(layer, x, head)


def recurrent_delta_net(layer: RecurrentDeltaNet, x: Tensor) -> Tensor:
    h, p, v = layer.num_heads, layer.head_dim, layer.value_dim
    qkv, b_raw = convolved(layer, x), layer.b_proj(x)

    def head(i: int, j: int) -> list[Tensor]:
        S, y, R, outputs = x.new_zeros(p, v), x.new_zeros(v), layer.y_proj[j], []
        for t in range(x.shape[1]):
            own = torch.cat([qkv[i, t].view(h, -1)[j], b_raw[i, t, j : j + 1]])
            q, k, value, beta = (own + torch.tanh(y) @ R).split([p, p, v, 1])
            k = torch.softmax(k, 0)
            S = S + torch.sigmoid(beta) * torch.outer(k, value - S.T @ k)
            y = S.T @ torch.softmax(q, 0)
            outputs.append(y)
        return outputs

    return written_out(layer, x, head)


def key_decay(layer: GatedDeltaNet2, x: Tensor) -> Tensor:
    h, p = layer.num_heads, layer.head_dim
    qkv = F.silu(convolved(layer, x))
    raw, low = torch.sigmoid(layer.strength_proj(x)), layer.low_proj(x)
    f, g = layer.f_proj(low[..., :p]), torch.sigmoid(layer.g_proj(low[..., p:]))

    def head(i: int, j: int) -> list[Tensor]:
        S, outputs = x.new_zeros(p, p), []
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
        return outputs

    return written_out(layer, x, head)


def mamba3(layer: Mamba3, x: Tensor) -> Tensor:
    h, n, d = layer.num_heads, layer.biases.shape[-1], layer.out_proj.in_features

    def head(i: int, j: int) -> list[Tensor]:
        memory = before = x.new_zeros(n, d // h)
        angle, outputs = x.new_zeros(n // 4), []
        for raw in layer.in_proj(x[i]):
            z, v, B, C, dt, A, trap, theta = raw.split([d, d, n, n, h, h, h, n // 4])
            D_t, lam = F.softplus(dt[j] + layer.dt_bias[j]), torch.sigmoid(trap[j])
            angle = angle + torch.pi * torch.tanh(theta) * D_t
            turned = []
            for k, u in enumerate((B, C)):
                u = F.rms_norm(u, (n,)) * layer.norm_weights[k] + layer.biases[k, j]
                number = torch.view_as_complex(u[: n // 2].view(-1, 2))
                number = number * torch.polar(torch.ones_like(angle), angle)
                turned.append(torch.cat([torch.view_as_real(number).flatten(), u[n // 2 :]]))
            v, alpha = v.view(h, -1)[j], torch.exp(-F.softplus(A[j]) * D_t)
            now = torch.outer(turned[0], v)
            memory = alpha * memory + alpha * (1 - lam) * D_t * before + lam * D_t * now
            before = now
            outputs.append((memory.T @ turned[1] + layer.D[j] * v) * F.silu(z.view(h, -1)[j]))
        return outputs

    return written_out(layer, x, head)


VALUES = {"num_heads": 2, "head_dim": 3, "expand_v": 2 / 3}
KEYS = {"num_heads": 2, "head_dim": 3, "d_conv": 3}


@pytest.mark.parametrize(
    ("make", "equations", "t"),
    [
        (partial(M2RNN, **VALUES, d_conv=3), m2rnn, 7),
        (partial(RecurrentDeltaNet, **VALUES, d_conv=3), recurrent_delta_net, 7),
        (partial(RecurrentDeltaNet, **VALUES, d_conv=None), recurrent_delta_net, 7),
        (partial(GatedDeltaNet2, **KEYS), key_decay, 18),
        (partial(KimiDeltaAttention, **KEYS), key_decay, 18),
        (partial(Mamba3, d_state=8, head_dim=3, expand=1), mamba3, 67),
    ],
)
def test_equals_the_recurrence(
    make: Callable[[int], nn.Module], equations: Callable[[Any, Tensor], Tensor], t: int
) -> None:
    layer = make(6).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in ("state_weight", "D", "norm_weight", "norm_weights", "biases"):
                parameter.add_(torch.randn_like(parameter))
    x = torch.randn(2, t, 6, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    outputs = layer(x), equations(layer, x)
    grads = [torch.autograd.grad(v.square().sum(), inputs) for v in outputs]
    for pair in (outputs, *zip(*grads, strict=True)):
        torch.testing.assert_close(*pair, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("t", [1, 4, 5, 18])
def test_chunks_with_strong_decay_equal_the_loop(t: int) -> None:
    """Outputs and gradients behind decays whose products are 0."""
    q, k, strength, value, decay = torch.randn(5, 2, t, 2, 3, dtype=torch.float64)
    k = F.normalize(k, dim=-1)
    inputs = [q, k, 2 * torch.sigmoid(strength) * k, value, -torch.exp(3 * decay + 1)]
    q, k, erased, value, decay = (v.requires_grad_() for v in inputs)
    S, outputs = q.new_zeros(2, 2, 3, 3), []
    for i in range(t):
        S = decay[:, i].exp().unsqueeze(-1) * S
        error = value[:, i] - torch.einsum("bhp,bhpv->bhv", erased[:, i], S)
        S = S + k[:, i].unsqueeze(-1) * error.unsqueeze(-2)
        outputs.append(torch.einsum("bhp,bhpv->bhv", q[:, i], S))
    expected, found = torch.stack(outputs, 1), key_decay_rule(*inputs, chunk=4)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    grads = [torch.autograd.grad((weight * v).sum(), inputs) for v in (found, expected)]
    torch.testing.assert_close(*grads)


def test_rates_are_not_decayed_and_begin_as_asked() -> None:
    for layer, names in (
        (M2RNN(8, **VALUES, d_conv=4), {"A_log", "dt_bias", "D"}),
        (Mamba3(8, d_state=4, head_dim=4), {"dt_bias", "D"}),
        (slow := GatedDeltaNet2(8, **KEYS, rate_scale=0.01), {"A_log", "dt_bias"}),
    ):
        marked = {n for n, p in layer.named_parameters() if getattr(p, "_no_weight_decay", False)}
        assert marked == names
    assert ((slow.A_log.exp() >= 0.01) & (slow.A_log.exp() <= 0.16001)).all()

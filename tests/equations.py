"""The delta rule, written out token by token and head by head."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def unit(v: Tensor) -> Tensor:
    return v * torch.rsqrt(v.square().sum(-1, keepdim=True) + 1e-6)


def delta_rule(
    layer: Any,  # a DeltaProduct, or a class below it
    x: Tensor,  # (b, t, m)
    state: Any,
) -> tuple[Tensor, Tensor]:
    """What is read from the memory (b, t, h v), and the output (b, t, m), of every token."""
    k, h, p, v = layer.num_householder, layer.num_heads, layer.head_dim, layer.value_dim
    window, read, outputs = state.conv, [], []
    memories = list(state.memory.unbind(1))
    for x_t in x.unbind(1):
        raw = torch.cat([layer.q_proj(x_t), layer.k_proj(x_t), layer.v_proj(x_t)], -1)
        if layer.conv.weight is not None:
            window = torch.cat([window, raw.unsqueeze(1)], dim=1)
            raw, window = (window * layer.conv.weight.T).sum(1), window[:, 1:]
        q, key, value = F.silu(raw).split([h * p, k * h * p, k * h * v], -1)
        key, value = key.unflatten(-1, (k, h, p)), value.unflatten(-1, (k, h, v))
        q, key = unit(q.unflatten(-1, (h, p))), unit(key)
        beta = torch.sigmoid(layer.b_proj(x_t)).unflatten(-1, (k, h))
        beta = 2 * beta if layer.eigenvalues == "full" else beta
        found = []
        for i in range(h):
            S = memories[i]
            if layer.a_proj is not None:
                dt = F.softplus(layer.a_proj(x_t)[:, i] + layer.dt_bias[i])
                S = S * torch.exp(-layer.A_log[i].exp() * dt)[:, None, None]
            for j in range(k):
                u, b = key[:, j, i].unsqueeze(-1), beta[:, j, i, None, None]
                S = S - b * u @ (u.mT @ S) + b * u @ value[:, j, i].unsqueeze(-2)
            memories[i] = S
            found.append((S.mT @ q[:, i].unsqueeze(-1)).squeeze(-1))
        read.append(torch.cat(found, -1))
        o = torch.stack(found, 1) / p**0.5
        o = o / (o.square().mean(-1, keepdim=True) + layer.norm_eps).sqrt() * layer.norm_weight
        gate = 1 if layer.g_proj is None else F.silu(layer.g_proj(x_t))
        outputs.append(layer.out_proj(o.flatten(1) * gate))
    return torch.stack(read, 1), torch.stack(outputs, 1)

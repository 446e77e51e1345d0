"""Mamba-3: equal to its equations, sample by sample and head by head."""

import torch
from torch import Tensor
from torch.nn import functional as F

from research.rivals import Mamba3
from research.rivals.mamba3 import Mamba3State


def by_equations(layer: Mamba3, u: Tensor, state: Mamba3State) -> Tensor:  # (b, t, m)
    h, n, p = layer.num_heads, layer.d_state, layer.head_dim
    rows = []
    for i in range(len(u)):
        heads = []
        for j in range(h):
            memory = state.ssm[i, j]
            angle, B_last, x_last = (v[i].view(h, -1)[j] for v in state.tensors[1:])
            outputs = []
            for raw in layer.in_proj(u[i]):
                z, x, B, C, dt, A, trap, theta = raw.split([h * p, h * p, n, n, h, h, h, n // 4])
                D_t, lam = F.softplus(dt[j] + layer.dt_bias[j]), torch.sigmoid(trap[j])
                angle = angle + torch.pi * torch.tanh(theta) * D_t
                turned = []
                for k, v in enumerate((B, C)):
                    v = F.rms_norm(v, (n,)) * layer.norm_weights[k] + layer.biases[k, j]
                    number = torch.view_as_complex(v[: n // 2].view(-1, 2))
                    number = number * torch.polar(torch.ones_like(angle), angle)
                    turned.append(torch.cat([torch.view_as_real(number).flatten(), v[n // 2 :]]))
                B, C = turned
                x = x.view(h, p)[j]
                alpha = torch.exp(-F.softplus(A[j]) * D_t)
                memory = alpha * memory + alpha * (1 - lam) * D_t * torch.outer(B_last, x_last)
                memory = memory + lam * D_t * torch.outer(B, x)
                outputs.append((memory.T @ C + layer.D[j] * x) * F.silu(z.view(h, p)[j]))
                B_last, x_last = B, x
            heads.append(torch.stack(outputs))
        rows.append(torch.cat(heads, dim=-1))
    return torch.stack(rows) @ layer.out_proj.weight.T


def test_equals_the_recurrence() -> None:
    layer = Mamba3(4, d_state=8, head_dim=3, expand=1.5, dtype=torch.float64)
    with torch.no_grad():
        for parameter in (layer.norm_weights, layer.biases, layer.D):
            parameter.add_(torch.randn_like(parameter))
    u = torch.randn(2, 67, 4, dtype=torch.float64, requires_grad=True)
    state = Mamba3State(*(torch.randn_like(v) for v in layer.init_state(2)))
    y, expected = layer(u, state), by_equations(layer, u, state)
    torch.testing.assert_close(y, expected)
    inputs = [u, *layer.parameters()]
    grads = [torch.autograd.grad(v.square().sum(), inputs) for v in (y, expected)]
    torch.testing.assert_close(*grads)
    first, after = layer(u[:, :65], state, True)
    torch.testing.assert_close(torch.cat([first, layer(u[:, 65:], after)], 1), y)
    mask = torch.arange(67) < torch.tensor([[67], [7]])
    _, padded = layer(u, state, True, mask=mask)
    _, alone = layer(u[1:, :7], state[1:2], True)
    for v, w in zip(padded[1:2].tensors, alone.tensors, strict=True):
        torch.testing.assert_close(v, w)

"""Mamba-3: equal to its equations, sample by sample and head by head."""

import torch
from torch import Tensor
from torch.nn import functional as F

from research.rivals import Mamba3


def by_equations(layer: Mamba3, u: Tensor) -> Tensor:  # (b, t, m) -> (b, t, m)
    h, n = layer.num_heads, layer.biases.shape[-1]
    rows = []
    for row in u:
        heads = []
        for j in range(h):
            memory, angle = torch.zeros_like(u[0, 0, 0]), torch.zeros(n // 4, dtype=u.dtype)
            before, outputs = torch.zeros_like(memory), []
            for raw in layer.in_proj(row):
                d = layer.out_proj.in_features
                z, x, B, C, dt, A, trap, theta = raw.split([d, d, n, n, h, h, h, n // 4])
                D_t, lam = F.softplus(dt[j] + layer.dt_bias[j]), torch.sigmoid(trap[j])
                angle = angle + torch.pi * torch.tanh(theta) * D_t
                turned = []
                for k, v in enumerate((B, C)):
                    v = F.rms_norm(v, (n,)) * layer.norm_weights[k] + layer.biases[k, j]
                    number = torch.view_as_complex(v[: n // 2].view(-1, 2))
                    number = number * torch.polar(torch.ones_like(angle), angle)
                    turned.append(torch.cat([torch.view_as_real(number).flatten(), v[n // 2 :]]))
                x, alpha = x.view(h, -1)[j], torch.exp(-F.softplus(A[j]) * D_t)
                now = torch.outer(turned[0], x)
                memory = alpha * memory + alpha * (1 - lam) * D_t * before + lam * D_t * now
                before = now
                outputs.append((memory.T @ turned[1] + layer.D[j] * x) * F.silu(z.view(h, -1)[j]))
            heads.append(torch.stack(outputs))
        rows.append(torch.cat(heads, dim=-1))
    return torch.stack(rows) @ layer.out_proj.weight.T


def test_equals_the_recurrence_in_values_and_gradients() -> None:
    layer = Mamba3(4, d_state=8, head_dim=3, expand=1.5).double()
    with torch.no_grad():
        for parameter in (layer.norm_weights, layer.biases, layer.D):
            parameter.add_(torch.randn_like(parameter))
    u = torch.randn(2, 67, 4, dtype=torch.float64, requires_grad=True)
    y, expected = layer(u), by_equations(layer, u)
    torch.testing.assert_close(y, expected)
    inputs = [u, *layer.parameters()]
    grads = [torch.autograd.grad(v.square().sum(), inputs) for v in (y, expected)]
    torch.testing.assert_close(*grads)

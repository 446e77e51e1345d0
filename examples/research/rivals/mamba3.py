"""Mamba-3: a recurrence with rotations and the trapezoidal rule.

Letters: b batch, t time, m d_model, h heads, p channels of a head, n states of a channel, a angles,
c tokens of a chunk.
"""

import math

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.kernels.backend import without_autocast
from bedouin.layers.common import at_least_float32, expanded, mark, reset_dt_bias

CHUNK = 64  # tokens
SLOWEST = 1e-4  # the smallest -A, as in the published code


class Mamba3(nn.Module):
    """Mamba-3 with one input and one output of a head (SISO), (b, t, m) -> (b, t, m), on whole
    sequences:

        h_t = e^{A_t D_t} (h_{t-1} + (1 - l_t) D_t B_{t-1} x_{t-1}^T) + l_t D_t B_t x_t^T
        out = out_proj((h_t^T C_t + D x_t) * SiLU(z_t))

    where B and C are RMS-normalized, have a bias of each head, and are then rotated in pairs of the
    first 2 a states by the sum of pi tanh(theta_s) D_s up to t; A = -softplus(raw), D_t =
    softplus(raw + dt_bias), l = sigmoid(raw). Source: Mamba-3 (arXiv 2603.15569) and the code of
    its authors, with its default of n / 4 angles; d_state is n and h p = expand * m.
    """

    def __init__(
        self, d_model: int, *, d_state: int = 128, head_dim: int = 64, expand: float = 2
    ) -> None:
        super().__init__()
        d, n, p = expanded("expand", expand, "d_model", d_model), d_state, head_dim
        h = self.num_heads = d // p
        self.state_size = h * (n * p + n + p + n // 4)
        self._sizes = [d, d, n, n, h, h, h, n // 4]
        self.in_proj = nn.Linear(d_model, sum(self._sizes), bias=False)
        self.dt_bias = nn.Parameter(torch.empty(h))
        self.norm_weights = nn.Parameter(torch.ones(2, n))
        self.biases = nn.Parameter(torch.ones(2, h, n))
        self.D = nn.Parameter(torch.ones(h))
        self.out_proj = nn.Linear(d, d_model, bias=False)
        reset_dt_bias(self.dt_bias)
        mark(self, "_no_weight_decay", "dt_bias", "D", "norm_weights")

    def forward(self, u: Tensor) -> Tensor:  # (b, t, m) -> (b, t, m)
        projected = self.in_proj(u)
        with without_autocast(u.device):
            z, x, *BC, dt, A, trap, theta = at_least_float32(projected).split(self._sizes, -1)
            x = x.unflatten(-1, (self.num_heads, -1))
            dt = F.softplus(dt + self.dt_bias)  # (b, t, h)
            turned = math.pi * torch.tanh(theta).unsqueeze(-2) * dt.unsqueeze(-1)
            angle = turned.cumsum(1)  # (b, t, h, a)
            B, C = (
                rotated(F.rms_norm(v, v.shape[-1:], w).unsqueeze(-2) + bias, angle)
                for v, w, bias in zip(BC, self.norm_weights, self.biases, strict=True)
            )
            decay, trap = dt * -F.softplus(A).clamp(min=SLOWEST), torch.sigmoid(trap)
            y = trapezoidal_scan(x, B, C, decay, (1 - trap) * dt, trap * dt)
            y = (y + self.D.unsqueeze(-1) * x).flatten(-2) * F.silu(z)
        output: Tensor = self.out_proj(y.to(projected.dtype))
        return output


def rotated(v: Tensor, angle: Tensor) -> Tensor:  # (b, t, h, n), (b, t, h, a) -> (b, t, h, n)
    """The first 2 a numbers of each vector in pairs, turned by the angles, and the others."""
    a = 2 * angle.shape[-1]
    first, second = v[..., :a].unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    pair = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
    return torch.cat([pair.flatten(-2), v[..., a:]], -1)


def trapezoidal_scan(
    x: Tensor, B: Tensor, C: Tensor, decay: Tensor, earlier: Tensor, own: Tensor
) -> Tensor:  # (b, t, h, p)
    """h_t^T C_t of every token, in chunks: x (b, t, h, p), B and C (b, t, h, n), logarithms of
    decays, and the weights of the token before and of a token itself (b, t, h)."""
    # the next token writes a token again, before it decays the memory
    again = F.pad(earlier[:, 1:], (0, 0, 0, 1))
    memory, outputs = x.new_zeros(x.shape[0], *B.shape[2:], x.shape[-1]), []
    for parts in zip(*(v.split(CHUNK, 1) for v in (x, B, C, decay, own, again)), strict=True):
        x_c, B_c, C_c, G, own_c, again_c = (v.transpose(1, 2) for v in parts)  # (b, h, c, ...)
        G = G.cumsum(-1)
        token = torch.arange(G.shape[-1], device=G.device)
        difference = G.unsqueeze(-1) - G.unsqueeze(-2)
        ratio = torch.exp(difference.masked_fill(token.unsqueeze(1) < token, -torch.inf))
        weight = own_c.unsqueeze(-2) + again_c.unsqueeze(-2) * (token.unsqueeze(1) > token)
        within = (ratio * weight * (C_c @ B_c.mT)) @ x_c
        outputs.append(within + G.exp().unsqueeze(-1) * (C_c @ memory))
        written = (ratio[..., -1, :] * (own_c + again_c)).unsqueeze(-1) * B_c
        memory = G[..., -1:].exp().unsqueeze(-1) * memory + written.mT @ x_c
    return rearrange(torch.cat(outputs, 2), "b h t p -> b t h p")

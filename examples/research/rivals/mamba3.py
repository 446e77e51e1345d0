"""Mamba-3: a recurrence with rotations and the trapezoidal rule.

Letters: b batch, t time, m d_model, h heads, p channels of a head, n states of a channel, a angles,
c tokens of a chunk.
"""

import math
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.checks import known_options, positive_int
from bedouin.kernels.backend import without_autocast
from bedouin.layers.common import (
    RecurrentLayer,
    StateShapes,
    at_least_float32,
    expanded,
    factory_options,
    mark,
    reset_dt_bias,
)
from bedouin.packing import last_token, tokens_before, zero_outside
from bedouin.state import RecurrentState

CHUNK = 64
"""Tokens of a chunk."""

SLOWEST = 1e-4
"""The smallest -A, as in the published code."""


class _Mamba3Fields(NamedTuple):
    ssm: Tensor
    angle: Tensor
    B: Tensor
    x: Tensor


class Mamba3State(RecurrentState, _Mamba3Fields):  # type: ignore[misc]
    """ssm: (b, h, n, p), the memory; angle: (b, h a), the sum of the rotations; B: (b, h n) and x:
    (b, h p) of the last token; at least float32."""

    __slots__ = ()
    axes = (3, 1, 1, 1)


class Mamba3(RecurrentLayer[Mamba3State]):
    """Mamba-3 with one input and one output of a head (SISO), (b, t, m) -> (b, t, m):

        h_t = e^{A_t D_t} (h_{t-1} + (1 - l_t) D_t B_{t-1} x_{t-1}^T) + l_t D_t B_t x_t^T
        out = out_proj((h_t^T C_t + D x_t) * SiLU(z_t))

    where B and C are RMS-normalized, have a bias of each head, and are then rotated in pairs of the
    first 2 a states by the sum of pi tanh(theta_s) D_s up to t; A = -softplus(raw), D_t =
    softplus(raw + dt_bias), l = sigmoid(raw). Source: Mamba-3 (arXiv 2603.15569) and the code of
    its authors, with its default of n / 4 angles.

    Args:
        d_state: n.
        head_dim: p.
        expand: h p as a multiple of d_model.
    """

    state_type = Mamba3State

    @known_options
    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 128,
        head_dim: int = 64,
        expand: float = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, dtype)
        n = self.d_state = positive_int("d_state", d_state)
        p = self.head_dim = positive_int("head_dim", head_dim)
        d = expanded("expand", expand, "d_model", d_model)
        if d % p or n % 4:
            raise ValueError(
                f"head_dim must divide expand * d_model = {d}, and 4 d_state, got {p} and {n}"
            )
        h = self.num_heads = d // p
        self._sizes = [d, d, n, n, h, h, h, n // 4]
        factory = factory_options(device, dtype)
        self.in_proj = nn.Linear(d_model, sum(self._sizes), bias=False, **factory)
        self.dt_bias = nn.Parameter(torch.empty(h, **factory))
        self.norm_weights = nn.Parameter(torch.empty(2, n, **factory))
        self.biases = nn.Parameter(torch.empty(2, h, n, **factory))
        self.D = nn.Parameter(torch.empty(h, **factory))
        self.out_proj = nn.Linear(d, d_model, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.in_proj.reset_parameters()
        self.out_proj.reset_parameters()
        for ones in (self.norm_weights, self.biases, self.D):
            nn.init.ones_(ones)
        reset_dt_bias(self.dt_bias)
        self._mark_parameters()

    def _mark_parameters(self) -> None:
        for name in ("dt_bias", "D"):
            mark(self._parameters.get(name), "_no_weight_decay")

    def _state_sizes(self) -> StateShapes:
        h, n, p = self.num_heads, self.d_state, self.head_dim
        return {"ssm": (h, n, p), "angle": (h * n // 4,), "B": (h * n,), "x": (h * p,)}

    def _run(
        self,
        u: Tensor,  # (b, t, m)
        state: Mamba3State,
        lengths: Tensor | None,  # (b,)
    ) -> tuple[Tensor, Mamba3State]:  # (b, t, m)
        projected = self.in_proj(u)
        with without_autocast(u.device):
            z, x, *BC, dt, A, trap, theta = at_least_float32(projected).split(self._sizes, -1)
            x = x.unflatten(-1, (self.num_heads, self.head_dim))
            dt = F.softplus(dt + at_least_float32(self.dt_bias))  # (b, t, h)
            if lengths is not None:  # padding leaves the memory as it is
                dt = zero_outside(tokens_before(lengths, u.shape[1]), dt)
            turned = math.pi * torch.tanh(theta).unsqueeze(-2) * dt.unsqueeze(-1)
            first, *before = (v.unflatten(-1, (self.num_heads, -1)) for v in state.tensors[1:])
            angle = first.unsqueeze(1) + turned.cumsum(1)  # (b, t, h, a)
            norms, biases = at_least_float32(self.norm_weights), at_least_float32(self.biases)
            B, C = (
                rotated(F.rms_norm(v, v.shape[-1:], norms[i]).unsqueeze(-2) + biases[i], angle)
                for i, v in enumerate(BC)
            )
            decay = dt * -F.softplus(A).clamp(min=SLOWEST)
            trap = torch.sigmoid(trap)
            weights = (1 - trap) * dt, trap * dt
            y, after = trapezoidal_scan(x, B, C, decay, weights, (state.ssm, *before))
            y = (y + at_least_float32(self.D).unsqueeze(-1) * x).flatten(-2) * F.silu(z)
            ends = [v.flatten(-2) for v in (angle, B, x)]
            if lengths is None:
                last = [v[:, -1] for v in ends]
            else:
                pairs = zip(ends, state.tensors[1:], strict=True)
                last = [last_token(v, lengths, w) for v, w in pairs]
        return self.out_proj(y.to(projected.dtype)), Mamba3State(after, *last)


def rotated(
    v: Tensor,  # (b, t, h, n)
    angle: Tensor,  # (b, t, h, a)
) -> Tensor:  # (b, t, h, n)
    """The first 2 a numbers of each vector in pairs, turned by the angles, and the others."""
    a = 2 * angle.shape[-1]
    first, second = v[..., :a].unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    pair = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
    return torch.cat([pair.flatten(-2), v[..., a:]], -1)


def trapezoidal_scan(
    x: Tensor,  # (b, t, h, p)
    B: Tensor,  # (b, t, h, n)
    C: Tensor,  # (b, t, h, n)
    decay: Tensor,  # (b, t, h), a logarithm
    weights: tuple[Tensor, Tensor],  # (b, t, h), of the token before and of this one
    before: tuple[Tensor, ...],  # (b, h, n, p), (b, h, n), (b, h, p)
) -> tuple[Tensor, Tensor]:  # (b, t, h, p), (b, h, n, p)
    """h_t^T C_t of every token, and the last h, in chunks."""
    memory, B_last, x_last = before
    outputs = []
    for parts in zip(*(v.split(CHUNK, 1) for v in (x, B, C, decay, *weights)), strict=True):
        x_c, B_c, C_c, G, earlier, own = (v.transpose(1, 2) for v in parts)  # (b, h, c, ...)
        G = G.cumsum(-1)
        memory = memory + earlier[..., :1, None] * B_last.unsqueeze(-1) * x_last.unsqueeze(-2)
        # a token but the last of the chunk is written once by itself, once by the next one
        both = own + F.pad(earlier[..., 1:], (0, 1))
        difference = G.unsqueeze(-1) - G.unsqueeze(-2)
        token = torch.arange(G.shape[-1], device=G.device)
        ratio = torch.exp(difference.masked_fill(token.unsqueeze(1) < token, -torch.inf))
        kept = ratio * both.unsqueeze(-2)
        is_own = token.unsqueeze(1) == token
        scores = torch.where(is_own, own.unsqueeze(-2), kept) * (C_c @ B_c.mT)
        outputs.append(scores @ x_c + G.exp().unsqueeze(-1) * (C_c @ memory))
        written = (kept[..., -1, :].unsqueeze(-1) * B_c).mT @ x_c
        memory = G[..., -1:].exp().unsqueeze(-1) * memory + written
        B_last, x_last = B_c[..., -1, :], x_c[..., -1, :]
    return rearrange(torch.cat(outputs, 2), "b h t p -> b t h p"), memory

"""Memories by the delta rule with a decay for each key channel: Kimi Delta Attention and Gated
DeltaNet-2.

Letters: b batch, t time, m d_model, h heads, p key channels and v value channels of a head, n
chunks, c tokens of a chunk, w convolution width.
"""

import math
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.checks import known_options
from bedouin.kernels.backend import without_autocast
from bedouin.layers.common import (
    at_least_float32,
    factory_options,
    mark,
    positive_number,
    reset_dt_bias,
)
from bedouin.layers.convolution import ShortConvolution
from bedouin.packing import tokens_before, zero_outside
from bedouin.state import RecurrentState
from research.rivals.matrix_layer import MatrixLayer

CHUNK = 16
"""Tokens of a chunk; the products of all its pairs are p numbers each."""

A_RANGE = 1.0, 16.0
"""Initial values of exp(A_log)."""


class _KeyDecayFields(NamedTuple):
    conv: Tensor
    memory: Tensor


class KeyDecayState(RecurrentState, _KeyDecayFields):  # type: ignore[misc]
    """conv: (b, w - 1, h (2 p + v)), the last inputs of the convolution; memory: (b, h, p, v); at
    least float32."""

    __slots__ = ()
    axes = (2, 3)


class Written(NamedTuple):
    """What a token contributes to `key_decay_rule`."""

    query: Tensor  # (b, t, h, p)
    key: Tensor  # (b, t, h, p)
    erased: Tensor  # (b, t, h, p), the key times the strength of erasing
    value: Tensor  # (b, t, h, v), times the strength of writing
    log_decay: Tensor  # (b, t, h, p), <= 0


class GatedDeltaNet2(MatrixLayer[KeyDecayState]):
    """Gated DeltaNet-2, (b, t, m) -> (b, t, m), with eigenvalues in [-1, 1]:

        S_t = (I - k_t (b_t * k_t)^T) Diag(a_t) S_{t-1} + k_t (w_t * v_t)^T
        out = out_proj(norm(S_t^T q_t / sqrt(p)) * sigmoid(g_t))

    where q, k, v = SiLU(conv(proj(x))), q and k of unit length, b = 2 sigmoid(proj(x)) is a
    strength for each key channel, w = sigmoid(proj(x)) for each value channel, a = exp(-exp(A_log)
    softplus(f(x) + dt_bias)) a decay for each key channel, and f and g are linear through v values.
    Source: Gated DeltaNet-2 (arXiv 2605.22791); initial values are those of
    flash-linear-attention's layer with `allow_neg_eigval`.

    Args:
        num_heads: h.
        head_dim: p; None: d_model / num_heads.
        expand_v: v is expand_v * p.
        d_conv: width of the short convolution; None: no convolution, SiLU stays.
        rate_scale: factor on the initial decay rates; below 1 memories are longer.
    """

    state_type = KeyDecayState
    settable_options = ("norm_eps",)
    saved_options = ("norm_eps",)

    @known_options
    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 4,
        head_dim: int | None = None,
        expand_v: float = 1,
        d_conv: int | None = 4,
        rate_scale: float = 1.0,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, head_dim, expand_v, dtype)
        h, p, v = self.num_heads, self.head_dim, self.value_dim
        self.norm_eps = positive_number("norm_eps", norm_eps)
        self.rate_scale = positive_number("rate_scale", rate_scale)
        factory = factory_options(device, dtype)
        self.qkv_proj = nn.Linear(d_model, h * (2 * p + v), bias=False, **factory)
        self.conv = ShortConvolution(h * (2 * p + v), d_conv, bias=False, **factory)
        self.strength_proj = nn.Linear(d_model, sum(self._strengths()), bias=False, **factory)
        self.low_proj = nn.Linear(d_model, 2 * v, bias=False, **factory)
        self.f_proj = nn.Linear(v, h * p, bias=False, **factory)
        self.g_proj = nn.Linear(v, h * v, **factory)
        self.A_log = nn.Parameter(torch.empty(h, **factory))
        self.dt_bias = nn.Parameter(torch.empty(h * p, **factory))
        self.norm_weight = nn.Parameter(torch.empty(v, **factory))
        self.out_proj = nn.Linear(h * v, d_model, bias=False, **factory)
        self.reset_parameters()

    def _strengths(self) -> tuple[int, int]:
        """The strengths of erasing and of writing."""
        return self.num_heads * self.head_dim, self.num_heads * self.value_dim

    def reset_parameters(self) -> None:
        for module in self.children():
            assert isinstance(module, nn.Linear | ShortConvolution)
            module.reset_parameters()
        nn.init.ones_(self.norm_weight)
        nn.init.uniform_(self.A_log, *A_RANGE)
        with torch.no_grad():
            self.A_log.log_().add_(math.log(self.rate_scale))
        reset_dt_bias(self.dt_bias)
        self._mark_parameters()

    def _mark_parameters(self) -> None:
        for name in ("A_log", "dt_bias"):
            mark(self._parameters.get(name), "_no_weight_decay")

    def strengths(self, raw: Tensor) -> tuple[Tensor, Tensor]:  # (b, t, h p), (b, t, h v)
        """b and w."""
        erase, write = torch.sigmoid(raw).split(self._strengths(), -1)
        return 2 * erase, write

    def _run(
        self,
        x: Tensor,  # (b, t, m)
        state: KeyDecayState,
        lengths: Tensor | None,  # (b,)
    ) -> tuple[Tensor, KeyDecayState]:  # (b, t, m)
        qkv, window = self.conv(self.qkv_proj(x), state.conv, lengths)
        of_decay, of_gate = self.low_proj(x).chunk(2, -1)
        raw = qkv, self.strength_proj(x), self.f_proj(of_decay)
        gate, h, p, v = self.g_proj(of_gate), self.num_heads, self.head_dim, self.value_dim
        with without_autocast(x.device):
            qkv, strengths, f = map(at_least_float32, raw)
            parts = F.silu(qkv).split([h * p, h * p, h * v], -1)
            q, k, value = (rearrange(part, "b t (h p) -> b t h p", h=h) for part in parts)
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            erase, write = (
                rearrange(part, "b t (h p) -> b t h p", h=h) for part in self.strengths(strengths)
            )
            dt = F.softplus(f + at_least_float32(self.dt_bias)).unflatten(-1, (h, p))
            decay = -at_least_float32(self.A_log).exp().unsqueeze(-1) * dt
            if lengths is not None:  # padding leaves the memory as it is
                real = tokens_before(lengths, x.shape[1])
                erase, write, decay = (zero_outside(real, u) for u in (erase, write, decay))
            written = Written(q / math.sqrt(p), k, erase * k, write * value, decay)
            o, memory = key_decay_rule(written, state.memory)
            o = F.rms_norm(o, (v,), None, self.norm_eps) * at_least_float32(self.norm_weight)
            o = o.flatten(-2) * torch.sigmoid(at_least_float32(gate))
        return self.out_proj(o.to(gate.dtype)), KeyDecayState(window, memory)


class KimiDeltaAttention(GatedDeltaNet2):
    """Kimi Delta Attention, (b, t, m) -> (b, t, m), with eigenvalues in [-1, 1]: `GatedDeltaNet2`
    with one strength beta = 2 sigmoid(proj(x)) for each head, of erasing and of writing.

    Source: Kimi Linear (arXiv 2510.26692). Initial values are those of `GatedDeltaNet2`.
    """

    def _strengths(self) -> tuple[int, int]:
        return self.num_heads, 0

    def strengths(self, raw: Tensor) -> tuple[Tensor, Tensor]:  # (b, t, h), (b, t, h)
        beta = 2 * torch.sigmoid(raw)
        return beta, beta


def key_decay_rule(
    written: Written,
    memory: Tensor,  # (b, h, p, v)
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v)
    """S^T q of every token, and the last S, in chunks.

    With G_i (p,) the decay from the start of a chunk to its token i, S_i = G_i S_0 + sum_{j <= i}
    (G_i / G_j * k_j) e_j^T, where the e_j solve the unit lower triangular system

        e_i + sum_{j < i} (erased_i . (G_i / G_j * k_j)) e_j = value_i - S_0^T (G_i * erased_i)

    It is solved for all chunks at once with S_0 unknown; then one product a chunk gives the next
    S_0. All ratios G_i / G_j are at most 1, so that none overflows.
    """
    t, c = written.query.shape[1], chunk
    parts = (F.pad(v, (0, 0, 0, 0, 0, -t % c)) for v in written)
    q, k, erased, value, decay = (rearrange(v, "b (n c) h p -> b h n c p", c=c) for v in parts)
    G = decay.cumsum(-2)  # (b, h, n, c, p), logarithms
    token = torch.arange(c, device=q.device)
    earlier = (token.unsqueeze(1) > token).unsqueeze(-1)
    seen = (token.unsqueeze(1) >= token).unsqueeze(-1)
    ratio = torch.exp((G.unsqueeze(-2) - G.unsqueeze(-3)).masked_fill(~seen, -torch.inf))
    decayed = ratio * k.unsqueeze(-3)  # (b, h, n, c, c, p)
    scores = (q.unsqueeze(-2) * decayed).sum(-1)
    system = (erased.unsqueeze(-2) * decayed).masked_fill(~earlier, 0).sum(-1)
    known = torch.cat([value, G.exp() * erased], dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    new, read = solved.split([value.shape[-1], k.shape[-1]], dim=-1)
    q, to_end = G.exp() * q, decayed[..., -1, :, :]
    whole = G[..., -1, :].exp().unsqueeze(-1)  # (b, h, n, p, 1)
    outputs = []
    for n in range(q.shape[2]):
        e = new[:, :, n] - read[:, :, n] @ memory  # (b, h, c, v)
        outputs.append(q[:, :, n] @ memory + scores[:, :, n] @ e)
        memory = whole[:, :, n] * memory + to_end[:, :, n].mT @ e
    return rearrange(torch.cat(outputs, 2), "b h t v -> b t h v")[:, :t], memory.clone()

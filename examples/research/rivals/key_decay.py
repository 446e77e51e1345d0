"""Memories by the delta rule with a decay for each key channel: Kimi Delta Attention and Gated
DeltaNet-2.

Letters: b batch, t time, m d_model, h heads, p key and value channels of a head, n chunks, c tokens
of a chunk.
"""

import math

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.kernels.backend import without_autocast
from bedouin.layers.common import at_least_float32, mark, reset_dt_bias
from bedouin.layers.convolution import ShortConvolution

CHUNK = 16  # tokens, of which all pairs have p numbers
NORM_EPS = 1e-5


class GatedDeltaNet2(nn.Module):
    """Gated DeltaNet-2, (b, t, m) -> (b, t, m), with eigenvalues in [-1, 1], on whole sequences:

        S_t = (I - k_t (b_t * k_t)^T) Diag(a_t) S_{t-1} + k_t (w_t * v_t)^T
        out = out_proj(norm(S_t^T q_t / sqrt(p)) * sigmoid(g_t))

    where q, k, v = SiLU(conv(proj(x))), q and k of unit length, b = 2 sigmoid(proj(x)) is a
    strength for each key channel, w = sigmoid(proj(x)) for each value channel, a = exp(-exp(A_log)
    softplus(f(x) + dt_bias)) a decay for each key channel, and f and g are linear through p values.
    Source: Gated DeltaNet-2 (arXiv 2605.22791); initial values are those of
    flash-linear-attention's layer with `allow_neg_eigval`, whose rates exp(A_log) are multiplied by
    `rate_scale`.
    """

    def __init__(
        self, d_model: int, *, num_heads: int, head_dim: int, d_conv: int, rate_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        p, d = head_dim, num_heads * head_dim
        self.state_size = d * p + 3 * d * (d_conv - 1)
        self.qkv_proj = nn.Linear(d_model, 3 * d, bias=False)
        self.conv = ShortConvolution(3 * d, d_conv, bias=False)
        self.strength_proj = nn.Linear(d_model, self._num_strengths(), bias=False)
        self.low_proj = nn.Linear(d_model, 2 * p, bias=False)
        self.f_proj = nn.Linear(p, d, bias=False)
        self.g_proj = nn.Linear(p, d)
        rates = rate_scale * torch.empty(num_heads).uniform_(1, 16)
        self.A_log = nn.Parameter(rates.log())
        self.dt_bias = nn.Parameter(torch.empty(d))
        self.norm_weight = nn.Parameter(torch.ones(p))
        self.out_proj = nn.Linear(d, d_model, bias=False)
        reset_dt_bias(self.dt_bias)
        mark(self, "_no_weight_decay", "A_log", "dt_bias", "norm_weight")

    def _num_strengths(self) -> int:
        return 2 * self.num_heads * self.head_dim

    def strengths(self, raw: Tensor) -> tuple[Tensor, Tensor]:  # (b, t, 2 h p) -> (b, t, h, p)
        """b and w."""
        erase, write = torch.sigmoid(raw).unflatten(-1, (2, self.num_heads, -1)).unbind(-3)
        return 2 * erase, write

    def rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, erase: Tensor, write: Tensor
    ) -> Tensor:  # (b, t, h, p); strengths may be (b, t, h, 1)
        """S^T q from the logarithms of the decays, and from the strengths of erasing and writing, b
        and w."""
        return key_decay_rule(q, k, erase * k, write * v, decay)

    def forward(self, x: Tensor) -> Tensor:  # (b, t, m) -> (b, t, m)
        h, p = self.num_heads, self.head_dim
        qkv, _ = self.conv(self.qkv_proj(x), x.new_zeros(len(x), *self.conv.window_size))
        f, gate = self.low_proj(x).chunk(2, -1)
        parts, low = (qkv, self.f_proj(f), self.g_proj(gate), self.strength_proj(x)), qkv.dtype
        with without_autocast(x.device):
            qkv, f, gate, raw = map(at_least_float32, parts)
            q, k, v = F.silu(qkv).unflatten(-1, (3, h, -1)).unbind(-3)
            q, k = F.normalize(q, dim=-1) / math.sqrt(p), F.normalize(k, dim=-1)
            erase, write = self.strengths(raw)
            dt = F.softplus(f + self.dt_bias).unflatten(-1, (h, -1))
            decay = -self.A_log.exp().unsqueeze(-1) * dt
            o = self.rule(q, k, v, decay, erase, write)
            o = F.rms_norm(o, o.shape[-1:], self.norm_weight, NORM_EPS).flatten(-2)
            o = (o * torch.sigmoid(gate)).to(low)
        output: Tensor = self.out_proj(o)
        return output


class KimiDeltaAttention(GatedDeltaNet2):
    """Kimi Delta Attention, (b, t, m) -> (b, t, m), with eigenvalues in [-1, 1]: `GatedDeltaNet2`
    with one strength beta = 2 sigmoid(proj(x)) for each head, of erasing and of writing.

    Source: Kimi Linear (arXiv 2510.26692). Initial values are those of `GatedDeltaNet2`.
    """

    def _num_strengths(self) -> int:
        return self.num_heads

    def strengths(self, raw: Tensor) -> tuple[Tensor, Tensor]:  # (b, t, h) -> (b, t, h, 1)
        beta = 2 * torch.sigmoid(raw).unsqueeze(-1)
        return beta, beta


def key_decay_rule(*inputs: Tensor, chunk: int = CHUNK) -> Tensor:  # (b, t, h, p) all
    """S^T q of every token, in chunks, from queries, keys, erased (keys times the strength of
    erasing), values times the strength of writing, and logarithms of decays.

    With G_i (p,) the decay from the start of a chunk to its token i, S_i = G_i S_0 + sum_{j <= i}
    (G_i / G_j * k_j) e_j^T, where the e_j solve the unit lower triangular system

        e_i + sum_{j < i} (erased_i . (G_i / G_j * k_j)) e_j = value_i - S_0^T (G_i * erased_i)

    It is solved for all chunks at once with S_0 unknown; then one product a chunk gives the next
    S_0. All ratios G_i / G_j are at most 1, so that none overflows.
    """
    t = inputs[0].shape[1]
    parts = (F.pad(v, (0, 0, 0, 0, 0, -t % chunk)) for v in inputs)
    q, k, a, v, decay = (rearrange(u, "b (n c) h p -> b h n c p", c=chunk) for u in parts)
    G = decay.cumsum(-2)  # logarithms
    token = torch.arange(chunk, device=q.device)
    later = (token.unsqueeze(1) < token).unsqueeze(-1)
    ratio = torch.exp((G.unsqueeze(-2) - G.unsqueeze(-3)).masked_fill(later, -torch.inf))
    decayed = ratio * k.unsqueeze(-3)  # (b, h, n, c, c, p)
    scores = (q.unsqueeze(-2) * decayed).sum(-1)
    system = (a.unsqueeze(-2) * decayed).sum(-1)  # its diagonal is read as ones
    known = torch.cat([v, G.exp() * a], dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    new, read = solved.chunk(2, -1)
    q, to_end = G.exp() * q, decayed[..., -1, :, :]
    whole = G[..., -1, :].exp().unsqueeze(-1)  # (b, h, n, p, 1)
    memory, outputs = torch.zeros_like(whole[:, :, 0] * v[:, :, 0, :1]), []  # (b, h, p, p)
    for n in range(q.shape[2]):
        e = new[:, :, n] - read[:, :, n] @ memory  # (b, h, c, p)
        outputs.append(q[:, :, n] @ memory + scores[:, :, n] @ e)
        memory = whole[:, :, n] * memory + to_end[:, :, n].mT @ e
    return rearrange(torch.cat(outputs, 2), "b h t p -> b t h p")[:, :t]

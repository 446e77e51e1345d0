"""M2RNN: a nonlinear RNN whose state is a matrix.

Letters: b batch, t time, m d_model, h heads, p key channels and v value channels of a head, r = 2 p
+ v, w convolution width.
"""

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.checks import known_options
from bedouin.kernels.backend import without_autocast
from bedouin.layers.common import at_least_float32, mark, positive_number, reset_dt_bias
from bedouin.layers.convolution import ShortConvolution
from bedouin.layers.delta_net import A_MAX
from bedouin.packing import tokens_before, zero_outside
from bedouin.state import RecurrentState
from research.rivals.matrix_layer import MatrixLayer


class _M2RNNFields(NamedTuple):
    conv: Tensor
    memory: Tensor


class M2RNNState(RecurrentState, _M2RNNFields):  # type: ignore[misc]
    """conv: (b, w - 1, h (2 p + v)), the last inputs of the convolution; memory: (b, h, p, v); at
    least float32."""

    __slots__ = ()
    axes = (2, 3)


class M2RNN(MatrixLayer[M2RNNState]):
    """M2RNN, (b, t, m) -> (b, t, m), token by token:

        S_t = f_t S_{t-1} + (1 - f_t) tanh(S_{t-1} W + k_t v_t^T)
        out = out_proj(norm((S_t^T q_t + D * v_t) * SiLU(g_t)))

    where q, k, v = SiLU(conv(proj(x))), W is a matrix of the head, norm is an RMSNorm of each head,
    and f_t = exp(-exp(A_log) softplus(f_proj(x) + dt_bias)), one number a head. W is the identity
    at first. Source: M2RNN (arXiv 2603.14360); its heads have 64 key and 16 value channels.

    Args:
        num_heads: h.
        head_dim: p; None: d_model / num_heads.
        expand_v: v is expand_v * p.
        d_conv: width of the short convolution; None: no convolution, SiLU stays.
        conv_bias: whether that convolution has a bias.
    """

    state_type = M2RNNState
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
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, head_dim, expand_v, dtype)
        h, p, v = self.num_heads, self.head_dim, self.value_dim
        self.norm_eps = positive_number("norm_eps", norm_eps)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(d_model, h * (2 * p + v), bias=False, **factory)
        self.conv = ShortConvolution(h * (2 * p + v), d_conv, bias=conv_bias, **factory)
        self.f_proj = nn.Linear(d_model, h, bias=False, **factory)
        self.g_proj = nn.Linear(d_model, h * v, bias=False, **factory)
        self.state_weight = nn.Parameter(torch.empty(h, v, v, **factory))
        self.A_log = nn.Parameter(torch.empty(h, **factory))
        self.dt_bias = nn.Parameter(torch.empty(h, **factory))
        self.D = nn.Parameter(torch.empty(h, v, **factory))
        self.norm_weight = nn.Parameter(torch.empty(h, v, **factory))
        self.out_proj = nn.Linear(h * v, d_model, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in (self.qkv_proj, self.conv, self.f_proj, self.g_proj, self.out_proj):
            module.reset_parameters()
        nn.init.ones_(self.norm_weight)
        nn.init.ones_(self.D)
        with torch.no_grad():
            identity = torch.eye(self.value_dim, device=self.D.device)
            self.state_weight.copy_(identity.expand_as(self.state_weight))
            self.A_log.copy_(torch.log(A_MAX * (1 - torch.rand_like(self.A_log))))
        reset_dt_bias(self.dt_bias)
        self._mark_parameters()

    def _mark_parameters(self) -> None:
        mark(self, "_no_weight_decay", "A_log", "dt_bias", "D")

    def _run(
        self,
        x: Tensor,  # (b, t, m)
        state: M2RNNState,
        lengths: Tensor | None,  # (b,)
    ) -> tuple[Tensor, M2RNNState]:  # (b, t, m)
        qkv, window = self.conv(self.qkv_proj(x), state.conv, lengths)
        low, f_raw, gate = qkv.dtype, self.f_proj(x), self.g_proj(x)
        with without_autocast(x.device):
            qkv = F.silu(at_least_float32(rearrange(qkv, "b t (h r) -> b t h r", h=self.num_heads)))
            v = qkv[..., 2 * self.head_dim :]
            dt = F.softplus(at_least_float32(f_raw) + at_least_float32(self.dt_bias))
            if lengths is not None:  # padding leaves the state: f = 1
                dt = zero_outside(tokens_before(lengths, x.shape[1]), dt)
            f = torch.exp(-torch.exp(at_least_float32(self.A_log)) * dt)
            o, memory = recurrence(qkv, f, at_least_float32(self.state_weight), state.memory)
            o = o + at_least_float32(self.D) * v
            gate = rearrange(F.silu(at_least_float32(gate)), "b t (h v) -> b t h v", v=v.shape[-1])
            o = F.rms_norm(o * gate, (self.value_dim,), None, self.norm_eps) * self.norm_weight
            o = rearrange(o, "b t h v -> b t (h v)").to(low)
        return self.out_proj(o), M2RNNState(window, memory)


def recurrence(
    qkv: Tensor,  # (b, t, h, r)
    f: Tensor,  # (b, t, h)
    W: Tensor,  # (h, v, v)
    memory: Tensor,  # (b, h, p, v)
) -> tuple[Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v)
    """S^T q of every token, and the last S, which owns its memory, in plain PyTorch."""
    p, v = memory.shape[2:]
    q, k, value = qkv.split([p, p, v], dim=-1)
    S = rearrange(memory, "b h p v -> h b p v")
    queries = rearrange(q, "b t h p -> t (h b) 1 p").unbind(0)
    keys = rearrange(k, "b t h p -> t h b p 1").unbind(0)
    values = rearrange(value, "b t h v -> t h b 1 v").unbind(0)
    rates = rearrange(f, "b t h -> t h b 1 1").unbind(0)
    outputs = []
    for q_t, k_t, v_t, f_t in zip(queries, keys, values, rates, strict=True):
        # one product with W for all samples
        mixed = torch.baddbmm((k_t * v_t).flatten(1, 2), S.flatten(1, 2), W).view_as(S)
        S = torch.lerp(torch.tanh(mixed), S, f_t)
        outputs.append(q_t @ S.flatten(0, 1))
    o = rearrange(torch.stack(outputs), "t (h b) 1 v -> b t h v", b=memory.shape[0])
    return o, rearrange(S, "h b p v -> b h p v").clone()

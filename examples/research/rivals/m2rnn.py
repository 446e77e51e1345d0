"""M2RNN: a nonlinear RNN whose state is a matrix.

Letters: b batch, t time, m d_model, h heads, p key channels and v value channels of a head, r = 2 p
+ v.
"""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.kernels.backend import without_autocast
from bedouin.layers.common import at_least_float32, expanded, mark, reset_dt_bias
from bedouin.layers.convolution import ShortConvolution
from bedouin.layers.delta_net import A_MAX

NORM_EPS = 1e-5


class M2RNN(nn.Module):
    """M2RNN, (b, t, m) -> (b, t, m), token by token:

        S_t = f_t S_{t-1} + (1 - f_t) tanh(S_{t-1} W + k_t v_t^T)
        out = out_proj(norm((S_t^T q_t + D * v_t) * SiLU(g_t)))

    where q, k, v = SiLU(conv(proj(x))), W is a matrix of the head, norm is an RMSNorm of each head,
    and f_t = exp(-exp(A_log) softplus(f_proj(x) + dt_bias)), one number a head. W is the identity
    at first. Source: M2RNN (arXiv 2603.14360); its heads have 64 key and 16 value channels.
    """

    def __init__(
        self, d_model: int, *, num_heads: int, head_dim: int, expand_v: float, d_conv: int | None
    ) -> None:
        super().__init__()
        h, p, v = num_heads, head_dim, expanded("expand_v", expand_v, "head_dim", head_dim)
        self.num_heads, self.head_dim, self.value_dim = h, p, v
        self.qkv_proj = nn.Linear(d_model, h * (2 * p + v), bias=False)
        self.conv = ShortConvolution(h * (2 * p + v), d_conv, bias=False)
        self.state_size = h * p * v + self.conv.window_size[0] * self.conv.channels
        self.f_proj = nn.Linear(d_model, h, bias=False)
        self.g_proj = nn.Linear(d_model, h * v, bias=False)
        self.state_weight = nn.Parameter(torch.eye(v).repeat(h, 1, 1))
        self.A_log = nn.Parameter(torch.log(A_MAX * (1 - torch.rand(h))))
        self.dt_bias = nn.Parameter(torch.empty(h))
        self.D = nn.Parameter(torch.ones(h, v))
        self.norm_weight = nn.Parameter(torch.ones(h, v))
        self.out_proj = nn.Linear(h * v, d_model, bias=False)
        reset_dt_bias(self.dt_bias)
        mark(self, "_no_weight_decay", "A_log", "dt_bias", "D", "norm_weight")

    def forward(self, x: Tensor) -> Tensor:  # (b, t, m) -> (b, t, m)
        qkv, _ = self.conv(self.qkv_proj(x), x.new_zeros(len(x), *self.conv.window_size))
        low, f_raw, gate = qkv.dtype, self.f_proj(x), self.g_proj(x)
        with without_autocast(x.device):
            qkv = F.silu(at_least_float32(rearrange(qkv, "b t (h r) -> b t h r", h=self.num_heads)))
            dt = F.softplus(at_least_float32(f_raw) + self.dt_bias)
            f = torch.exp(-torch.exp(self.A_log) * dt)
            o = recurrence(qkv, f, self.state_weight) + self.D * qkv[..., 2 * self.head_dim :]
            gate = F.silu(at_least_float32(gate)).unflatten(-1, (self.num_heads, -1))
            o = F.rms_norm(o * gate, (self.value_dim,), None, NORM_EPS) * self.norm_weight
        output: Tensor = self.out_proj(o.flatten(-2).to(low))
        return output


def recurrence(
    qkv: Tensor,  # (b, t, h, r)
    f: Tensor,  # (b, t, h)
    W: Tensor,  # (h, v, v)
) -> Tensor:  # (b, t, h, v)
    """S^T q of every token."""
    h, v, _ = W.shape
    q, k, value = qkv.split([(qkv.shape[-1] - v) // 2] * 2 + [v], dim=-1)
    S = qkv.new_zeros(h, len(qkv), k.shape[-1], v)
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
    return rearrange(torch.stack(outputs), "t (h b) 1 v -> b t h v", h=h)

"""Recurrent Delta Net: the delta rule whose queries, keys, values and rates see the last output.

Letters: b batch, t time, m d_model, h heads, p key channels and v value channels of a head, r = 2 p
+ v + 1 raw values of a head.
"""

import math

import torch
from einops import rearrange
from torch import Tensor, nn

from bedouin.kernels.backend import without_autocast
from bedouin.layers.common import at_least_float32, expanded
from bedouin.layers.convolution import ShortConvolution


class RecurrentDeltaNet(nn.Module):
    """Recurrent Delta Net, (b, t, m) -> (b, t, m): a fast weight programmer with feedback.

        q, k, v, beta = W x_t + R tanh(y_{t-1})       R of a head reads the y of that head
        S_t = S_{t-1} + sigmoid(beta) softmax(k) (v - S_{t-1}^T softmax(k))^T
        y_t = S_t^T softmax(q),   out = out_proj(y_t)

    It runs token by token. Source: Going Beyond Linear Transformers with Recurrent Fast Weight
    Programmers (arXiv 2106.06295), section 3; the convolution of width d_conv of the parts of q, k
    and v that x gives is not part of it. `feedback_init` is a factor on R at initialization, 1:
    that of torch.nn.Linear.
    """

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int,
        head_dim: int,
        expand_v: float,
        d_conv: int | None,
        feedback_init: float = 1.0,
    ) -> None:
        super().__init__()
        h, p, v = num_heads, head_dim, expanded("expand_v", expand_v, "head_dim", head_dim)
        self.num_heads, self.head_dim, self.value_dim = h, p, v
        self.qkv_proj = nn.Linear(d_model, h * (2 * p + v), bias=False)
        self.b_proj = nn.Linear(d_model, h, bias=False)
        self.conv = ShortConvolution(h * (2 * p + v), d_conv, bias=False)
        self.state_size = h * (p + 1) * v + self.conv.window_size[0] * self.conv.channels
        bound = feedback_init / math.sqrt(v)
        self.y_proj = nn.Parameter(torch.empty(h, v, 2 * p + v + 1).uniform_(-bound, bound))
        self.out_proj = nn.Linear(h * v, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (b, t, m) -> (b, t, m)
        qkv, _ = self.conv(self.qkv_proj(x), x.new_zeros(len(x), *self.conv.window_size))
        qkv = rearrange(qkv, "b t (h r) -> b t h r", h=self.num_heads)
        beta = self.b_proj(x).unsqueeze(-1)
        with without_autocast(x.device):
            raw = at_least_float32(torch.cat([qkv, beta.to(qkv.dtype)], dim=-1))
            y = recurrence(raw, self.y_proj)
        output: Tensor = self.out_proj(y.flatten(-2).to(qkv.dtype))
        return output


def recurrence(raw: Tensor, R: Tensor) -> Tensor:  # (b, t, h, r), (h, v, r) -> (b, t, h, v)
    """The outputs of every token."""
    (h, v, r), b = R.shape, len(raw)
    p = (r - v - 1) // 2
    S, y, outputs = raw.new_zeros(h * b, p, v), raw.new_zeros(h, b, v), []
    for raw_t in rearrange(raw, "b t h r -> t h b r").unbind(0):
        fed = torch.baddbmm(raw_t, torch.tanh(y), R).flatten(0, 1)  # (h b, r)
        keys, value, beta = fed.split([2 * p, v, 1], dim=-1)
        qk = torch.softmax(keys.unflatten(-1, (2, p)), dim=-1)  # (h b, 2, p)
        q, k = qk.unbind(1)
        read_q, read_k = (qk @ S).unbind(1)
        step = torch.sigmoid(beta) * (value - read_k)  # (h b, v)
        S = torch.baddbmm(S, k.unsqueeze(2), step.unsqueeze(1))
        y = (read_q + (q * k).sum(-1, keepdim=True) * step).view_as(y)
        outputs.append(y)
    return rearrange(torch.stack(outputs), "t h b v -> b t h v")

"""Recurrent Delta Net: the delta rule whose queries, keys, values and rates see the last output.

Letters: b batch, t time, m d_model, h heads, p key channels and v value channels of a head, r = 2 p
+ v + 1 raw values of a head, w convolution width.
"""

import math
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from bedouin.checks import known_options
from bedouin.kernels.backend import without_autocast
from bedouin.layers.common import at_least_float32, positive_number
from bedouin.layers.convolution import ShortConvolution
from bedouin.packing import tokens_before
from bedouin.state import RecurrentState, StateShapes
from research.rivals.matrix_layer import MatrixLayer


class _RecurrentDeltaFields(NamedTuple):
    conv: Tensor
    memory: Tensor
    y: Tensor


class RecurrentDeltaState(RecurrentState, _RecurrentDeltaFields):  # type: ignore[misc]
    """conv: (b, w - 1, h (2 p + v)), the last inputs of the convolution; memory: (b, h, p, v); y:
    (b, h, v), the last output; at least float32."""

    __slots__ = ()
    axes = (2, 3, 2)


class RecurrentDeltaNet(MatrixLayer[RecurrentDeltaState]):
    """Recurrent Delta Net, (b, t, m) -> (b, t, m): a fast weight programmer with feedback.

        q, k, v, beta = W x_t + R tanh(y_{t-1})       R of a head reads the y of that head
        S_t = S_{t-1} + sigmoid(beta) softmax(k) (v - S_{t-1}^T softmax(k))^T
        y_t = S_t^T softmax(q),   out = out_proj(y_t)

    It runs token by token. Source: Going Beyond Linear Transformers with Recurrent Fast Weight
    Programmers (arXiv 2106.06295), section 3; the convolution of W x is not part of it.

    Args:
        num_heads: h.
        head_dim: p; None: d_model / num_heads.
        expand_v: v is expand_v * p.
        d_conv: width of a short convolution of the parts of q, k and v that x gives; None (the
            default): no convolution.
        conv_bias: whether that convolution has a bias.
        feedback_init: factor on R at initialization, 1: that of torch.nn.Linear.
    """

    state_type = RecurrentDeltaState

    @known_options
    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 4,
        head_dim: int | None = None,
        expand_v: float = 1,
        d_conv: int | None = None,
        conv_bias: bool = False,
        feedback_init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, head_dim, expand_v, dtype)
        h, p, v = self.num_heads, self.head_dim, self.value_dim
        self.feedback_init = positive_number("feedback_init", feedback_init)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(d_model, h * (2 * p + v), bias=False, **factory)
        self.b_proj = nn.Linear(d_model, h, bias=False, **factory)
        self.conv = ShortConvolution(h * (2 * p + v), d_conv, bias=conv_bias, **factory)
        self.y_proj = nn.Parameter(torch.empty(h, v, 2 * p + v + 1, **factory))
        self.out_proj = nn.Linear(h * v, d_model, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in (self.qkv_proj, self.b_proj, self.conv, self.out_proj):
            module.reset_parameters()
        bound = self.feedback_init / math.sqrt(self.value_dim)
        nn.init.uniform_(self.y_proj, -bound, bound)

    def _state_sizes(self) -> StateShapes:
        return super()._state_sizes() | {"y": (self.num_heads, self.value_dim)}

    def _run(
        self,
        x: Tensor,  # (b, t, m)
        state: RecurrentDeltaState,
        lengths: Tensor | None,  # (b,)
    ) -> tuple[Tensor, RecurrentDeltaState]:  # (b, t, m)
        qkv, window = self.conv(self.qkv_proj(x), state.conv, lengths)
        qkv = rearrange(qkv, "b t (h r) -> b t h r", h=self.num_heads)
        beta = self.b_proj(x).unsqueeze(-1)
        with without_autocast(x.device):
            raw = at_least_float32(torch.cat([qkv, beta.to(qkv.dtype)], dim=-1))
            R = at_least_float32(self.y_proj)
            y, memory, last = recurrence(raw, R, state.memory, state.y, lengths)
        output = self.out_proj(rearrange(y, "b t h v -> b t (h v)").to(qkv.dtype))
        return output, RecurrentDeltaState(window, memory, last)


def recurrence(
    raw: Tensor,  # (b, t, h, r)
    R: Tensor,  # (h, v, r)
    memory: Tensor,  # (b, h, p, v)
    y: Tensor,  # (b, h, v)
    lengths: Tensor | None,  # (b,)
) -> tuple[Tensor, Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v), (b, h, v)
    """The outputs, and the memory and the output after the last token, in plain PyTorch."""
    (h, v, _), p = R.shape, memory.shape[2]
    real = None if lengths is None else tokens_before(lengths, raw.shape[1])
    S = rearrange(memory, "b h p v -> (h b) p v")
    y = rearrange(y, "b h v -> h b v")
    outputs = []
    for t, raw_t in enumerate(rearrange(raw, "b t h r -> t h b r").unbind(0)):
        fed = torch.baddbmm(raw_t, torch.tanh(y), R).flatten(0, 1)  # (h b, r)
        keys, value, beta = fed.split([2 * p, v, 1], dim=-1)
        qk = torch.softmax(keys.unflatten(-1, (2, p)), dim=-1)  # (h b, 2, p)
        q, k = qk.unbind(1)
        read_q, read_k = (qk @ S).unbind(1)
        step = torch.sigmoid(beta) * (value - read_k)  # (h b, v)
        if real is not None:  # padding writes nothing
            step = step.masked_fill(~real[:, t].repeat(h).unsqueeze(1), 0)
        S = torch.baddbmm(S, k.unsqueeze(2), step.unsqueeze(1))
        new = (read_q + (q * k).sum(-1, keepdim=True) * step).view_as(y)
        y = new if real is None else torch.where(real[:, t, None], new, y)
        outputs.append(y)
    memory = rearrange(S, "(h b) p v -> b h p v", h=h)
    return rearrange(outputs, "t h b v -> b t h v"), memory, rearrange(y, "h b v -> b h v").clone()

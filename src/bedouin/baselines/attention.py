"""Causal softmax attention with rotary positions.

Letters: b batch, t time, s earlier tokens, m d_model, h heads, p channels of a head,
w convolution width.
"""

from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.baselines.interface import Baseline, Sizes, each, owned
from bedouin.baselines.options import head_size, positive_number
from bedouin.baselines.short_convolution import ShortConvolution
from bedouin.checks import check_bool, positive_int
from bedouin.kernels.backend import without_autocast
from bedouin.parameters import at_least_float32, factory_options


class AttentionState(NamedTuple):
    """conv: (b, w - 1, 3 m), the last inputs of the convolution; keys (already rotated) and values:
    (b, s, h, p) of all s earlier tokens, so s is the position of the next one. In the layer's
    dtype."""

    conv: Tensor
    keys: Tensor
    values: Tensor

    def detach(self) -> "AttentionState":
        """The state without its gradient history: truncated back-propagation through time."""
        return AttentionState(*each(self, Tensor.detach))

    def to(self, *args: Any, **options: Any) -> "AttentionState":
        """Every tensor through `Tensor.to`."""
        return AttentionState(*each(self, lambda v: v.to(*args, **options)))

    def __getitem__(self, index: Any) -> "AttentionState":  # type: ignore[override]
        """Samples of the batch: state[2:5], state[mask]; state[i] is one, without batch axis."""
        return AttentionState(*each(self, lambda v: v[index]))


class Attention(Baseline[AttentionState]):
    """Causal multi-head attention by torch's scaled_dot_product_attention, (b, t, m) -> (b, t, m).

        o_t = sum_{s <= t} softmax_s(R_t q_t . R_s k_s / sqrt(p)) v_s

    Sources: Attention Is All You Need (arXiv 1706.03762); RoFormer (arXiv 2104.09864) for the
    rotations R.

    Args:
        num_heads: must divide d_model.
        rope_base: base of the rotary frequencies, which need an even number of channels a head;
            None: no positions.
        bias: whether the projections have biases.
        d_conv: width of a short convolution of queries, keys and values, as Primer
            (arXiv 2109.08668) has it; None (the default): no convolution.
        conv_bias: whether that convolution has a bias.
    """

    state_type = AttentionState

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 4,
        rope_base: float | None = 10_000.0,
        bias: bool = False,
        d_conv: int | None = None,
        conv_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, dtype)
        factory = factory_options(device, dtype)
        check_bool("bias", bias)
        self.num_heads = positive_int("num_heads", num_heads)
        self.head_dim = head_size(d_model, num_heads)
        self.rope_base = None if rope_base is None else positive_number("rope_base", rope_base)
        if rope_base is not None and self.head_dim % 2:
            raise ValueError(
                "rotary positions need an even number of channels a head, got d_model / num_heads "
                f"= {self.head_dim}: choose another num_heads, or rope_base=None for no positions"
            )
        self.in_proj = nn.Linear(d_model, 3 * d_model, bias=bias, **factory)
        self.conv = ShortConvolution(3 * d_model, d_conv, bias=conv_bias, **factory)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias, **factory)

    def reset_parameters(self) -> None:
        for module in (self.in_proj, self.conv, self.out_proj):
            module.reset_parameters()

    @property
    def state_dtype(self) -> torch.dtype:
        """The layer's dtype: a wider cache would be converted as a whole for every token."""
        return self.out_proj.weight.dtype

    def _state_sizes(self) -> Sizes:
        cache = (None, self.num_heads, self.head_dim)
        return {"conv": self.conv.window_size, "keys": cache, "values": cache}

    def _checked_state(self, state: AttentionState, b: int) -> AttentionState:
        state = super()._checked_state(state, b)
        if state.keys.shape != state.values.shape:
            raise ValueError(
                "state.keys and state.values must have one shape, got "
                f"{tuple(state.keys.shape)} and {tuple(state.values.shape)}"
            )
        return state

    def _run(
        self,
        x: Tensor,  # (b, t, m)
        state: AttentionState,
    ) -> tuple[Tensor, AttentionState]:  # (b, t, m)
        qkv, window = self.conv(self.in_proj(x), state.conv)
        q, k, v = rearrange(qkv, "b t (i h p) -> i b t h p", i=3, h=self.num_heads)
        t, s = x.shape[1], state.keys.shape[1]
        if self.rope_base is not None:
            q, k = (rotate(u, s, self.rope_base) for u in (q, k))
        keys = torch.cat([state.keys, k.to(self.state_dtype)], dim=1)
        values = torch.cat([state.values, v.to(self.state_dtype)], dim=1)
        query, key, value = (u.to(q.dtype).transpose(1, 2) for u in (q, keys, values))
        # is_causal aligns query 0 with key 0, so it is right only without earlier tokens
        mask = _mask(t, s, x.device) if s and t > 1 else None
        causal = s == 0 and t > 1
        o = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
        output = self.out_proj(rearrange(o, "b h t p -> b t (h p)"))
        return output, AttentionState(window, owned(keys), owned(values))

    def extra_repr(self) -> str:
        return f"{self.d_model}, num_heads={self.num_heads}, rope_base={self.rope_base}"


def _mask(t: int, s: int, device: torch.device) -> Tensor:  # (t, s + t)
    """True where one of t tokens may attend: the s earlier tokens, itself and those before it."""
    return torch.ones(t, s + t, dtype=torch.bool, device=device).tril(s)


def rotate(
    x: Tensor,  # (b, t, h, p), p even
    start: int,
    base: float,
) -> Tensor:  # (b, t, h, p)
    """Rotary positions start, start + 1, ...: channel pairs (i, i + p/2) turned by the angle
    position * base^(-2i/p), in at least float32."""
    half = x.shape[-1] // 2
    with without_autocast(x.device):
        first, second = at_least_float32(x).chunk(2, -1)
        dtype, device = first.dtype, x.device
        frequency = base ** (-torch.arange(half, dtype=dtype, device=device) / half)
        position = torch.arange(start, start + x.shape[1], dtype=dtype, device=device)
        angle = (position.unsqueeze(-1) * frequency).unsqueeze(1)  # (t, 1, p/2)
        cos, sin = angle.cos(), angle.sin()
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.to(x.dtype)

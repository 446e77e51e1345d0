"""Causal softmax attention with rotary positions.

Letters: b batch, t time, s earlier tokens, m d_model, h heads of p channels, w width.
"""

from collections import namedtuple
from collections.abc import Sequence
from typing import Any, Self

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.checks import check_bool, check_tensor, known_options, positive_int
from bedouin.kernels.backend import without_autocast
from bedouin.layers.common import RecurrentLayer, at_least_float32, head_size, positive_number
from bedouin.layers.convolution import ShortConvolution
from bedouin.packing import tokens_before, zero_outside
from bedouin.state import Join, RecurrentState, StateShapes

_AttentionFields = namedtuple("_AttentionFields", "conv keys values")


class AttentionState(RecurrentState, _AttentionFields):  # type: ignore[misc]
    """conv: (b, w - 1, 3 m), the last inputs of the convolution; keys (already rotated) and values:
    (b, s, h, p) of all s earlier tokens, s the next one's position; in the layer's dtype."""

    __slots__ = ()
    axes = (2, 3, 3)

    @classmethod
    def _joined(cls, states: Sequence[Any], batched: bool, join: Join) -> Any:
        is_padded = [isinstance(state, PaddedAttentionState) for state in states]
        # not a set: torch.compile cannot hash symbolic sizes
        sizes = [state.keys.shape[-3] for state in states if isinstance(state, CACHES)]
        if any(is_padded) or any(size != sizes[0] for size in sizes):
            return PaddedAttentionState._joined(states, batched, join)
        return super()._joined(states, batched, join)


_PaddedAttentionFields = namedtuple("_PaddedAttentionFields", "conv keys values lengths")


class PaddedAttentionState(RecurrentState, _PaddedAttentionFields):  # type: ignore[misc]
    """The state of samples with different numbers of earlier tokens: the fields of
    `AttentionState`, where s is the most places, and lengths: (b,) int64, the places that each
    sample has filled from the left, and so the position of its next token."""

    __slots__ = ()
    axes = (2, 3, 3, 0)

    def to(self, *args: Any, **options: Any) -> Self:
        """The state with `Tensor.to` applied to every tensor; lengths keep their dtype."""
        conv, keys, values = (v.to(*args, **options) for v in self.tensors[:3])
        return self._make((conv, keys, values, self.lengths.to(keys.device)))

    @classmethod
    def _joined(cls, states: Sequence[Any], batched: bool, join: Join) -> Self:
        s = max((state.keys.shape[-3] for state in states if isinstance(state, CACHES)), default=0)
        padded = []
        for state in states:
            if isinstance(state, CACHES):
                conv, keys, values, *rest = state.tensors
                lengths = rest or [
                    keys.new_full(keys.shape[:-3], keys.shape[-3], dtype=torch.int64)
                ]
                more = 0, 0, 0, 0, 0, s - keys.shape[-3]
                state = cls._make((conv, F.pad(keys, more), F.pad(values, more), *lengths))
            padded.append(state)
        return super()._joined(padded, batched, join)


CACHES = (AttentionState, PaddedAttentionState)


class Attention(RecurrentLayer[AttentionState]):
    """Causal multi-head attention by torch's scaled_dot_product_attention, (b, t, m) -> (b, t, m).

        o_t = sum_{s <= t} softmax_s(R_t q_t . R_s k_s / sqrt(p)) v_s

    Sources: Attention Is All You Need (arXiv 1706.03762); RoFormer (arXiv 2104.09864), rotations R.

    Args:
        num_heads: h. head_dim: p, even with positions; None: d_model / num_heads.
        rope_base: base of the rotary frequencies; None: no positions.
        bias: whether the projections have biases.
        d_conv: width of a short convolution of queries, keys and values, as Primer (arXiv
            2109.08668) has it; None: no convolution.
    """

    state_type = AttentionState
    saved_options = ("num_heads", "rope_base")
    shown_options = ("num_heads", "rope_base")

    @known_options
    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 4,
        head_dim: int | None = None,
        rope_base: float | None = 10_000.0,
        bias: bool = False,
        d_conv: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, dtype)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        check_bool("bias", bias)
        h = self.num_heads = positive_int("num_heads", num_heads)
        p = head_size(d_model, h) if head_dim is None else positive_int("head_dim", head_dim)
        self.head_dim = p
        self.rope_base = None if rope_base is None else positive_number("rope_base", rope_base)
        if rope_base is not None and self.head_dim % 2:
            raise ValueError(
                f"rotary positions need an even number of channels a head, got {self.head_dim}: "
                "choose another num_heads or head_dim, or rope_base=None for no positions"
            )
        self.in_proj = nn.Linear(d_model, 3 * h * p, bias=bias, **factory)
        self.conv = ShortConvolution(3 * h * p, d_conv, bias=False, **factory)
        self.out_proj = nn.Linear(h * p, d_model, bias=bias, **factory)

    @property
    def state_dtype(self) -> torch.dtype:
        """The layer's dtype: a wider cache would be converted as a whole for every token."""
        return self.out_proj.weight.dtype

    def _state_sizes(self) -> StateShapes:
        cache = (None, self.num_heads, self.head_dim)
        return {"conv": self.conv.window_size, "keys": cache, "values": cache}

    def checked_state(self, state: Any, b: int) -> Any:
        lengths = None
        if isinstance(state, PaddedAttentionState):
            *fields, lengths = state.tensors
            state = AttentionState(*fields)
        state = super().checked_state(state, b)
        if state.keys.shape != state.values.shape:
            raise ValueError(
                "state.keys and state.values must have one shape, got "
                f"{tuple(state.keys.shape)} and {tuple(state.values.shape)}"
            )
        if lengths is None:
            return state
        check_tensor("state.lengths", lengths, "(b,)")
        if lengths.numel() != b or lengths.dtype != torch.int64:
            raise ValueError(
                f"state.lengths must be int64 of shape ({b},), got {lengths.dtype} of "
                f"{tuple(lengths.shape)}: select samples with state[...]"
            )
        return PaddedAttentionState._make((*state.tensors, lengths.reshape(b)))

    def _run(
        self, x: Tensor, state: AttentionState | PaddedAttentionState, lengths: Tensor | None
    ) -> tuple[Tensor, Any]:  # (b, t, m), (b,) -> (b, t, m)
        qkv, window = self.conv(self.in_proj(x), state.conv, lengths)
        q, k, v = rearrange(qkv, "b t (i h p) -> i b t h p", i=3, h=self.num_heads)
        t, s = x.shape[1], state.keys.shape[1]
        filled = state.lengths if isinstance(state, PaddedAttentionState) else None
        if self.rope_base is not None:
            q, k = (rotate(u, s if filled is None else filled, self.rope_base) for u in (q, k))
        keys = _append(state.keys, k.to(self.state_dtype), filled)
        values = _append(state.values, v.to(self.state_dtype), filled)
        # torch's fused kernels need adjacent channels, which a convolution's output does not have
        q = q.contiguous()
        query, key, value = (u.to(q.dtype).transpose(1, 2) for u in (q, keys, values))
        # is_causal aligns query 0 with key 0, so it is right only without earlier tokens
        causal, mask = filled is None and not s and t > 1, None
        if filled is not None:  # True for the earlier tokens, itself and those before it
            last = filled.unsqueeze(1) + torch.arange(t, device=x.device)  # (b, t)
            mask = (torch.arange(s + t, device=x.device) <= last.unsqueeze(-1)).unsqueeze(1)
        elif s and t > 1:
            mask = torch.ones(t, s + t, dtype=torch.bool, device=x.device).tril(s)
        o = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
        output = self.out_proj(rearrange(o, "b h t p -> b t (h p)"))
        if filled is None and lengths is None:
            return output, AttentionState(window, keys, values)
        if filled is None:
            filled = state.keys.new_full(x.shape[:1], s, dtype=torch.int64)
        after = filled + (t if lengths is None else lengths)
        keys, values = (zero_outside(tokens_before(after, s + t), u) for u in (keys, values))
        return output, PaddedAttentionState(window, keys, values, after)


def _append(cache: Tensor, new: Tensor, filled: Tensor | None) -> Tensor:
    """The filled places of the cache (b, s, h, p), None for all, and the new ones (b, t, h, p)."""
    joined = torch.cat([cache, new], dim=1)
    if filled is None:
        return joined
    s, places = cache.shape[1], joined.shape[1]
    place, end = torch.arange(places, device=cache.device), filled.unsqueeze(1)
    index = torch.where(place < end, place, place - end + s).clamp(max=places - 1)
    return joined.gather(1, index[..., None, None].expand(joined.shape))


def rotate(x: Tensor, start: int | Tensor, base: float) -> Tensor:  # (b, t, h, p), p even
    """Rotary positions from start on: channels (i, i + p/2) turned by position * base^(-2i/p)."""
    half = x.shape[-1] // 2
    with without_autocast(x.device):
        first, second = at_least_float32(x).chunk(2, -1)
        dtype, device = first.dtype, x.device
        frequency = base ** (-torch.arange(half, dtype=dtype, device=device) / half)
        first_position = start.unsqueeze(1) if isinstance(start, Tensor) else start
        position = first_position + torch.arange(x.shape[1], dtype=dtype, device=device)
        angle = (position.unsqueeze(-1) * frequency).unsqueeze(-2)  # (t, 1, p/2), or (b, t, 1, p/2)
        cos, sin = angle.cos(), angle.sin()
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.to(x.dtype)

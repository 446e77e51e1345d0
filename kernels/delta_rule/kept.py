"""Sizes of chunks of the Triton kernels, and what their backward reads besides the inputs.

Letters: b batch, t time, h heads, p key channels and v value channels of a head, n chunks, c tokens
of a chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.delta_rule.types import CHUNK
from bedouin.kernels.launch import ceil_div, next_power_of_two

LEAST = 16
"""The least size of a factor of tl.dot."""


def longest_chunk(dtype: torch.dtype) -> int:
    """Most tokens of a chunk whose products have factors of `dtype`. The factors of float32 are
    computed from the tiles, so they must have fewer than 64 rows (triton_chunks.py)."""
    return CHUNK // 2 if dtype == torch.float32 else CHUNK


def chunk_size(t: int, dtype: torch.dtype) -> int:
    """Tokens of a chunk in a call of t tokens, less than the longest one where there are fewer."""
    return min(longest_chunk(dtype), max(LEAST, next_power_of_two(max(1, t))))


class Kept(NamedTuple):
    """In the dtype of the products. A call shorter than a chunk uses a part of the squares."""

    inverses: Tensor  # (b h, n, c, c)
    scores: Tensor  # (b h, n, c, c)
    errors: Tensor  # (b, t, h, v)
    states: Tensor  # (b h, n, p, v), before each chunk, and n - 1 where the first has zeros

    @staticmethod
    def empty(
        query: Tensor,  # (b, t, h, p)
        v: int,
        keep: bool,
        started: bool,
    ) -> "Kept":
        """Uninitialized tensors, without `keep` of no size. No size branches on the length."""
        if not keep:
            return Kept(*(query.new_empty(0) for _ in range(4)))
        (b, t, h, p), n = query.shape, ceil_div(query.shape[1], longest_chunk(query.dtype))
        states = query.new_empty(b * h, n if started else n - 1, p, v)
        return Kept(*Kept.squares(query), query.new_empty(b, t, h, v), states)

    @staticmethod
    def squares(
        query: Tensor,  # (b, t, h, p)
    ) -> tuple[Tensor, Tensor]:  # (b h, n, c, c), (b h, n, c, c)
        """Uninitialized memory for the inverses and the scores."""
        (b, t, h, _), c = query.shape, longest_chunk(query.dtype)
        size = b * h, ceil_div(t, c), c, c
        return query.new_empty(size), query.new_empty(size)

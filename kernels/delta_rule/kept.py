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
    states: Tensor  # (b h, n, p, v), before each chunk

    @staticmethod
    def empty(
        query: Tensor,  # (b, t, h, p)
        v: int,
        keep: bool,
    ) -> "Kept":
        """Uninitialized tensors, without `keep` of no size. No size branches on the length."""
        (b, t, h, p), c = query.shape, longest_chunk(query.dtype)
        n = ceil_div(t, c)
        sizes = (b * h, n, c, c), (b * h, n, c, c), (b, t, h, v), (b * h, n, p, v)
        return Kept(*(query.new_empty(size if keep else 0) for size in sizes))

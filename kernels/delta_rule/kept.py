"""What the backward of the chunk kernels reads besides the inputs.

Letters: b batch, t time, h heads, p key channels and v value channels of a head, n chunks, c tokens
of a chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.delta_rule.types import CHUNK
from bedouin.kernels.launch import ceil_div


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
        dtype: torch.dtype,
        keep: bool,
    ) -> "Kept":
        """Uninitialized tensors, without `keep` of no size."""
        b, t, h, p = query.shape
        n = ceil_div(t, CHUNK)
        square = b * h, n, CHUNK, CHUNK
        sizes = square, square, (b, t, h, v), (b * h, n, p, v)
        return Kept(*(query.new_empty(size if keep else 0, dtype=dtype) for size in sizes))

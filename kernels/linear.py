"""Shapes that the fast products of cuBLAS take.

Where the contiguous extent of an operand or of the result is no multiple of eight, cuBLAS falls
back to kernels that take twice as long or more.
"""

import torch
from torch import Tensor

ALIGNMENT = 64


def padding(r: int) -> int:
    """Values to add to r for a multiple of 64, so that rows of r values are aligned."""
    return -r % ALIGNMENT


def pad_rows(
    W: Tensor,  # (r, d)
) -> Tensor:  # (r + padding(r), d)
    """W (r, d), below it `padding(r)` rows of zeros."""
    missing = padding(W.shape[0])
    return torch.nn.functional.pad(W, (0, 0, 0, missing)) if missing else W


def in_eights(
    v: Tensor,  # any shape
    axis: int,
) -> tuple[Tensor, ...]:
    """v, whose last few along an axis by themselves; one part where it is short."""
    size = v.shape[axis]
    rest = size % 8
    return v.split([size - rest, rest], axis) if rest and size > 8 else (v,)

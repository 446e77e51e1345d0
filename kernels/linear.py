"""Padding and splitting of matrices to shapes for which cuBLAS is fast.

If the contiguous extent of an operand or of the result is not a multiple of eight, cuBLAS falls
back to kernels that take at least twice as long.
"""

import torch
from torch import Tensor

ALIGNMENT = 64


def padding(r: int) -> int:
    """The number to add to r for a multiple of ALIGNMENT, so that rows of r values are aligned."""
    return -r % ALIGNMENT


def pad_rows(
    W: Tensor,  # (r, d)
) -> Tensor:  # (r + padding(r), d)
    """W with `padding(r)` rows of zeros appended."""
    missing = padding(W.shape[0])
    return torch.nn.functional.pad(W, (0, 0, 0, missing)) if missing else W


def in_eights(
    v: Tensor,  # any shape
    axis: int,
) -> tuple[Tensor, ...]:
    """v split along an axis into a part whose size is a multiple of eight and the rest; v alone if
    there is no rest, or if v has at most eight entries along the axis."""
    size = v.shape[axis]
    rest = size % 8
    return v.split([size - rest, rest], axis) if rest and size > 8 else (v,)

"""Sizes, dtypes and memory layout of launches, shared by all operations; free of Triton.

Triton has functions of the same names as the sizes here, but they are made for kernels and slow on
the host.
"""

from typing import Any

import torch
from torch import Tensor


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`, for size >= 1."""
    return 1 << (size - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def accumulator(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype in which operands of `dtypes` are computed: float64 if one is, otherwise float32.

    Iterates, memories, residuals and sums have at least float32 throughout the library.
    """
    return torch.float64 if torch.float64 in dtypes else torch.float32


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of float32 or float64, the dtypes that `accumulator` returns."""
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float64: tl.float64}[dtype]


def last_axis_contiguous(
    v: Tensor,  # (..., c)
) -> Tensor:  # (..., c)
    """v (..., c), copied only where its last axis is not contiguous."""
    return v if v.stride(-1) == 1 else v.contiguous()


def evenly_spaced(
    v: Tensor,  # (b, t, c)
) -> Tensor:  # (b, t, c)
    """v (b, t, c), copied only where its b t rows are not contiguous and at one distance."""
    spaced = v.stride(2) == 1 and v.stride(0) == v.shape[1] * v.stride(1)
    return v if spaced else v.contiguous()

"""The factor of a normalization in plain torch; kernels/device/norms.py has that of kernels."""

import math

import torch
from torch import Tensor


def inverse_norm(
    squares: Tensor,  # any shape, a sum or mean of squares
    floor: float,
) -> Tensor:  # as `squares`
    """rsqrt(squares + floor), but NaN where the squares have overflowed, so that the sample is
    reported: the factor 0 would make a zero of the vector."""
    return torch.rsqrt(squares.nan_to_num(math.nan, math.nan) + floor)

"""Max norms of vectors, maxima that keep NaN, and the factor of a normalization."""

import triton
import triton.language as tl


@triton.jit
def larger_or_nan(a, b):
    """max(a, b), or NaN if one of them is NaN, as in torch.cummax."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def inverse_norm(squares, floor):
    """rsqrt(squares + floor), or NaN where the squares have overflowed, so that the sample is
    reported: the factor 0 would make a zero of the vector."""
    return tl.rsqrt(tl.where(squares == float("inf"), float("nan"), squares) + floor)


@triton.jit
def max_norm(v, axis: tl.constexpr):
    """max |v| over an axis, or NaN if there is one: a warp reduces integers in one instruction."""
    # as integers |v| are in the same order, and NaN is the largest
    bits = tl.abs(v).to(tl.int32, bitcast=True)
    return tl.max(bits, axis=axis).to(tl.float32, bitcast=True)

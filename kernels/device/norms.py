"""Max norms of vectors, maxima that keep NaN, and the factor of a normalization."""

import triton
import triton.language as tl


@triton.jit
def larger_or_nan(a, b):
    """max(a, b), or NaN if one of them is NaN, as in torch.cummax."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def _larger2(a0, a1, b0, b1):
    return tl.maximum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def _larger3(a0, a1, a2, b0, b1, b2):
    return tl.maximum(a0, b0), tl.maximum(a1, b1), tl.maximum(a2, b2)


@triton.jit
def max_norms_of_two(v0, v1):
    """max |v| of two vectors (d,) in one reduction; NaN is ignored."""
    return tl.reduce((tl.abs(v0), tl.abs(v1)), 0, _larger2)


@triton.jit
def max_norms_of_three(v0, v1, v2):
    """max |v| of three vectors (d,) in one reduction; NaN is ignored."""
    return tl.reduce((tl.abs(v0), tl.abs(v1), tl.abs(v2)), 0, _larger3)


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

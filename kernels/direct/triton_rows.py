"""A token's row of scalars of its local system, and addresses of rows of tokens.

Letters: b batch, t time, n state per channel, k reflections.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def local_size(k):
    """The scalars of a token's local system; see triton_prepare.py."""
    return 3 * (k * (k + 1) // 2) + k * k + 5 * k + 4


@triton.constexpr_function
def local_padding(k):
    """The unused entries before them: then B begins at a multiple of four."""
    return -local_size(k) % 4


@triton.constexpr_function
def local_width(k, n):
    """The entries of a token's row of `local_ptr`: padding, scalars, B and C."""
    return local_padding(k) + local_size(k) + 2 * n


@triton.jit
def far(t, stride):
    """t * stride, in 64 bits: 32 do not hold the offsets of long sequences."""
    return tl.cast(t, tl.int64) * stride


@triton.jit
def aligned_row(ptr, sample, t, stride_b, stride_t, ALIGNED: tl.constexpr):
    """Pointer to the entries of token t of (b, t, width), at an offset that ALIGNED divides, so
    that loads are wide."""
    return ptr + tl.multiple_of(sample * stride_b + far(t, stride_t), ALIGNED)

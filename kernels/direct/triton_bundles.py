"""Arguments of the direct sweep's device functions, in bundles, and addresses of their rows.

An entry kernel has a flat signature, builds the bundles in the call of its body, and passes them
on. A bundle is never assigned to a name inside a kernel: Triton would turn its constexprs into
tensors. It holds either bundles or values, since Triton 3.6 loses the constexprs of bundles beside
values inside loops.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Pointers and integers are values of a running kernel, constants are known to the compiler. Triton
# replaces both by types of its own.
Pointer = Any
Integer = Any
Constant = Any


class TokenRows(NamedTuple):
    """A tensor (b, t, width) whose last axis is contiguous."""

    ptr: Pointer
    stride_b: Integer
    stride_t: Integer


class BundleSizes(NamedTuple):
    """Extents of the tensors, and the blocks in which a program holds a sample's memory (n, d)."""

    d: Constant
    n: Constant
    BLOCK_D: Constant  # at least d
    BLOCK_N: Constant  # states at a time; BLOCKS times BLOCK_N is at least n
    BLOCKS: Constant
    ROWS: Constant  # warps that hold equal numbers of channels; 0: spread in another way
    batch: Integer
    t_end: Integer


class Options(NamedTuple):
    """How a token's coefficients follow from its raw values, and the precision of all that; the
    last three in the forward sweep only."""

    K: Constant
    ACTIVATION: Constant
    SELECTIVE: Constant
    INPUT_SCALE: Constant
    FULL: Constant  # eigenvalues in (-1, 1) instead of (0, 1)
    NORM: Constant
    ALIGNED: Constant  # a power of two that divides all offsets of rows of raw values
    OVERLAP: Constant  # whether launches of tokens overlap
    FAST: Constant
    BETA_MAX: Constant = None
    NORM_EPS: Constant = None
    EPS: Constant = None  # of the norms of B, C and the reflections


class Tokens(NamedTuple):
    """Tensors that are read token by token; the last two in the reverse sweep only."""

    x: TokenRows  # (b, t, d)
    raw: TokenRows  # (b, t, r), raw^x
    fed: TokenRows | None = None  # (b, t, r), W^y norm(y_{t-1})
    grad_y: TokenRows | None = None  # (b, t, d)


class ForwardBuffers(NamedTuple):
    """Tensors of the forward sweep."""

    fed_ptr: Pointer  # (SPLITS, b, width), W^y norm(y_{t-1}), as a sum
    fed_stride: Integer  # from sample to sample
    SPLITS: Constant  # 0: no feedback
    A_ptr: Pointer  # (n, d), log2(e) A
    BC_ptr: Pointer  # (b, 2 n): B and C of the present token, if there are several blocks of states
    y_ptr: Pointer  # (b, t, d)
    normed_ptr: Pointer  # (b, t, d): norm(y_{t-1}), in the dtype of W^y; the first is given
    statistics_ptr: Pointer  # (4, b, t): defect, scale, magnitude, pivot


class Chunk(NamedTuple):
    """Consecutive tokens that are replayed and taken back together: what is known of them."""

    slot: Integer  # its number
    start: Integer  # its first token
    count: Integer  # of its tokens
    mixed_ptr: Pointer  # (b, count, d): x~
    local_ptr: Pointer  # (b, count, WIDTH): see triton_prepare.py
    h0_ptr: Pointer  # (b, n, d): h before token 0
    h0_stride_b: Integer
    kept_ptr: Pointer  # (b, slots, n, d): h before the first token of every chunk but the first
    replayed_ptr: Pointer  # (b, count - 1, n, d): h before the other tokens of the chunk
    slots: Integer


class ReverseBuffers(NamedTuple):
    """Tensors of the reverse sweep that are whole."""

    y_ptr: Pointer  # (b, t, d)
    grad_normed_ptr: Pointer  # (SPLITS, b, d): (W^y)^T grad_raw_{t+1}, the cotangent of norm(y_t)
    SPLITS: Constant  # 0: no feedback
    A_ptr: Pointer  # (n, d), log2(e) A
    H_ptr: Pointer  # (b, n, d): cotangent of h_t, replaced by that of h_{t-1}
    grad_x_ptr: Pointer  # (b, t, d)
    grad_raw_ptr: Pointer  # (b, t, width), may be the memory of `fed`
    width: Constant
    grad_A_ptr: Pointer  # (b, n, d), added to
    statistics_ptr: Pointer  # (2, b, t): defect and scale of the adjoint equation


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
    """The entries of a token's row in `Chunk.local_ptr`: padding, scalars, B and C."""
    return local_padding(k) + local_size(k) + 2 * n


@triton.jit
def matrix_of(A_ptr, sample, per_head, d, n):
    """Pointer to A (n, d) of the head that a sample belongs to; `per_head` None: one head."""
    if per_head is None:
        return A_ptr
    else:
        return A_ptr + sample // per_head * (n * d)


@triton.jit
def _far(t, stride):
    """t * stride, in 64 bits: 32 do not hold the offsets of long sequences."""
    return tl.cast(t, tl.int64) * stride


@triton.jit
def strided_row(ptr, sample, t, per_head, stride_h, stride_b, stride_t):
    """Pointer to the entries of token t of (b, t, d), or with heads of (H, b / H, t, d)."""
    if per_head is None:
        return ptr + sample * stride_b + _far(t, stride_t)
    else:
        start = sample // per_head * stride_h + sample % per_head * stride_b
        return ptr + start + _far(t, stride_t)


@triton.jit
def aligned_row(ptr, sample, t, stride_b, stride_t, ALIGNED: tl.constexpr):
    """Pointer to the entries of token t of (b, t, width), at an offset that ALIGNED divides, so
    that loads are wide."""
    return ptr + tl.multiple_of(sample * stride_b + _far(t, stride_t), ALIGNED)


@triton.jit
def token_row(rows, sample, t, ALIGNED: tl.constexpr = 1):
    """`aligned_row` of `TokenRows`."""
    return aligned_row(rows.ptr, sample, t, rows.stride_b, rows.stride_t, ALIGNED)


@triton.jit
def chunk_memory(h0_ptr, h0_stride_b, kept_ptr, sample, slot, slots, d, n):
    """Pointer to h (n, d) before the first token of a chunk: given, or kept."""
    memory = h0_ptr + sample * h0_stride_b
    if slot > 0:
        memory = kept_ptr + (sample * slots + slot - 1) * n * d
    return memory


@triton.jit
def token_memory(chunk, sample, i_token, sizes):
    """Pointer to h (n, d) before token i_token of a chunk: given, kept, or replayed."""
    token = sample * (chunk.count - 1) + i_token - 1
    memory = chunk.replayed_ptr + token * sizes.n * sizes.d
    if i_token == 0:
        memory = chunk_memory(
            chunk.h0_ptr, chunk.h0_stride_b, chunk.kept_ptr, sample, chunk.slot, chunk.slots,
            sizes.d, sizes.n,
        )  # fmt: skip
    return memory

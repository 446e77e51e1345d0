"""Arguments of the direct sweep's device functions, in bundles.

An entry kernel has a flat signature, builds the bundles in the call of its body, and passes them
on. A bundle is never assigned to a name inside a kernel: Triton would turn its constexprs into
tensors. It holds either bundles or values, since Triton 3.6 loses the constexprs of bundles beside
values inside loops. A field that a kernel does not read is None, and stands last.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Pointers and integers are values of a running kernel, constants are known to the compiler. Triton
# replaces both by types of its own.
Pointer = Any
Integer = Any
Constant = Any


class Rows(NamedTuple):
    """A tensor (b, t, width) whose last axis is contiguous."""

    ptr: Pointer
    stride_b: Integer
    stride_t: Integer


class Sizes(NamedTuple):
    """Extents of the tensors, and the blocks in which a program holds a sample's memory (n, d)."""

    d: Constant
    n: Constant
    BLOCK_D: Constant  # at least d
    BLOCK_N: Constant  # states at a time; BLOCKS times BLOCK_N is at least n
    BLOCKS: Constant = 1
    batch: Integer = None
    t_end: Integer = None
    r: Constant = None
    KEEP: Constant = None  # every so many tokens h is kept
    CROWDED: Constant = False  # the memory occupies half of the program's registers
    ROWS: Constant = 0  # warps that hold equal numbers of channels; 0: spread in another way
    LATER_A: Constant = False  # the cotangent of A is added behind the walk


class Options(NamedTuple):
    """How a token's coefficients follow from its raw values, and the precision of all that."""

    K: Constant
    ACTIVATION: Constant
    INPUT_SCALE: Constant
    FULL: Constant  # eigenvalues in (-1, 1) instead of (0, 1)
    FEEDBACK: Constant
    ALIGNED: Constant  # a power of two that divides all offsets of rows of raw values
    FAST: Constant
    ACC: Constant  # dtype of all arithmetic
    SELECTIVE: Constant = None
    BETA_MAX: Constant = None
    NORM: Constant = None
    NORM_EPS: Constant = None
    EPS: Constant = None  # of the norms of B, C and the reflections


class Product(NamedTuple):
    """How the product with W^y or its transpose is spread over persistent programs."""

    PERSISTENT: Constant
    SPLITS: Constant  # tiles that share a row of the matrix
    COMPILED: Constant
    ONE_TILE: Constant = None  # no program has more than one tile, which then stays in its memory
    SEPARATE: Constant = None  # no program has both a tile and samples
    RESIDENT: Constant = None  # no program has more than one sample: its h stays in registers
    BLOCK_M: Constant = None  # rows of a tile
    BLOCK_K: Constant = None  # columns of a chunk of a tile
    CHUNKS: Constant = None  # of a tile
    BLOCK_B: Constant = None  # samples at a time
    PRECISION: Constant = None
    DOT: Constant = None  # dtype of the factors


class Counters(NamedTuple):
    """Counters in device memory, zero at the launch."""

    samples: Pointer  # finished samples, of all tokens so far
    tiles: Pointer  # finished tiles


class Tokens(NamedTuple):
    """Tensors that are read token by token."""

    raw: Rows  # (b, t, r), raw^x
    x: Rows | None = None  # (b, t, d)
    fed: Rows | None = None  # (b, t, r), W^y norm(y_{t-1})
    grad_y: Rows | None = None  # (b, t, d)


class ForwardBuffers(NamedTuple):
    """Tensors of the forward sweep."""

    W_ptr: Pointer  # (r, d), W^y
    A_ptr: Pointer  # (n, d), log2(e) A
    h_ptr: Pointer  # (b, n, d), in place
    kept_ptr: Pointer  # (b, ceil(t / KEEP) - 1, n, d): h before tokens KEEP, 2 KEEP, ...
    fed_ptr: Pointer  # (splits, b, r): parts of W^y norm(y_{t-1})
    fed_stride: Integer  # from sample to sample
    BC_ptr: Pointer  # (b, 2 n): B and C of the present token, if there are several blocks of states
    y_ptr: Pointer  # (b, t, d)
    normed_ptr: Pointer  # (b, t, d): norm(y_{t-1}), in the dtype of W^y; the first is given
    statistics_ptr: Pointer  # (4, b, t): defect, scale, magnitude, pivot


class ForwardSweep(NamedTuple):
    """All that the forward sweep's programs share."""

    tokens: Tokens
    buffers: ForwardBuffers
    counters: Counters
    sizes: Sizes
    options: Options
    product: Product


class Prepared(NamedTuple):
    """A, and the intermediate results of the tokens of a chunk, written by `prepare_token`."""

    A_ptr: Pointer  # (n, d) or (H, n, d), log2(e) A

    mixed_ptr: Pointer  # (b, count, d): x~
    local_ptr: Pointer  # (b, count, WIDTH): see triton_prepare.py
    per_head: Integer = None  # samples of a head; None: one head
    x_stride_h: Integer = None  # of x, from head to head; the samples of one have x's stride_b


class Memories(NamedTuple):
    """Where h before each token is: given, kept by the forward sweep, or replayed."""

    h0_ptr: Pointer  # (b, n, d): before token 0
    h0_stride_b: Integer
    kept_ptr: Pointer  # (b, slots, n, d): before the first token of every chunk but the first
    replayed_ptr: Pointer  # (b, count - 1, n, d): before the other tokens of the present chunk; if
    # CROWDED (b, count, n, d), the last one after it
    slots: Integer


class Chunk(NamedTuple):
    """Consecutive tokens that are replayed and taken back together."""

    slot: Integer  # its number
    start: Integer  # its first token
    count: Integer  # of its tokens
    done: Integer = None  # tokens after the chunk, which the reverse sweep has taken back already
    behind: Integer = 0  # samples of another chunk that precede those of this one in the buffers


class ReverseBuffers(NamedTuple):
    """Tensors of the reverse sweep that are whole."""

    y_ptr: Pointer  # (b, t, d), y
    W_ptr: Pointer  # (R, d), W^y; of r columns of grad_raw the last r - R are 0
    grad_normed_ptr: Pointer  # (splits, b, d): parts of (W^y)^T grad_raw_{t+1}, that of norm(y_t)
    H_ptr: Pointer  # (b, n, d): cotangent of the last h, replaced by that before the first token
    grad_x_ptr: Pointer  # (b, t, d)
    grad_raw_ptr: Pointer  # (b, t, r), may be the memory of `fed`
    grad_A_ptr: Pointer  # (b, n, d), added to
    statistics_ptr: Pointer  # (2, b, t): defect and scale of the adjoint equation


class WalkedChunk(NamedTuple):
    """What the walk back over a chunk keeps for the cotangent of A, if that is added later."""

    vectors_ptr: Pointer  # (b, count, 2, d): w and Delta
    top_ptr: Pointer  # (b, n, d): cotangent of h after the chunk


class ReverseSweep(NamedTuple):
    """All that the reverse sweep's programs share."""

    tokens: Tokens
    prepared: Prepared
    memories: Memories
    walked: WalkedChunk
    buffers: ReverseBuffers
    counters: Counters
    sizes: Sizes
    options: Options
    product: Product


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
    """The entries of a token's row in `Prepared.local_ptr`: padding, scalars, B and C."""
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
        of_sample = sample // per_head * stride_h + sample % per_head * stride_b
        return ptr + of_sample + _far(t, stride_t)


@triton.jit
def head_matrix(prepared, sample, sizes):
    """Pointer to A (n, d) of the head that a sample belongs to."""
    return matrix_of(prepared.A_ptr, sample, prepared.per_head, sizes.d, sizes.n)


@triton.jit
def input_row(tokens, prepared, sample, t):
    """Pointer to x (d,) of token t."""
    x = tokens.x
    return strided_row(
        x.ptr, sample, t, prepared.per_head, prepared.x_stride_h, x.stride_b, x.stride_t
    )


@triton.jit
def token_row(rows, sample, t):
    """Pointer to the entries of token t."""
    return rows.ptr + sample * rows.stride_b + _far(t, rows.stride_t)


@triton.jit
def aligned_row(rows, sample, t, ALIGNED: tl.constexpr):
    """`token_row`, whose offset ALIGNED divides, so that loads are wide."""
    return rows.ptr + tl.multiple_of(sample * rows.stride_b + _far(t, rows.stride_t), ALIGNED)

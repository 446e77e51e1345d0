"""What the kernels of heads share: samples as rows, products of a head's matrix, sums.

A tensor (s, d) holds a vector of each of a program's samples, one warp a sample.
Letters: d channels of a head, n state per channel, k reflections, s samples of a program.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# Tuples that grow are tuples of other types.
# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.reflections import scale


@triton.jit
def combine_of_samples(weights, rows, K: tl.constexpr):
    """sum over i of weights_i rows_i (s, d) for weights (s,)."""
    total = weights[0][:, None] * rows[0]
    for i in tl.static_range(K):
        if i > 0:
            total += weights[i][:, None] * rows[i]
    return total


@triton.jit
def small_rows(at, d: tl.constexpr, n: tl.constexpr, K: tl.constexpr, SELECTIVE: tl.constexpr):
    """The columns of raw values of [B n | C n | alpha k], in this order, and those of K d past."""
    STATES: tl.constexpr = 2 * n if SELECTIVE else 0
    return tl.where(at < STATES, d + at, d + K * d + at)


@triton.jit
def columns_of(v, S: tl.constexpr, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr):
    """v (s, d) as (d, COLUMNS), every sample COLUMNS / s times: a product has 8 columns or more."""
    if S < COLUMNS:
        v = tl.broadcast_to(v[:, None, :], [S, COLUMNS // S, BLOCK_D])
        v = tl.reshape(v, [COLUMNS, BLOCK_D])
    return tl.trans(v)


@triton.jit
def rows_of(v, S: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """The inverse of `columns_of`: (BLOCK, COLUMNS) as (s, BLOCK)."""
    v = tl.trans(v)
    if S < COLUMNS:
        v = tl.max(tl.reshape(v, [S, COLUMNS // S, BLOCK]), axis=1)
    return v


@triton.jit
def sum_of(values, N: tl.constexpr):
    """Sum of N tensors, in four parts, whose additions do not wait for each other."""
    PARTS: tl.constexpr = 4 if N >= 4 else N
    parts = ()
    for i in tl.static_range(PARTS):
        part = values[i]
        for j in tl.static_range(i + PARTS, N, PARTS):
            part += values[j]
        parts = parts + (part,)
    total = parts[0]
    for i in tl.static_range(1, PARTS):
        total += parts[i]
    return total


@triton.jit
def dot_of(a, b, N: tl.constexpr):
    """sum of a_i b_i."""
    return sum_of(scale(a, b, N), N)


@triton.jit
def join_rows(rows, S: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """K = 2 or 4 rows (s, BLOCK) as (s, K BLOCK), entry c of row i at K c + i."""
    if K == 2:
        joined = tl.join(rows[0], rows[1])
    else:
        joined = tl.join(tl.join(rows[0], rows[2]), tl.join(rows[1], rows[3]))
    return tl.reshape(joined, [S, K * BLOCK])


@triton.jit
def split_rows(joined, S: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of `join_rows`."""
    if K == 2:
        return tl.split(tl.reshape(joined, [S, BLOCK, 2]))
    else:
        even, odd = tl.split(tl.reshape(joined, [S, BLOCK, 2, 2]))
        v0, v2 = tl.split(even)
        v1, v3 = tl.split(odd)
        return v0, v1, v2, v3

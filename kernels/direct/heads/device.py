"""What the kernels of heads share: samples as rows, products of a head's matrix, sums.

A tensor (s, d) holds a vector of each of a program's samples, one warp a sample. A tensor
(s, d, N) holds their memories, N the states n rounded up to a power of two: a thread holds all
states of its channels, so that a sum over states moves no data, and one operation serves all of
them (Triton's compiler takes minutes for kernels of thousands of operations).
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
def load_states(
    rows_at,  # pointers (s, d) to state 0
    inside, d: tl.constexpr, n: tl.constexpr, S: tl.constexpr, BLOCK_D: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """n states, d elements apart, as (s, d, N), zeros past the last one."""
    # a loop of the device, because the compiler takes long for every load of a tensor
    number = tl.arange(0, N)[None, None, :]
    states = spread(tl.zeros([S, BLOCK_D], tl.float32), S, BLOCK_D, N)
    for i in tl.range(0, n):
        row = tl.load(rows_at + i * d, mask=inside, other=0.0)
        states = tl.where(number == i, spread(row, S, BLOCK_D, N), states)
    return states


@triton.jit
def store_states(
    rows_at,  # pointers (s, d) to state 0
    states,  # (s, d, N)
    inside, d: tl.constexpr, n: tl.constexpr, S: tl.constexpr, BLOCK_D: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_states`."""
    for i in tl.range(0, n):
        tl.store(rows_at + i * d, state_of(states, i, S, BLOCK_D, N), mask=inside)


@triton.jit
def state_of(states, i, S: tl.constexpr, BLOCK_D: tl.constexpr, N: tl.constexpr):
    """State i of (s, d, N), (s, d)."""
    if N == 1:
        return tl.reshape(states, [S, BLOCK_D])
    else:
        even, odd = tl.split(tl.reshape(states, [S, BLOCK_D, N // 2, 2]))
        return state_of(tl.where(i % 2 == 1, odd, even), i // 2, S, BLOCK_D, N // 2)


@triton.jit
def load_same(
    row,  # pointers (s,)
    n: tl.constexpr, S: tl.constexpr, BLOCK_D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """n consecutive scalars as (s, d, N), the same in all channels, zeros past the last one."""
    if N > 16:
        # a load of at least 32 elements a sample would not be made by every thread for itself
        low = load_same(row, n, S, BLOCK_D, N // 2)
        high = load_same(row + N // 2, n - N // 2, S, BLOCK_D, N // 2)
        return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), [S, BLOCK_D, N])
    else:
        at = tl.arange(0, N)
        values = tl.load(row[:, None] + at[None, :], mask=(at < n)[None, :], other=0.0)
        return tl.broadcast_to(values[:, None, :], [S, BLOCK_D, N])


@triton.jit
def spread(v, S: tl.constexpr, BLOCK_D: tl.constexpr, N: tl.constexpr):
    """v (s, d) as (s, d, N), the same for every state.

    Joined with itself rather than broadcast, and summed by `sum_states` rather than by tl.sum, so
    that the compiler sees one layout of (s, d) and does not compute values in several ones.
    """
    if N == 1:
        return tl.reshape(v, [S, BLOCK_D, 1])
    else:
        half = spread(v, S, BLOCK_D, N // 2)
        return tl.reshape(tl.join(half, half), [S, BLOCK_D, N])


@triton.jit
def sum_states(values, S: tl.constexpr, BLOCK_D: tl.constexpr, N: tl.constexpr):
    """Sum of (s, d, N) over the states, in pairs, so that additions do not wait for each other."""
    if N == 1:
        return tl.reshape(values, [S, BLOCK_D])
    else:
        even, odd = tl.split(tl.reshape(values, [S, BLOCK_D, N // 2, 2]))
        return sum_states(even + odd, S, BLOCK_D, N // 2)


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

"""What the kernels of heads share: samples as rows, products of a head's matrix, sums.

A tensor (s, d) holds a vector of each of a program's samples, one warp a row. A row has all
channels of a sample or, as `parts.py` describes, a part of them, and is called a sample here. A
tensor (s, d, N) holds their memories, N the states n rounded up to a power of two: a thread holds
all states of its channels, so that a sum over states moves no data, and one operation serves all of
them (Triton's compiler takes minutes for kernels of thousands of operations).
Letters: d channels of a head, n state per channel, k reflections, s samples of a program. `how`:
`head_constants` of launch.py. `row`: pointers (s,) to consecutive values of each sample. `rows_at`:
pointers (s, d) to state 0 of a memory, whose states are d elements apart.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import exp2, input_scale, one_minus_exp2

STATE_AXIS = tl.constexpr(1 if triton.__version__.startswith("3.6.") else 0)
"""Where the states are in pointers to memory: (N, s, d) or (s, N, d). Warps shall have different
samples. Of the axes whose values are not contiguous, Triton 3.6 spreads the warps over the first
one, and later versions over the last one."""


@triton.jit
def samples_of(per_head, how):
    """The head of a program, whether it has as many samples, their numbers among those of the head
    and among all; (s,), one for each part. Past the last sample that one again, so that loads need
    no mask."""
    blocks = tl.cdiv(per_head, how.S)
    program = tl.program_id(0)
    head = (program // blocks).to(tl.int64)
    local = program % blocks * how.S + tl.arange(0, how.ROWS) // how.PARTS
    here = local < per_head
    local = tl.minimum(local, per_head - 1)
    return head, here, local, head * per_head + local


@triton.jit
def store_statistics(at, values, row_of, here):
    """Store statistics of a token of each sample, (s, 1) or (s, 32) each, at the pointers `at` (s,)
    and `row_of` elements apart.

    Every second column of (s, 32), because the compiler changes the layout of values that it finds
    at addresses without neighbours.
    """
    cols = tl.arange(0, 32)[None, :]
    rows = tl.zeros([here.shape[0], 32], tl.float32) + values[0]
    for i in tl.static_range(1, len(values)):
        rows = tl.where(cols == 2 * i, values[i], rows)
    mask = here[:, None] & (cols % 2 == 0) & (cols < 2 * len(values))
    tl.store(at[:, None] + (row_of * (cols // 2) + cols % 2), rows, mask=mask)


@triton.jit
def rows_of_statistics(per_head, t_end, how):
    """Elements between two statistics of a token, b t."""
    heads = tl.num_programs(0) // tl.cdiv(per_head, how.S)
    return per_head.to(tl.int64) * heads * t_end


@triton.jit
def as_columns(values):
    """Scalars (s,) as (s, 1)."""
    out = ()
    for i in tl.static_range(len(values)):
        out = out + (values[i][:, None],)
    return out


@triton.jit
def small_rows(at, how):
    """The columns of raw values of [B n | C n | alpha k], in this order, and those of K d past."""
    return tl.where(at < how.STATES, how.d + at, how.d + how.K * how.d + at)


@triton.jit
def columns_of(v, how):
    """v (s, d), in rows of samples or of parts, as (d, COLUMNS), every sample COLUMNS / s times: a
    product has 8 columns or more."""
    BLOCK: tl.constexpr = v.shape[0] * v.shape[1] // how.S
    v = tl.reshape(v, [how.S, BLOCK])
    if how.S < how.COLUMNS:
        v = tl.broadcast_to(v[:, None, :], [how.S, how.COLUMNS // how.S, BLOCK])
        v = tl.reshape(v, [how.COLUMNS, BLOCK])
    return tl.trans(v)


@triton.jit
def rows_of(v, how):
    """The inverse of `columns_of`: (d, COLUMNS) as (s, d), or in parts (rows, .).

    The first of equal columns, since a maximum of them would take an exchange for each value.
    """
    BLOCK: tl.constexpr = v.shape[0]
    v = tl.trans(v)
    if how.S < how.COLUMNS:
        v = tl.permute(tl.reshape(v, [how.S, how.COLUMNS // how.S, BLOCK]), (0, 2, 1))
        v = unstack_states(v, how.S, BLOCK, how.COLUMNS // how.S)[0]
    return tl.reshape(v, [how.ROWS, BLOCK // how.PARTS])


@triton.jit
def join_all(rows, N: tl.constexpr):
    """N = 1, 2, 4, ... tensors as one with log2(N) more axes of size 2, ordered as an axis of N."""
    if N == 1:
        return rows[0]
    else:
        return tl.join(join_all(rows[0:N:2], N // 2), join_all(rows[1:N:2], N // 2))


@triton.jit
def unstack_states(states, S: tl.constexpr, BLOCK_D: tl.constexpr, N: tl.constexpr):
    """(s, d, N) as N rows (s, d)."""
    if N == 1:
        return (tl.reshape(states, [S, BLOCK_D]),)
    else:
        even, odd = tl.split(tl.reshape(states, [S, BLOCK_D, N // 2, 2]))
        evens = unstack_states(even, S, BLOCK_D, N // 2)
        odds = unstack_states(odd, S, BLOCK_D, N // 2)
        rows = ()
        for i in tl.static_range(N // 2):
            rows = rows + (evens[i], odds[i])
        return rows


@triton.jit
def _states_at(rows_at, inside, i, N: tl.constexpr, how):
    """Pointers and masks of block i of N states as STATE_AXIS says, from those of state 0."""
    D: tl.constexpr = rows_at.shape[1]
    number = tl.expand_dims(tl.arange(0, N)[:, None] + i * N, 1 - STATE_AXIS)
    at = tl.expand_dims(rows_at, STATE_AXIS) + number * how.d
    # a thread shall have as many channels as of a row, 1 or D // 32: less is said of addresses than
    # the compiler can prove, which would give it as many as one instruction loads
    if D > 32:
        at = tl.max_contiguous(at, [1, 1, D // 32])
    else:
        at = tl.multiple_of(at, [1, 1, 4])
    mask = tl.expand_dims(inside, STATE_AXIS)
    if how.n < how.N:
        mask &= number < how.n
    return at, mask


@triton.jit
def load_head_states(rows_at, inside, how, i=0, BLOCKS: tl.constexpr = 1):
    """Block i of the states of a memory as (s, d, N / BLOCKS), zeros past the last state.

    In one load, because the compiler takes long for every load of a tensor.
    """
    at, mask = _states_at(rows_at, inside, i, how.N // BLOCKS, how)
    return tl.permute(tl.load(at, mask=mask, other=0.0), (1 - STATE_AXIS, 2, STATE_AXIS))


@triton.jit
def store_head_states(rows_at, states, inside, how, i=0):
    """The inverse of `load_head_states`."""
    at, mask = _states_at(rows_at, inside, i, states.shape[2], how)
    states = tl.permute(states, (0, 2, 1) if STATE_AXIS == 1 else (2, 0, 1))
    tl.store(at, states, mask=mask)


@triton.jit
def load_vector(row, n, N: tl.constexpr):
    """n scalars of a row, or the first N, as (s, N), zeros past the last one."""
    if N > 16:
        # a load of at least 32 elements a sample would not be made by every thread for itself
        low = load_vector(row, n, N // 2)
        high = load_vector(row + N // 2, n - N // 2, N // 2)
        return concatenated(low, high, row.shape[0], N // 2)
    else:
        at = tl.arange(0, N)
        return tl.load(row[:, None] + at[None, :], mask=(at < n)[None, :], other=0.0)


@triton.jit
def load_same(row, n, D: tl.constexpr, N: tl.constexpr):
    """`load_vector` as (s, D, N), the same for all channels."""
    return tl.broadcast_to(load_vector(row, n, N)[:, None, :], [row.shape[0], D, N])


@triton.jit
def load_block(row, i: tl.constexpr, BLOCKS: tl.constexpr, how):
    """Block i of a row of n scalars as `load_same` gives it."""
    N: tl.constexpr = how.N // BLOCKS
    return load_same(row + i * N, how.n - i * N, how.D, N)


@triton.jit
def load_both(row, how):
    """B and C from a row [B n | C n] as `load_same` gives them, 1 if they are not SELECTIVE."""
    if how.SELECTIVE:
        return load_block(row, 0, 1, how), load_block(row + how.n, 0, 1, how)
    else:
        ones = tl.where(tl.arange(0, how.N) < how.n, 1.0, 0.0)
        B = spread(tl.zeros([how.ROWS, how.D], tl.float32), how.N) + ones[None, None, :]
        return B, B


@triton.jit
def discretize(A, delta, how):
    """The decay (s, d, N), and s (s, d), for "one_minus_decay" 1 - decay of the only state, from
    log2(e) A (s, d, N) and Delta (s, d)."""
    exponent = A * spread(delta, A.shape[2])
    decay = exp2(exponent)
    if how.INPUT_SCALE == "one_minus_decay":
        s = tl.reshape(one_minus_exp2(exponent, decay), [how.ROWS, how.D])
    else:
        s = input_scale(delta, how.INPUT_SCALE)
    return decay, s


@triton.jit
def load_scalars(row, n: tl.constexpr, D: tl.constexpr):
    """n <= 16 scalars of a row, (s, D) each, the same for all channels: in the layout of rows,
    which the compiler does not find for (s, 1). Reads up to the next multiple of 4."""
    N: tl.constexpr = 16 if n > 8 else (8 if n > 4 else 4)
    return unstack_states(load_same(row, (n + 3) // 4 * 4, D, N), row.shape[0], D, N)


@triton.jit
def spread(v, N: tl.constexpr):
    """v (s, d) as (s, d, N), the same for every state.

    Joined with itself rather than broadcast, and summed by `sum_states` rather than by tl.sum, so
    that the compiler sees one layout of (s, d) and does not compute values in several ones.
    """
    S: tl.constexpr = v.shape[0]
    BLOCK_D: tl.constexpr = v.shape[1]
    if N == 1:
        return tl.reshape(v, [S, BLOCK_D, 1])
    else:
        half = spread(v, N // 2)
        return tl.reshape(tl.join(half, half), [S, BLOCK_D, N])


@triton.jit
def sum_states(states):
    """Sum of (s, d, N) over the states, in pairs, so that additions do not wait for each other."""
    S: tl.constexpr = states.shape[0]
    BLOCK_D: tl.constexpr = states.shape[1]
    N: tl.constexpr = states.shape[2]
    if N == 1:
        return tl.reshape(states, [S, BLOCK_D])
    else:
        even, odd = tl.split(tl.reshape(states, [S, BLOCK_D, N // 2, 2]))
        return sum_states(even + odd)


@triton.jit
def lanes_of(v, S: tl.constexpr, BLOCK_D: tl.constexpr):
    """(s, min(32, d)) with the sum of v (s, d): of the channels that one thread holds."""
    if BLOCK_D <= 32:
        return v
    else:
        even, odd = tl.split(tl.reshape(v, [S, BLOCK_D // 2, 2]))
        return lanes_of(even + odd, S, BLOCK_D // 2)


@triton.jit
def in_lanes(v, S: tl.constexpr, BLOCK_D: tl.constexpr, L: tl.constexpr):
    """v (s, d), the same for all channels, as (s, L)."""
    if BLOCK_D < L:
        return in_lanes(concatenated(v, v, S, BLOCK_D), S, 2 * BLOCK_D, L)
    elif BLOCK_D == L:
        return v
    else:
        even, _ = tl.split(tl.reshape(v, [S, BLOCK_D // 2, 2]))
        return in_lanes(even, S, BLOCK_D // 2, L)


@triton.jit
def transposed_sums(values, V: tl.constexpr, S: tl.constexpr, L: tl.constexpr):
    """Sums of V <= L rows, (s, L, V), over the columns c of one c % V: column c has that of row
    c % V.

    Threads exchange half of their rows, then half of the rest, and so on: V - 1 exchanges, where a
    sum that every thread needs takes log2(L) for each row.
    """
    if V == 1:
        return tl.reshape(values, [S, L])
    else:
        HALF: tl.constexpr = V // 2
        columns = tl.arange(0, L)
        upper = ((columns & HALF) != 0)[None, :, None]
        pairs = tl.permute(tl.reshape(values, [S, L, 2, HALF]), (0, 1, 3, 2))
        low, high = tl.split(pairs)
        given = tl.where(upper, low, high)
        other = tl.broadcast_to((columns ^ HALF)[None, :, None], [S, L, HALF])
        total = tl.where(upper, high, low) + tl.gather(given, other, 1)
        return transposed_sums(total, HALF, S, L)


@triton.jit
def column_sums(values, V: tl.constexpr, S: tl.constexpr, L: tl.constexpr):
    """Sums of V = 1, 2, 4, ... <= L rows, (s, L, V): column c has that of row c % V."""
    total = transposed_sums(values, V, S, L)
    for i in tl.static_range(5):
        if V * 2**i < L:
            other = (tl.arange(0, L) ^ (V * 2**i))[None, :]
            total += tl.gather(total, tl.broadcast_to(other, [S, L]), 1)
    return total


@triton.jit
def _lanes_of_states(states, S: tl.constexpr, BLOCK_D: tl.constexpr, V: tl.constexpr):
    """`lanes_of` of every state of (s, d, V)."""
    if BLOCK_D <= 32:
        return states
    else:
        pairs = tl.permute(tl.reshape(states, [S, BLOCK_D // 2, 2, V]), (0, 1, 3, 2))
        even, odd = tl.split(pairs)
        return _lanes_of_states(even + odd, S, BLOCK_D // 2, V)


@triton.jit
def sum_channels(states, S: tl.constexpr, BLOCK_D: tl.constexpr, V: tl.constexpr):
    """Sums of (s, d, V) over a row, (s, max(V, L)), L = min(32, d): column c has sum c % V.

    In the threads of their columns, not in all of them.
    """
    L: tl.constexpr = min(32, BLOCK_D)
    if V > L:
        low, high = tl.split(
            tl.permute(tl.reshape(states, [S, BLOCK_D, 2, V // 2]), (0, 1, 3, 2))
        )  # fmt: skip
        low = sum_channels(low, S, BLOCK_D, V // 2)
        high = sum_channels(high, S, BLOCK_D, V // 2)
        return concatenated(low, high, S, V // 2)
    else:
        return column_sums(_lanes_of_states(states, S, BLOCK_D, V), V, S, L)


@triton.jit
def concatenated(a, b, S: tl.constexpr, N: tl.constexpr):
    """a and b (s, N), one after the other, (s, 2 N)."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [S, 2 * N])


@triton.jit
def join_rows(rows, S: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """K = 1, 2 or 4 rows (s, BLOCK) as (s, K BLOCK), entry c of row i at K c + i."""
    return tl.reshape(join_all(rows, K), [S, K * BLOCK])

"""Sums over the channels of a sample, of which every thread of a program holds some.

A sum that all threads need takes five exchanges within a warp and three barriers between warps.
Here threads exchange half of their sums, then half of the rest, and so on, so that each is left
with one sum over the channels of its warp; one exchange between warps serves up to 32 sums. A warp
has 128, 64 or 32 channels, a thread 4, 2 or 1 neighbours of them, with all their states.

The results are (ROWS, 32), the same number in every place: a row is a warp's, a thread holds one
place. What follows from them has this shape, too, until `over_channels` makes it a vector (d,).
Where the channels are spread in another way (ROWS is 0), results are scalars instead.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.reflections import load_tuple, sums
from bedouin.kernels.direct.heads.device import column_sums, lanes_of, stack_states, sum_states

LANES = tl.constexpr(32)


@triton.jit
def channel_sums(values, sizes):
    """Sums of vectors (d,), each a scalar or (ROWS, 32)."""
    N: tl.constexpr = len(values)
    if sizes.ROWS == 0:
        return sums(values)
    else:
        out = ()
        for first in tl.static_range(0, N, LANES):
            part = values[first : min(first + LANES, N)]
            out = out + _up_to_32_sums(part, sizes)
        return out


@triton.jit
def _up_to_32_sums(values, sizes):
    N: tl.constexpr = len(values)
    ROWS: tl.constexpr = sizes.ROWS
    lanes = ()
    for i in tl.static_range(N):
        row = tl.reshape(values[i], [ROWS, sizes.BLOCK_D // ROWS])
        lanes = lanes + (lanes_of(row, ROWS, sizes.BLOCK_D // ROWS),)
    total = sum_between_warps(sums_of_rows(lanes, ROWS), sizes)
    out = ()
    for i in tl.static_range(N):
        out = out + (tl.gather(total, tl.full([ROWS, LANES], i, tl.int32), 1),)
    return out


@triton.jit
def sums_of_rows(lanes, ROWS: tl.constexpr):
    """Sums of N <= 32 tensors (ROWS, 32) over their columns: (ROWS, 32) with sum i of a row in its
    columns i, i + V, i + 2 V, ..., where V is N rounded up to a power of two."""
    N: tl.constexpr = len(lanes)
    V: tl.constexpr = triton.next_power_of_2(N)
    for _ in tl.static_range(V - N):
        lanes = lanes + (tl.zeros_like(lanes[0]),)
    return column_sums(stack_states(lanes, ROWS, LANES, V), V, ROWS, LANES)


@triton.jit
def sum_between_warps(v, sizes):
    """The sum of the rows of (ROWS, 32) in every row.

    Every thread loads and adds a whole column, which takes two barriers; `tl.sum` would add within
    a warp and take four.
    """
    ROWS: tl.constexpr = sizes.ROWS
    if ROWS > 1:
        columns = sum_states(tl.reshape(tl.trans(v), [1, LANES, ROWS]), 1, LANES, ROWS)
        v = tl.broadcast_to(columns, [ROWS, LANES])
    return v


@triton.jit
def over_channels(values, sizes):
    """Results of `channel_sums` as factors of vectors (d,)."""
    if sizes.ROWS == 0:
        return values
    else:
        N: tl.constexpr = len(values)
        SHAPE: tl.constexpr = [sizes.ROWS, LANES, sizes.BLOCK_D // sizes.ROWS // LANES]
        out = ()
        for i in tl.static_range(N):
            value = tl.broadcast_to(values[i][:, :, None], SHAPE)
            out = out + (tl.reshape(value, [sizes.BLOCK_D]),)
        return out


@triton.jit
def places(ROWS: tl.constexpr):
    """The rows and the columns of (ROWS, 32), in this shape."""
    zeros = tl.zeros([ROWS, LANES], dtype=tl.int32)
    return tl.arange(0, ROWS)[:, None] + zeros, tl.arange(0, LANES)[None, :] + zeros


@triton.jit
def store_one(ptr, value, sizes):
    """Store a result of `channel_sums`, or what follows from such."""
    if sizes.ROWS == 0:
        tl.store(ptr, value)
    else:
        rows, columns = places(sizes.ROWS)
        tl.store(ptr + columns, value, mask=(rows == 0) & (columns == 0))


@triton.jit
def scalars_at(first: tl.constexpr, K: tl.constexpr, sizes):
    """Offsets of K <= 32 scalars and masks: of all in the columns of one tensor, or of each."""
    at = ()
    masks = ()
    if sizes.ROWS == 0:
        for i in tl.static_range(K):
            at = at + (first + i,)
            masks = masks + (True,)
    else:
        _, columns = places(sizes.ROWS)
        at = at + (first + columns,)
        masks = masks + (columns < K,)
    return at, masks


@triton.jit
def scalars_of(values, K: tl.constexpr, sizes):
    """K values at `scalars_at` as results of `channel_sums`."""
    if sizes.ROWS == 0:
        return values
    else:
        out = ()
        for i in tl.static_range(K):
            column = tl.full([sizes.ROWS, LANES], i, tl.int32)
            out = out + (tl.gather(values[0], column, 1),)
        return out


@triton.jit
def load_in_columns(ptr, N: tl.constexpr, sizes):
    """N consecutive scalars, of which a thread holds one of every 32; nothing if ROWS is 0."""
    out = ()
    if sizes.ROWS > 0:
        _, columns = places(sizes.ROWS)
        for first in tl.static_range(0, N, LANES):
            at = first + columns
            out = out + (tl.load(ptr + at, mask=at < N, other=0.0),)
    return out


@triton.jit
def some_scalars(ptr, held, FIRST: tl.constexpr, N: tl.constexpr, sizes):
    """Scalars FIRST .. FIRST + N - 1 of those that `load_in_columns` has loaded from ptr."""
    if sizes.ROWS == 0:
        return load_tuple(ptr + FIRST, N)
    else:
        out = ()
        for i in tl.static_range(FIRST, FIRST + N):
            column = tl.full([sizes.ROWS, LANES], i % 32, tl.int32)
            out = out + (tl.gather(held[i // 32], column, 1),)
        return out

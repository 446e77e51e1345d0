"""Samples of several warps: a sample's channels in parts, one warp a part.

A tensor (s, d) of the kernels of heads is then a row for each part of each sample, (s, d / parts),
the parts of a sample one after the other. Only this module depends on that: it computes which
channels a row has, and exchanges values between the warps of a sample, which costs two barriers
each time.
Letters: d channels of a head, s samples of a program, l lanes: values of a row, one a thread.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.reflections import sums, total_of
from bedouin.kernels.direct.device import column_sums, join_all, lanes_of, unstack_states

FEW_SUMS = tl.constexpr(8)
"""As many sums over the lanes of a warp, as many exchanges each as lanes have bits; more are summed
as `transposed_sums` does."""


@triton.jit
def columns_of_rows(ROWS: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr):
    """The numbers of the columns that the rows have of a vector (PARTS D) of a sample: (rows, D),
    or (1, D) if a row has all of them."""
    columns = tl.arange(0, D)[None, :]
    if PARTS > 1:
        columns += (tl.arange(0, ROWS) % PARTS * D)[:, None]
    return columns


@triton.jit
def sum_of_parts(v, PARTS: tl.constexpr):
    """The sum of v (rows, l) over the parts of a sample, in the rows of all of them.

    In the same order in every row, so that all parts compute the same bits, and of values of one
    thread, since the compiler would make a tl.gather, or a sum over parts, out of two exchanges.
    """
    if PARTS == 1:
        return v
    else:
        ROWS: tl.constexpr = v.shape[0]
        L: tl.constexpr = v.shape[1]
        S: tl.constexpr = ROWS // PARTS
        v = tl.permute(tl.reshape(v, [S, 1, PARTS, L]), (0, 1, 3, 2))
        v = tl.reshape(tl.broadcast_to(v, [S, PARTS, L, PARTS]), [ROWS, L, PARTS])
        return total_of(unstack_states(v, ROWS, L, PARTS))


@triton.jit
def over_channels_of_parts(values, how):
    """Sums of `values`, (s, d) each, over the channels of a sample, (rows,) each."""
    ROWS: tl.constexpr = how.ROWS
    L: tl.constexpr = min(32, how.D)
    N: tl.constexpr = len(values)
    if how.PARTS == 1 and N <= FEW_SUMS:
        return sums(values, 1)
    elif N > L:
        some = over_channels_of_parts(values[0:L], how)
        return some + over_channels_of_parts(values[L:N], how)
    else:
        V: tl.constexpr = triton.next_power_of_2(N)
        lanes = ()
        for i in tl.static_range(V):
            lanes = lanes + (lanes_of(values[min(i, N - 1)], ROWS, how.D),)
        total = column_sums(tl.reshape(join_all(lanes, V), [ROWS, L, V]), V, ROWS, L)
        total = sum_of_parts(total, how.PARTS)
        out = ()
        for i in tl.static_range(N):
            one = tl.gather(total, tl.full([ROWS, 1], i, tl.int32), 1)
            out = out + (tl.reshape(one, [ROWS]),)
        return out


@triton.jit
def part_of(v, PARTS: tl.constexpr):
    """The share (rows, l / PARTS) of each part of v (rows, l), the same for all of a sample."""
    if PARTS == 1:
        return v
    else:
        ROWS: tl.constexpr = v.shape[0]
        L: tl.constexpr = v.shape[1]
        v = tl.reshape(v, [ROWS, PARTS, L // PARTS])
        part = (tl.arange(0, ROWS) % PARTS)[:, None, None]
        mine = tl.arange(0, PARTS)[None, :, None] == part
        return tl.sum(tl.where(mine, v, 0), axis=1).to(v.dtype)

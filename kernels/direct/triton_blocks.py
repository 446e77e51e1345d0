"""States of a channel in blocks of N, for a sweep that cannot hold what a token needs of all.

A block is a tensor (s, d, N), the states of all blocks a tuple of these; rows (s, d) and loads are
those of `device.py`.
Letters: d channels of a head, n state per channel, s samples of a program.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import exp2, one_minus_exp2
from bedouin.kernels.direct import device


@triton.jit
def load_head_block(
    rows_at,  # pointers (s, d) to state 0
    block: tl.constexpr, inside, d: tl.constexpr, n: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """States N block to N block + N - 1, as far as there are n, by `load_head_states`."""
    COUNT: tl.constexpr = n - block * N
    count = None if COUNT >= N else COUNT
    return device.load_head_states(rows_at + block * N * d, inside, count, d, N)


@triton.jit
def load_head_blocks(
    rows_at,  # pointers (s, d) to state 0
    inside, d: tl.constexpr, n: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """n states, d elements apart, in blocks of N, (s, d, N) each."""
    blocks = ()
    for i in tl.static_range((n + N - 1) // N):
        blocks = blocks + (load_head_block(rows_at, i, inside, d, n, N),)
    return blocks


@triton.jit
def store_head_blocks(
    rows_at,  # pointers (s, d) to state 0
    blocks,  # (s, d, N) each
    inside, d: tl.constexpr, n: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_head_blocks`."""
    for i in tl.static_range((n + N - 1) // N):
        count = None if n - i * N >= N else n - i * N
        device.store_head_states(rows_at + i * N * d, blocks[i], inside, count, d, N)


@triton.jit
def load_both(
    row,  # pointers (s,) to B n and C n
    block: tl.constexpr, n: tl.constexpr, S: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """B and C of a block of N states, as `load_same` gives them."""
    COUNT: tl.constexpr = min(N, n - block * N)
    B = device.load_same(row + block * N, COUNT, S, D, N)
    return B, device.load_same(row + n + block * N, COUNT, S, D, N)


@triton.jit
def keep_order(FAST: tl.constexpr):
    """Keep the compiler from moving operations across this place. Unlike a barrier it makes no warp
    wait for another one."""
    if FAST:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;",
            "=r,r,~{memory}",
            [tl.full([], 0, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def join_blocks(blocks, S: tl.constexpr):
    """Rows (s, w) of 1 or more blocks as one, entry c of block i at 2^m c + i, with 2^m blocks of
    which the last ones may be zeros."""
    BLOCKS: tl.constexpr = len(blocks)
    WIDTH: tl.constexpr = blocks[0].shape[1]
    M: tl.constexpr = triton.next_power_of_2(BLOCKS)
    for _ in tl.static_range(BLOCKS, M):
        blocks = blocks + (tl.zeros_like(blocks[0]),)
    return tl.reshape(device.join_all(blocks, M), [S, WIDTH * M])


@triton.jit
def in_blocks(joined, S: tl.constexpr, BLOCKS: tl.constexpr):
    """The inverse of `join_blocks`."""
    M: tl.constexpr = triton.next_power_of_2(BLOCKS)
    WIDTH: tl.constexpr = joined.shape[1] // M
    return device.unstack_states(tl.reshape(joined, [S, WIDTH, M]), S, WIDTH, M)[:BLOCKS]


@triton.jit
def discretize_block(
    A,  # (s, d, N), log2(e) A
    delta, s,  # rows (s, d)
    ROWS: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    COUPLED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The decay of a block of states, and s; COUPLED: 1 - decay of the only state in its place."""
    exponent = A * device.spread(delta, ROWS, D, N)
    decay = exp2(exponent, FAST)
    if COUPLED:
        s = tl.reshape(one_minus_exp2(exponent, decay), [ROWS, D])
    return decay, s

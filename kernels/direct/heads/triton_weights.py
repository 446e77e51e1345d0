"""W^y of a head in the tiles of its products, which the kernels of heads hold in shared memory.

Letters: d channels of a head, n state per channel, k reflections.
"""

import triton
import triton.language as tl

from bedouin.kernels.direct.heads.blocks import REVERSE_ALPHA
from bedouin.kernels.direct.heads.device import columns_of, join_rows, small_rows
from bedouin.kernels.direct.heads.parts import part_of
from bedouin.kernels.direct.heads.triton_blocks import join_blocks

BLOCK_ALPHA = tl.constexpr(REVERSE_ALPHA)


@triton.jit
def load_weight_tiles(
    W_ptr, d: tl.constexpr, n: tl.constexpr, K: tl.constexpr, SELECTIVE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, ALPHA: tl.constexpr, DOT: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """W^y of a head in tiles: Delta, u_1 .. u_k (d, d), and [B | C | alpha] (BLOCK_S, d),
    alpha in (ALPHA, d) if that is not 0."""
    STATES: tl.constexpr = 2 * n if SELECTIVE else 0
    rows, cols = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D)
    inside = (rows < d)[:, None] & (cols < d)[None, :]
    at = rows[:, None] * d + cols[None, :]
    tiles = (tl.load(W_ptr + at, mask=inside, other=0.0).to(DOT),)
    if JOINED:
        rows = tl.arange(0, K * BLOCK_D)
        at = (d + STATES + rows % K * d + rows // K)[:, None] * d + cols[None, :]
        within = (rows // K < d)[:, None] & (cols < d)[None, :]
        tiles = tiles + (tl.load(W_ptr + at, mask=within, other=0.0).to(DOT),)
    else:
        for i in tl.static_range(K):
            at = (d + STATES + i * d + rows)[:, None] * d + cols[None, :]
            tiles = tiles + (tl.load(W_ptr + at, mask=inside, other=0.0).to(DOT),)
    rows = tl.arange(0, BLOCK_S)
    inside = (rows < STATES + K)[:, None] & (cols < d)[None, :]
    at = small_rows(rows, d, n, K, SELECTIVE)[:, None] * d + cols[None, :]
    tiles = tiles + (tl.load(W_ptr + at, mask=inside, other=0.0).to(DOT),)
    if ALPHA > 0:
        rows = tl.arange(0, ALPHA)
        inside = (rows < K)[:, None] & (cols < d)[None, :]
        at = (d + STATES + K * d + rows)[:, None] * d + cols[None, :]
        tiles = tiles + (tl.load(W_ptr + at, mask=inside, other=0.0).to(DOT),)
    return tiles


@triton.jit
def state_columns(first, block, n: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """Of the columns of `sum_channels` for B and C of a block of N states: where these are, from
    the `first` one on, and whether there are such."""
    return _columns_at(tl.arange(0, max(2 * N, min(32, D))), first, block, n, N)


@triton.jit
def _columns_at(at, first, block, n: tl.constexpr, N: tl.constexpr):
    state = block * N + at % N
    return first + at // N * n + state, (at < 2 * N) & (state < n)


@triton.jit
def joined_columns(first, n: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """`state_columns` of all blocks, joined by `join_blocks`."""
    BLOCKS: tl.constexpr = triton.next_power_of_2((n + N - 1) // N)
    at = tl.arange(0, max(2 * N, min(32, D)) * BLOCKS)
    return _columns_at(at // BLOCKS, first, at % BLOCKS, n, N)


@triton.jit
def load_weight_columns(W_ptr, numbers, given, d: tl.constexpr, BLOCK_D: tl.constexpr):
    """Columns (d, .) of (W^y)^T by their numbers, zeros where none is given."""
    cols = tl.arange(0, BLOCK_D)[:, None]
    within = (cols < d) & given[None, :]
    return tl.load(W_ptr + numbers[None, :] * d + cols, mask=within, other=0.0)


@triton.jit
def small_columns(at, d: tl.constexpr, n: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    """The numbers of the raw values B, C and alpha, interleaved, and whether there are such."""
    i = at // 2
    even = at % 2 == 0
    numbers = tl.where(even, d + i // N * n + i % N, d + 2 * n + K * d + i)
    return numbers, (even & (i < 2 * N) & (i % N < n)) | ((at % 2 == 1) & (i < K))


@triton.jit
def load_transposed_weights(
    W_ptr, d: tl.constexpr, n: tl.constexpr, K: tl.constexpr, SELECTIVE: tl.constexpr,
    N: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """(W^y)^T of a head in tiles of columns, those of `in_tiles`.

    Their numbers are computed, not joined as the rows are: with a tl.join before a product the
    compiler chooses another layout of its factors, which takes more instructions.
    """
    u_at: tl.constexpr = d + (2 * n if SELECTIVE else 0)
    BLOCKS: tl.constexpr = triton.next_power_of_2((n + N - 1) // N)
    WIDTH: tl.constexpr = max(2 * N, min(32, D)) * BLOCKS if SELECTIVE else 0
    cols, pairs = tl.arange(0, BLOCK_D), tl.arange(0, 2 * BLOCK_D)
    tiles = ()
    if WIDTH == BLOCK_ALPHA and 2 * BLOCK_ALPHA == BLOCK_D:
        numbers, given = small_columns(pairs // 2, d, n, K, N)
        numbers = tl.where(pairs % 2 == 0, pairs // 2, numbers)
        given = ((pairs % 2 == 0) & (pairs // 2 < d)) | ((pairs % 2 == 1) & given)
        tiles = (load_weight_columns(W_ptr, numbers, given, d, BLOCK_D).to(DOT),)
    else:
        tiles = (load_weight_columns(W_ptr, cols, cols < d, d, BLOCK_D).to(DOT),)
        if WIDTH == BLOCK_ALPHA:
            numbers, given = small_columns(tl.arange(0, 2 * BLOCK_ALPHA), d, n, K, N)
            tiles = tiles + (load_weight_columns(W_ptr, numbers, given, d, BLOCK_D).to(DOT),)
        else:
            if SELECTIVE:
                numbers, given = joined_columns(d, n, N, D)
                tiles = tiles + (load_weight_columns(W_ptr, numbers, given, d, BLOCK_D).to(DOT),)
            alphas = tl.arange(0, BLOCK_ALPHA)
            numbers = u_at + K * d + alphas
            tiles = tiles + (load_weight_columns(W_ptr, numbers, alphas < K, d, BLOCK_D).to(DOT),)
    for i in tl.static_range(K // 2):
        numbers = u_at + (2 * i + pairs % 2) * d + pairs // 2
        tiles = tiles + (load_weight_columns(W_ptr, numbers, pairs // 2 < d, d, BLOCK_D).to(DOT),)
    if K % 2 == 1:
        numbers = u_at + (K - 1) * d + cols
        tiles = tiles + (load_weight_columns(W_ptr, numbers, cols < d, d, BLOCK_D).to(DOT),)
    return tiles


@triton.jit
def in_tiles(
    delta, u,  # rows (s, d)
    states,  # of each block, (s, .)
    alpha,  # (s, .)
    K: tl.constexpr, PARTS: tl.constexpr, SELECTIVE: tl.constexpr,
):  # fmt: skip
    """The raw values of a token in tiles, each a factor of one product.

    Rows of one width are interleaved, since a change of layout for each product takes two barriers,
    but no more than two of d channels, since a product is one chain of accumulations.
    """
    ROWS: tl.constexpr = delta.shape[0]
    D: tl.constexpr = delta.shape[1]
    alpha = part_of(alpha, PARTS)
    if SELECTIVE:
        states = part_of(join_blocks(states, ROWS), PARTS)
    tiles = ()
    if SELECTIVE and states.shape[1] == alpha.shape[1]:
        small = join_rows((states, alpha), ROWS, 2, alpha.shape[1])
        if small.shape[1] == D:
            tiles = (join_rows((delta, small), ROWS, 2, D),)
        else:
            tiles = (delta, small)
    elif SELECTIVE:
        tiles = (delta, states, alpha)
    else:
        tiles = (delta, alpha)
    for i in tl.static_range(0, K // 2):
        tiles = tiles + (join_rows(u[2 * i : 2 * i + 2], ROWS, 2, D),)
    if K % 2 == 1:
        tiles = tiles + (u[K - 1],)
    return tiles


@triton.jit
def transposed_product(
    W, grads, S: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """(W^y)^T times the cotangents of the raw values, (d, COLUMNS).

    Differences, because the compiler turns a sum of products into one chain of accumulations, in
    which every step waits for the one before it.
    """
    v = columns_of(grads[0].to(DOT), S, W[0].shape[1], COLUMNS)
    total = tl.dot(W[0], v, input_precision=PRECISION)
    for i in tl.static_range(1, len(W)):
        v = columns_of(-grads[i].to(DOT), S, W[i].shape[1], COLUMNS)
        total -= tl.dot(W[i], v, input_precision=PRECISION)
    return total

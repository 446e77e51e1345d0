"""W^y of a head in the tiles of its products, which the kernels of heads hold in shared memory.

Letters: d channels of a head, n state per channel, k reflections.
"""

import triton
import triton.language as tl

from bedouin.kernels.direct.device import columns_of, join_rows, small_rows
from bedouin.kernels.direct.parts import part_of


@triton.constexpr_function
def small_width(N, D):
    """Columns of the cotangents of B and C, and as many for those of alpha: every thread of a warp
    has one."""
    return max(2 * N, min(32, D))


@triton.jit
def load_weight_tile(
    W_ptr, i: tl.constexpr, d: tl.constexpr, n: tl.constexpr, K: tl.constexpr,
    SELECTIVE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, DOT: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """Tile i of W^y of a head: Delta, u_1 .. u_k (d, d), and [B | C | alpha] (BLOCK_S, d)."""
    STATES: tl.constexpr = 2 * n if SELECTIVE else 0
    SMALL: tl.constexpr = 2 if JOINED else K + 1
    cols = tl.arange(0, BLOCK_D)
    if i == SMALL:
        rows = tl.arange(0, BLOCK_S)
        given, numbers = rows < STATES + K, small_rows(rows, d, n, K, SELECTIVE)
    elif JOINED and i > 0:
        rows = tl.arange(0, K * BLOCK_D)
        given, numbers = rows // K < d, d + STATES + rows % K * d + rows // K
    else:
        rows = tl.arange(0, BLOCK_D)
        given, numbers = rows < d, rows + (0 if i == 0 else d + STATES + (i - 1) * d)
    inside = given[:, None] & (cols < d)[None, :]
    at = numbers[:, None] * d + cols[None, :]
    return tl.load(W_ptr + at, mask=inside, other=0.0).to(DOT)


@triton.jit
def state_columns(at, first, n: tl.constexpr, N: tl.constexpr):
    """Where columns `at` of the cotangents of B and C are, from the `first` one on, and whether
    there are such."""
    return first + at // N * n + at % N, (at < 2 * N) & (at % N < n)


@triton.jit
def _small_columns(
    at, d: tl.constexpr, n: tl.constexpr, K: tl.constexpr, SELECTIVE: tl.constexpr, N: tl.constexpr
):
    """The numbers of the raw values B and C, interleaved with alpha, and whether there are such."""
    numbers, given = state_columns(at // 2, d, n, N)
    alpha_at: tl.constexpr = d + (2 * n if SELECTIVE else 0) + K * d
    numbers = tl.where(at % 2 == 0, numbers, alpha_at + at // 2)
    return numbers, tl.where(at % 2 == 0, given & SELECTIVE, at // 2 < K)


@triton.jit
def _load_columns(
    W_ptr, at, i: tl.constexpr, d: tl.constexpr, n: tl.constexpr, K: tl.constexpr,
    SELECTIVE: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Columns `at` of tile i of (W^y)^T, in the order of `in_tiles`, zeros where there are none.

    Their numbers are computed, not joined as the rows are: with a tl.join before a product the
    compiler chooses another layout of its factors, which takes more instructions.
    """
    u_at: tl.constexpr = d + (2 * n if SELECTIVE else 0)
    FIRST: tl.constexpr = tiles_before_reflections(N, BLOCK_D, D)
    if i >= FIRST:
        if i - FIRST < K // 2:
            numbers, given = u_at + (2 * (i - FIRST) + at % 2) * d + at // 2, at // 2 < d
        else:
            numbers, given = u_at + (K - 1) * d + at, at < d
    elif FIRST == 1:
        numbers, given = _small_columns(at // 2, d, n, K, SELECTIVE, N)
        numbers = tl.where(at % 2 == 0, at // 2, numbers)
        given = tl.where(at % 2 == 0, at // 2 < d, given)
    elif i == 0:
        numbers, given = at, at < d
    else:
        numbers, given = _small_columns(at, d, n, K, SELECTIVE, N)
    cols = tl.arange(0, BLOCK_D)[:, None]
    within = (cols < d) & given[None, :]
    return tl.load(W_ptr + numbers[None, :] * d + cols, mask=within, other=0.0).to(DOT)


@triton.constexpr_function
def tiles_before_reflections(N, block_d, D):
    """Tiles of Delta, B, C and alpha: one, if B, C and alpha together are as wide as Delta, else
    one of Delta and one of the others."""
    return 1 if 2 * small_width(N, D) == block_d else 2


@triton.constexpr_function
def width_of_tile(i, K, N, block_d, D):
    first = tiles_before_reflections(N, block_d, D)
    if i >= first:
        return 2 * block_d if i - first < K // 2 else block_d
    return block_d if first == 2 and i == 0 else 2 * small_width(N, D) * (3 - first)


@triton.jit
def load_transposed_weights(
    W_ptr, d: tl.constexpr, n: tl.constexpr, K: tl.constexpr, SELECTIVE: tl.constexpr,
    N: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """(W^y)^T of a head in tiles of columns, those of `in_tiles`."""
    FIRST: tl.constexpr = tiles_before_reflections(N, BLOCK_D, D)
    tiles = ()
    for i in tl.static_range(FIRST + (K + 1) // 2):
        at = tl.arange(0, width_of_tile(i, K, N, BLOCK_D, D))
        tile = _load_columns(W_ptr, at, i, d, n, K, SELECTIVE, N, BLOCK_D, D, DOT)
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def in_tiles(
    delta, u,  # rows (s, d)
    states, alpha,  # (s, .)
    K: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The raw values of a token in tiles, each a factor of one product.

    Rows of one width are interleaved, since a change of layout for each product takes two barriers,
    but no more than two of d channels, since a product is one chain of accumulations.
    """
    ROWS: tl.constexpr = delta.shape[0]
    D: tl.constexpr = delta.shape[1]
    small = join_rows(
        (part_of(states, PARTS), part_of(alpha, PARTS)), ROWS, 2, alpha.shape[1] // PARTS
    )
    tiles = (delta, small)
    if small.shape[1] == D:
        tiles = (join_rows((delta, small), ROWS, 2, D),)
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


@triton.jit
def _product_of_tile(
    W_ptr, grads, i: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, DOT: tl.constexpr, d: tl.constexpr, n: tl.constexpr, K: tl.constexpr,
    SELECTIVE: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Tile i of (W^y)^T times its part of the cotangents, one of two interleaved rows at once."""
    WIDTH: tl.constexpr = width_of_tile(i, K, N, BLOCK_D, D)
    PARTS: tl.constexpr = 2 if WIDTH == 2 * BLOCK_D else 1
    parts = (columns_of(grads.to(DOT), S, WIDTH, COLUMNS),)
    if PARTS == 2:
        parts = tl.split(tl.permute(tl.reshape(parts[0], [BLOCK_D, 2, COLUMNS]), (0, 2, 1)))
    total = tl.zeros([BLOCK_D, COLUMNS], tl.float32)
    for j in tl.static_range(PARTS):
        at = PARTS * tl.arange(0, WIDTH // PARTS) + j
        W = _load_columns(W_ptr, at, i, d, n, K, SELECTIVE, N, BLOCK_D, D, DOT)
        total += tl.dot(W, parts[j], input_precision=PRECISION)
    return total


@triton.jit
def streamed_product(
    W_ptr, grads, S: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    DOT: tl.constexpr, d: tl.constexpr, n: tl.constexpr, K: tl.constexpr, SELECTIVE: tl.constexpr,
    N: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """`transposed_product` with W^y from global memory."""
    total = tl.zeros([BLOCK_D, COLUMNS], tl.float32)
    for i in tl.static_range(len(grads)):
        total += _product_of_tile(
            W_ptr, grads[i], i, S, COLUMNS, PRECISION, DOT, d, n, K, SELECTIVE, N, BLOCK_D, D
        )
    return total

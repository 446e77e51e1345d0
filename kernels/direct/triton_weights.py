"""W^y of a head in the tiles of its products, which the kernels of heads hold in shared memory.

Letters: d channels of a head, n state per channel, k reflections. `how`: `head_constants`.
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
def load_weight_tile(W_ptr, i: tl.constexpr, how):
    """Tile i of W^y of a head: Delta, u_1 .. u_k (d, d), and [B | C | alpha] (BLOCK_S, d)."""
    cols = tl.arange(0, how.BLOCK_D)
    if i == how.SMALL:
        rows = tl.arange(0, how.BLOCK_S)
        given, numbers = rows < how.STATES + how.K, small_rows(rows, how)
    elif how.JOINED and i > 0:
        rows = tl.arange(0, how.K * how.BLOCK_D)
        given, numbers = rows // how.K < how.d, how.U_AT + rows % how.K * how.d + rows // how.K
    else:
        rows = tl.arange(0, how.BLOCK_D)
        given, numbers = rows < how.d, rows + (0 if i == 0 else how.U_AT + (i - 1) * how.d)
    inside = given[:, None] & (cols < how.d)[None, :]
    at = numbers[:, None] * how.d + cols[None, :]
    return tl.load(W_ptr + at, mask=inside, other=0.0).to(how.DOT)


@triton.jit
def state_columns(at, first, how):
    """Where columns `at` of the cotangents of B and C are, from the `first` one on, and whether
    there are such. `join_rows` has interleaved the states of the blocks."""
    state = at % how.BLOCKS * (how.N // how.BLOCKS) + at % how.N // how.BLOCKS
    return first + at // how.N * how.n + state, (at < 2 * how.N) & (state < how.n)


@triton.jit
def _small_columns(at, how):
    """The numbers of the raw values B and C, interleaved with alpha, and whether there are such."""
    numbers, given = state_columns(at // 2, how.d, how)
    alpha_at: tl.constexpr = how.U_AT + how.K * how.d
    numbers = tl.where(at % 2 == 0, numbers, alpha_at + at // 2)
    return numbers, tl.where(at % 2 == 0, given & how.SELECTIVE, at // 2 < how.K)


@triton.jit
def _load_columns(W_ptr, at, i: tl.constexpr, how):
    """Columns `at` of tile i of (W^y)^T, in the order of `in_tiles`, zeros where there are none.

    Their numbers are computed, not joined as the rows are: with a tl.join before a product the
    compiler chooses another layout of its factors, which takes more instructions.
    """
    d: tl.constexpr = how.d
    FIRST: tl.constexpr = tiles_before_reflections(how.N, how.BLOCK_D, how.D)
    if i >= FIRST:
        if i - FIRST < how.K // 2:
            numbers, given = how.U_AT + (2 * (i - FIRST) + at % 2) * d + at // 2, at // 2 < d
        else:
            numbers, given = how.U_AT + (how.K - 1) * d + at, at < d
    elif FIRST == 1:
        numbers, given = _small_columns(at // 2, how)
        numbers = tl.where(at % 2 == 0, at // 2, numbers)
        given = tl.where(at % 2 == 0, at // 2 < d, given)
    elif i == 0:
        numbers, given = at, at < d
    else:
        numbers, given = _small_columns(at, how)
    cols = tl.arange(0, how.BLOCK_D)[:, None]
    within = (cols < d) & given[None, :]
    return tl.load(W_ptr + numbers[None, :] * d + cols, mask=within, other=0.0).to(how.DOT)


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
def load_transposed_weights(W_ptr, how):
    """(W^y)^T of a head in tiles of columns, those of `in_tiles`."""
    FIRST: tl.constexpr = tiles_before_reflections(how.N, how.BLOCK_D, how.D)
    tiles = ()
    for i in tl.static_range(FIRST + (how.K + 1) // 2):
        at = tl.arange(0, width_of_tile(i, how.K, how.N, how.BLOCK_D, how.D))
        tiles = tiles + (_load_columns(W_ptr, at, i, how),)
    return tiles


@triton.jit
def in_tiles(delta, u, states, alpha, how):
    """The raw values of a token in tiles, each a factor of one product, from rows (s, d) of Delta
    and u and (s, .) of B, C and alpha.

    Rows of one width are interleaved, since a change of layout for each product takes two barriers,
    but no more than two of d channels, since a product is one chain of accumulations.
    """
    WIDTH: tl.constexpr = alpha.shape[1] // how.PARTS
    both = part_of(states, how.PARTS), part_of(alpha, how.PARTS)
    small = join_rows(both, how.ROWS, 2, WIDTH)
    tiles = (delta, small)
    if small.shape[1] == how.D:
        tiles = (join_rows((delta, small), how.ROWS, 2, how.D),)
    for i in tl.static_range(0, how.K // 2):
        tiles = tiles + (join_rows(u[2 * i : 2 * i + 2], how.ROWS, 2, how.D),)
    if how.K % 2 == 1:
        tiles = tiles + (u[how.K - 1],)
    return tiles


@triton.jit
def transposed_product(W, grads, how):
    """(W^y)^T times the cotangents of the raw values, (d, COLUMNS).

    Differences, because the compiler turns a sum of products into one chain of accumulations, in
    which every step waits for the one before it.
    """
    v = columns_of(grads[0].to(how.DOT), how)
    total = tl.dot(W[0], v, input_precision=how.PRECISION)
    for i in tl.static_range(1, len(W)):
        v = columns_of(-grads[i].to(how.DOT), how)
        total -= tl.dot(W[i], v, input_precision=how.PRECISION)
    return total


@triton.jit
def _product_of_tile(W_ptr, grads, i: tl.constexpr, how):
    """Tile i of (W^y)^T times its part of the cotangents, one of two interleaved rows at once."""
    WIDTH: tl.constexpr = width_of_tile(i, how.K, how.N, how.BLOCK_D, how.D)
    PARTS: tl.constexpr = 2 if WIDTH == 2 * how.BLOCK_D else 1
    parts = (columns_of(grads.to(how.DOT), how),)
    if PARTS == 2:
        parts = tl.reshape(parts[0], [how.BLOCK_D, 2, how.COLUMNS])
        parts = tl.split(tl.permute(parts, (0, 2, 1)))
    total = tl.zeros([how.BLOCK_D, how.COLUMNS], tl.float32)
    for j in tl.static_range(PARTS):
        at = PARTS * tl.arange(0, WIDTH // PARTS) + j
        W = _load_columns(W_ptr, at, i, how)
        total += tl.dot(W, parts[j], input_precision=how.PRECISION)
    return total


@triton.jit
def streamed_product(W_ptr, grads, how):
    """`transposed_product` with W^y from global memory."""
    total = tl.zeros([how.BLOCK_D, how.COLUMNS], tl.float32)
    for i in tl.static_range(len(grads)):
        total += _product_of_tile(W_ptr, grads[i], i, how)
    return total

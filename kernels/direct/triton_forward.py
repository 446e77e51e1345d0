"""The direct sweep with feedback as one Triton kernel, with two ways to compute W^y norm(y_{t-1}).

* Persistent: one cooperative launch for the whole sequence. Some programs hold a tile of W^y each,
  in shared memory, and multiply it with norm(y_{t-1}) of all samples; one program a sample holds
  its memory h in registers and solves the local equation. Two counters in device memory order the
  programs: finished samples and finished tiles.
* A launch a token, around a product by cuBLAS: where the persistent kernel does not fit.

The raw values are laid out as `RawLayout` says. h is (b, n, d) here.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.sync import announce, wait_for
from bedouin.kernels.direct.triton_blocks import (
    load_blocks,
    store_blocks,
    unaligned,
    zero_blocks,
)
from bedouin.kernels.direct.triton_bundles import (
    Counters,
    ForwardBuffers,
    ForwardSweep,
    Options,
    Product,
    Rows,
    Sizes,
    Tokens,
)
from bedouin.kernels.direct.triton_product import load_tile, tile_product
from bedouin.kernels.direct.triton_token import solve_token


@triton.jit
def _multiply(W, sweep, t, done, first_tile, tiles):
    """W^y norm(y_{t-1}) of all samples: the program's tiles."""
    r: tl.constexpr = sweep.sizes.r
    d: tl.constexpr = sweep.sizes.d
    batch = sweep.sizes.batch
    vector_ptr = sweep.buffers.normed_ptr + tl.cast(t, tl.int64) * d
    if first_tile < tiles:
        wait_for(sweep.counters.samples, done * batch, sweep.product.COMPILED)
    if sweep.product.ONE_TILE:
        if first_tile < tiles:
            tile_product(
                W, first_tile, vector_ptr, sweep.buffers.fed_ptr, t >> 30, batch, r, d,
                tl.cast(sweep.sizes.t_end, tl.int64) * d, sweep.buffers.fed_stride, sweep.product,
            )  # fmt: skip
            announce(sweep.counters.tiles)
    else:
        for tile in range(first_tile, tiles, tl.num_programs(0)):
            part = load_tile(sweep.buffers.W_ptr, tile, r, d, d, 1, sweep.product)
            tile_product(
                part, tile, vector_ptr, sweep.buffers.fed_ptr, t >> 30, batch, r, d,
                tl.cast(sweep.sizes.t_end, tl.int64) * d, sweep.buffers.fed_stride, sweep.product,
            )  # fmt: skip
            announce(sweep.counters.tiles)


@triton.jit
def _keep(h, sweep, sample, slots, t):
    """Store h before token t, if the reverse sweep starts a chunk there."""
    if (t > 0) & (t % sweep.sizes.KEEP == 0):
        slot = sample * slots + t // sweep.sizes.KEEP - 1
        kept_ptr = sweep.buffers.kept_ptr + slot * sweep.sizes.n * sweep.sizes.d
        store_blocks(unaligned(kept_ptr, t, sweep.sizes), h, sweep.sizes.n, sweep.sizes)


@triton.jit
def _walk(
    h,  # BLOCKS times (BLOCK_N, BLOCK_D), of the program's own sample, if RESIDENT
    W,  # the program's tile, if ONE_TILE
    sweep,  # ForwardSweep
    first_tile,
    tiles,
    stride,  # from one of the program's samples to its next
    start,
    stop,
    WITH_TILES: tl.constexpr,
    WITH_SAMPLES: tl.constexpr,
):
    """Tokens start .. stop - 1: the program's tile, its samples, or both; returns h."""
    program = tl.program_id(0)
    own = program.to(tl.int64)
    d: tl.constexpr = sweep.sizes.d
    n: tl.constexpr = sweep.sizes.n
    slots = tl.cdiv(sweep.sizes.t_end, sweep.sizes.KEEP) - 1
    for t in range(start, stop):
        done = t - start
        if WITH_TILES:
            _multiply(W, sweep, t, done, first_tile, tiles)
        if WITH_SAMPLES and sweep.product.RESIDENT:
            if program < sweep.sizes.batch:
                _keep(h, sweep, own, slots, t)
                h = solve_token(
                    h, sweep.tokens, sweep.buffers, sweep.counters, sweep.sizes, sweep.options,
                    sweep.product, own, t, (done + 1) * tiles,
                )  # fmt: skip
        if WITH_SAMPLES and not sweep.product.RESIDENT:
            for index in range(program, sweep.sizes.batch, stride):
                sample = tl.cast(index, tl.int64)
                memory = sweep.buffers.h_ptr + sample * n * d
                memory = unaligned(memory, t, sweep.sizes)
                other = load_blocks(memory, n, sweep.sizes)
                _keep(other, sweep, sample, slots, t)
                other = solve_token(
                    other, sweep.tokens, sweep.buffers, sweep.counters, sweep.sizes, sweep.options,
                    sweep.product, sample, t, (done + 1) * tiles,
                )  # fmt: skip
                store_blocks(memory, other, n, sweep.sizes)
                # the next token reads h, perhaps in other threads than those that wrote it
                tl.debug_barrier()
    return h


@triton.jit
def _sweep(sweep, start, stop):
    """Tokens start .. stop - 1 of the program's samples, and the program's share of products."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    d: tl.constexpr = sweep.sizes.d
    n: tl.constexpr = sweep.sizes.n
    r: tl.constexpr = sweep.sizes.r
    own_h_ptr = sweep.buffers.h_ptr + program.to(tl.int64) * n * d
    own_h_ptr = unaligned(own_h_ptr, start, sweep.sizes)
    h = zero_blocks(sweep.sizes, sweep.options.ACC)
    # loaded here, h would occupy registers of the programs that have tiles
    LATE: tl.constexpr = sweep.sizes.CROWDED and sweep.product.SEPARATE and sweep.product.RESIDENT
    if sweep.product.RESIDENT and not LATE:
        if program < sweep.sizes.batch:
            h = load_blocks(own_h_ptr, n, sweep.sizes)
    # samples from the first program on, tiles from the last: few programs have both
    first_tile = programs - 1 - program
    tiles = 0
    if sweep.product.PERSISTENT:
        tiles = tl.cdiv(r, sweep.product.BLOCK_M) * sweep.product.SPLITS
    if sweep.product.SEPARATE:
        stride = programs - tiles
        if first_tile < tiles:
            W = load_tile(sweep.buffers.W_ptr, first_tile, r, d, d, 1, sweep.product)
            _walk(h, W, sweep, first_tile, tiles, stride, start, stop, True, False)
        elif LATE:
            if program < sweep.sizes.batch:
                h = load_blocks(own_h_ptr, n, sweep.sizes)
                h = _walk(h, (), sweep, first_tile, tiles, stride, start, stop, False, True)
                store_blocks(own_h_ptr, h, n, sweep.sizes)
        else:
            h = _walk(h, (), sweep, first_tile, tiles, stride, start, stop, False, True)
    else:
        W = ()
        if sweep.product.PERSISTENT and sweep.product.ONE_TILE:
            W = load_tile(sweep.buffers.W_ptr, first_tile, r, d, d, 1, sweep.product)
        h = _walk(
            h, W, sweep, first_tile, tiles, programs, start, stop, sweep.product.PERSISTENT, True
        )
    if sweep.product.RESIDENT and not LATE:
        if program < sweep.sizes.batch:
            store_blocks(own_h_ptr, h, n, sweep.sizes)


@triton.jit(do_not_specialize=["start", "stop", "t_end", "batch"])
def sweep_kernel(
    x_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r), from x
    W_ptr,  # (r, d), W^y
    A_ptr,  # (n, d), log2(e) A
    h_ptr,  # (b, n, d), in place
    kept_ptr,  # (b, ceil(t / KEEP) - 1, n, d): h before tokens KEEP, 2 KEEP, ...
    fed_ptr,  # (splits, b, r): parts of W^y norm(y_{t-1})
    BC_ptr,  # (b, 2 n): B and C of the present token, if BLOCKS > 1
    y_ptr,  # (b, t, d)
    normed_ptr,  # (b, t, d): norm(y_{t-1}), in the dtype of W^y; that of y0 is there
    statistics_ptr,  # (4, b, t): defect, scale, magnitude, pivot
    counters_ptr,  # (2,), zeros: finished samples, finished tiles
    start,
    stop,
    batch,
    t_end,
    r: tl.constexpr,
    d: tl.constexpr,
    n: tl.constexpr,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    fed_stride,
    K: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,  # states at a time
    BLOCKS: tl.constexpr,  # how many times
    CROWDED: tl.constexpr,  # the memory of a sample occupies half of the program's registers
    ROWS: tl.constexpr,  # warps that hold equal numbers of channels; 0: spread in another way
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SPLITS: tl.constexpr,  # tiles that share a row of W^y
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    PERSISTENT: tl.constexpr,
    ONE_TILE: tl.constexpr,  # no program has more than one tile of W^y, which then stays with it
    SEPARATE: tl.constexpr,  # no program has a tile and samples: their loops share no registers
    RESIDENT: tl.constexpr,  # no program has more than one sample, whose h then stays in registers
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    EPS: tl.constexpr,
    ALIGNED: tl.constexpr,  # a power of two that divides all offsets of rows of raw values
    FAST: tl.constexpr,
    COMPILED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Tokens start .. stop - 1 of all samples, each as `solve_token` says:

    y_t and h_t from raw_t = raw^x_t + W^y norm(y_{t-1}), x_t and h_{t-1}.
    """
    _sweep(
        ForwardSweep(
            Tokens(
                Rows(raw_ptr, raw_stride_b, raw_stride_t),
                Rows(x_ptr, x_stride_b, x_stride_t),
            ),
            ForwardBuffers(
                W_ptr,
                A_ptr,
                h_ptr,
                kept_ptr,
                fed_ptr,
                fed_stride,
                BC_ptr,
                y_ptr,
                normed_ptr,
                statistics_ptr,
            ),
            Counters(samples=counters_ptr, tiles=counters_ptr + 1),
            Sizes(d, n, BLOCK_D, BLOCK_N, BLOCKS, batch, t_end, r, KEEP, CROWDED, ROWS),
            Options(
                K,
                ACTIVATION,
                INPUT_SCALE,
                FULL,
                True,
                ALIGNED,
                FAST,
                ACC,
                SELECTIVE,
                BETA_MAX,
                NORM,
                NORM_EPS,
                EPS,
            ),
            Product(
                PERSISTENT,
                SPLITS,
                COMPILED,
                ONE_TILE,
                SEPARATE,
                RESIDENT,
                BLOCK_M,
                BLOCK_K,
                CHUNKS,
                BLOCK_B,
                PRECISION,
                DOT,
            ),
        ),
        start,
        stop,
    )

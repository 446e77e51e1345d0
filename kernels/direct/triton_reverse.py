"""The reverse sweep with feedback as Triton kernels: the adjoint of a chunk in four launches.

`prepare_kernel` computes in parallel what follows from y, `replay_kernel` the memory before every
token of the chunk from the memory kept before the chunk, and `reverse_kernel` walks back as
persistent programs that also multiply with (W^y)^T, ordered by two counters as in
triton_forward.py: finished tiles of (W^y)^T grad_raw_{t+1} and samples whose grad_raw_t is written.
A fourth adds the chunk's part of the cotangent of A (triton_grad_A.py). For few samples all that is
one launch, and programs that have neither a tile nor a sample prepare a chunk, and add that of the
one two after it, while the others walk back over the one between; a third counter orders these.
Where the product does not fit, `step_kernel` takes a token back, around a product by cuBLAS.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.sync import announce, wait_for
from bedouin.kernels.direct.triton_blocks import load_blocks, of_thread, store_blocks
from bedouin.kernels.direct.triton_bundles import (
    Chunk,
    Counters,
    Memories,
    Options,
    Prepared,
    Product,
    ReverseBuffers,
    ReverseSweep,
    Rows,
    Sizes,
    Tokens,
    WalkedChunk,
)
from bedouin.kernels.direct.triton_grad_A import add_grad_A
from bedouin.kernels.direct.triton_prepare import prepare_token
from bedouin.kernels.direct.triton_product import load_tile, tile_product
from bedouin.kernels.direct.triton_replay import later_memory, replay_block
from bedouin.kernels.direct.triton_reverse_token import reverse_token


@triton.jit
def _keep_top(H, sweep, chunk, sample, i_token):
    """Keep the cotangent of h after a chunk, if the cotangent of A is added later."""
    if sweep.sizes.LATER_A and i_token == chunk.count - 1:
        of_sample = (sample + chunk.behind) * sweep.sizes.n * sweep.sizes.d
        top_ptr = of_thread(sweep.walked.top_ptr + of_sample, chunk.start, sweep.sizes)
        store_blocks(top_ptr, H, sweep.sizes.n, sweep.sizes)


@triton.jit
def _step(sweep, chunk, i_token):
    """A token of the program's sample."""
    own = tl.program_id(0).to(tl.int64)
    H_ptr = of_thread(sweep.buffers.H_ptr, chunk.start, sweep.sizes)
    H_ptr += own * sweep.sizes.n * sweep.sizes.d
    H = load_blocks(H_ptr, sweep.sizes.n, sweep.sizes)
    _keep_top(H, sweep, chunk, own, i_token)
    H = reverse_token(H, sweep, chunk, own, i_token, 0)
    tl.debug_barrier()
    store_blocks(H_ptr, H, sweep.sizes.n, sweep.sizes)


@triton.jit(do_not_specialize=["i_token", "start", "count", "slot", "slots", "t_end", "batch"])
def step_kernel(
    grad_y_ptr,  # (b, t, d)
    grad_normed_ptr,  # (splits, b, d): parts of (W^y)^T grad_raw_{t+1}, that of norm(y_t)
    x_ptr,  # (b, t, d)
    y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r)
    A_ptr,  # (n, d), log2(e) A
    mixed_ptr,  # (b, count, d)
    local_ptr,  # (b, count, WIDTH)
    h0_ptr,  # (b, n, d)
    kept_ptr,  # (b, slots, n, d)
    replayed_ptr,  # (b, count - 1, n, d)
    H_ptr,  # (b, n, d): cotangent of h_t, in place that of h_{t-1}
    grad_x_ptr,  # (b, t, d)
    grad_raw_ptr,  # (b, t, r), may be the memory of `fed`
    vectors_ptr,  # (b, count, 2, d), written if LATER_A: w and Delta
    top_ptr,  # (b, n, d), written if LATER_A: cotangent of h after the chunk
    grad_A_ptr,  # (b, n, d), added to unless LATER_A
    statistics_ptr,  # (2, b, t): defect and scale of the adjoint equation
    i_token,
    start,
    count,
    slot,
    slots,
    batch,
    t_end,
    r: tl.constexpr,
    d: tl.constexpr,
    n: tl.constexpr,
    grad_y_stride_b,
    grad_y_stride_t,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    h0_stride_b,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,  # states at a time
    BLOCKS: tl.constexpr,  # how many times
    CROWDED: tl.constexpr,  # the memory of a sample occupies half of the program's registers
    ROWS: tl.constexpr,  # warps that hold equal numbers of channels; 0: spread in another way
    LATER_A: tl.constexpr,  # the cotangent of A is added behind the walk
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    EPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
    ACC: tl.constexpr,
):
    """The adjoint of token start + i_token alone, of all samples, as `reverse_token` says.

    The products with (W^y)^T are computed outside.
    """
    _step(
        ReverseSweep(
            Tokens(
                Rows(raw_ptr, raw_stride_b, raw_stride_t),
                Rows(x_ptr, x_stride_b, x_stride_t),
                Rows(fed_ptr, fed_stride_b, fed_stride_t),
                Rows(grad_y_ptr, grad_y_stride_b, grad_y_stride_t),
            ),
            Prepared(A_ptr, mixed_ptr, local_ptr),
            Memories(h0_ptr, h0_stride_b, kept_ptr, replayed_ptr, slots),
            WalkedChunk(vectors_ptr, top_ptr),
            ReverseBuffers(
                y_ptr,
                grad_raw_ptr,  # instead of W, which is not read
                grad_normed_ptr,
                H_ptr,
                grad_x_ptr,
                grad_raw_ptr,
                grad_A_ptr,
                statistics_ptr,
            ),
            Counters(None, None),
            Sizes(d, n, BLOCK_D, BLOCK_N, BLOCKS, batch, t_end, r, None, CROWDED, ROWS, LATER_A),
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
            Product(False, 1, False),
        ),
        Chunk(slot, start, count),
        i_token,
    )


@triton.jit
def _multiply(W, sweep, t, finished, first_tile, tiles):
    """(W^y)^T grad_raw_t once `finished` samples have been counted: the program's tiles."""
    r: tl.constexpr = sweep.sizes.r
    d: tl.constexpr = sweep.sizes.d
    STATES: tl.constexpr = 2 * sweep.sizes.n if sweep.options.SELECTIVE else 0
    R: tl.constexpr = d + STATES + sweep.options.K * (d + 1)
    batch = sweep.sizes.batch
    vector_ptr = sweep.buffers.grad_raw_ptr + tl.cast(t, tl.int64) * r
    if first_tile < tiles:
        wait_for(sweep.counters.samples, finished, sweep.product.COMPILED)
    if sweep.product.ONE_TILE:
        if first_tile < tiles:
            tile_product(
                W, first_tile, vector_ptr, sweep.buffers.grad_normed_ptr, t >> 30, batch, d, r,
                tl.cast(sweep.sizes.t_end, tl.int64) * r, d, sweep.product,
            )  # fmt: skip
            announce(sweep.counters.tiles)
    else:
        for tile in range(first_tile, tiles, tl.num_programs(0)):
            part = load_tile(sweep.buffers.W_ptr, tile, d, R, 1, d, sweep.product)
            tile_product(
                part, tile, vector_ptr, sweep.buffers.grad_normed_ptr, t >> 30, batch, d, r,
                tl.cast(sweep.sizes.t_end, tl.int64) * r, d, sweep.product,
            )  # fmt: skip
            announce(sweep.counters.tiles)


@triton.jit
def _walk_back(
    H,  # BLOCKS times (BLOCK_N, BLOCK_D), of the program's own sample, if RESIDENT
    W,  # the program's tile, if ONE_TILE
    sweep,  # ReverseSweep
    chunk,  # Chunk
    first_tile,
    tiles,
    stride,  # from one of the program's samples to its next
    WITH_TILES: tl.constexpr,
    WITH_SAMPLES: tl.constexpr,
):
    """The tokens of a chunk, last first: the program's tile, its samples, or both; returns H."""
    program = tl.program_id(0)
    own = program.to(tl.int64)
    for back in range(0, chunk.count):
        i_token = chunk.count - 1 - back
        t = chunk.start + i_token
        done = chunk.done + back
        if WITH_SAMPLES and sweep.product.RESIDENT:
            if program < sweep.sizes.batch:
                _keep_top(H, sweep, chunk, own, i_token)
                H = reverse_token(H, sweep, chunk, own, i_token, done * tiles)
        if WITH_SAMPLES and not sweep.product.RESIDENT:
            for index in range(program, sweep.sizes.batch, stride):
                sample = tl.cast(index, tl.int64)
                H_ptr = of_thread(sweep.buffers.H_ptr, t, sweep.sizes)
                H_ptr += sample * sweep.sizes.n * sweep.sizes.d
                later = load_blocks(H_ptr, sweep.sizes.n, sweep.sizes)
                _keep_top(later, sweep, chunk, sample, i_token)
                later = reverse_token(later, sweep, chunk, sample, i_token, done * tiles)
                store_blocks(H_ptr, later, sweep.sizes.n, sweep.sizes)
                # the next token reads H, perhaps in other threads than those that wrote it
                tl.debug_barrier()
        if WITH_TILES:
            _multiply(W, sweep, t, (done + 1) * sweep.sizes.batch, first_tile, tiles)
    return H


@triton.jit
def _grad_A_share(
    sweep,
    chunk,  # Chunk
    first,
    sharing,  # number of programs that have a share, of which this is number `first`
    REPLAY_D: tl.constexpr,
    GRAD_N: tl.constexpr,
):
    """A program's share of the cotangent of A of a chunk."""
    blocks = tl.cdiv(sweep.sizes.d, REPLAY_D) * tl.cdiv(sweep.sizes.n, GRAD_N)
    for index in range(first, sweep.sizes.batch * blocks, sharing):
        add_grad_A(
            sweep.prepared, sweep.memories, sweep.walked, sweep.buffers.grad_A_ptr, chunk,
            Sizes(sweep.sizes.d, sweep.sizes.n, REPLAY_D, GRAD_N, CROWDED=sweep.sizes.CROWDED),
            sweep.options, index,
        )  # fmt: skip


@triton.jit
def _prepare_share(
    sweep,
    chunk,  # Chunk
    phase_ptr,
    finished,  # value of the counter when the intermediate results of all tokens are there
    first,
    sharing,  # number of programs that have a share, of which this is number `first`
    REPLAY_D: tl.constexpr,
):
    """A program's share of the intermediate results and then of the memory of a chunk."""
    batch = sweep.sizes.batch
    for index in range(first, batch * chunk.count, sharing):
        prepare_token(
            sweep.tokens, sweep.buffers.y_ptr, sweep.prepared, chunk, sweep.sizes, sweep.options,
            index,
        )  # fmt: skip
    _end_phase(phase_ptr, finished, sweep.product.COMPILED)
    for index in range(first, batch * tl.cdiv(sweep.sizes.d, REPLAY_D), sharing):
        replay_block(
            sweep.tokens, sweep.prepared, sweep.memories,
            Rows(
                later_memory(sweep.memories, 0, chunk.count - 1, chunk, sweep.sizes),
                chunk.count * sweep.sizes.n * sweep.sizes.d,
                None,
            ),
            chunk,
            Sizes(
                sweep.sizes.d, sweep.sizes.n, REPLAY_D, sweep.sizes.BLOCK_N, sweep.sizes.BLOCKS,
                CROWDED=sweep.sizes.CROWDED,
            ),
            sweep.options, index, True, sweep.sizes.CROWDED,
        )  # fmt: skip
    announce(phase_ptr)


@triton.jit
def _reverse_chunk(
    H,  # BLOCKS times (BLOCK_N, BLOCK_D), of the program's own sample, if RESIDENT
    W,  # the program's tile, if ONE_TILE
    sweep,  # ReverseSweep
    chunk,  # Chunk
    tiles,
):
    """The walk back over a chunk; returns H."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    first_tile = programs - 1 - program
    if sweep.product.SEPARATE:
        stride = programs - tiles
        if first_tile < tiles:
            _walk_back((), W, sweep, chunk, first_tile, tiles, stride, True, False)
        elif sweep.product.RESIDENT:
            # in a branch: with masks, H would be held outside of it, too
            if program < sweep.sizes.batch:
                H_ptr = of_thread(sweep.buffers.H_ptr, chunk.start, sweep.sizes)
                H_ptr += program.to(tl.int64) * sweep.sizes.n * sweep.sizes.d
                own_H = load_blocks(H_ptr, sweep.sizes.n, sweep.sizes)
                own_H = _walk_back(own_H, (), sweep, chunk, first_tile, tiles, stride, False, True)
                store_blocks(H_ptr, own_H, sweep.sizes.n, sweep.sizes)
        else:
            _walk_back((), (), sweep, chunk, first_tile, tiles, stride, False, True)
    else:
        H = _walk_back(H, W, sweep, chunk, first_tile, tiles, programs, True, True)
    return H


@triton.jit
def _reverse_one(
    sweep,  # ReverseSweep
    slot,
    KEEP: tl.constexpr,
):
    """A chunk that has been prepared: the program's samples and its share of the products."""
    program = tl.program_id(0)
    d: tl.constexpr = sweep.sizes.d
    n: tl.constexpr = sweep.sizes.n
    tiles = tl.cdiv(d, sweep.product.BLOCK_M) * sweep.product.SPLITS
    W = _own_tile(sweep)
    # in blocks of states, so that few registers are in use at a time
    own_n = tl.where(program < sweep.sizes.batch, n, 0)
    own_H_ptr = of_thread(sweep.buffers.H_ptr, slot, sweep.sizes)
    own_H_ptr += program.to(tl.int64) * n * d
    H = ()
    if sweep.product.RESIDENT and not sweep.product.SEPARATE:
        H = load_blocks(own_H_ptr, own_n, sweep.sizes)
    start = slot * KEEP
    count = tl.minimum(KEEP, sweep.sizes.t_end - start)
    H = _reverse_chunk(H, W, sweep, Chunk(slot, start, count, 0, 0), tiles)
    if sweep.product.RESIDENT and not sweep.product.SEPARATE:
        store_blocks(own_H_ptr, H, own_n, sweep.sizes)


@triton.jit
def _own_tile(sweep):
    """The program's tile of (W^y)^T, if it keeps one."""
    d: tl.constexpr = sweep.sizes.d
    STATES: tl.constexpr = 2 * sweep.sizes.n if sweep.options.SELECTIVE else 0
    R: tl.constexpr = d + STATES + sweep.options.K * (d + 1)
    W = ()
    if sweep.product.ONE_TILE:
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        W = load_tile(sweep.buffers.W_ptr, tile, d, R, 1, d, sweep.product)
    return W


@triton.jit
def _reverse_ahead(
    sweep,  # ReverseSweep
    phase_ptr,  # counter of programs at the end of a phase
    chunks,
    KEEP: tl.constexpr,
    REPLAY_D: tl.constexpr,
    GRAD_N: tl.constexpr,
):
    """All chunks, the last first: a program has a tile, or a sample, or prepares a chunk and adds
    the cotangent of A of another while the others walk the one between them.

    Of the first of these chunks all programs prepare a share. Two chunks at a time are in memory.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    batch, t_end = sweep.sizes.batch, sweep.sizes.t_end
    COMPILED: tl.constexpr = sweep.product.COMPILED
    tiles = tl.cdiv(sweep.sizes.d, sweep.product.BLOCK_M) * sweep.product.SPLITS
    helpers = programs - tiles - batch
    top = (chunks - 1) * KEEP
    _prepare_share(
        sweep, Chunk(chunks - 1, top, t_end - top, 0, 0), phase_ptr, programs, program, programs,
        REPLAY_D,
    )  # fmt: skip
    if program >= programs - tiles:
        W = _own_tile(sweep)
        for number in range(0, chunks):
            start = top - number * KEEP
            count = tl.minimum(KEEP, t_end - start)
            _walk_back(
                (), W, sweep, Chunk(chunks - 1 - number, start, count, t_end - start - count, 0),
                programs - 1 - program, tiles, 1, True, False,
            )  # fmt: skip
    elif program < batch:
        H_ptr = of_thread(sweep.buffers.H_ptr, chunks, sweep.sizes)
        H_ptr += program.to(tl.int64) * sweep.sizes.n * sweep.sizes.d
        H = load_blocks(H_ptr, sweep.sizes.n, sweep.sizes)
        for number in range(0, chunks):
            wait_for(phase_ptr, _prepared(number, programs, helpers), COMPILED)
            start = top - number * KEEP
            count = tl.minimum(KEEP, t_end - start)
            H = _walk_back(
                H, (), sweep,
                Chunk(
                    chunks - 1 - number, start, count, t_end - start - count, number % 2 * batch
                ),
                0, tiles, 1, False, True,
            )  # fmt: skip
        store_blocks(H_ptr, H, sweep.sizes.n, sweep.sizes)
    else:
        helper = program - batch
        # two more rounds for the cotangent of A of the last two chunks
        for number in range(1, chunks + 2):
            start = top - number * KEEP
            behind = number % 2 * batch
            # a sample that has announced a token of the chunk after this one has read all of the
            # chunk after that, whose memory is overwritten; at last, all tokens
            walked = tl.minimum(tl.maximum(t_end - start - 2 * KEEP, 0) + 1, t_end)
            wait_for(sweep.counters.samples, walked * batch, COMPILED)
            if number > 1:
                later = start + 2 * KEEP
                _grad_A_share(
                    sweep,
                    Chunk(
                        chunks + 1 - number, later, tl.minimum(KEEP, t_end - later), None, behind
                    ),
                    helper, helpers, REPLAY_D, GRAD_N,
                )  # fmt: skip
            if number < chunks:
                finished = _prepared(number, programs, helpers)
                if number > 1:
                    _end_phase(phase_ptr, finished - 2 * helpers, COMPILED)
                count = tl.minimum(KEEP, t_end - start)
                _prepare_share(
                    sweep, Chunk(chunks - 1 - number, start, count, 0, behind), phase_ptr,
                    finished - helpers, helper, helpers, REPLAY_D,
                )  # fmt: skip


@triton.jit
def _reverse(
    sweep, phase_ptr, slot,
    KEEP: tl.constexpr, AHEAD: tl.constexpr, REPLAY_D: tl.constexpr, GRAD_N: tl.constexpr,
):  # fmt: skip
    """Bundles keep their constants as arguments only, so that both forms are called here."""
    if AHEAD:
        _reverse_ahead(sweep, phase_ptr, slot + 1, KEEP, REPLAY_D, GRAD_N)
    else:
        _reverse_one(sweep, slot, KEEP)


@triton.jit
def _prepared(number, programs, helpers):
    """The counter of phases when a chunk is prepared: two phases of all programs for the first, two
    of the helpers for each other, and one for each sum before."""
    return 2 * programs + helpers * (2 * number + tl.maximum(number - 1, 0))


@triton.jit
def _end_phase(counter, target, COMPILED: tl.constexpr):
    """Wait until all programs have reached this point."""
    announce(counter)
    wait_for(counter, target, COMPILED)


@triton.jit(do_not_specialize=["slot", "t_end", "batch"])
def reverse_kernel(
    grad_y_ptr,  # (b, t, d)
    grad_normed_ptr,  # (splits, b, d): parts of (W^y)^T grad_raw_{t+1}, that of norm(y_t)
    x_ptr,  # (b, t, d)
    y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    fed_ptr,  # (b, t, r)
    W_ptr,  # (R, d), W^y; of r columns of grad_raw the last r - R are 0
    A_ptr,  # (n, d), log2(e) A
    mixed_ptr,  # (b, KEEP, d): x~ of a chunk
    local_ptr,  # (b, KEEP, WIDTH)
    h0_ptr,  # (b, n, d): h before token 0
    kept_ptr,  # (b, ceil(t / KEEP) - 1, n, d): h before tokens KEEP, 2 KEEP, ...
    replayed_ptr,  # (b, KEEP - 1, n, d): h before the tokens of a chunk but the first
    H_ptr,  # (b, n, d): cotangent of the last h, in place that of the first
    grad_x_ptr,  # (b, t, d)
    grad_raw_ptr,  # (b, t, r), may be the memory of `fed`
    vectors_ptr,  # (b, KEEP, 2, d), written if LATER_A: w and Delta
    top_ptr,  # (b, n, d), written if LATER_A: cotangent of h after the chunk
    grad_A_ptr,  # (b, n, d), added to, if LATER_A and not AHEAD by another kernel
    statistics_ptr,  # (2, b, t): defect and scale of the adjoint equation
    counters_ptr,  # (3,), zeros: finished tiles, finished samples, programs at the end of a phase
    slot,  # number of the chunk; if AHEAD, of the last one
    batch,
    t_end,
    r: tl.constexpr,
    d: tl.constexpr,
    n: tl.constexpr,
    grad_y_stride_b,
    grad_y_stride_t,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    fed_stride_b,
    fed_stride_t,
    h0_stride_b,
    K: tl.constexpr,
    KEEP: tl.constexpr,
    AHEAD: tl.constexpr,  # whether this kernel also prepares and replays a chunk while it walks the
    # one after it, and then adds its part of the cotangent of A, in programs without other work
    BLOCK_D: tl.constexpr,
    REPLAY_D: tl.constexpr,  # channels of a block whose memory is replayed
    GRAD_N: tl.constexpr,  # states of a block of the cotangent of A
    BLOCK_N: tl.constexpr,  # states at a time
    BLOCKS: tl.constexpr,  # how many times
    CROWDED: tl.constexpr,  # the memory of a sample occupies half of the program's registers
    ROWS: tl.constexpr,  # warps that hold equal numbers of channels; 0: spread in another way
    LATER_A: tl.constexpr,  # the cotangent of A is added behind the walk
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SPLITS: tl.constexpr,  # tiles that share a row of (W^y)^T
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    ONE_TILE: tl.constexpr,
    SEPARATE: tl.constexpr,  # no program has a tile and samples: their loops share no registers
    RESIDENT: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    EPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
    COMPILED: tl.constexpr,
    ACC: tl.constexpr,
):
    """The adjoint of the tokens of a chunk of KEEP, or of all chunks if AHEAD, the last first:

    each token as `reverse_token` says, with (W^y)^T grad_raw_{t+1}, the cotangent of norm(y_t).
    """
    _reverse(
        ReverseSweep(
            Tokens(
                Rows(raw_ptr, raw_stride_b, raw_stride_t),
                Rows(x_ptr, x_stride_b, x_stride_t),
                Rows(fed_ptr, fed_stride_b, fed_stride_t),
                Rows(grad_y_ptr, grad_y_stride_b, grad_y_stride_t),
            ),
            Prepared(A_ptr, mixed_ptr, local_ptr),
            Memories(h0_ptr, h0_stride_b, kept_ptr, replayed_ptr, tl.cdiv(t_end, KEEP) - 1),
            WalkedChunk(vectors_ptr, top_ptr),
            ReverseBuffers(
                y_ptr,
                W_ptr,
                grad_normed_ptr,
                H_ptr,
                grad_x_ptr,
                grad_raw_ptr,
                grad_A_ptr,
                statistics_ptr,
            ),
            Counters(samples=counters_ptr + 1, tiles=counters_ptr),
            Sizes(d, n, BLOCK_D, BLOCK_N, BLOCKS, batch, t_end, r, None, CROWDED, ROWS, LATER_A),
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
                True,
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
        counters_ptr + 2,
        slot,
        KEEP,
        AHEAD,
        REPLAY_D,
        GRAD_N,
    )

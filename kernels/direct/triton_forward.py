"""The direct sweep as one Triton kernel, in three ways of feeding y_{t-1} back.

* No feedback: one program a sample walks the whole sequence.
* Persistent: with feedback, one cooperative launch for the whole sequence. Some programs hold a
  tile of W^y each, in shared memory, and multiply it with norm(y_{t-1}) of all samples; one program
  a sample holds its memory h in registers and solves the local equation. Two counters in device
  memory order them: `solved` counts samples whose y_{t-1} is written, `fed` tiles of W^y y_{t-1}.
* A launch a token, around a product made elsewhere: where the persistent kernel does not fit.

The raw values are read as `RawLayout` says. h is (b, n, d), as in forward.py.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate
from bedouin.kernels.device.discretize import build_coupled, build_decay, input_scale
from bedouin.kernels.device.elementary import sigmoid
from bedouin.kernels.device.norms import max_norms_of_three
from bedouin.kernels.device.reflections import (
    combine,
    eliminate,
    inverse_sizes,
    local_system,
    products,
    rows_times,
    scale,
    scale_symmetric,
    sums,
    upper_times,
    wy_upper,
)
from bedouin.kernels.device.sync import announce, load_stream, wait_for
from bedouin.kernels.direct.triton_product import load_tile, tile_product


@triton.jit
def _load_fed(fed, at, mask, part, SPLITS: tl.constexpr, ROUND: tl.constexpr, ACC: tl.constexpr):
    """W^y norm(y_{t-1}) at some columns, from its parts; rounded as a whole product would be."""
    total = load_stream(fed + at, mask).to(ACC)
    for split in tl.static_range(1, SPLITS):
        total += load_stream(fed + split * part + at, mask).to(ACC)
    if SPLITS > 1:
        total = total.to(ROUND).to(ACC)
    return total


@triton.jit
def _solve_token(
    h,  # (BLOCK_N, BLOCK_D)
    sample,
    t,
    x_ptr,
    A_ptr,
    raw_ptr,
    fed_ptr,
    y_ptr,
    normed_ptr,
    statistics_ptr,
    solved_ptr,
    fed_counter_ptr,
    fed_target,
    batch,
    t_end,
    d,
    n,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    fed_stride,
    normed_stride_b,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEEDBACK: tl.constexpr,
    PERSISTENT: tl.constexpr,
    SPLITS: tl.constexpr,
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
    """y_t, norm(y_t) and the statistics of token t; returns h_t."""
    rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_n, in_d = rows < n, cols < d
    # raw is [Delta d | B n | C n | u k d | alpha k], B and C only if SELECTIVE
    u_at = d + (2 * n if SELECTIVE else 0)
    raw = raw_ptr + tl.multiple_of(sample * raw_stride_b + t * raw_stride_t, ALIGNED)
    fed = fed_ptr + tl.multiple_of(sample * fed_stride, ALIGNED)
    ROUND: tl.constexpr = normed_ptr.dtype.element_ty
    token = sample * t_end + t
    # what does not depend on y is on its way while the program waits for the feedback
    in_state = in_n[:, None] & in_d[None, :]
    A_log2 = tl.load(A_ptr + rows[:, None] * d + cols[None, :], mask=in_state, other=0.0)
    x = tl.load(x_ptr + sample * x_stride_b + t * x_stride_t + cols, mask=in_d, other=0.0).to(ACC)
    delta = load_stream(raw + cols, in_d).to(ACC)
    u = ()
    alpha = ()
    for i in tl.static_range(K):
        u = u + (load_stream(raw + u_at + i * d + cols, in_d).to(ACC),)
        alpha = alpha + (tl.load(raw + u_at + K * d + i).to(ACC),)
    if SELECTIVE:
        B = tl.load(raw + d + rows, mask=in_n, other=0.0).to(ACC)
        C = tl.load(raw + d + n + rows, mask=in_n, other=0.0).to(ACC)
    if PERSISTENT:
        wait_for(fed_counter_ptr, fed_target, COMPILED)
    if FEEDBACK:
        part = tl.cast(batch, tl.int64) * fed_stride
        delta += _load_fed(fed, cols, in_d, part, SPLITS, ROUND, ACC)
        new_u = ()
        new_alpha = ()
        for i in tl.static_range(K):
            more = _load_fed(fed, u_at + i * d + cols, in_d, part, SPLITS, ROUND, ACC)
            new_u = new_u + (u[i] + more,)
            more = _load_fed(fed, u_at + K * d + i, True, part, SPLITS, ROUND, ACC)
            new_alpha = new_alpha + (alpha[i] + more,)
        u = new_u
        alpha = new_alpha
        if SELECTIVE:
            B += _load_fed(fed, d + rows, in_n, part, SPLITS, ROUND, ACC)
            C += _load_fed(fed, d + n + rows, in_n, part, SPLITS, ROUND, ACC)
    if SELECTIVE:
        B *= tl.rsqrt(tl.sum(B * B, axis=0) + n * EPS)
        C *= tl.rsqrt(tl.sum(C * C, axis=0) + n * EPS)
    else:
        B = tl.where(in_n, 1.0, 0.0).to(ACC)
        C = B
    delta = activate(delta, ACTIVATION)
    # p_t + sigma_t x_t, and the inner products that the local equation needs
    if INPUT_SCALE == "one_minus_decay":
        decay, s_rows = build_coupled(A_log2 * delta[None, :], FULL, FAST)
        sigma = tl.sum(s_rows * (B * C)[:, None], axis=0)
    else:
        decay = build_decay(A_log2 * delta[None, :], FULL, FAST)
        s = input_scale(delta, INPUT_SCALE)
        sigma = s * tl.sum(B * C, axis=0)
    h *= decay  # from here to the write: what has decayed
    rest = tl.sum(h * C[:, None], axis=0) + sigma * x
    sigma_u, with_rest = rows_times(u, sigma, K), rows_times(u, rest - x, K)
    beta = ()
    for i in tl.static_range(K):
        beta = beta + (BETA_MAX * sigmoid(alpha[i]),)
    PAIRS: tl.constexpr = K * (K + 1) // 2
    dots = sums(products(u, u, K) + products(sigma_u, u, K) + with_rest)
    inv = inverse_sizes(dots, d, K, EPS)
    G = scale_symmetric(dots[0:PAIRS], inv, K)
    S = scale_symmetric(dots[PAIRS : 2 * PAIRS], inv, K)
    T = wy_upper(G, beta, K)

    # y = rest + sigma U^T e, e = T U (y - x), so (I - S T) U (y - x) = U (rest - x)
    q = scale(dots[2 * PAIRS : 2 * PAIRS + K], inv, K)
    U_v, pivot = eliminate(local_system(S, T, False, K), q, K, 1)
    y = rest + sigma * combine(scale(upper_times(T, U_v, K), inv, K), u, K)

    dots = sums((y * y,) + rows_times(u, y - x, K))
    tl.store(y_ptr + token * d + cols, y.to(y_ptr.dtype.element_ty), mask=in_d)
    if FEEDBACK:
        normed = y
        if NORM:
            normed = y * tl.rsqrt(dots[0] / d + NORM_EPS)
        at = normed_ptr + sample * normed_stride_b + (t + 1) * d + cols
        in_time = cols < tl.where(t + 1 < t_end, d, 0)
        tl.store(at, normed.to(normed_ptr.dtype.element_ty), mask=in_time)
    if PERSISTENT:
        announce(solved_ptr)

    # F(y)_t, from the y that is written
    U_v = scale(dots[1 : K + 1], inv, K)
    mixed = x + combine(scale(upper_times(T, U_v, K), inv, K), u, K)
    terms = tl.abs(x) + tl.abs(mixed)
    if INPUT_SCALE == "one_minus_decay":
        h += s_rows * mixed[None, :] * B[:, None]
        terms *= tl.max(s_rows, axis=0)
    else:
        h += (s * mixed)[None, :] * B[:, None]
        terms *= s
    F = tl.sum(h * C[:, None], axis=0)
    # a maximum passes over NaN; a sample that has left the numbers must show it
    finite = 0 * dots[0]
    defect, size, magnitude = max_norms_of_three(F - y, F, terms)
    defect += finite
    size += finite
    cell = statistics_ptr + token
    row = tl.cast(batch, tl.int64) * t_end
    tl.store(cell, defect)
    tl.store(cell + row, size)
    tl.store(cell + 2 * row, magnitude)
    tl.store(cell + 3 * row, pivot)
    return h


@triton.jit
def _walk(
    h,  # of the program's own sample, if RESIDENT
    W,
    program,
    first_tile,
    tiles,
    stride,  # from one of the program's samples to its next
    WITH_TILES: tl.constexpr,
    WITH_SAMPLES: tl.constexpr,
    x_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r), from x
    W_ptr,  # (r, d), W^y
    A_ptr,  # (n, d), log2(e) A
    h_ptr,  # (b, n, d), in place
    kept_ptr,  # (b, ceil(t / KEEP) - 1, n, d): h before tokens KEEP, 2 KEEP, ...
    fed_ptr,  # (splits, b, r): parts of W^y norm(y_{t-1})
    y_ptr,  # (b, t, d)
    normed_ptr,  # (b, t, d): norm(y_{t-1}), in the dtype of W^y; that of y0 is there
    statistics_ptr,  # (4, b, t): defect, scale, magnitude, pivot
    counters_ptr,  # (2,), zeros: solved, fed
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
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SPLITS: tl.constexpr,  # tiles that share a row of W^y
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    FEEDBACK: tl.constexpr,
    PERSISTENT: tl.constexpr,
    ONE_TILE: tl.constexpr,  # no program has more than one tile of W^y, which then stays with it
    APART: tl.constexpr,  # no program has a tile and samples: their loops share no registers
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
    """All tokens: the program's tile, its samples, or both."""
    rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    state = rows[:, None] * d + cols[None, :]
    in_state = (rows < n)[:, None] & (cols < d)[None, :]
    slots = tl.cdiv(t_end, KEEP) - 1
    solved_ptr, fed_counter_ptr = counters_ptr, counters_ptr + 1
    own = program.to(tl.int64)
    for t in range(start, stop):
        done = t - start
        if WITH_TILES:
            rows_ptr = normed_ptr + tl.cast(t, tl.int64) * d
            if first_tile < tiles:
                wait_for(solved_ptr, done * batch, COMPILED)
            if ONE_TILE:
                if first_tile < tiles:
                    tile_product(
                        W, first_tile, rows_ptr, fed_ptr, t >> 30, batch, r, d, t_end * d,
                        fed_stride, PRECISION, DOT, BLOCK_M, BLOCK_K, CHUNKS, BLOCK_B, COMPILED,
                    )  # fmt: skip
                    announce(fed_counter_ptr)
            else:
                for tile in range(first_tile, tiles, tl.num_programs(0)):
                    part = load_tile(W_ptr, tile, r, d, d, 1, DOT, BLOCK_M, BLOCK_K, CHUNKS)
                    tile_product(
                        part, tile, rows_ptr, fed_ptr, t >> 30, batch, r, d, t_end * d, fed_stride,
                        PRECISION, DOT, BLOCK_M, BLOCK_K, CHUNKS, BLOCK_B, COMPILED,
                    )  # fmt: skip
                    announce(fed_counter_ptr)
        if WITH_SAMPLES and RESIDENT:
            if program < batch:
                if (t > 0) & (t % KEEP == 0):
                    slot = own * slots + t // KEEP - 1
                    tl.store(kept_ptr + slot * n * d + state, h, mask=in_state)
                h = _solve_token(
                    h, own, t, x_ptr, A_ptr, raw_ptr, fed_ptr, y_ptr, normed_ptr, statistics_ptr,
                    solved_ptr, fed_counter_ptr, (done + 1) * tiles, batch, t_end, d, n, x_stride_b,
                    x_stride_t, raw_stride_b, raw_stride_t, fed_stride, t_end * d, K, BLOCK_D,
                    BLOCK_N, FEEDBACK, PERSISTENT, SPLITS, NORM, NORM_EPS, ACTIVATION, SELECTIVE,
                    BETA_MAX, INPUT_SCALE, FULL, EPS, ALIGNED, FAST, COMPILED, ACC,
                )  # fmt: skip
        if WITH_SAMPLES and not RESIDENT:
            for index in range(program, batch, stride):
                sample = tl.cast(index, tl.int64)
                memory = h_ptr + sample * n * d + state
                h = tl.load(memory, mask=in_state, other=0.0)
                if (t > 0) & (t % KEEP == 0):
                    slot = sample * slots + t // KEEP - 1
                    tl.store(kept_ptr + slot * n * d + state, h, mask=in_state)
                h = _solve_token(
                    h, sample, t, x_ptr, A_ptr, raw_ptr, fed_ptr, y_ptr, normed_ptr, statistics_ptr,
                    solved_ptr, fed_counter_ptr, (done + 1) * tiles, batch, t_end, d, n, x_stride_b,
                    x_stride_t, raw_stride_b, raw_stride_t, fed_stride, t_end * d, K, BLOCK_D,
                    BLOCK_N, FEEDBACK, PERSISTENT, SPLITS, NORM, NORM_EPS, ACTIVATION, SELECTIVE,
                    BETA_MAX, INPUT_SCALE, FULL, EPS, ALIGNED, FAST, COMPILED, ACC,
                )  # fmt: skip
                tl.store(memory, h, mask=in_state)
                # the next token reads h, perhaps with other threads than those that wrote it
                tl.debug_barrier()
    return h


@triton.jit(do_not_specialize=["start", "stop", "t_end", "batch"])
def sweep_kernel(
    x_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r), from x
    W_ptr,  # (r, d), W^y
    A_ptr,  # (n, d), log2(e) A
    h_ptr,  # (b, n, d), in place
    kept_ptr,  # (b, ceil(t / KEEP) - 1, n, d): h before tokens KEEP, 2 KEEP, ...
    fed_ptr,  # (splits, b, r): parts of W^y norm(y_{t-1})
    y_ptr,  # (b, t, d)
    normed_ptr,  # (b, t, d): norm(y_{t-1}), in the dtype of W^y; that of y0 is there
    statistics_ptr,  # (4, b, t): defect, scale, magnitude, pivot
    counters_ptr,  # (2,), zeros: solved, fed
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
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SPLITS: tl.constexpr,  # tiles that share a row of W^y
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    FEEDBACK: tl.constexpr,
    PERSISTENT: tl.constexpr,
    ONE_TILE: tl.constexpr,  # no program has more than one tile of W^y, which then stays with it
    APART: tl.constexpr,  # no program has a tile and samples: their loops share no registers
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
    program, programs = tl.program_id(0), tl.num_programs(0)
    rows, cols = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    state = rows[:, None] * d + cols[None, :]
    in_state = (rows < n)[:, None] & (cols < d)[None, :]
    own = program.to(tl.int64)
    h = tl.zeros([BLOCK_N, BLOCK_D], dtype=ACC)
    if RESIDENT:
        if program < batch:
            h = tl.load(h_ptr + own * n * d + state, mask=in_state, other=0.0)
    # samples from the first program on, tiles from the last: few programs have both
    first_tile = programs - 1 - program
    tiles = tl.cdiv(r, BLOCK_M) * SPLITS if PERSISTENT else 0
    stride = programs - tiles if APART else programs
    if APART:
        if first_tile < tiles:
            W = load_tile(W_ptr, first_tile, r, d, d, 1, DOT, BLOCK_M, BLOCK_K, CHUNKS)
            _walk(
                h, W, program, first_tile, tiles, stride, True, False, x_ptr, raw_ptr, W_ptr, A_ptr,
                h_ptr, kept_ptr, fed_ptr, y_ptr, normed_ptr, statistics_ptr, counters_ptr, start,
                stop, batch, t_end, r, d, n, x_stride_b, x_stride_t, raw_stride_b, raw_stride_t,
                fed_stride, K, KEEP, BLOCK_D, BLOCK_N, BLOCK_M, BLOCK_K, CHUNKS, BLOCK_B, SPLITS,
                PRECISION, DOT, FEEDBACK, PERSISTENT, ONE_TILE, APART, RESIDENT, NORM, NORM_EPS,
                ACTIVATION, SELECTIVE, BETA_MAX, INPUT_SCALE, FULL, EPS, ALIGNED, FAST, COMPILED,
                ACC,
            )  # fmt: skip
        else:
            h = _walk(
                h, (), program, first_tile, tiles, stride, False, True, x_ptr, raw_ptr, W_ptr,
                A_ptr, h_ptr, kept_ptr, fed_ptr, y_ptr, normed_ptr, statistics_ptr, counters_ptr,
                start, stop, batch, t_end, r, d, n, x_stride_b, x_stride_t, raw_stride_b,
                raw_stride_t, fed_stride, K, KEEP, BLOCK_D, BLOCK_N, BLOCK_M, BLOCK_K, CHUNKS,
                BLOCK_B, SPLITS, PRECISION, DOT, FEEDBACK, PERSISTENT, ONE_TILE, APART, RESIDENT,
                NORM, NORM_EPS, ACTIVATION, SELECTIVE, BETA_MAX, INPUT_SCALE, FULL, EPS, ALIGNED,
                FAST, COMPILED, ACC,
            )  # fmt: skip
    else:
        W = ()
        if PERSISTENT and ONE_TILE:
            W = load_tile(W_ptr, first_tile, r, d, d, 1, DOT, BLOCK_M, BLOCK_K, CHUNKS)
        h = _walk(
            h, W, program, first_tile, tiles, stride, PERSISTENT, True, x_ptr, raw_ptr, W_ptr,
            A_ptr, h_ptr, kept_ptr, fed_ptr, y_ptr, normed_ptr, statistics_ptr, counters_ptr, start,
            stop, batch, t_end, r, d, n, x_stride_b, x_stride_t, raw_stride_b, raw_stride_t,
            fed_stride, K, KEEP, BLOCK_D, BLOCK_N, BLOCK_M, BLOCK_K, CHUNKS, BLOCK_B, SPLITS,
            PRECISION, DOT, FEEDBACK, PERSISTENT, ONE_TILE, APART, RESIDENT, NORM, NORM_EPS,
            ACTIVATION, SELECTIVE, BETA_MAX, INPUT_SCALE, FULL, EPS, ALIGNED, FAST, COMPILED, ACC,
        )  # fmt: skip
    if RESIDENT:
        if program < batch:
            tl.store(h_ptr + own * n * d + state, h, mask=in_state)

"""The direct sweep of heads that fit a multiprocessor: one program a head and a few samples.

A program holds the memory of its samples in registers and W^y of its head in shared memory, so that
no program waits for another one. A warp holds a row: a sample, whose sums over channels are then
sums over the warp's lanes, or a part of a sample (`parts.py`). The local equation of a token is
that of local.py, in terms of e as in cpu.py.

The memory that a token leaves is computed beside the next one's product with W^y, and its defect
after the next one's exchange between warps. Without feedback B, C and alpha are stored one token
ahead.

Letters: b folded samples, t time, d channels of a head, n state per channel, k reflections, r raw
values, s samples of a program, or their parts.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import activate, inverse_norm, max_norm
from bedouin.kernels.device.reflections import (
    combine,
    eliminate,
    inverse_sizes,
    local_system,
    products,
    rows_times,
    scale,
    scale_symmetric,
    subtract,
    upper_times,
    wy_upper,
)
from bedouin.kernels.direct import device
from bedouin.kernels.direct.parts import columns_of_rows, over_channels_of_parts
from bedouin.kernels.direct.triton_replay import fetch_tokens, load_rows
from bedouin.kernels.direct.triton_weights import load_weight_tile


@triton.jit
def largest_gap(
    dots,  # U (y - x), of the rows u as they are
    sigma, u,  # rows
    inv, T, factors,  # factors (s, 1) of u in x~ - x = U^T e
    K: tl.constexpr,
):  # fmt: skip
    """The defect of a token whose h and y follow from x~: max |sigma U^T (T U (y - x) - e)|."""
    mixing = scale(upper_times(T, scale(dots, inv, K), K), inv, K)
    gaps = subtract(device.as_columns(mixing, K), factors, K)
    return max_norm(sigma * combine(gaps, u, K), 1)


@triton.jit(do_not_specialize=["t_end", "per_head", "token"])
def sweep_kernel(
    x_ptr,  # (H, b / H, t, d)
    raw_ptr,  # (b, t, r)
    W_ptr,  # (H, r, d), W^y; if SINGLE (b, r or more), W^y norm(y_{t-1}); without FEEDBACK any
    A_ptr,  # (H, n, d), log2(e) A
    h_ptr,  # (b, n, d), in place
    kept_ptr,  # (b, ceil(t / KEEP), n, d): h before tokens 0, KEEP, 2 KEEP, ...
    first_ptr,  # (b, 1, d): norm(y0), in the dtype of W^y; if SINGLE norm(y_t), written
    scratch_ptr,  # (programs, S, 2, BLOCK_S): raw B, C and alpha of a token, in turn
    y_ptr,  # (b, t, d)
    statistics_ptr,  # (PARTS, 4, b, t): defect, scale, magnitude and pivot, of each part
    per_head,  # samples of a head, b / H
    t_end,
    token,  # of a launch if SINGLE
    d: tl.constexpr,
    n: tl.constexpr,
    x_stride_h,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    W_stride_h,  # if SINGLE of samples
    K: tl.constexpr,
    KEEP: tl.constexpr,
    S: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEEDBACK: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    BETA_MAX: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    EPS: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT: tl.constexpr,
    ROUND: tl.constexpr,
    JOINED: tl.constexpr,
    STREAMED: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """All tokens of S samples of one head. STREAMED: whether W^y is read anew for each token;
    SINGLE: whether a launch has one token, whose product with W^y is given."""
    start, stop = 0, t_end
    if SINGLE:
        start, stop = token.to(tl.int64), token + 1
    ROWS: tl.constexpr = S * PARTS
    D: tl.constexpr = BLOCK_D // PARTS
    head, here, local, sample = device.samples_of(per_head, S, PARTS)
    cols = columns_of_rows(ROWS, PARTS, D)
    small = columns_of_rows(ROWS, PARTS, BLOCK_S // PARTS)
    STATES: tl.constexpr = 2 * n if SELECTIVE else 0
    u_at: tl.constexpr = d + STATES
    in_row = cols < d
    inside = here[:, None] & in_row
    PAIRS: tl.constexpr = K * (K + 1) // 2
    SMALL: tl.constexpr = 2 if JOINED else K + 1  # the tile of B, C and alpha
    if FEEDBACK and not SINGLE:
        W_at = W_ptr + head * W_stride_h
        W = ()
        for i in tl.static_range(0 if STREAMED else SMALL + 1):
            W_i = load_weight_tile(W_at, i, d, n, K, SELECTIVE, BLOCK_D, BLOCK_S, DOT, JOINED)
            W = W + (W_i,)
        v = tl.load(first_ptr + sample[:, None] * d + cols, mask=in_row, other=0.0)
    HOLD_A: tl.constexpr = N * D <= device.MOST_HELD
    # (s, d), because a load of (d,) would be followed by a change of its layout
    A_at = (A_ptr + head * n * d + cols) + 0 * local[:, None]
    if HOLD_A:
        A = device.load_head_states(A_at, in_row, d, n, N)
    h_at = h_ptr + sample[:, None] * (n * d) + cols
    decayed = device.load_head_states(h_at, in_row, d, n, N)
    row_of = device.rows_of_statistics(per_head, t_end, S)
    part_at = statistics_ptr + tl.arange(0, ROWS) % PARTS * (4 * row_of)
    x_row = x_ptr + head * x_stride_h + local.to(tl.int64) * x_stride_b
    raw_row = raw_ptr + sample * raw_stride_b
    slots = tl.cdiv(t_end, KEEP)
    place = tl.program_id(0).to(tl.int64) * S + tl.arange(0, ROWS) // PARTS
    cell = scratch_ptr + place * 2 * BLOCK_S
    # loads of a token are issued while the one before it is computed
    small_at = device.small_rows(small, d, n, K, SELECTIVE)
    in_small = small < STATES + K
    RAW: tl.constexpr = u_at + K * d + K
    x_first, raw_first = x_row + start * x_stride_t, raw_row + start * raw_stride_t
    x_next = tl.load(x_first[:, None] + cols, mask=in_row, other=0.0)
    next_rows = load_rows(raw_first, cols, in_row, d, u_at, K)
    small_next = tl.load(raw_first[:, None] + small_at, mask=in_small, other=0.0)
    # a token before the first one, which leaves h as it is
    zero = tl.zeros([ROWS, D], tl.float32)
    none = tl.zeros([ROWS], tl.float32)
    pivot = none + (1.0 if K == 0 else 0.0)
    written = zero
    B = device.spread(zero, ROWS, D, N)
    mixing = zero, (zero,) * K, (none,) * K, (none,) * PAIRS, device.as_columns((none,) * K, K)
    offset, maxima = zero, (none, none)  # y - x, scale and magnitude
    if not FEEDBACK:
        fetch_tokens(x_row, 0, x_stride_t, t_end, d, KEEP, PARTS, FAST)
        fetch_tokens(raw_row, 0, raw_stride_t, t_end, RAW, KEEP, PARTS, FAST)
        tl.store(cell[:, None] + small, small_next.to(tl.float32), mask=in_small)
        second = raw_row + tl.minimum(1, t_end - 1).to(tl.int64) * raw_stride_t
        small_next = tl.load(second[:, None] + small_at, mask=in_small, other=0.0)
    for t in range(start, stop):
        at = sample * t_end + t
        now = cell + t % 2 * BLOCK_S
        later = cell + (t + 1) % 2 * BLOCK_S
        if FEEDBACK and not SINGLE:
            columns = device.columns_of(v.to(DOT), S, BLOCK_D, COLUMNS)
            fed = ()
            for i in tl.static_range(SMALL + 1):
                if STREAMED:
                    W_i = load_weight_tile(
                        W_at, i, d, n, K, SELECTIVE, BLOCK_D, BLOCK_S, DOT, JOINED
                    )
                else:
                    W_i = W[i]
                fed = fed + (tl.dot(W_i, columns, input_precision=PRECISION).to(ROUND),)
        h = decayed + device.spread(written, ROWS, D, N) * B
        if t % KEEP == 0:
            slot = sample * slots + t // KEEP
            kept_at = kept_ptr + slot[:, None] * (n * d) + cols
            device.store_head_states(kept_at, h, inside, d, n, N)
        # raw = raw^x + W^y norm(y_{t-1})
        x = x_next.to(tl.float32)
        delta = next_rows[0].to(tl.float32)
        u = ()
        for i in tl.static_range(K):
            u = u + (next_rows[i + 1].to(tl.float32),)
        if FEEDBACK:
            # in turn in two places, so that one barrier a token is enough
            if SINGLE:
                fed_row = W_ptr + sample * W_stride_h
                values = tl.load(fed_row[:, None] + small_at, mask=in_small, other=0.0)
                rows = load_rows(fed_row, cols, in_row, d, u_at, K)
            else:
                values = device.rows_of(fed[SMALL], S, BLOCK_S, COLUMNS, PARTS)
                rows = (device.rows_of(fed[0], S, BLOCK_D, COLUMNS, PARTS),)
                if JOINED:
                    joined = device.rows_of(fed[1], S, K * BLOCK_D, COLUMNS, PARTS)
                    joined = tl.reshape(joined, [ROWS, D, K])
                    rows = rows + device.unstack_states(joined, ROWS, D, K)
                else:
                    for i in tl.static_range(K):
                        one = device.rows_of(fed[i + 1], S, BLOCK_D, COLUMNS, PARTS)
                        rows = rows + (one,)
            values = small_next.to(tl.float32) + values.to(tl.float32)
            tl.store(now[:, None] + small, values, mask=in_small)
            delta += rows[0].to(tl.float32)
            both = ()
            for i in tl.static_range(K):
                both = both + (u[i] + rows[i + 1].to(tl.float32),)
            u = both
            tl.debug_barrier()
        else:
            tl.debug_barrier()
            tl.store(later[:, None] + small, small_next.to(tl.float32), mask=in_small)
            if t % KEEP == 0:
                fetch_tokens(x_row, t + KEEP, x_stride_t, t_end, d, KEEP, PARTS, FAST)
                fetch_tokens(raw_row, t + KEEP, raw_stride_t, t_end, RAW, KEEP, PARTS, FAST)
        beta = ()
        for i in tl.static_range(K):
            beta = beta + (BETA_MAX * activate(tl.load(now + STATES + i), "sigmoid", FAST),)
        delta = activate(delta, ACTIVATION, FAST)
        B, C = device.load_both(now, n, ROWS, D, N, SELECTIVE)
        A_t = A if HOLD_A else device.load_head_states(A_at, in_row, d, n, N)
        decay, s = device.discretize(A_t, delta, N, INPUT_SCALE, FAST)
        decayed = decay * h
        p = device.sum_states(decayed * C, ROWS, D, N)
        if SELECTIVE:
            # (s, d), the same for all channels
            inv_B = inverse_norm(zero + device.sum_states(B * B, ROWS, D, N), n * EPS)
            inv_C = inverse_norm(zero + device.sum_states(C * C, ROWS, D, N), n * EPS)
            B_C = device.sum_states(B * C, ROWS, D, N) * inv_B * inv_C
        else:
            inv_B = zero + 1.0
            inv_C = inv_B
            B_C = zero + n
        sigma = s * B_C
        # p_t + sigma_t x_t, and the inner products that the local equation needs
        p *= inv_C
        rest = p + sigma * x
        sigma_u = rows_times(u, sigma, K)
        step = tl.minimum(t + 1, t_end - 1).to(tl.int64)
        x_row_next = x_row + step * x_stride_t
        x_next = tl.load(x_row_next[:, None] + cols, mask=in_row, other=0.0)
        next_rows = load_rows(raw_row + step * raw_stride_t, cols, in_row, d, u_at, K)
        if not FEEDBACK:
            step = tl.minimum(t + 2, t_end - 1).to(tl.int64)
        small_row = raw_row + step * raw_stride_t
        small_next = tl.load(small_row[:, None] + small_at, mask=in_small, other=0.0)
        # every exchange between warps takes barriers: this one is also for the token before
        gap, last_pivot = none, pivot
        y = rest
        mixed = x
        if K > 0:
            dots = products(u, u, K) + products(sigma_u, u, K) + rows_times(u, rest - x, K)
            dots = dots + rows_times(mixing[1], offset, K)
            dots = over_channels_of_parts(dots, ROWS, PARTS, D)
            gap = largest_gap(dots[2 * PAIRS + K :], *mixing, K)
            inv = inverse_sizes(dots, d, K, EPS)
            G = scale_symmetric(dots[0:PAIRS], inv, K)
            S_u = scale_symmetric(dots[PAIRS : 2 * PAIRS], inv, K)
            T = wy_upper(G, beta, K)
            # y = rest + sigma U^T e, e = T U (y - x), so (I - S T) U (y - x) = U (rest - x)
            q = scale(dots[2 * PAIRS : 2 * PAIRS + K], inv, K)
            U_v, pivot = eliminate(local_system(S_u, T, False, K), q, K, 1, FAST)
            T_v = device.as_columns(scale(upper_times(T, U_v, K), inv, K), K)
            mixed = combine(T_v, u, K)
            y += sigma * mixed
            mixed += x
            mixing = sigma, u, inv, T, T_v
            offset = y - x
        if FEEDBACK:
            v = y
            if NORM:
                square = over_channels_of_parts((y * y,), ROWS, PARTS, D)[0]
                v = y * inverse_norm(square / d, NORM_EPS)[:, None]
            v = v.to(ROUND)
            if SINGLE:
                tl.store(first_ptr + sample[:, None] * d + cols, v, mask=inside)
        if not SINGLE:
            whole = device.as_columns((gap,) + maxima + (last_pivot,), 4)
            device.store_statistics(part_at + at - 1, whole, row_of, here & (t > 0), ROWS)
        written = s * mixed * inv_B
        maxima = max_norm(y, 1), max_norm((tl.abs(x) + tl.abs(mixed)) * s, 1)
        tl.store(y_ptr + at[:, None] * d + cols, y, mask=inside)
    h = decayed + device.spread(written, ROWS, D, N) * B
    gap = none
    if K > 0:
        dots = over_channels_of_parts(rows_times(mixing[1], offset, K), ROWS, PARTS, D)
        gap = largest_gap(dots, *mixing, K)
    whole = device.as_columns((gap,) + maxima + (pivot,), 4)
    last = sample * t_end + stop - 1
    device.store_statistics(part_at + last, whole, row_of, here, ROWS)
    device.store_head_states(h_at, h, inside, d, n, N)

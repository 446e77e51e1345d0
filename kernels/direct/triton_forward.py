"""The direct sweep of heads that fit a multiprocessor: one program a head and a few samples.

A program holds the memory of its samples in registers and W^y of its head in shared memory, so that
no program waits for another one. A warp holds a row: a sample, whose sums over channels are then
sums over the warp's lanes, or a part of a sample (`parts.py`). The local equation of a token is
that of local.py, in terms of e as in cpu.py.

The memory that a token leaves is computed beside the next one's product with W^y, and its defect
after the next one's exchange between warps. Without feedback B, C and alpha are stored one token
ahead.

Letters: b folded samples, t time, d channels of a head, n state per channel, k reflections, r raw
values, s samples of a program, or their parts. `how`: `head_constants`.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import activate, inverse_norm, max_norm
from bedouin.kernels.device.reflections import (
    add,
    combine,
    eliminate,
    inverse_sizes,
    local_system,
    products,
    rows_times,
    scale,
    scale_symmetric,
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
    gaps = add(rows_times(device.as_columns(mixing), -1.0, K), factors, K)
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
    x_strides,  # of heads, samples and tokens
    raw_strides,  # of samples and tokens
    W_stride,  # of heads, if SINGLE of samples
    how: tl.constexpr,
):
    """All tokens of S samples of one head."""
    d: tl.constexpr = how.d
    n: tl.constexpr = how.n
    K: tl.constexpr = how.K
    N: tl.constexpr = how.N
    KEEP: tl.constexpr = how.KEEP
    start, stop = 0, t_end
    if how.SINGLE:
        start, stop = token.to(tl.int64), token + 1
    head, here, local, sample = device.samples_of(per_head, how)
    cols = columns_of_rows(how.ROWS, how.PARTS, how.D)
    small = columns_of_rows(how.ROWS, how.PARTS, how.BLOCK_S // how.PARTS)
    in_row = cols < d
    inside = here[:, None] & in_row
    PAIRS: tl.constexpr = K * (K + 1) // 2
    if how.FEEDBACK and not how.SINGLE:
        W_at = W_ptr + head * W_stride
        W = ()
        for i in tl.static_range(0 if how.STREAMED else how.SMALL + 1):
            W = W + (load_weight_tile(W_at, i, how),)
        v = tl.load(first_ptr + sample[:, None] * d + cols, mask=in_row, other=0.0)
    # (s, d), because a load of (d,) would be followed by a change of its layout
    A_at = (A_ptr + head * n * d + cols) + 0 * local[:, None]
    if how.BLOCKS == 1:
        A = device.load_head_states(A_at, in_row, how)
    h_at = h_ptr + sample[:, None] * (n * d) + cols
    decayed = device.load_head_states(h_at, in_row, how)
    row_of = device.rows_of_statistics(per_head, t_end, how)
    part_at = statistics_ptr + tl.arange(0, how.ROWS) % how.PARTS * (4 * row_of)
    x_row = x_ptr + head * x_strides[0] + local.to(tl.int64) * x_strides[1]
    raw_row = raw_ptr + sample * raw_strides[0]
    slots = tl.cdiv(t_end, KEEP)
    place = tl.program_id(0).to(tl.int64) * how.S + tl.arange(0, how.ROWS) // how.PARTS
    cell = scratch_ptr + place * 2 * how.BLOCK_S
    # loads of a token are issued while the one before it is computed
    small_at = device.small_rows(small, how)
    in_small = small < how.STATES + K
    RAW: tl.constexpr = how.U_AT + K * d + K
    x_first, raw_first = x_row + start * x_strides[2], raw_row + start * raw_strides[1]
    x_next = tl.load(x_first[:, None] + cols, mask=in_row, other=0.0)
    next_rows = load_rows(raw_first, cols, in_row, how)
    small_next = tl.load(raw_first[:, None] + small_at, mask=in_small, other=0.0)
    # a token before the first one, which leaves h as it is
    zero = tl.zeros([how.ROWS, how.D], tl.float32)
    none = tl.zeros([how.ROWS], tl.float32)
    pivot = none + (1.0 if K == 0 else 0.0)
    written = zero
    B = device.spread(zero, N)
    mixing = zero, (zero,) * K, (none,) * K, (none,) * PAIRS, device.as_columns((none,) * K)
    offset, maxima = zero, (none, none)  # y - x, scale and magnitude
    if not how.FEEDBACK:
        fetch_tokens(x_row, 0, x_strides[2], t_end, d, KEEP, how)
        fetch_tokens(raw_row, 0, raw_strides[1], t_end, RAW, KEEP, how)
        tl.store(cell[:, None] + small, small_next.to(tl.float32), mask=in_small)
        second = raw_row + tl.minimum(1, t_end - 1).to(tl.int64) * raw_strides[1]
        small_next = tl.load(second[:, None] + small_at, mask=in_small, other=0.0)
    for t in range(start, stop):
        at = sample * t_end + t
        now = cell + t % 2 * how.BLOCK_S
        later = cell + (t + 1) % 2 * how.BLOCK_S
        if how.FEEDBACK and not how.SINGLE:
            columns = device.columns_of(v.to(how.DOT), how)
            fed = ()
            for i in tl.static_range(how.SMALL + 1):
                W_i = load_weight_tile(W_at, i, how) if how.STREAMED else W[i]
                fed_i = tl.dot(W_i, columns, input_precision=how.PRECISION)
                fed = fed + (fed_i.to(how.ROUND),)
        h = decayed + device.spread(written, N) * B
        if t % KEEP == 0:
            slot = sample * slots + t // KEEP
            kept_at = kept_ptr + slot[:, None] * (n * d) + cols
            device.store_head_states(kept_at, h, inside, how)
        # raw = raw^x + W^y norm(y_{t-1})
        x = x_next.to(tl.float32)
        delta = next_rows[0].to(tl.float32)
        u = ()
        for i in tl.static_range(K):
            u = u + (next_rows[i + 1].to(tl.float32),)
        if how.FEEDBACK:
            # in turn in two places, so that one barrier a token is enough
            if how.SINGLE:
                fed_row = W_ptr + sample * W_stride
                values = tl.load(fed_row[:, None] + small_at, mask=in_small, other=0.0)
                rows = load_rows(fed_row, cols, in_row, how)
            else:
                values = device.rows_of(fed[how.SMALL], how)
                rows = (device.rows_of(fed[0], how),)
                if how.JOINED:
                    joined = tl.reshape(device.rows_of(fed[1], how), [how.ROWS, how.D, K])
                    rows = rows + device.unstack_states(joined, how.ROWS, how.D, K)
                else:
                    for i in tl.static_range(K):
                        rows = rows + (device.rows_of(fed[i + 1], how),)
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
                fetch_tokens(x_row, t + KEEP, x_strides[2], t_end, d, KEEP, how)
                fetch_tokens(raw_row, t + KEEP, raw_strides[1], t_end, RAW, KEEP, how)
        beta = ()
        for i in tl.static_range(K):
            beta = beta + (how.BETA_MAX * activate(tl.load(now + how.STATES + i), "sigmoid"),)
        delta = activate(delta, how.ACTIVATION)
        B, C = device.load_both(now, how)
        A_t = A if how.BLOCKS == 1 else device.load_head_states(A_at, in_row, how)
        decay, s = device.discretize(A_t, delta, how)
        decayed = decay * h
        p = device.sum_states(decayed * C)
        if how.SELECTIVE:
            # (s, d), the same for all channels
            inv_B = inverse_norm(zero + device.sum_states(B * B), n * how.EPS)
            inv_C = inverse_norm(zero + device.sum_states(C * C), n * how.EPS)
            B_C = device.sum_states(B * C) * inv_B * inv_C
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
        x_row_next = x_row + step * x_strides[2]
        x_next = tl.load(x_row_next[:, None] + cols, mask=in_row, other=0.0)
        next_rows = load_rows(raw_row + step * raw_strides[1], cols, in_row, how)
        if not how.FEEDBACK:
            step = tl.minimum(t + 2, t_end - 1).to(tl.int64)
        small_row = raw_row + step * raw_strides[1]
        small_next = tl.load(small_row[:, None] + small_at, mask=in_small, other=0.0)
        # every exchange between warps takes barriers: this one is also for the token before
        gap, last_pivot = none, pivot
        y = rest
        mixed = x
        if K > 0:
            dots = products(u, u, K) + products(sigma_u, u, K) + rows_times(u, rest - x, K)
            dots = dots + rows_times(mixing[1], offset, K)
            dots = over_channels_of_parts(dots, how)
            gap = largest_gap(dots[2 * PAIRS + K :], *mixing, K)
            inv = inverse_sizes(dots, d, K, how.EPS)
            G = scale_symmetric(dots[0:PAIRS], inv, K)
            S_u = scale_symmetric(dots[PAIRS : 2 * PAIRS], inv, K)
            T = wy_upper(G, beta, K)
            # y = rest + sigma U^T e, e = T U (y - x), so (I - S T) U (y - x) = U (rest - x)
            q = scale(dots[2 * PAIRS : 2 * PAIRS + K], inv, K)
            U_v, pivot = eliminate(local_system(S_u, T, False, K), q, K, 1, True)
            T_v = device.as_columns(scale(upper_times(T, U_v, K), inv, K))
            mixed = combine(T_v, u, K)
            y += sigma * mixed
            mixed += x
            mixing = sigma, u, inv, T, T_v
            offset = y - x
        if how.FEEDBACK:
            v = y
            if how.NORM:
                square = over_channels_of_parts((y * y,), how)[0]
                v = y * inverse_norm(square / d, how.NORM_EPS)[:, None]
            v = v.to(how.ROUND)
            if how.SINGLE:
                tl.store(first_ptr + sample[:, None] * d + cols, v, mask=inside)
        if not how.SINGLE:
            whole = device.as_columns((gap,) + maxima + (last_pivot,))
            device.store_statistics(part_at + at - 1, whole, row_of, here & (t > 0))
        written = s * mixed * inv_B
        maxima = max_norm(y, 1), max_norm((tl.abs(x) + tl.abs(mixed)) * s, 1)
        tl.store(y_ptr + at[:, None] * d + cols, y, mask=inside)
    h = decayed + device.spread(written, N) * B
    gap = none
    if K > 0:
        dots = over_channels_of_parts(rows_times(mixing[1], offset, K), how)
        gap = largest_gap(dots, *mixing, K)
    whole = device.as_columns((gap,) + maxima + (pivot,))
    last = sample * t_end + stop - 1
    device.store_statistics(part_at + last, whole, row_of, here)
    device.store_head_states(h_at, h, inside, how)

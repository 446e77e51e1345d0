"""The direct sweep of heads that fit a multiprocessor: one program a head and a few samples.

A program holds the memory of its samples in registers and W^y of its head in shared memory, so that
no program waits for another one. A warp holds a row: a sample, whose sums over channels are then
sums over the warp's lanes, or a part of a sample (`parts.py`). The equations are those of
`../triton_forward.py`.

With feedback the end of a token overlaps with the next one's product with W^y. Without it only the
memory and its k sums over channels depend on the token before: B, C and alpha are stored one token
ahead, and the defect of a token waits for the next one's exchange between warps.

Letters: b folded samples, t time, d channels of a head, n state per channel, k reflections, r raw
values, s samples of a program, or their parts.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate
from bedouin.kernels.device.discretize import input_scale
from bedouin.kernels.device.norms import inverse_norm, max_norm
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
    sums,
    total_of,
    upper_times,
    wy_upper,
)
from bedouin.kernels.direct import device, triton_blocks
from bedouin.kernels.direct.parts import columns_of_rows, first_parts, over_channels_of_parts
from bedouin.kernels.direct.triton_replay import fetch_tokens
from bedouin.kernels.direct.triton_weights import load_weight_tile, load_weight_tiles


@triton.jit
def load_raw_token(
    x_row, raw_row,  # pointers (s,)
    cols, in_row,  # the channels of a row, (s, d) or (1, d)
    d: tl.constexpr, u_at: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """x, and the raw values of Delta and of u of a token."""
    x = tl.load(x_row[:, None] + cols, mask=in_row, other=0.0)
    rows = ()
    for i in tl.static_range(K + 1):
        at = raw_row[:, None] + (0 if i == 0 else u_at + (i - 1) * d) + cols
        rows = rows + (tl.load(at, mask=in_row, other=0.0),)
    return x, rows


@triton.jit
def load_small(
    raw_row,  # pointers (s,)
    small_at, in_small,  # columns of raw B, C and alpha in a row, (s, .) or (1, .)
    alphas,  # numbers of alpha in a row, if it is apart
    alpha_at: tl.constexpr, K: tl.constexpr, ALPHA: tl.constexpr,
):  # fmt: skip
    """The other raw values of a token."""
    small = (tl.load(raw_row[:, None] + small_at, mask=in_small, other=0.0),)
    if ALPHA > 0:
        at = raw_row[:, None] + alpha_at + alphas
        small = small + (tl.load(at, mask=alphas < K, other=0.0),)
    return small


@triton.jit
def store_small(
    place,  # pointers (s,)
    values,  # those of `load_small`, with their feedback
    small, in_small, alphas, STATES: tl.constexpr, K: tl.constexpr, ALPHA: tl.constexpr,
):  # fmt: skip
    """Store B, C and alpha of a token where they are near."""
    tl.store(place[:, None] + small, values[0].to(tl.float32), mask=in_small)
    if ALPHA > 0:
        tl.store(place[:, None] + STATES + alphas, values[1].to(tl.float32), mask=alphas < K)


@triton.jit
def both_of(
    row,  # pointers (s,) to B n and C n
    block: tl.constexpr, n: tl.constexpr, S: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    SELECTIVE: tl.constexpr,
):  # fmt: skip
    """B and C of a block of N states, (s, d, N), 1 if they are not SELECTIVE."""
    if SELECTIVE:
        B, C = triton_blocks.load_both(row, block, n, S, D, N)
    else:
        ones = tl.where(block * N + tl.arange(0, N) < n, 1.0, 0.0)
        B = device.spread(tl.zeros([S, D], tl.float32), S, D, N) + ones[None, None, :]
        C = B
    return B, C


@triton.jit
def inner_products(
    row,  # pointers (s,) to B n and C n
    n: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """B B, C C and B C, (s, 1) each: by the threads of a warp, not by each of them, which would
    take three instructions for each state."""
    lanes = tl.arange(0, max(32, triton.next_power_of_2(STATES)))[None, :]
    B = tl.load(row[:, None] + lanes, mask=lanes < n, other=0.0)
    C = tl.load(row[:, None] + n + lanes, mask=lanes < n, other=0.0)
    return device.as_columns(sums((B * B, C * C, B * C), 1), 3)


@triton.jit
def finish_token(
    token,  # x, y, U (y - x), s, inv_B, p, sigma, u, inv, T, decayed, B or ()
    B_row,  # pointers (s,) to B if it is not given
    n: tl.constexpr, K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    SELECTIVE: tl.constexpr,
):  # fmt: skip
    """F(y)_t: h_t, and of each row defect, scale and magnitude, (s, 1)."""
    x, y, dots, s, inv_B, p, sigma, u, inv, T, decayed, held = token
    if len(dots) == 0:
        dots = sums(rows_times(u, y - x, K), 1)
    mixed = x
    if K > 0:
        mixed += combine(_mixing(dots, inv, T, K), u, K)
    h, terms = write_memory(x, mixed, s, inv_B, decayed, held, B_row, n, N, ROWS, D, SELECTIVE)
    # h_t C_t, in which h is not needed again
    F = p + sigma * mixed
    maxima = (max_norm(F - y, 1), max_norm(F, 1), max_norm(terms, 1))
    return h, device.as_columns(maxima, 3)


@triton.jit
def _mixing(
    dots,  # U v, of the rows u as they are
    inv, T, K: tl.constexpr,
):  # fmt: skip
    """The factors (s, 1) of u in U^T T U v."""
    return device.as_columns(scale(upper_times(T, scale(dots, inv, K), K), inv, K), K)


@triton.jit
def largest_gap(
    dots,  # U (y - x), of the rows u as they are
    token,  # u, y - x, sigma, inv, T, and the factors (s, 1) of u in x~ - x = U^T e
    K: tl.constexpr,
):  # fmt: skip
    """The defect of a token whose h and y follow from x~: max |sigma U^T (T U (y - x) - e)|."""
    u, _, sigma, inv, T, factors = token
    return max_norm(sigma * combine(subtract(_mixing(dots, inv, T, K), factors, K), u, K), 1)


@triton.jit
def write_memory(
    x, mixed, s, inv_B,  # rows
    decayed, held,  # of each block of states, B or ()
    B_row,  # pointers (s,) to B if it is not given
    n: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, SELECTIVE: tl.constexpr,
):  # fmt: skip
    """h_t, and what the magnitude is the maximum of."""
    written = device.spread(s * mixed * inv_B, ROWS, D, N)
    h = ()
    for i in tl.static_range(len(decayed)):
        if len(held) > 0:
            B = held[i]
        else:
            B, _ = both_of(B_row, i, n, ROWS, D, N, SELECTIVE)
        h = h + (decayed[i] + written * B,)
    return h, (tl.abs(x) + tl.abs(mixed)) * s


@triton.jit(do_not_specialize=["t_end", "per_head"])
def sweep_kernel(
    x_ptr,  # (H, b / H, t, d)
    raw_ptr,  # (b, t, r)
    W_ptr,  # (H, r, d), W^y; without FEEDBACK, as `first_ptr`, any tensor
    A_ptr,  # (H, n, d), log2(e) A
    h_ptr,  # (b, n, d), in place
    kept_ptr,  # (b, ceil(t / KEEP) - 1, n, d): h before tokens KEEP, 2 KEEP, ...
    first_ptr,  # (b, 1, d): norm(y0), in the dtype of W^y
    scratch_ptr,  # (programs, S, 2, BLOCK_S + ALPHA): raw B, C and alpha of a token, in turn
    y_ptr,  # (b, t, d)
    # (4, b, t): defect, scale, magnitude, pivot; without FEEDBACK (PARTS, 4, b, t), of each part
    statistics_ptr,
    per_head,  # samples of a head, b / H
    t_end,
    d: tl.constexpr,
    n: tl.constexpr,
    x_stride_h,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    W_stride_h,
    K: tl.constexpr,
    KEEP: tl.constexpr,
    S: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ALPHA: tl.constexpr,
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
):
    """All tokens of S samples of one head. STREAMED: whether W^y is read anew for each token."""
    ROWS: tl.constexpr = S * PARTS
    D: tl.constexpr = BLOCK_D // PARTS
    head, here, local, sample = device.samples_of(per_head, S, PARTS)
    cols = columns_of_rows(ROWS, PARTS, D)
    small = columns_of_rows(ROWS, PARTS, BLOCK_S // PARTS)
    alphas = columns_of_rows(ROWS, PARTS, max(ALPHA, 16) // PARTS)
    STATES: tl.constexpr = 2 * n if SELECTIVE else 0
    u_at: tl.constexpr = d + STATES
    in_row = cols < d
    inside = here[:, None] & in_row
    COUPLED: tl.constexpr = INPUT_SCALE == "one_minus_decay"
    PAIRS: tl.constexpr = K * (K + 1) // 2
    if FEEDBACK:
        W_at = W_ptr + head * W_stride_h
        TILES: tl.constexpr = (2 if JOINED else K + 1) + (2 if ALPHA > 0 else 1)
        if not STREAMED:
            W = load_weight_tiles(W_at, d, n, K, SELECTIVE, BLOCK_D, BLOCK_S, ALPHA, DOT, JOINED)
        v = tl.load(first_ptr + sample[:, None] * d + cols, mask=in_row, other=0.0)
    BLOCKS: tl.constexpr = (n + N - 1) // N
    HOLD_A: tl.constexpr = BLOCKS * N * D <= 1024
    # B of more states is read again where it is needed
    HOLD_B: tl.constexpr = BLOCKS == 1
    # (s, d), because a load of (d,) would be followed by a change of its layout
    A_at = (A_ptr + head * n * d + cols) + 0 * local[:, None]
    if HOLD_A:
        A = triton_blocks.load_head_blocks(A_at, in_row, d, n, N)
    h_at = h_ptr + sample[:, None] * (n * d) + cols
    h = triton_blocks.load_head_blocks(h_at, in_row, d, n, N)
    row_of = device.rows_of_statistics(per_head, t_end, S)
    is_first_part = first_parts(here, ROWS, PARTS)
    x_row = x_ptr + head * x_stride_h + local.to(tl.int64) * x_stride_b
    raw_row = raw_ptr + sample * raw_stride_b
    slots = tl.cdiv(t_end, KEEP) - 1
    WIDTH: tl.constexpr = BLOCK_S + ALPHA
    SMALL: tl.constexpr = 2 if JOINED else K + 1  # the tile of B, C and alpha
    cell = (
        scratch_ptr + (tl.program_id(0).to(tl.int64) * S + tl.arange(0, ROWS) // PARTS) * 2 * WIDTH
    )
    # loads of a token are issued while the one before it is computed
    small_at = device.small_rows(small, d, n, K, SELECTIVE)
    in_small = small < STATES + K
    alpha_at: tl.constexpr = u_at + K * d
    x_next, next_rows = load_raw_token(x_row, raw_row, cols, in_row, d, u_at, K)
    small_next = load_small(raw_row, small_at, in_small, alphas, alpha_at, K, ALPHA)
    # a token before the first one, which leaves h as it is
    zero = tl.zeros([ROWS, D], tl.float32)
    none = tl.zeros([ROWS], tl.float32)
    pivot = none + (1.0 if K == 0 else 0.0)
    if FEEDBACK:
        last = (
            zero, zero, (none,) * (K if PARTS > 1 else 0), zero, zero, zero, zero, (zero,) * K,
            (none,) * K, (none,) * PAIRS, h, (device.spread(zero, ROWS, D, N),) if HOLD_B else (),
        )  # fmt: skip
        if not HOLD_B:
            place = (cell + WIDTH)[:, None] + small
            tl.store(place, tl.zeros([ROWS, BLOCK_S // PARTS], tl.float32))
            tl.debug_barrier()
    else:
        part_at = statistics_ptr + tl.arange(0, ROWS) % PARTS * (4 * row_of)
        mixing = (
            (zero,) * K, zero, zero, (none,) * K, (none,) * PAIRS, device.as_columns((none,) * K, K)
        )  # fmt: skip
        maxima = (none, none)
        fetch_tokens(x_row, 0, x_stride_t, t_end, d, KEEP, PARTS, FAST)
        fetch_tokens(raw_row, 0, raw_stride_t, t_end, alpha_at + K, KEEP, PARTS, FAST)
        store_small(cell, small_next, small, in_small, alphas, STATES, K, ALPHA)
        second = tl.minimum(1, t_end - 1).to(tl.int64) * raw_stride_t
        small_next = load_small(raw_row + second, small_at, in_small, alphas, alpha_at, K, ALPHA)
    for t in range(0, t_end):
        token = sample * t_end + t
        now = cell + t % 2 * WIDTH
        later = cell + (t + 1) % 2 * WIDTH
        if FEEDBACK:
            columns = device.columns_of(v.to(DOT), S, BLOCK_D, COLUMNS)
            fed = ()
            for i in tl.static_range(TILES):
                if STREAMED:
                    W_i = load_weight_tile(
                        W_at, i, d, n, K, SELECTIVE, BLOCK_D, BLOCK_S, ALPHA, DOT, JOINED
                    )
                    fed = fed + (tl.dot(W_i, columns, input_precision=PRECISION),)
                else:
                    fed = fed + (tl.dot(W[i], columns, input_precision=PRECISION),)
            # the end of the token before is not on the critical path
            h, maxima = finish_token(last, later, n, K, N, ROWS, D, SELECTIVE)
            if PARTS == 1:
                whole = maxima + (pivot[:, None],)
                device.store_statistics(
                    statistics_ptr + token - 1, whole, row_of, here & (t > 0), ROWS
                )
        if (t % KEEP == 0) & (t > 0):
            slot = sample * slots + t // KEEP - 1
            kept_at = kept_ptr + slot[:, None] * (n * d) + cols
            triton_blocks.store_head_blocks(kept_at, h, inside, d, n, N)
        # raw = raw^x + W^y norm(y_{t-1})
        x = x_next.to(tl.float32)
        delta = next_rows[0].to(tl.float32)
        u = ()
        for i in tl.static_range(K):
            u = u + (next_rows[i + 1].to(tl.float32),)
        if FEEDBACK:
            values = small_next[0].to(tl.float32)
            values += (
                device.rows_of(fed[SMALL], S, BLOCK_S, COLUMNS, PARTS).to(ROUND).to(tl.float32)
            )
            values = (values,)
            if ALPHA > 0:
                more = device.rows_of(fed[SMALL + 1], S, ALPHA, COLUMNS, PARTS)
                more = more.to(ROUND).to(tl.float32)
                values = values + (small_next[1].to(tl.float32) + more,)
            # in turn in two places, so that one barrier a token is enough
            store_small(now, values, small, in_small, alphas, STATES, K, ALPHA)
            delta += device.rows_of(fed[0], S, BLOCK_D, COLUMNS, PARTS).to(ROUND).to(tl.float32)
            if JOINED:
                joined = device.join_rows(u, ROWS, K, D)
                joined += (
                    device.rows_of(fed[1], S, K * BLOCK_D, COLUMNS, PARTS).to(ROUND).to(tl.float32)
                )
                u = device.split_rows(joined, ROWS, K, D)
            else:
                rows = ()
                for i in tl.static_range(K):
                    more = (
                        device.rows_of(fed[i + 1], S, BLOCK_D, COLUMNS, PARTS)
                        .to(ROUND)
                        .to(tl.float32)
                    )
                    rows = rows + (u[i] + more,)
                u = rows
            tl.debug_barrier()
        else:
            tl.debug_barrier()
            store_small(later, small_next, small, in_small, alphas, STATES, K, ALPHA)
            if t % KEEP == 0:
                fetch_tokens(x_row, t + KEEP, x_stride_t, t_end, d, KEEP, PARTS, FAST)
                fetch_tokens(
                    raw_row, t + KEEP, raw_stride_t, t_end, alpha_at + K, KEEP, PARTS, FAST
                )
        beta = ()
        for i in tl.static_range(K):
            beta = beta + (BETA_MAX * activate(tl.load(now + STATES + i), "sigmoid", FAST),)
        delta = activate(delta, ACTIVATION, FAST)
        s = input_scale(delta, INPUT_SCALE, FAST)
        held = ()
        decayed = ()
        reads = ()
        for i in tl.static_range(BLOCKS):
            B, C = both_of(now, i, n, ROWS, D, N, SELECTIVE)
            A_block = A[i] if HOLD_A else triton_blocks.load_head_block(A_at, i, in_row, d, n, N)
            decay, s = triton_blocks.discretize_block(A_block, delta, s, ROWS, D, N, COUPLED, FAST)
            decayed = decayed + (decay * h[i],)
            reads = reads + (device.sum_states(decayed[i] * C, ROWS, D, N),)
            if HOLD_B:
                held = held + (B,)
        if SELECTIVE:
            # (s, d), the same for all channels
            if HOLD_B:
                B_B, C_C = (
                    device.sum_states(B * B, ROWS, D, N),
                    device.sum_states(C * C, ROWS, D, N),
                )
                B_C = device.sum_states(B * C, ROWS, D, N)
            else:
                B_B, C_C, B_C = inner_products(now, n, BLOCKS * N)
            inv_B = inverse_norm(zero + B_B, n * EPS)
            inv_C = inverse_norm(zero + C_C, n * EPS)
            B_C = B_C * inv_B * inv_C
        else:
            inv_B = zero + 1.0
            inv_C = inv_B
            B_C = zero + n
        sigma = s * B_C
        # p_t + sigma_t x_t, and the inner products that the local equation needs
        p = total_of(reads) * inv_C
        rest = p + sigma * x
        sigma_u = rows_times(u, sigma, K)
        step = tl.minimum(t + 1, t_end - 1).to(tl.int64)
        x_next, next_rows = load_raw_token(
            x_row + step * x_stride_t, raw_row + step * raw_stride_t, cols, in_row, d, u_at, K
        )
        if not FEEDBACK:
            step = tl.minimum(t + 2, t_end - 1).to(tl.int64)
        small_row = raw_row + step * raw_stride_t
        small_next = load_small(small_row, small_at, in_small, alphas, alpha_at, K, ALPHA)
        # every exchange between warps takes barriers: the first one has the maxima of the token
        # before, too
        whole = () if FEEDBACK else (none,) + maxima + (pivot,)
        inv = ()
        T = ()
        y = rest
        mixed = x
        if K > 0:
            dots = products(u, u, K) + products(sigma_u, u, K) + rows_times(u, rest - x, K)
            if not FEEDBACK:
                dots = dots + rows_times(mixing[0], mixing[1], K)
            with_dots = maxima if FEEDBACK and PARTS > 1 else ()
            dots = over_channels_of_parts(dots, with_dots, ROWS, PARTS, D)
            before = dots[2 * PAIRS + K :]
            if FEEDBACK:
                whole = before + (pivot,)
            else:
                whole = (largest_gap(before, mixing, K),) + maxima + (pivot,)
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
        if FEEDBACK:
            own = ()
            if PARTS > 1:
                own = rows_times(u, y - x, K) + (y * y,)
                own = over_channels_of_parts(own, () if K > 0 else maxima, ROWS, PARTS, D)
                if K == 0:
                    whole = own[1:] + (pivot,)
                whole = device.as_columns(whole, 4)
                device.store_statistics(
                    statistics_ptr + token - 1, whole, row_of, is_first_part & (t > 0), ROWS
                )
            v = y
            if NORM:
                square = own[K] if PARTS > 1 else tl.sum(y * y, axis=1)
                v = y * inverse_norm(square / d, NORM_EPS)[:, None]
            v = v.to(ROUND)
            last = (x, y, own[0:K], s, inv_B, p, sigma, u, inv, T, decayed, held)
        else:
            whole = device.as_columns(whole, 4)
            device.store_statistics(part_at + token - 1, whole, row_of, here & (t > 0), ROWS)
            h, terms = write_memory(
                x, mixed, s, inv_B, decayed, held, now, n, N, ROWS, D, SELECTIVE
            )
            maxima = (max_norm(y, 1), max_norm(terms, 1))
            if K > 0:
                mixing = (u, y - x, sigma, inv, T, T_v)
        tl.store(y_ptr + token[:, None] * d + cols, y, mask=inside)
    token = sample * t_end + t_end - 1
    if FEEDBACK:
        h, maxima = finish_token(last, cell + (t_end + 1) % 2 * WIDTH, n, K, N, ROWS, D, SELECTIVE)
        if PARTS > 1:
            maxima = device.as_columns(
                over_channels_of_parts((zero,), maxima, ROWS, PARTS, D)[1:], 3
            )
        device.store_statistics(
            statistics_ptr + token, maxima + (pivot[:, None],), row_of, is_first_part, ROWS
        )
    else:
        gap = none
        if K > 0:
            dots = over_channels_of_parts(rows_times(mixing[0], mixing[1], K), (), ROWS, PARTS, D)
            gap = largest_gap(dots, mixing, K)
        whole = device.as_columns((gap,) + maxima + (pivot,), 4)
        device.store_statistics(part_at + token, whole, row_of, here, ROWS)
    triton_blocks.store_head_blocks(h_at, h, inside, d, n, N)

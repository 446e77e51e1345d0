"""The cotangents of h between segments of tokens, for a reverse sweep of all segments at once.

Without feedback the cotangent of h depends on little: it takes a quarter to a third of the
instructions of `triton_reverse.py`, which then has a program for each segment where samples leave
multiprocessors idle. Equations and scalars are those of that file and of `../triton_prepare.py`.

Letters: b folded samples, t time, d channels of a head, n state per channel, k reflections, r raw
values, s samples of a program, or their parts.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate
from bedouin.kernels.device.discretize import input_scale
from bedouin.kernels.device.reflections import combine, rows_times, square_times, total_of
from bedouin.kernels.direct.heads.device import as_columns, samples_of, spread, sum_states
from bedouin.kernels.direct.heads.parts import columns_of_rows, over_channels_of_parts
from bedouin.kernels.direct.heads.triton_blocks import (
    discretize_head,
    load_both,
    load_head_block,
    load_head_blocks,
    store_head_blocks,
)
from bedouin.kernels.direct.heads.triton_replay import fetch_tokens
from bedouin.kernels.direct.triton_rows import local_padding, local_size, local_width


@triton.jit
def _load_token(
    grad_y_row, raw_row, local_row,  # pointers (s,) to rows of a token
    cols, in_row,  # the channels of a row, (s, d) or (1, d)
    u_at: tl.constexpr, n: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, N: tl.constexpr, d: tl.constexpr,
):  # fmt: skip
    """The cotangent of y, raw Delta and u, sum B C, the K K factors of the solution, and B and C if
    they are a single block."""
    g = tl.load(grad_y_row[:, None] + cols, mask=in_row, other=0.0)
    raw = ()
    for i in tl.static_range(K + 1):
        at = (0 if i == 0 else u_at + (i - 1) * d) + cols
        raw = raw + (tl.load(raw_row[:, None] + at, mask=in_row, other=0.0),)
    factors = ()
    for i in tl.static_range(K * K):
        factors = factors + (tl.load(local_row + 3 * (K * (K + 1) // 2) + i),)
    both = ()
    if n <= N:
        both = load_both(local_row + local_size(K), 0, n, ROWS, D, N)
    return g, raw, tl.load(local_row + local_size(K) - 3), factors, both


@triton.jit(do_not_specialize=["each", "t_end", "segments", "per_head"])
def head_edges_kernel(
    grad_y_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r)
    local_ptr,  # (b, t, WIDTH)
    A_ptr,  # (H, n, d), log2(e) A
    H_ptr,  # (segments, b, n, d): cotangent of h after each segment, given for the last one
    each,  # tokens of a segment, a multiple of KEEP
    t_end,
    segments,
    per_head,  # samples of a head, b / H
    d: tl.constexpr,
    n: tl.constexpr,
    grad_y_stride_b,
    grad_y_stride_t,
    raw_stride_b,
    raw_stride_t,
    K: tl.constexpr,
    KEEP: tl.constexpr,
    S: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SELECTIVE: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FAST: tl.constexpr,
    HOLD: tl.constexpr,  # whether a thread holds A
):
    """All tokens of S samples of one head but those of the first segment, the last first."""
    ROWS: tl.constexpr = S * PARTS
    D: tl.constexpr = BLOCK_D // PARTS
    COUPLED: tl.constexpr = INPUT_SCALE == "one_minus_decay"
    BLOCKS: tl.constexpr = (n + N - 1) // N
    WIDTH: tl.constexpr = local_width(K, n)
    u_at: tl.constexpr = d + (2 * n if SELECTIVE else 0)
    head, here, local, sample = samples_of(per_head, S, PARTS)
    cols = columns_of_rows(ROWS, PARTS, D)
    in_row = cols < d
    inside = here[:, None] & in_row
    A_at = A_ptr + head * n * d + cols + 0 * local[:, None]
    if HOLD:
        A = load_head_blocks(A_at, in_row, d, n, N)
    edge = per_head.to(tl.int64) * (tl.num_programs(0) // tl.cdiv(per_head, S)) * (n * d)
    H_at = H_ptr + (sample[:, None] * (n * d) + cols + (segments - 1) * edge)
    H = load_head_blocks(H_at, in_row, d, n, N)
    left = t_end - (segments - 1) * each  # tokens of the segment that are not taken back yet
    grad_y_row = grad_y_ptr + sample * grad_y_stride_b
    raw_row = raw_ptr + sample * raw_stride_b
    local_row = local_ptr + sample * t_end * WIDTH + local_padding(K)
    last = (t_end - 1).to(tl.int64)
    # loads of a token are issued while the one after it is taken back
    loaded = _load_token(
        grad_y_row + last * grad_y_stride_t, raw_row + last * raw_stride_t,
        local_row + last * WIDTH, cols, in_row, u_at, n, K, ROWS, D, N, d,
    )  # fmt: skip
    for back in range(0, t_end - each):
        t = t_end - 1 - back
        if back % KEEP == 0:
            first = tl.maximum(t - 2 * KEEP, 0)
            fetch_tokens(grad_y_row, first, grad_y_stride_t, t_end, d, KEEP, PARTS, FAST)
            fetch_tokens(raw_row, first, raw_stride_t, t_end, u_at + K * d, KEEP, PARTS, FAST)
            fetch_tokens(local_row, first, WIDTH, t_end, WIDTH, KEEP, PARTS, FAST)
        g, raw, B_C, factors, both = loaded
        now = local_row + t.to(tl.int64) * WIDTH + local_size(K)
        before = tl.maximum(t - 1, 0).to(tl.int64)
        loaded = _load_token(
            grad_y_row + before * grad_y_stride_t, raw_row + before * raw_stride_t,
            local_row + before * WIDTH, cols, in_row, u_at, n, K, ROWS, D, N, d,
        )  # fmt: skip
        delta = activate(raw[0].to(tl.float32), ACTIVATION, FAST)
        s = delta if COUPLED else input_scale(delta, INPUT_SCALE, FAST)
        w = g.to(tl.float32)
        decays, known, reads, gains = (), (), (), ()
        for i in tl.static_range(BLOCKS):
            B, C = both if BLOCKS == 1 else load_both(now, i, n, ROWS, D, N)
            A_block = A[i] if HOLD else load_head_block(A_at, i, in_row, d, n, N)
            decay, scales = discretize_head(A_block, delta, s, ROWS, D, N, COUPLED, FAST)
            decays = decays + (decay,)
            known = known + (C,)
            if COUPLED:
                reads = reads + (sum_states(H[i] * scales * B, ROWS, D, N),)
                gains = gains + (sum_states(scales * B * C, ROWS, D, N),)
            else:
                reads = reads + (sum_states(H[i] * B, ROWS, D, N),)
        if K > 0:
            u = ()
            for i in tl.static_range(K):
                u = u + (raw[i + 1].to(tl.float32),)
            if COUPLED:
                through = total_of(reads) + total_of(gains) * w
            else:
                through = s * (total_of(reads) + B_C[:, None] * w)
            dots = over_channels_of_parts(rows_times(u, through, K), (), ROWS, PARTS, D)
            w += combine(as_columns(square_times(factors, dots, K), K), u, K)
        w_states = spread(w, ROWS, D, N)
        earlier = ()
        for i in tl.static_range(BLOCKS):
            earlier = earlier + ((H[i] + w_states * known[i]) * decays[i],)
        H = earlier
        left -= 1
        if left == 0:
            left = each
            H_at -= edge
            store_head_blocks(H_at, H, inside, d, n, N)

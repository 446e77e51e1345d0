"""Phase R: the part of the reverse sweep on which the next earlier token depends.

With H the cotangent of h_t that token t + 1 sends, w that of y_t, and q = A d a / d(A Delta):

    B_H = H B,  written_ = B_H + (B C) w                             the cotangent of `written`
    raw_ = g B_H + act' ln 2 sum_n H q + read w                      g and read: kept by phase S
    x_ = s written_
    w_{t-1} = grad_{t-1} + the adjoint of norm of W^y^T raw_
    H_{t-1} = lambda * (H + w C^T)

With reflections w is g + U^T f for the cotangent g of y_t, (I - S T)^T f = T^T U (s H B + sigma g),
and x_ loses U^T f, since T^T U (s written_) = f.

The chain is w -> raw_ -> one product with W^y -> w; sums over states with H run beside it. q is
computed for a chunk of tokens from its first h, without any sum, and kept in scratch memory: every
thread reads what it wrote. This replay of a chunk runs beside the tokens of the next later chunk,
one token of each in turns, since the chain alone leaves most of the multiprocessor idle. The norm's
adjoint subtracts norm(y) <raw_, W^y norm(y)> / d, with an inner product that every thread computes
by itself.
Letters as in `triton_sweep.py`.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.discretize import build_decay, input_scale
from bedouin.kernels.device.elementary import LN2
from bedouin.kernels.device.reflections import (
    combine,
    eliminate,
    load_tuple,
    local_system,
    rows_times,
    store_tuple,
    sums,
    upper_transposed_times,
)
from bedouin.kernels.direct.phases.device import (
    load_lanes,
    load_reflections,
    load_states,
    no_states,
    over_channels,
    pack,
    places_of_states,
    prefetch_rows,
    put,
    reach_of,
    row_of,
    slope_of,
    store_states,
    unit_vectors,
    unpack,
    vector_of,
)
from bedouin.kernels.track.device import (
    load_row,
    load_words,
    over_inputs,
    over_states,
    places_of_channels,
    prefetch,
    store_words,
    wait_for,
)


@triton.jit
def load_transposed(
    ptr,  # (d, d)
    d: tl.constexpr, P: tl.constexpr, NL: tl.constexpr,
):  # fmt: skip
    """W^y by outputs, (P / NL, P, NL) for output jr NL + jl of input p."""
    jr, p, jl = tl.arange(0, P // NL), tl.arange(0, P), tl.arange(0, NL)
    output_at = (jr * NL)[:, None, None] + jl[None, None, :]
    at = ptr + (output_at * d + p[None, :, None])
    inside = (output_at < d) & (p[None, :, None] < d)
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_kept(
    row,  # (2, P) of a token
    factors,  # (FACTORS, P) of it
    p, P: tl.constexpr, FEEDS: tl.constexpr,
):  # fmt: skip
    """Delta, g, read, and with FEEDS what was fed, else read again, of a token, as they are in
    memory: a conversion would wait for them."""
    read = tl.load(factors + P + p)
    fed = read
    if FEEDS:
        fed = tl.load(factors + 2 * P + p)
    return tl.load(row + p), tl.load(factors + p), read, fed


@triton.jit
def replay(
    h, A,  # tuples of V parts
    delta, written,  # (P,)
    B,
    V: tl.constexpr, FULL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """h_t and q from h_{t-1}."""
    q = ()
    after = ()
    for v in tl.static_range(V):
        decay = build_decay(A[v] * delta[None, :, None], FULL, FAST)
        a = decay * h[v]
        q = q + (A[v] * (reach_of(decay, FULL) * h[v] if FULL else a),)
        after = after + (a + written[None, :, None] * B[v][:, None, :],)
    return after, q


@triton.jit
def place_of(scratch, step, size: tl.constexpr, KEEP: tl.constexpr):
    """Where q of the token of a step is in scratch memory, and where a token that is replayed for a
    later chunk then takes its place: chunks are there in their order and in the reverse order, in
    turns."""
    i = KEEP - 1 - step % KEEP
    return scratch + tl.where(step // KEEP % 2 == 1, KEEP - 1 - i, i) * size


@triton.jit
def with_memory(
    H, B, q,  # tuples of V parts
    V: tl.constexpr,
):  # fmt: skip
    """The sums over states of H with B and with q, each (P,)."""
    H_B = H[0] * B[0][:, None, :]
    H_q = H[0] * q[0]
    for v in tl.static_range(1, V):
        H_B += H[v] * B[v][:, None, :]
        H_q += H[v] * q[v]
    return over_states(H_B), over_states(H_q)


@triton.jit
def load_replayed(
    kept_ptr, B_ptr,
    token, real, p, P: tl.constexpr, WORDS: tl.constexpr, NL: tl.constexpr,
):  # fmt: skip
    """Delta, written and B of a token that is replayed; zeros, which leave h as it is, unless it is
    `real`."""
    row = kept_ptr + token * (2 * P)
    delta = tl.load(row + p, mask=p < tl.where(real, P, 0), other=0.0)
    written = tl.load(row + P + p, mask=p < tl.where(real, P, 0), other=0.0)
    return delta, written, load_row(B_ptr + token * WORDS, WORDS, NL)


@triton.jit
def load_past(
    grad_y_ptr, y_ptr, y0_ptr,
    sample, token, first, p, channels, d: tl.constexpr, FEEDS: tl.constexpr, NORM: tl.constexpr,
    START: tl.constexpr,
):  # fmt: skip
    """The cotangent of y before a token but for what is fed back, and that y in two parts, of which
    one is 0; as they are in memory, because a conversion or a sum would wait for the loads."""
    # before the first token there is y0, whose cotangent is that of its norm alone
    at_start = token <= first
    earlier = tl.maximum(token - 1, first)
    real = p < tl.where(at_start, 0, d)
    if FEEDS:
        w = tl.load(grad_y_ptr + earlier * d + p, mask=real, other=0.0)
    else:
        own = channels < tl.where(at_start, 0, d)
        w = load_lanes(grad_y_ptr + earlier * d, channels, own, False)
    y = w
    start = w
    if FEEDS and NORM:
        y = tl.load(y_ptr + earlier * d + p, mask=real, other=0.0)
        if START:
            start = tl.load(y0_ptr + sample * d + p, mask=p < tl.where(at_start, d, 0), other=0.0)
        else:
            start = tl.zeros_like(w).to(tl.float32)
    return w, y, start


@triton.jit(do_not_specialize=["t_end", "per_head"])
def phase_reverse_kernel(
    grad_y_ptr,  # (b, t, d)
    y_ptr,  # (b, t, d)
    y0_ptr,  # (b, d), with START
    raw_ptr,  # (b, t, r), of which the reflections are read
    solved_ptr,  # (b, t, K + 1 + PAIRS), from phase S
    kept_ptr,  # (b, t, 2, P)
    factors_ptr,  # (b, t, FACTORS, P)
    inverse_ptr,  # (b, t)
    scalars_ptr,  # (b, t, SCALARS)
    B_ptr,  # (b, t, N / V), words
    C_ptr,  # likewise
    W_ptr,  # (H, d, d), W^y, contiguous for each head
    A_ptr,  # (H, n, d), log2(e) A
    states_ptr,  # (b, ceil(t / KEEP), N, P)
    scratch_ptr,  # (b, KEEP, N P / V), int64
    last_ptr,  # (b, n, d), with LAST: H after the last token, else zeros
    H_ptr,  # (b, n, d), written: H before the first token
    edges_ptr,  # (b, ceil(t / KEEP), N, P), written: H after the last token of each chunk
    adjoint_ptr,  # (b, t, 2, P), written: w and the cotangent of `written`
    grad_raw_ptr,  # (b, t, d), written: the cotangent of raw Delta
    grad_x_ptr,  # (b, t, d), written
    f_ptr,  # (b, t, K), written
    grad_y0_ptr,  # (b, d), written
    per_head,
    t_end,
    W_stride,  # from head to head
    raw_stride_b,
    raw_stride_t,
    d: tl.constexpr,
    n: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    NL: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    KEEP: tl.constexpr,
    START: tl.constexpr,
    LAST: tl.constexpr,
    FACTORS: tl.constexpr,
    FEEDS: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    FAST: tl.constexpr,
):
    """All tokens of a sample of a head, from the last to the first."""
    WORDS: tl.constexpr = N // V
    SIZE: tl.constexpr = P * N
    PAIRS: tl.constexpr = K * (K + 1) // 2
    SCALARS: tl.constexpr = 1 + 2 * (K + PAIRS)
    sample = tl.program_id(0).to(tl.int64)
    raw_at = raw_ptr + sample * raw_stride_b + d + 2 * n
    head = sample // per_head
    p = tl.arange(0, P)
    A = load_states(A_ptr + head * n * d, d, n, P, N, NL, V)
    places = places_of_states(P, N, NL, V)
    channels = places_of_channels(P, NL)
    inside = channels < d
    if FEEDS:
        W = load_transposed(W_ptr + head * W_stride, d, P, NL)
    if LAST:
        H = load_states(last_ptr + sample * n * d, d, n, P, N, NL, V)
    else:
        H = no_states(A, V)
    chunks = tl.cdiv(t_end, KEEP)
    scratch = scratch_ptr + sample * KEEP * (SIZE // V)
    first = sample * t_end
    token = first + t_end - 1
    w = row_of(grad_y_ptr + token * d, p, d, P)
    # Chunks are counted from the end, so that the first may be shorter than the others: tokens
    # before it are replayed as tokens that change nothing.
    start = t_end - KEEP
    rows_read, rows_replayed = (factors_ptr, C_ptr, grad_y_ptr, y_ptr), (kept_ptr, B_ptr)
    SIZES: tl.constexpr = (FACTORS * P, WORDS, d, d)
    REPLAYED: tl.constexpr = (2 * P, WORDS)
    row = tl.maximum(token - tl.arange(0, 2 * KEEP), first)
    prefetch_rows(rows_read, row, SIZES, FAST)
    prefetch_rows(rows_replayed, row, REPLAYED, FAST)
    h = load_states(states_ptr + (sample * chunks + chunks - 1) * SIZE, P, N, P, N, NL, V)
    for i in range(tl.maximum(-start, 0), KEEP):
        delta, written, B_words = load_replayed(
            kept_ptr, B_ptr, first + start + i, True, p, P, WORDS, NL
        )
        h, q = replay(h, A, delta, written, unpack(B_words, V, True), V, FULL, FAST)
        store_words(scratch + i * (SIZE // V), places, pack(q, V, FAST))
    row, factors = kept_ptr + token * (2 * P), factors_ptr + token * (FACTORS * P)
    delta, g, read, fed = load_kept(row, factors, p, P, FEEDS)
    scalars = scalars_ptr + token * SCALARS
    B_C = tl.load(scalars)
    raw_row = raw_at + (t_end - 1).to(tl.int64) * raw_stride_t
    reflections = load_reflections(raw_row, scalars, p, d, P, K)
    S = load_tuple(solved_ptr + token * (K + 1 + PAIRS) + K + 1, PAIRS)
    inverse = tl.load(inverse_ptr + token)
    B_words = load_row(B_ptr + token * WORDS, WORDS, NL)
    C_words = load_row(C_ptr + token * WORDS, WORDS, NL)
    tl.debug_barrier()
    q_words = load_words(scratch + (KEEP - 1) * (SIZE // V), places)
    H_B, H_q = with_memory(H, unpack(B_words, V, True), unpack(q_words, V, False), V)
    store_states(edges_ptr + ((sample + 1) * chunks - 1) * SIZE, H, P, N, P, N, NL, V)
    # the replay is one token ahead of the place in its chunk that the sweep has in its own
    slot = sample * chunks + tl.maximum(chunks - 2, 0)
    h = load_states(states_ptr + slot * SIZE, P, N, P, N, NL, V)
    replayed = first + tl.maximum(start - KEEP, 0)
    delta_replay, written, B_replay = load_replayed(
        kept_ptr, B_ptr, replayed, start >= KEEP, p, P, WORDS, NL
    )
    h, q = replay(h, A, delta_replay, written, unpack(B_replay, V, True), V, FULL, FAST)
    store_words(scratch + (KEEP - 1) * (SIZE // V), places, pack(q, V, FAST))
    replayed = start - KEEP + 1
    at = first + tl.maximum(replayed, 0)
    delta_replay, written, B_replay = load_replayed(
        kept_ptr, B_ptr, at, replayed >= 0, p, P, WORDS, NL
    )
    w_next, y, y_start = load_past(
        grad_y_ptr, y_ptr, y0_ptr, sample, token, first, p, channels, d, FEEDS, NORM, START
    )
    for step in range(0, t_end):
        token = first + t_end - 1 - step
        earlier = tl.maximum(token - 1, first)
        next_step = step + 1
        row, factors = kept_ptr + earlier * (2 * P), factors_ptr + earlier * (FACTORS * P)
        delta_next, g_next, read_next, fed_next = load_kept(row, factors, p, P, FEEDS)
        scalars = scalars_ptr + earlier * SCALARS
        B_C_next = tl.load(scalars)
        raw_row = raw_at + (earlier - first) * raw_stride_t
        reflections_next = load_reflections(raw_row, scalars, p, d, P, K)
        S_next = load_tuple(solved_ptr + earlier * (K + 1 + PAIRS) + K + 1, PAIRS)
        inverse_next = tl.load(inverse_ptr + earlier)
        B_next = load_row(B_ptr + earlier * WORDS, WORDS, NL)
        C_next = load_row(C_ptr + earlier * WORDS, WORDS, NL)
        w_later, y_later, start_later = load_past(
            grad_y_ptr, y_ptr, y0_ptr, sample, token - 1, first, p, channels, d, FEEDS, NORM, START
        )
        # here, because a thread that waits for one load waits for all that it has issued before
        q_words = load_words(place_of(scratch, next_step, SIZE // V, KEEP), places)
        replayed = t_end - ((step + 2) // KEEP + 2) * KEEP + (step + 2) % KEEP
        at = first + tl.maximum(replayed, 0)
        delta_later, written_later, B_later = load_replayed(
            kept_ptr, B_ptr, at, replayed >= 0, p, P, WORDS, NL
        )
        C = unpack(C_words, V, True)
        s = input_scale(delta, INPUT_SCALE, FAST)
        if K > 0:
            u, sizes, T = reflections
            u = unit_vectors(u, sizes, K)
            dots = sums(rows_times(u, s * (H_B + B_C * w), K))
            right = upper_transposed_times(T, dots, K)
            f, _ = eliminate(local_system(S, T, True, K), right, K, 1, True, FAST)
            store_tuple(f_ptr + token * K, f, K)
            added = combine(f, u, K)
            w += added
        grad_written = H_B + B_C * w
        grad_raw = g.to(tl.float32) * H_B + slope_of(delta, ACTIVATION) * LN2 * H_q
        grad_raw += read.to(tl.float32) * w
        grad_x = s * grad_written
        if K > 0:
            grad_x -= added
        put(adjoint_ptr + token * (2 * P), w, channels, inside, True, P, NL)
        put(adjoint_ptr + token * (2 * P) + P, grad_written, channels, inside, True, P, NL)
        put(grad_raw_ptr + token * d, grad_raw, channels, inside, d == P, P, NL)
        put(grad_x_ptr + token * d, grad_x, channels, inside, d == P, P, NL)
        w_before = vector_of(w_next)
        if FEEDS:
            rows = tl.reshape(grad_raw, (P // NL, NL))[:, None, :]
            fed_back = over_inputs(W * rows, P // NL, P, NL)
            if NORM:
                terms = grad_raw * fed.to(tl.float32)
                fed_back -= (y + y_start) * (over_channels(terms, P, NL) * (inverse / d))
            w_before += fed_back * inverse if NORM else fed_back
        # beside this product, on which the earlier token depends
        after = ()
        for v in tl.static_range(V):
            grad_h = H[v] + w[None, :, None] * C[v][:, None, :]
            after = after + (grad_h * build_decay(A[v] * delta[None, :, None], FULL, FAST),)
        H = after
        # The compiler does not move what reads the loads before this condition.
        if (next_step % KEEP == 0) & (next_step < t_end):
            slot = (sample + 1) * chunks - 1 - next_step // KEEP
            store_states(edges_ptr + slot * SIZE, H, P, N, P, N, NL, V)
            replayed_slot = sample * chunks + tl.maximum(chunks - 2 - next_step // KEEP, 0)
            h = load_states(states_ptr + replayed_slot * SIZE, P, N, P, N, NL, V)
            h = wait_for(h, V)
            # for the next chunk of the tokens and of the replay
            earlier_slot = tl.maximum(replayed_slot - 1, sample * chunks)
            part = tl.arange(0, 32)
            prefetch(states_ptr + earlier_slot * SIZE, part, SIZE // 32, SIZE // 32, FAST)
            earlier_row = token - 1 - KEEP - tl.arange(0, KEEP)
            prefetch_rows(rows_read, tl.maximum(earlier_row, first), SIZES, FAST)
            earlier_row -= KEEP
            prefetch_rows(rows_replayed, tl.maximum(earlier_row, first), REPLAYED, FAST)
        H_B, H_q = with_memory(H, unpack(B_next, V, True), unpack(q_words, V, False), V)
        h, q = replay(h, A, delta_replay, written, unpack(B_replay, V, True), V, FULL, FAST)
        store_words(place_of(scratch, next_step, SIZE // V, KEEP), places, pack(q, V, FAST))
        delta_replay, written, B_replay = delta_later, written_later, B_later
        w, w_next, y, y_start = w_before, w_later, y_later, start_later
        delta, g, read, fed = delta_next, g_next, read_next, fed_next
        B_C, inverse, S = B_C_next, inverse_next, S_next
        reflections = reflections_next
        C_words = C_next
    put(grad_y0_ptr + sample * d, w, channels, inside, d == P, P, NL)
    store_states(H_ptr + sample * n * d, H, d, n, P, N, NL, V)

"""Phase S: the exact sweep over the tokens.

    raw = raw^x + W^y norm(y_{t-1})     (of Delta, if it is fed)
    a = lambda * h,  written = s x
    y = a C + (B C) written,  h = a + written B^T

With reflections x~ = x + U^T e takes the place of x in `written`: with S = U diag(sigma) U^T and
the y above, (I - S T) z = U (y - x), e = T z, and sigma U^T e is added to y.

Letters: b folded samples, t time, d channels of a head, n state per channel, P and N both rounded
up to powers of two; V, NL as in `device.py`.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate
from bedouin.kernels.device.discretize import build_decay, input_scale
from bedouin.kernels.device.elementary import LN2
from bedouin.kernels.device.norms import inverse_norm
from bedouin.kernels.device.reflections import (
    combine,
    eliminate,
    local_system,
    products,
    rows_times,
    store_tuple,
    sums,
    upper_times,
)
from bedouin.kernels.direct.phases.device import (
    load_channels,
    load_lanes,
    load_reflections,
    load_states,
    no_states,
    put,
    row_of,
    slope_of,
    store_states,
    unit_vectors,
    unknown_zeros,
    unpack,
    vector_of,
)
from bedouin.kernels.track.device import (
    load_row,
    over_inputs,
    over_states,
    places_of_channels,
    prefetch,
    wait_for,
)


@triton.jit
def load_weights(
    ptr,  # (d, d), transposed, so that the lanes of a warp read neighbours
    d: tl.constexpr, P: tl.constexpr, NL: tl.constexpr,
):  # fmt: skip
    """W^y, (P / NL, P, NL) for input ir NL + il of output p."""
    ir, p, il = tl.arange(0, P // NL), tl.arange(0, P), tl.arange(0, NL)
    input_at = (ir * NL)[:, None, None] + il[None, None, :]
    at = ptr + (input_at * d + p[None, :, None])
    return tl.load(at, mask=(p[None, :, None] < d) & (input_at < d), other=0.0).to(tl.float32)


@triton.jit
def feed_back(
    y,  # (P,)
    W,  # of `load_weights`
    d: tl.constexpr, P: tl.constexpr, NL: tl.constexpr,
    NORM: tl.constexpr, NORM_EPS: tl.constexpr,
):  # fmt: skip
    """W^y norm(y) (P,), and 1 / rms of y, of which each thread has that of its channel."""
    before = tl.reshape(y, (P // NL, NL))[:, None, :]
    inverse = tl.zeros((P,), tl.float32) + 1.0
    if NORM:
        # by each thread for its channel: a sum of the whole block would cost barriers
        squares = tl.broadcast_to(before * before, (P // NL, P, NL))
        square = over_inputs(squares, P // NL, P, NL)
        inverse = inverse_norm(square / d, NORM_EPS)
    return over_inputs(W * before, P // NL, P, NL) * inverse, inverse


@triton.jit
def _load(ptr, d: tl.constexpr, P: tl.constexpr, NL: tl.constexpr, FEEDS: tl.constexpr):
    """x or raw Delta of a token, as `vector_of` takes it."""
    if FEEDS:
        return load_channels(ptr, tl.arange(0, P), d, P)
    else:
        channels = places_of_channels(P, NL)
        return load_lanes(ptr, channels, channels < d, d == P)


@triton.jit
def load_inputs(
    first,  # pointers to the rows of x, raw, scalars, B and C of a token, and `unknown_zeros` (P,)
    strides,  # of x and raw
    step,  # tokens after it
    d: tl.constexpr, n: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NL: tl.constexpr,
    V: tl.constexpr, K: tl.constexpr, FEEDS: tl.constexpr,
):  # fmt: skip
    """x, raw Delta, B C, B, C, the reflections and T of a token, as they are in memory: a
    conversion would wait for them."""
    WORDS: tl.constexpr = N // V
    raw_at = first[1] + step * strides[1]
    scalars = first[2] + step * (1 + K * (K + 3))
    x = _load(first[0] + step * strides[0], d, P, NL, FEEDS)
    raw = _load(raw_at, d, P, NL, FEEDS)
    B = load_row(first[3] + step * WORDS, WORDS, NL)
    C = load_row(first[4] + step * WORDS, WORDS, NL)
    u, inverse, T = load_reflections(raw_at + d + 2 * n, scalars, tl.arange(0, P), d, P, K)
    return x, raw, tl.load(scalars + first[5]), B, C, u, inverse, T


@triton.jit
def prefetch_inputs(
    first, strides,  # as in `load_inputs`
    tokens, d: tl.constexpr, WORDS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The rows of x, raw Delta, B and C of tokens."""
    prefetch(first[0], tokens, strides[0], d, FAST)
    prefetch(first[1], tokens, strides[1], d, FAST)
    prefetch(first[3], tokens, WORDS, WORDS, FAST)
    prefetch(first[4], tokens, WORDS, WORDS, FAST)


@triton.jit(do_not_specialize=["t_end", "per_head"])
def phase_sweep_kernel(
    x_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r), of which the first d are those of Delta
    scalars_ptr,  # (b, t, SCALARS): B C, then those of `load_reflections`
    B_ptr,  # (b, t, N / V), words
    C_ptr,  # likewise
    W_ptr,  # (H, d, d), W^y transposed, contiguous for each head
    A_ptr,  # (H, n, d), log2(e) A
    y0_ptr,  # (b, d), with START
    h0_ptr,  # (b, n, d), with START
    h_ptr,  # (b, n, d), written
    y_ptr,  # (b, t, d)
    kept_ptr,  # (b, t, 2, P), written with KEEP_ROWS: Delta and `written`
    factors_ptr,  # (b, t, FACTORS, P), likewise: g, read, and what was fed
    inverse_ptr,  # (b, t), likewise: 1 / rms of y_{t-1}
    states_ptr,  # (b, ceil(t / KEEP), N, P), likewise: h before each chunk
    solved_ptr,  # (b, t, K + 1 + PAIRS), written: e, the smallest pivot, and S
    per_head,  # samples of a head, b / H
    t_end,
    W_stride,  # from head to head
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    d: tl.constexpr,
    n: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    NL: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    KEEP: tl.constexpr,  # tokens between two kept h; 0: none is kept
    KEEP_ROWS: tl.constexpr,  # whether the vectors of each token are kept
    START: tl.constexpr,  # whether y0 and h0 are given, else zeros
    FACTORS: tl.constexpr,
    FEEDS: tl.constexpr,  # whether Delta is fed back
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    FAST: tl.constexpr,
):
    """All tokens of a sample of a head."""
    WORDS: tl.constexpr = N // V
    SIZE: tl.constexpr = P * N
    PAIRS: tl.constexpr = K * (K + 1) // 2
    sample = tl.program_id(0).to(tl.int64)
    head = sample // per_head
    p = tl.arange(0, P)
    A = wait_for(load_states(A_ptr + head * n * d, d, n, P, N, NL, V), V)
    channels = places_of_channels(P, NL)
    inside = channels < d
    if FEEDS:
        W = load_weights(W_ptr + head * W_stride, d, P, NL)
    if START:
        h = wait_for(load_states(h0_ptr + sample * n * d, d, n, P, N, NL, V), V)
        y = row_of(y0_ptr + sample * d, p, d, P)
    else:
        h = no_states(A, V)
        y = tl.zeros((P,), tl.float32)
    token = sample * t_end
    first = (
        x_ptr + sample * x_stride_b,
        raw_ptr + sample * raw_stride_b,
        scalars_ptr + token * (1 + K * (K + 3)),
        B_ptr + token * WORDS,
        C_ptr + token * WORDS,
        unknown_zeros(p, t_end, P),
    )
    strides = (x_stride_t, raw_stride_t)
    if KEEP > 0:
        earliest = tl.minimum(tl.arange(0, KEEP), t_end - 1)
        prefetch_inputs(first, strides, earliest, d, WORDS, FAST)
    # The next token's rows are loaded as soon as those of a token have been read, in turns into two
    # places: a thread that waits for one load waits for all that it has issued before.
    even = load_inputs(first, strides, 0, d, n, P, N, NL, V, K, FEEDS)
    odd = even
    fed = y
    inverse = y
    if FEEDS:
        fed, inverse = feed_back(y, W, d, P, NL, NORM, NORM_EPS)
    for turn in range(0, tl.cdiv(t_end, 2)):
        for half in tl.static_range(2):
            t = 2 * turn + half
            if t < t_end:
                x, raw, B_C, B_words, C_words, u, sizes, T = even if half == 0 else odd
                x, raw = vector_of(x), vector_of(raw)
                if FEEDS:
                    raw += fed
                delta = activate(raw, ACTIVATION, FAST)
                s = input_scale(delta, INPUT_SCALE, FAST)
                # The compiler does not move the next token's loads before this condition.
                if KEEP > 0:
                    if (t == 0) | ((t_end - t) % KEEP == 0):
                        slot = (sample + 1) * tl.cdiv(t_end, KEEP) - tl.cdiv(t_end - t, KEEP)
                        store_states(states_ptr + slot * SIZE, h, P, N, P, N, NL, V)
                        later = tl.minimum(t + KEEP + tl.arange(0, KEEP), t_end - 1)
                        prefetch_inputs(first, strides, later, d, WORDS, FAST)
                step = tl.minimum(t + 1, t_end - 1).to(tl.int64)
                row = load_inputs(first, strides, step, d, n, P, N, NL, V, K, FEEDS)
                if half == 0:
                    odd = row
                else:
                    even = row
                B, C = unpack(B_words, V, True), unpack(C_words, V, True)
                decayed = ()
                q = tl.zeros((WORDS // NL, P, NL), tl.float32)
                for v in tl.static_range(V):
                    a = build_decay(A[v] * delta[None, :, None], FULL, FAST) * h[v]
                    decayed = decayed + (a,)
                    q += a * C[v][:, None, :]
                written = s * x
                y = over_states(q) + B_C * written
                token = sample * t_end + t
                mixed = x
                if K > 0:
                    u = unit_vectors(u, sizes, K)
                    sigma = s * B_C
                    dots = products(rows_times(u, sigma, K), u, K) + rows_times(u, y - x, K)
                    dots = sums(dots)
                    S = dots[0:PAIRS]
                    z, pivot = eliminate(
                        local_system(S, T, False, K), dots[PAIRS:], K, 1, True, FAST
                    )
                    e = upper_times(T, z, K)
                    added = combine(e, u, K)
                    mixed += added
                    written += s * added
                    y += sigma * added
                    to = solved_ptr + token * (K + 1 + PAIRS)
                    store_tuple(to, e + (pivot,) + S, K + 1 + PAIRS)
                # the next token depends on this product, and on nothing below
                fed_next = fed
                inverse_next = inverse
                if FEEDS:
                    fed_next, inverse_next = feed_back(y, W, d, P, NL, NORM, NORM_EPS)
                put(y_ptr + token * d, y, channels, inside, d == P, P, NL)
                if KEEP_ROWS:
                    # d a / d Delta = ln 2 A reach h, read out by C
                    slope_C = tl.zeros((WORDS // NL, P, NL), tl.float32)
                    for v in tl.static_range(V):
                        slope = A[v] * (decayed[v] + h[v] if FULL else decayed[v])
                        slope_C += slope * C[v][:, None, :]
                after = ()
                for v in tl.static_range(V):
                    after = after + (decayed[v] + written[None, :, None] * B[v][:, None, :],)
                h = after
                if KEEP_ROWS:
                    slope_raw = slope_of(delta, ACTIVATION)
                    g = (
                        mixed / ((1.0 + delta) * (1.0 + delta))
                        if INPUT_SCALE == "bounded_delta"
                        else mixed
                    )
                    g = slope_raw * g
                    at = kept_ptr + token * (2 * P)
                    put(at, delta, channels, inside, True, P, NL)
                    put(at + P, written, channels, inside, True, P, NL)
                    at = factors_ptr + token * (FACTORS * P)
                    put(at, g, channels, inside, True, P, NL)
                    read = B_C * g + slope_raw * LN2 * over_states(slope_C)
                    put(at + P, read, channels, inside, True, P, NL)
                    if FEEDS:
                        put(at + 2 * P, fed, channels, inside, True, P, NL)
                        # all channels have the same
                        put(inverse_ptr + token, inverse, channels // P, inside, True, P, NL)
                fed, inverse = fed_next, inverse_next
    store_states(h_ptr + sample * n * d, h, d, n, P, N, NL, V)

"""Phase S: the exact sweep over the tokens.

    raw = raw^x + W^y norm(y_{t-1}),  x^ = x + W^y norm(y_{t-1})     (those of both that are fed)
    a = lambda * h,  r = a B,  written = s x^ - beta^e r             (the delta rule's erase)
    y = a C + (B C) written,  h = a + written B^T

With reflections x~ = x^ + U^T e takes the place of x^ in `written`: with S = U diag(sigma) U^T and
the y above, (I - S T) z = U (y - x^), e = T z, and sigma U^T e is added to y.

Letters: b folded samples, t time, d channels of a head, n state per channel, P and N both rounded
up to powers of two; V, NL as in `device.py`.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.activations import activate, tanh
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
from bedouin.kernels.device.sync import await_launch
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
    ptr,  # (d, FEEDS d), transposed, so that the lanes of a warp read neighbours
    d: tl.constexpr, P: tl.constexpr, NL: tl.constexpr, FEEDS: tl.constexpr,
):  # fmt: skip
    """W^y of one fed vector, (P / NL, P, NL) for input ir NL + il of output p."""
    ir, p, il = tl.arange(0, P // NL), tl.arange(0, P), tl.arange(0, NL)
    input_at = (ir * NL)[:, None, None] + il[None, None, :]
    at = ptr + (input_at * (FEEDS * d) + p[None, :, None])
    return tl.load(at, mask=(p[None, :, None] < d) & (input_at < d), other=0.0).to(tl.float32)


@triton.jit
def feed_back(
    y,  # (P,)
    W,  # one `load_weights` for each fed vector
    d: tl.constexpr, P: tl.constexpr, NL: tl.constexpr, FEEDS: tl.constexpr,
    NORM: tl.constexpr, NORM_EPS: tl.constexpr,
):  # fmt: skip
    """W^y norm(y) of the fed vectors, a tuple of (P,), and 1 / rms of y, of which each thread has
    that of its channel."""
    before = tl.reshape(y, (P // NL, NL))[:, None, :]
    inverse = tl.zeros((P,), tl.float32) + 1.0
    if NORM:
        # by each thread for its channel: a sum of the whole block would cost barriers
        squares = tl.broadcast_to(before * before, (P // NL, P, NL))
        square = over_inputs(squares, P // NL, P, NL)
        inverse = inverse_norm(square / d, NORM_EPS)
    fed = ()
    for i in tl.static_range(FEEDS):
        fed = fed + (over_inputs(W[i] * before, P // NL, P, NL) * inverse,)
    return fed, inverse


@triton.jit
def load_products(
    ptr,  # (SPLITS, VECTORS, b, d)
    sample, p, d: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """The sums over the splits of each vector of a sample, a tuple of (P,)."""
    size = tl.num_programs(0).to(tl.int64) * d
    out = ()
    for i in tl.static_range(VECTORS):
        at = ptr + i * size + sample * d
        total = row_of(at, p, d, P)
        for split in tl.static_range(1, SPLITS):
            total += row_of(at + split * VECTORS * size, p, d, P)
        out = out + (total,)
    return out


@triton.jit
def _load(ptr, d: tl.constexpr, P: tl.constexpr, NL: tl.constexpr, FEEDS: tl.constexpr):
    """x or raw Delta of a token, as `vector_of` takes it."""
    if FEEDS > 0:
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
    """x, raw Delta, B C, beta^e, B, C, the reflections and T of a token, as they are in memory: a
    conversion would wait for them."""
    WORDS: tl.constexpr = N // V
    raw_at = first[1] + step * strides[1]
    scalars = first[2] + step * (2 + K * (K + 3))
    x = _load(first[0] + step * strides[0], d, P, NL, FEEDS)
    raw = _load(raw_at, d, P, NL, FEEDS)
    B = load_row(first[3] + step * WORDS, WORDS, NL)
    C = load_row(first[4] + step * WORDS, WORDS, NL)
    u, inverse, T = load_reflections(raw_at + d + 2 * n, scalars, tl.arange(0, P), d, P, K)
    at = scalars + first[5]
    return x, raw, tl.load(at), tl.load(at + 1), B, C, u, inverse, T


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


@triton.jit(do_not_specialize=["start", "t_end", "tokens", "per_head"])
def phase_sweep_kernel(
    x_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r), of which the first d are those of Delta
    scalars_ptr,  # (b, t, SCALARS): B C and beta^e, then those of `load_reflections`
    B_ptr,  # (b, t, N / V), words
    C_ptr,  # likewise
    W_ptr,  # (H, d, FEEDS d), W^y transposed, contiguous for each head, or the products of SPLITS
    A_ptr,  # (H, n, d), log2(e) A
    y0_ptr,  # (b, d), with START
    h0_ptr,  # (b, n, d), with START
    h_ptr,  # (b, n, d), written
    y_ptr,  # (b, t, d)
    kept_ptr,  # (b, t, 2, P), written with KEEP_ROWS: Delta and `written`
    # (b, t, FACTORS, P), likewise: g, read, what was fed, with BOUNDED the slope of tanh, and r
    factors_ptr,
    inverse_ptr,  # (b, t), likewise: 1 / rms of y_{t-1}
    states_ptr,  # (b, ceil(t / KEEP), N, P), likewise: h before each chunk
    solved_ptr,  # (b, t, K + 1 + PAIRS), written: e, the smallest pivot, and S
    start,  # the first token of this launch, 0 with KEEP
    per_head,  # samples of a head, b / H
    t_end,  # tokens of this launch
    tokens,  # of a sample
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
    # 0, or t_end is 1, and so many products (vectors, b, d) have the sum W^y norm(y_{t-1})
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
    START: tl.constexpr,  # whether y0 and h0 are given, else zeros
    OF_DELTA: tl.constexpr,  # what is fed back
    OF_X: tl.constexpr,
    BOUNDED: tl.constexpr,  # whether x with its feedback becomes its tanh
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INPUT_SCALE: tl.constexpr,
    FULL: tl.constexpr,
    ERASE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Tokens of a sample of a head, from `start` on."""
    FEEDS: tl.constexpr = 0 if SPLITS else OF_DELTA + OF_X
    FACTORS: tl.constexpr = 2 + FEEDS + BOUNDED + ERASE
    WORDS: tl.constexpr = N // V
    SIZE: tl.constexpr = P * N
    PAIRS: tl.constexpr = K * (K + 1) // 2
    sample = tl.program_id(0).to(tl.int64)
    head = sample // per_head
    p = tl.arange(0, P)
    A = wait_for(load_states(A_ptr + head * n * d, d, n, P, N, NL, V), V)
    channels = places_of_channels(P, NL)
    inside = channels < d
    W_at = W_ptr + head * W_stride
    W = ()
    for i in tl.static_range(FEEDS):
        W = W + (load_weights(W_at + i * d, d, P, NL, FEEDS),)
    if START:
        h = wait_for(load_states(h0_ptr + sample * n * d, d, n, P, N, NL, V), V)
        y = row_of(y0_ptr + sample * d, p, d, P)
    else:
        h = no_states(A, V)
        y = tl.zeros((P,), tl.float32)
    token = sample * tokens + start
    first = (
        x_ptr + sample * x_stride_b + start * x_stride_t,
        raw_ptr + sample * raw_stride_b + start * raw_stride_t,
        scalars_ptr + token * (2 + K * (K + 3)),
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
    fed = ()
    inverse = y
    if FEEDS > 0:
        fed, inverse = feed_back(y, W, d, P, NL, FEEDS, NORM, NORM_EPS)
    if SPLITS > 0:
        await_launch(OVERLAP)
        fed = load_products(W_ptr, sample, p, d, P, SPLITS, OF_DELTA + OF_X)
    for turn in range(0, 1 if SPLITS > 0 else tl.cdiv(t_end, 2)):
        for half in tl.static_range(1 if SPLITS > 0 else 2):
            t = 2 * turn + half
            if t < t_end:
                x, raw, B_C, beta, B_words, C_words, u, sizes, T = even if half == 0 else odd
                x, raw = vector_of(x), vector_of(raw)
                if OF_DELTA:
                    raw += fed[0]
                if OF_X:
                    x += fed[OF_DELTA]
                if BOUNDED:
                    x = tanh(x, FAST)
                delta = activate(raw, ACTIVATION, FAST)
                s = input_scale(delta, INPUT_SCALE, FAST)
                # The compiler does not move the next token's loads before this condition.
                if KEEP > 0:
                    if (t == 0) | ((t_end - t) % KEEP == 0):
                        slot = (sample + 1) * tl.cdiv(t_end, KEEP) - tl.cdiv(t_end - t, KEEP)
                        store_states(states_ptr + slot * SIZE, h, P, N, P, N, NL, V)
                        later = tl.minimum(t + KEEP + tl.arange(0, KEEP), t_end - 1)
                        prefetch_inputs(first, strides, later, d, WORDS, FAST)
                if SPLITS == 0:
                    step = tl.minimum(t + 1, t_end - 1).to(tl.int64)
                    row = load_inputs(first, strides, step, d, n, P, N, NL, V, K, FEEDS)
                    if half == 0:
                        odd = row
                    else:
                        even = row
                B, C = unpack(B_words, V, True), unpack(C_words, V, True)
                decayed = ()
                r = tl.zeros((WORDS // NL, P, NL), tl.float32)
                q = r
                for v in tl.static_range(V):
                    a = build_decay(A[v] * delta[None, :, None], FULL, FAST) * h[v]
                    decayed = decayed + (a,)
                    if ERASE:
                        r += a * B[v][:, None, :]
                    q += a * C[v][:, None, :]
                written = s * x
                if ERASE:
                    erased = over_states(r)
                    written -= beta * erased
                y = over_states(q) + B_C * written
                token = sample * tokens + start + t
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
                if FEEDS > 0:
                    fed_next, inverse_next = feed_back(y, W, d, P, NL, FEEDS, NORM, NORM_EPS)
                put(y_ptr + token * d, y, channels, inside, d == P, P, NL)
                if KEEP_ROWS:
                    # d a / d Delta = ln 2 A reach h, read out by B and C
                    slope_B = tl.zeros((WORDS // NL, P, NL), tl.float32)
                    slope_C = slope_B
                    for v in tl.static_range(V):
                        slope = A[v] * (decayed[v] + h[v] if FULL else decayed[v])
                        if ERASE:
                            slope_B += slope * B[v][:, None, :]
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
                    if ERASE:
                        g -= LN2 * beta * over_states(slope_B)
                    g = slope_raw * g
                    at = kept_ptr + token * (2 * P)
                    put(at, delta, channels, inside, True, P, NL)
                    put(at + P, written, channels, inside, True, P, NL)
                    at = factors_ptr + token * (FACTORS * P)
                    put(at, g, channels, inside, True, P, NL)
                    read = B_C * g + slope_raw * LN2 * over_states(slope_C)
                    put(at + P, read, channels, inside, True, P, NL)
                    for i in tl.static_range(FEEDS):
                        put(at + (2 + i) * P, fed[i], channels, inside, True, P, NL)
                    if BOUNDED:
                        put(at + (2 + FEEDS) * P, 1 - x * x, channels, inside, True, P, NL)
                    if ERASE:
                        put(at + (FACTORS - 1) * P, erased, channels, inside, True, P, NL)
                    if FEEDS > 0:
                        # all channels have the same
                        put(inverse_ptr + token, inverse, channels // P, inside, True, P, NL)
                fed, inverse = fed_next, inverse_next
    store_states(h_ptr + sample * n * d, h, d, n, P, N, NL, V)

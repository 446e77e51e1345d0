"""What the raw values of a token alone determine, the sweep over the tokens, and what ends the
backward of both.

    (fed_Delta, fed_x) = W_y norm(y_{t-1});  Delta = softplus(raw + fed_Delta)
    a = exp(A Delta) * h;  written = Delta (x + fed_x) - beta a B
    y = a C + (B C) written;  h = a + written B^T

The chain of a token is y -> W_y norm(y) -> Delta -> a -> a B and a C -> y; B, C, B C and beta are
prepared. All that only a backward reads is computed from what is kept, by `triton_reverse.py`.
Letters: b batch, f folded samples, t time, H heads, c channels and n states of a head, P and N:
both rounded up to powers of two, u tokens of a program; s, V, NL as in `device.py`.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import activate, exp2, inverse_norm, sigmoid, store_rounded
from bedouin.kernels.track import device
from bedouin.kernels.track.device import high, nearest_word, unpack


@triton.jit
def _load_weights(ptr, dtype: tl.constexpr, s):
    """W_y (c, c) of one vector, (P / NL, P, NL) for input ir NL + il of output p."""
    ir, p, il = tl.arange(0, s.P // s.NL), tl.arange(0, s.P)[None, :, None], tl.arange(0, s.NL)
    i = (ir * s.NL)[:, None, None] + il[None, None, :]
    return device.load_rounded(ptr + p * s.c + i, (p < s.c) & (i < s.c), dtype)


@triton.jit
def _feed_back(y, W, s, EPS: tl.constexpr):
    """W_y norm(y) of Delta and of x, and 1 / rms of y, (P,) each, of y (P,) and both W. Each thread
    computes the norm for its channel: a sum of the whole block would cost barriers."""
    before = tl.reshape(y, (s.P // s.NL, s.NL))[:, None, :]
    squares = tl.broadcast_to(before * before, (s.P // s.NL, s.P, s.NL))
    of_delta = device.over_inputs(W[0] * before, s.P // s.NL, s)
    of_x = device.over_inputs(W[1] * before, s.P // s.NL, s)
    inverse = inverse_norm(device.over_inputs(squares, s.P // s.NL, s) / s.c, EPS)
    return of_delta * inverse, of_x * inverse, inverse


@triton.jit
def _load_token(
    first,  # pointers to the rows of x, delta, scalars, B, C, and `unknown_zeros` (P,)
    strides,  # of x and delta
    step,  # tokens after it
    s,
):
    """What is read of a token, as it is in memory: a conversion would wait for it."""
    x = device.load_vector(first[0] + step * strides[0], s.c, s)
    raw = device.load_vector(first[1] + step * strides[1], s.c, s)
    at = first[2] + step * 2 + first[5]
    B = device.load_row(first[3] + step * s.WORDS, s)
    C = device.load_row(first[4] + step * s.WORDS, s)
    return x, raw, tl.load(at), tl.load(at + 1), B, C


@triton.jit
def _prefetch(first, strides, tokens, s):
    """`first` and `strides` as in `_load_token`."""
    device.prefetch(first[0], tokens, strides[0], s.c)
    device.prefetch(first[1], tokens, strides[1], s.c)
    device.prefetch(first[3], tokens, s.WORDS, s.WORDS)
    device.prefetch(first[4], tokens, s.WORDS, s.WORDS)


@triton.jit(do_not_specialize=["t_end", "H"])
def sweep_kernel(
    inputs,  # `Recurrence`
    strides,  # of the samples and tokens of x, B, C, delta and erase
    kept,  # `Kept`, with KEEP written from `rows` on
    h_ptr,  # (f, c, n), written
    y_ptr,  # (b, t, H c), written
    normed_ptr,  # (b, t, H c), written: norm(y_{t-1})
    t_end,
    H,
    s: tl.constexpr,
    CHUNK: tl.constexpr,
    KEEP: tl.constexpr,
    FEEDBACK_EPS: tl.constexpr,
):
    dtype: tl.constexpr = inputs.x.dtype.element_ty
    f = tl.program_id(0).to(tl.int64)
    b, head = f // H, f % H
    p, channels = tl.arange(0, s.P), device.places_of_channels(s)
    A = device.wait_for(device.load_rates(inputs.A_log + head * s.c * s.n, s))
    W_head = inputs.W + head * (2 * s.c * s.c)
    W = (
        _load_weights(W_head, dtype, s),
        _load_weights(W_head + s.c * s.c, dtype, s),
    )
    bias = device.load_vector(inputs.dt_bias + head * s.c, s.c, s).to(tl.float32)
    h, y = device.zeros_like(A), tl.zeros((s.P,), tl.float32)
    if inputs.h0 is not None:
        h = device.wait_for(device.load_memory(inputs.h0 + f * s.c * s.n, 0.0, s))
    if inputs.y0 is not None:
        y = device.load_vector(inputs.y0 + f * s.c, s.c, s).to(tl.float32)
    token = f * t_end
    first = (
        inputs.x + b * strides[0][0] + head * s.c,
        inputs.delta + b * strides[3][0] + head * s.c,
        kept.scalars + token * 2,
        kept.B + token * s.WORDS,
        kept.C + token * s.WORDS,
        device.unknown_zeros(p, t_end, s.P),
    )
    by_token = (strides[0][1], strides[3][1])
    earliest = tl.minimum(tl.arange(0, CHUNK), t_end - 1)
    _prefetch(first, by_token, earliest, s)
    # The next token's rows are loaded as soon as those of a token have been read, in turns into two
    # places: a thread that waits for one load waits for all that it has issued before.
    even = _load_token(first, by_token, 0, s)
    odd = even
    fed = _feed_back(y, W, s, FEEDBACK_EPS)
    for turn in range(0, tl.cdiv(t_end, 2)):
        for half in tl.static_range(2):
            t = 2 * turn + half
            if t < t_end:
                x, raw, B_C, beta, B_words, C_words = even if half == 0 else odd
                before = y
                mixed = x.to(tl.float32) + fed[1]
                delta = activate(raw.to(tl.float32) + bias + fed[0], "softplus")
                # The compiler does not move the next token's loads before this condition.
                if t % CHUNK == 0:
                    if KEEP:
                        slot = f * tl.cdiv(t_end, CHUNK) + t // CHUNK
                        device.store_kept(kept.states + slot * s.SIZE, h, s)
                    later = tl.minimum(t + CHUNK + tl.arange(0, CHUNK), t_end - 1)
                    _prefetch(first, by_token, later, s)
                step = tl.minimum(t + 1, t_end - 1).to(tl.int64)
                row = _load_token(first, by_token, step, s)
                if half == 0:
                    odd = row
                else:
                    even = row
                B, C = device.unpack(B_words, s.V), device.unpack(C_words, s.V)
                decayed = ()
                r = tl.zeros((s.WORDS // s.NL, s.P, s.NL), tl.float32)
                q = r
                for v in tl.static_range(s.V):
                    a = exp2(A[v] * delta[None, :, None]) * h[v]
                    decayed = decayed + (a,)
                    r += a * B[v][:, None, :]
                    q += a * C[v][:, None, :]
                written = delta * mixed - beta * device.over_states(r)
                y = device.over_states(q) + B_C * written
                # the next token depends on this product, and on nothing below but h
                fed_next = _feed_back(y, W, s, FEEDBACK_EPS)
                at = ((b * t_end + t) * H + head) * s.c
                device.put(y_ptr + at, y, channels, s.c, s)
                normed = (before * fed[2]).to(normed_ptr.dtype.element_ty)
                device.put(normed_ptr + at, normed, channels, s.c, s)
                after = ()
                for v in tl.static_range(s.V):
                    after = after + (decayed[v] + written[None, :, None] * B[v][:, None, :],)
                h = after
                if KEEP:
                    at = (token + t) * s.P
                    device.put(kept.rows + at, device.pair(delta, written), channels, s.P, s)
                    device.put(kept.fed + at, device.pair(fed[0], fed[1]), channels, s.P, s)
                    device.put(kept.past + at, device.pair(before, fed[2]), channels, s.P, s)
                fed = fed_next
    device.store_memory(h_ptr + f * s.c * s.n, h, s)


@triton.jit
def _halves(row, j, here, s):
    """The even and the odd ones of n raw values, (u, N / 2) each."""
    even = tl.load(row[:, None] + 2 * j, mask=here[:, None] & (2 * j < s.n), other=0.0)
    odd = tl.load(row[:, None] + 2 * j + 1, mask=here[:, None] & (2 * j + 1 < s.n), other=0.0)
    return even.to(tl.float32), odd.to(tl.float32)


@triton.jit
def _store_unit(ptr, row, j, here, v, s, EPS: tl.constexpr):
    """Write the unit vectors of raw vectors in halves as the words that `unpack` reads; returns the
    values that they hold."""
    inverse = inverse_norm(tl.sum(v[0] * v[0] + v[1] * v[1], 1), s.n * EPS)[:, None]
    even, odd, inside = v[0] * inverse, v[1] * inverse, here[:, None] & (j < s.N)
    if s.V == 4:
        word = nearest_word(even, odd)
        tl.store(ptr + row[:, None] * (s.N // 2) + j, word, mask=inside)
        return high(word), word.to(tl.float32, bitcast=True)
    else:
        at = ptr + row[:, None] * s.N + 2 * j
        tl.store(at, even.to(tl.int32, bitcast=True), mask=inside)
        tl.store(at + 1, odd.to(tl.int32, bitcast=True), mask=inside)
        return even, odd


@triton.jit(do_not_specialize=["count", "t_end", "H"])
def prepare_kernel(
    inputs,  # `Recurrence`
    strides,  # of the samples and tokens of x, B, C, delta and erase
    B_ptr,  # (f, t, words), int32, written
    C_ptr,  # likewise
    scalars_ptr,  # (f, t, 2), written: B C and beta
    count,  # b t
    t_end,
    H,
    s: tl.constexpr,
    UNIT_EPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head, here, j = tl.program_id(1), token < count, tl.arange(0, s.N // 2)[None, :]
    b, t = token // t_end, token % t_end
    row = (b * H + head) * t_end + t
    # all loads first: the compiler moves none of them across a barrier or a store
    B = _halves(inputs.B + b * strides[1][0] + t * strides[1][1] + head * s.n, j, here, s)
    C = _halves(inputs.C + b * strides[2][0] + t * strides[2][1] + head * s.n, j, here, s)
    at = inputs.erase + b * strides[4][0] + t * strides[4][1] + head
    erase = tl.load(at, mask=here, other=0.0).to(tl.float32)
    beta = sigmoid(erase + tl.load(inputs.erase_bias + head).to(tl.float32))
    B = _store_unit(B_ptr, row, j, here, B, s, UNIT_EPS)
    C = _store_unit(C_ptr, row, j, here, C, s, UNIT_EPS)
    tl.store(scalars_ptr + row * 2, tl.sum(B[0] * C[0] + B[1] * C[1], 1), mask=here)
    tl.store(scalars_ptr + row * 2 + 1, beta, mask=here)


@triton.jit
def _unit_vjp(raw_ptr, grad_ptr, inside, s, EPS: tl.constexpr):
    """The cotangents of raw vectors (u, N) from those of their unit vectors."""
    raw = tl.load(raw_ptr, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr, mask=inside, other=0.0)
    inverse = inverse_norm(tl.sum(raw * raw, 1), s.n * EPS)[:, None]
    unit = raw * inverse
    return inverse * (grad - unit * tl.sum(unit * grad, 1)[:, None])


@triton.jit(do_not_specialize=["count", "t_end", "H"])
def finish_kernel(
    inputs,  # `Recurrence`
    strides,  # of the samples and tokens of x, B, C, delta and erase
    kept,  # `Kept`
    adjoint_ptr,  # (f, t, P): pairs of w and the cotangent of `written`
    read_ptr,  # (f, t, P): a B
    unit_B_ptr,  # (f, t, N): the cotangent of the unit B
    unit_C_ptr,  # (f, t, N)
    grad_fed_ptr,  # (b, t, H, 2, c): the cotangents of raw Delta and, written, of x with feedback
    grads,  # as `inputs`, contiguous, of which x, B, C, delta and erase are written
    normed_ptr,  # (b, t, H, c), written: norm(y_{t-1})
    sums_ptr,  # (programs, H, 2, c), written: of dt_bias, and in the first place of erase_bias
    count,  # b t
    t_end,
    H,
    s: tl.constexpr,
    UNIT_EPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head, here = tl.program_id(1), token < count
    p, state = tl.arange(0, s.P)[None, :], tl.arange(0, s.N)[None, :]
    b, t = token // t_end, token % t_end
    row, wide = ((b * H + head) * t_end + t)[:, None], (token * H + head)[:, None]
    states, channels = here[:, None] & (state < s.n), here[:, None] & (p < s.c)
    at = (b * strides[1][0] + t * strides[1][1])[:, None] + head * s.n + state
    grad = _unit_vjp(inputs.B + at, unit_B_ptr + row * s.N + state, states, s, UNIT_EPS)
    store_rounded(grads.B + wide * s.n + state, grad, states)
    at = (b * strides[2][0] + t * strides[2][1])[:, None] + head * s.n + state
    grad = _unit_vjp(inputs.C + at, unit_C_ptr + row * s.N + state, states, s, UNIT_EPS)
    store_rounded(grads.C + wide * s.n + state, grad, states)
    at = row * s.P + p
    delta, _ = unpack(tl.load(kept.rows + at, mask=channels, other=0), 2)
    _, grad_written = unpack(tl.load(adjoint_ptr + at, mask=channels, other=0), 2)
    grad_mixed = delta * grad_written
    fed = grad_fed_ptr + wide * (2 * s.c) + p
    grad_delta = tl.load(fed, mask=channels, other=0.0)
    store_rounded(grads.delta + wide * s.c + p, grad_delta, channels)
    store_rounded(fed + s.c, grad_mixed, channels)
    store_rounded(grads.x + wide * s.c + p, grad_mixed, channels)
    y_past, inverse = unpack(tl.load(kept.past + at, mask=channels, other=0), 2)
    store_rounded(normed_ptr + wide * s.c + p, y_past * inverse, channels)
    read = tl.load(read_ptr + at, mask=channels, other=0.0)
    beta = tl.load(kept.scalars + ((b * H + head) * t_end + t) * 2 + 1, mask=here, other=0.0)
    grad_erase = -tl.sum(read * grad_written, 1) * beta * (1 - beta)
    store_rounded(grads.erase + token * H + head, grad_erase, here)
    channel = tl.arange(0, s.P)
    sums = sums_ptr + ((tl.program_id(0).to(tl.int64) * H + head) * 2) * s.c + channel
    tl.store(sums, tl.sum(grad_delta.to(tl.float32), 0), mask=channel < s.c)
    first = tl.where(channel == 0, tl.sum(grad_erase, 0), 0.0)
    tl.store(sums + s.c, first, mask=channel < s.c)

"""The sweep over the tokens.

    (fed_Delta, fed_x) = W_y norm(y_{t-1});  Delta = softplus(raw + fed_Delta)
    a = exp(A Delta) * h;  written = Delta (x + fed_x) - beta a B
    y = a C + (B C) written;  h = a + written B^T

The chain of a token is y -> W_y norm(y) -> Delta -> a -> a B and a C -> y; B, C, B C and beta are
prepared. All that only a backward reads is computed from what is kept, by `triton_reverse.py`.
Letters: f folded samples, t time, H heads, c channels and n states of a head, P and N: both rounded
up to powers of two; V, NL as in `device.py`.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import FAST, exp2
from bedouin.kernels.device.norms import inverse_norm
from bedouin.kernels.track import device


@triton.jit
def _load_weights(
    ptr,  # (c, c)
    dtype: tl.constexpr, c: tl.constexpr, P: tl.constexpr, NL: tl.constexpr,
):  # fmt: skip
    """W_y of one vector, (P / NL, P, NL) for input ir NL + il of output p."""
    ir, p, il = tl.arange(0, P // NL), tl.arange(0, P)[None, :, None], tl.arange(0, NL)
    i = (ir * NL)[:, None, None] + il[None, None, :]
    return device.load_rounded(ptr + p * c + i, (p < c) & (i < c), dtype)


@triton.jit
def _feed_back(
    y,  # (P,)
    W,  # of Delta and of x
    c: tl.constexpr, P: tl.constexpr, NL: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """W_y norm(y) of Delta and of x, and 1 / rms of y, (P,) each. Each thread computes the norm for
    its channel: a sum of the whole block would cost barriers."""
    before = tl.reshape(y, (P // NL, NL))[:, None, :]
    squares = tl.broadcast_to(before * before, (P // NL, P, NL))
    of_delta = device.over_inputs(W[0] * before, P // NL, P, NL)
    of_x = device.over_inputs(W[1] * before, P // NL, P, NL)
    inverse = inverse_norm(device.over_inputs(squares, P // NL, P, NL) / c, EPS)
    return of_delta * inverse, of_x * inverse, inverse


@triton.jit
def _load_token(
    first,  # pointers to the rows of x, delta, scalars, B, C, and `unknown_zeros` (P,)
    strides,  # of x and delta
    step,  # tokens after it
    c: tl.constexpr, P: tl.constexpr, WORDS: tl.constexpr, NL: tl.constexpr,
):  # fmt: skip
    """What is read of a token, as it is in memory: a conversion would wait for it."""
    x = device.load_vector(first[0] + step * strides[0], c, P)
    raw = device.load_vector(first[1] + step * strides[1], c, P)
    at = first[2] + step * 2 + first[5]
    B = device.load_row(first[3] + step * WORDS, WORDS, NL)
    C = device.load_row(first[4] + step * WORDS, WORDS, NL)
    return x, raw, tl.load(at), tl.load(at + 1), B, C


@triton.jit
def _prefetch(
    first, strides,  # as in `_load_token`
    tokens, c: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    device.prefetch(first[0], tokens, strides[0], c)
    device.prefetch(first[1], tokens, strides[1], c)
    device.prefetch(first[3], tokens, WORDS, WORDS)
    device.prefetch(first[4], tokens, WORDS, WORDS)


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
    c: tl.constexpr,
    n: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    NL: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    KEEP: tl.constexpr,
    FEEDBACK_EPS: tl.constexpr,
):
    WORDS: tl.constexpr = N // V
    SIZE: tl.constexpr = P * N
    dtype: tl.constexpr = inputs.x.dtype.element_ty
    f = tl.program_id(0).to(tl.int64)
    b, head = f // H, f % H
    p, channels = tl.arange(0, P), device.places_of_channels(P, NL)
    A = device.wait_for(device.load_rates(inputs.A_log + head * c * n, c, n, P, N, NL, V), V)
    W_head = inputs.W + head * (2 * c * c)
    W = (
        _load_weights(W_head, dtype, c, P, NL),
        _load_weights(W_head + c * c, dtype, c, P, NL),
    )
    bias = device.load_vector(inputs.dt_bias + head * c, c, P).to(tl.float32)
    h, y = device.zeros_like(A, V), tl.zeros((P,), tl.float32)
    if inputs.h0 is not None:
        h = device.wait_for(device.load_memory(inputs.h0 + f * c * n, 0.0, c, n, P, N, NL, V), V)
    if inputs.y0 is not None:
        y = device.load_vector(inputs.y0 + f * c, c, P).to(tl.float32)
    token = f * t_end
    first = (
        inputs.x + b * strides[0][0] + head * c,
        inputs.delta + b * strides[3][0] + head * c,
        kept.scalars + token * 2,
        kept.B + token * WORDS,
        kept.C + token * WORDS,
        device.unknown_zeros(p, t_end, P),
    )
    by_token = (strides[0][1], strides[3][1])
    earliest = tl.minimum(tl.arange(0, CHUNK), t_end - 1)
    _prefetch(first, by_token, earliest, c, WORDS)
    # The next token's rows are loaded as soon as those of a token have been read, in turns into two
    # places: a thread that waits for one load waits for all that it has issued before.
    even = _load_token(first, by_token, 0, c, P, WORDS, NL)
    odd = even
    fed = _feed_back(y, W, c, P, NL, FEEDBACK_EPS)
    for turn in range(0, tl.cdiv(t_end, 2)):
        for half in tl.static_range(2):
            t = 2 * turn + half
            if t < t_end:
                x, raw, B_C, beta, B_words, C_words = even if half == 0 else odd
                before = y
                mixed = x.to(tl.float32) + fed[1]
                delta = device.softplus(raw.to(tl.float32) + bias + fed[0])
                # The compiler does not move the next token's loads before this condition.
                if t % CHUNK == 0:
                    if KEEP:
                        slot = f * tl.cdiv(t_end, CHUNK) + t // CHUNK
                        device.store_kept(kept.states + slot * SIZE, h, P, N, NL, V)
                    later = tl.minimum(t + CHUNK + tl.arange(0, CHUNK), t_end - 1)
                    _prefetch(first, by_token, later, c, WORDS)
                step = tl.minimum(t + 1, t_end - 1).to(tl.int64)
                row = _load_token(first, by_token, step, c, P, WORDS, NL)
                if half == 0:
                    odd = row
                else:
                    even = row
                B, C = device.unpack(B_words, V), device.unpack(C_words, V)
                decayed = ()
                r = tl.zeros((WORDS // NL, P, NL), tl.float32)
                q = r
                for v in tl.static_range(V):
                    a = exp2(A[v] * delta[None, :, None], FAST) * h[v]
                    decayed = decayed + (a,)
                    r += a * B[v][:, None, :]
                    q += a * C[v][:, None, :]
                written = delta * mixed - beta * device.over_states(r)
                y = device.over_states(q) + B_C * written
                # the next token depends on this product, and on nothing below but h
                fed_next = _feed_back(y, W, c, P, NL, FEEDBACK_EPS)
                at = ((b * t_end + t) * H + head) * c
                device.put(y_ptr + at, y, channels, c, P, NL)
                normed = (before * fed[2]).to(normed_ptr.dtype.element_ty)
                device.put(normed_ptr + at, normed, channels, c, P, NL)
                after = ()
                for v in tl.static_range(V):
                    after = after + (decayed[v] + written[None, :, None] * B[v][:, None, :],)
                h = after
                if KEEP:
                    at = (token + t) * P
                    device.put(kept.rows + at, device.pair(delta, written), channels, P, P, NL)
                    device.put(kept.fed + at, device.pair(fed[0], fed[1]), channels, P, P, NL)
                    device.put(kept.past + at, device.pair(before, fed[2]), channels, P, P, NL)
                fed = fed_next
    device.store_memory(h_ptr + f * c * n, h, c, n, P, N, NL, V)

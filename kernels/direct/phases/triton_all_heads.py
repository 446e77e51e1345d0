"""A W^y that reads the outputs of all heads of a sample, token by token, beside phases S and R.

Such a W^y is the work of many programs, so that a token is a product (`feed_kernel`) and phase S of
this token alone, and backwards phase R of this token and the transposed product
(`feed_adjoint_kernel`); q, which phase R replays beside its tokens elsewhere, has a kernel of its
own (`replay_kernel`).

Sample i of head k is sample k S + i of the batch. Letters as in `triton_sweep.py`; H heads, S
samples of a head.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# Tuples that grow are tuples of other types.
# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.norms import inverse_norm
from bedouin.kernels.direct.phases.device import (
    load_states,
    pack,
    places_of_states,
    store_words,
    unpack,
)
from bedouin.kernels.direct.phases.triton_reverse import load_replayed, replay


@triton.jit
def products(
    v,  # (G, SAMPLES, K)
    W,  # (G, K, N)
    FAST: tl.constexpr,
):  # fmt: skip
    """The sum of G products (SAMPLES, N), which the warps share, of v rounded to the dtype of W."""
    v = v.to(W.dtype)
    if FAST:
        found = tl.dot(v, W, input_precision="ieee")
    else:
        # the interpreter cannot multiply bfloat16
        found = tl.dot(v.to(tl.float32), W.to(tl.float32))
    return tl.sum(found, 0)


@triton.jit
def load_before(
    y_ptr, y0_ptr,
    row, start, tokens, p,
    inside,  # which channels are read
    d: tl.constexpr,
):  # fmt: skip
    """y before token `start` of the rows of the batch."""
    in_first = inside & (p < tl.where(start == 0, d, 0))
    in_later = inside & (p < tl.where(start == 0, 0, d))
    at = (row * tokens + tl.maximum(start - 1, 0)) * d + p
    first = tl.load(y0_ptr + row * d + p, mask=in_first, other=0.0)
    return first + tl.load(y_ptr + at, mask=in_later, other=0.0)


@triton.jit(do_not_specialize=["start", "heads", "samples", "tokens"])
def feed_kernel(
    x_ptr,  # (b, t, d)
    raw_ptr,  # (b, t, r), of which the first d are those of Delta
    W_ptr,  # (H, FEEDS d, H d), contiguous
    y0_ptr,  # (b, d)
    y_ptr,  # (b, t, d)
    x_fed_ptr,  # (b, t, d), written with OF_X: x + W^y norm(y_{t-1})
    raw_fed_ptr,  # (b, t, d), written with OF_DELTA, likewise
    start,  # the token
    heads,
    samples,  # of a head
    tokens,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    d: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,  # heads that are read at once
    OUTPUTS: tl.constexpr,  # of a program
    SAMPLES: tl.constexpr,  # likewise
    OF_DELTA: tl.constexpr,
    OF_X: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Some outputs of one fed vector of a head, for some samples."""
    FEEDS: tl.constexpr = OF_DELTA + OF_X
    PARTS: tl.constexpr = P // OUTPUTS
    part, vector = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS % FEEDS
    head = tl.program_id(0) // (PARTS * FEEDS)
    sample = tl.program_id(1) * SAMPLES + tl.arange(0, SAMPLES)
    out = part * OUTPUTS + tl.arange(0, OUTPUTS)
    p, group = tl.arange(0, P)[None, None, :], tl.arange(0, GROUP)[:, None, None]
    real = (sample < samples)[None, :, None]
    outputs = W_ptr + ((head * FEEDS + vector) * d + out)[None, None, :] * (heads * d)
    q = tl.arange(0, P)[None, :, None]
    fed = tl.zeros((SAMPLES, OUTPUTS), tl.float32)
    for first in range(0, heads, GROUP):
        other = first + group
        row = (other * samples + sample[None, :, None]).to(tl.int64)
        y = load_before(y_ptr, y0_ptr, row, start, tokens, p, real & (other < heads), d)
        if NORM:
            y = y * inverse_norm(tl.sum(y * y, 2) / d, NORM_EPS)[:, :, None]
        inside = (other < heads) & (q < d) & (out < d)[None, None, :]
        W = tl.load(outputs + other * d + q, mask=inside, other=0.0)
        fed += products(y, W, FAST)
    row = (head * samples + sample).to(tl.int64)[:, None]
    inside = (sample < samples)[:, None] & (out < d)[None, :]
    to = (row * tokens + start) * d + out[None, :]
    if vector < OF_DELTA:
        at = raw_ptr + row * raw_stride_b + start * raw_stride_t + out[None, :]
        tl.store(raw_fed_ptr + to, fed + tl.load(at, mask=inside, other=0.0), mask=inside)
    else:
        at = x_ptr + row * x_stride_b + start * x_stride_t + out[None, :]
        tl.store(x_fed_ptr + to, fed + tl.load(at, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["start", "heads", "samples", "tokens"])
def feed_adjoint_kernel(
    fed_ptr,  # (b, t, 2, d), the cotangents of raw Delta and of x
    W_ptr,  # (H, FEEDS d, H d), contiguous
    y0_ptr,  # (b, d)
    y_ptr,  # (b, t, d)
    w_ptr,  # (b, t, d): grad_y, to which W^y^T is added; the cotangent of y
    grad_y0_ptr,  # (b, d), written by the first token
    start,  # the token
    heads,
    samples,  # of a head
    tokens,
    d: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,  # fed vectors that are read at once
    SAMPLES: tl.constexpr,  # of a program
    OF_DELTA: tl.constexpr,
    OF_X: tl.constexpr,
    NORM: tl.constexpr,
    NORM_EPS: tl.constexpr,
    FAST: tl.constexpr,
):
    """The cotangent of y_{t-1} of some samples of a head."""
    FEEDS: tl.constexpr = OF_DELTA + OF_X
    own, p = tl.program_id(0), tl.arange(0, P)[None, :]
    sample = tl.program_id(1) * SAMPLES + tl.arange(0, SAMPLES)
    group, out = tl.arange(0, GROUP)[:, None, None], tl.arange(0, P)[None, None, :]
    real = (sample < samples)[None, :, None]
    q = tl.arange(0, P)[None, :, None]
    grad = tl.zeros((SAMPLES, P), tl.float32)
    for first in range(0, heads * FEEDS, GROUP):
        one = first + group
        row = (one // FEEDS * samples + sample[None, :, None]).to(tl.int64)
        vector = one % FEEDS + (1 - OF_DELTA)
        known = one < heads * FEEDS
        at = fed_ptr + ((row * tokens + start) * 2 + vector) * d + out
        given = tl.load(at, mask=real & known & (out < d), other=0.0)
        at = W_ptr + (one * d + q) * (heads * d) + own * d + out
        W = tl.load(at, mask=known & (q < d) & (out < d), other=0.0)
        grad += products(given, W, FAST)
    row = (own * samples + sample).to(tl.int64)[:, None]
    inside = (sample < samples)[:, None] & (p < d)
    if NORM:
        y = load_before(y_ptr, y0_ptr, row, start, tokens, p, inside, d)
        inverse = inverse_norm(tl.sum(y * y, 1) / d, NORM_EPS)[:, None]
        along = (tl.sum(grad * y, 1) / d)[:, None]
        grad = inverse * (grad - y * inverse * inverse * along)
    if start == 0:
        tl.store(grad_y0_ptr + row * d + p, grad, mask=inside)
    else:
        at = w_ptr + (row * tokens + start - 1) * d + p
        tl.store(at, grad + tl.load(at, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["chunk", "tokens", "per_head", "one"])
def replay_kernel(
    kept_ptr,  # (b, t, ROWS, P)
    B_ptr,  # (b, t, N / V), words
    A_ptr,  # (H, n, d), log2(e) A
    states_ptr,  # (b, ceil(t / KEEP), N, P)
    scratch_ptr,  # (b, KEEP, N P / V), int64, written: q
    chunk,
    tokens,
    per_head,
    one,
    d: tl.constexpr,
    n: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    NL: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    KEEP: tl.constexpr,
    FULL: tl.constexpr,
    FAST: tl.constexpr,
):
    """q of the tokens of a chunk of a sample of a head."""
    SIZE: tl.constexpr = P * N
    WORDS: tl.constexpr = N // V
    sample = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, P)
    words = (tl.arange(0, WORDS // NL) * NL)[:, None] + tl.arange(0, NL)[None, :]
    A = load_states(A_ptr + sample // per_head * n * d, one, d, n, P, N, NL, V)
    places = places_of_states(one, P, N, NL, V)
    chunks = tl.cdiv(tokens, KEEP)
    # chunks are counted from the end: the first may be shorter than the others
    start = tokens - (chunks - chunk) * KEEP
    h = load_states(states_ptr + (sample * chunks + chunk) * SIZE, one, P, N, P, N, NL, V)
    scratch = scratch_ptr + sample * KEEP * (SIZE // V)
    for i in range(tl.maximum(-start, 0), KEEP):
        delta, written, B_words = load_replayed(
            kept_ptr, B_ptr, sample * tokens + start + i, True, words, p, P, ROWS, WORDS
        )
        h, q = replay(h, A, delta, written, unpack(B_words, V, True), V, FULL, FAST)
        store_words(scratch + i * (SIZE // V), places, pack(q, V, FAST))

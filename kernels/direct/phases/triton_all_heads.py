"""Feedback of all heads: the kernels beside phases S and R for a W^y that reads every head's y.

One program cannot hold such a W^y. So a token takes two launches: the product with W^y
(`feed_kernel`), and phase S of this token. In the backward pass they are phase R of this token, and
the product with the transposed W^y (`feed_adjoint_kernel`). `replay_chunk_kernel` computes q for a
chunk of tokens; a phase R of all tokens does that itself.

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
def add_product(
    v,  # (SAMPLES, GROUP, P)
    W,  # (GROUP P, OUTPUTS)
    total,  # (SAMPLES, OUTPUTS)
    FAST: tl.constexpr,
):  # fmt: skip
    """total + v W, with v rounded to the dtype of W."""
    v = tl.reshape(v.to(W.dtype), (v.shape[0], W.shape[0]))
    if FAST:
        return tl.dot(v, W, total, input_precision="ieee")
    else:
        # the interpreter cannot multiply bfloat16
        return tl.dot(v.to(tl.float32), W.to(tl.float32), total)


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
    group, p = tl.arange(0, GROUP)[None, :, None], tl.arange(0, P)[None, None, :]
    row_of = sample[:, None, None]
    # before the first token there is y0
    in_first, in_later = tl.where(start == 0, d, 0), tl.where(start == 0, 0, d)
    column = tl.arange(0, GROUP * P)[:, None]
    outputs = W_ptr + ((head * FEEDS + vector) * d + out)[None, :] * (heads * d)
    fed = tl.zeros((SAMPLES, OUTPUTS), tl.float32)
    for first in range(0, heads, GROUP):
        row = ((first + group) * samples + row_of).to(tl.int64)
        real = (row_of < samples) & (first + group < heads)
        y = tl.load(y0_ptr + row * d + p, mask=real & (p < in_first), other=0.0)
        at = y_ptr + (row * tokens + tl.maximum(start - 1, 0)) * d + p
        y += tl.load(at, mask=real & (p < in_later), other=0.0)
        if NORM:
            y = y * inverse_norm(tl.sum(y * y, 2) / d, NORM_EPS)[:, :, None]
        head_of, of_head = first + column // P, column % P
        inside = (head_of < heads) & (of_head < d) & (out < d)[None, :]
        W = tl.load(outputs + head_of * d + of_head, mask=inside, other=0.0)
        fed = add_product(y, W, fed, FAST)
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
    grad_ptr,  # (b, d), written: the cotangent of norm(y_{t-1})
    start,  # the token
    heads,
    samples,  # of a head
    tokens,
    d: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,  # fed vectors that are read at once
    OUTPUTS: tl.constexpr,  # channels of a program
    SAMPLES: tl.constexpr,  # likewise
    OF_DELTA: tl.constexpr,
    OF_X: tl.constexpr,
    FAST: tl.constexpr,
):
    """Some channels of a head, for some samples."""
    FEEDS: tl.constexpr = OF_DELTA + OF_X
    PARTS: tl.constexpr = P // OUTPUTS
    part, head = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    sample = tl.program_id(1) * SAMPLES + tl.arange(0, SAMPLES)
    own = part * OUTPUTS + tl.arange(0, OUTPUTS)
    group, p = tl.arange(0, GROUP)[None, :, None], tl.arange(0, P)[None, None, :]
    row_of = sample[:, None, None]
    column = tl.arange(0, GROUP * P)[:, None]
    grad = tl.zeros((SAMPLES, OUTPUTS), tl.float32)
    for first in range(0, heads * FEEDS, GROUP):
        vector = first + group
        row = (vector // FEEDS * samples + row_of).to(tl.int64)
        at = ((row * tokens + start) * 2 + vector % FEEDS + (1 - OF_DELTA)) * d + p
        real = (row_of < samples) & (vector < heads * FEEDS) & (p < d)
        fed = tl.load(fed_ptr + at, mask=real, other=0.0)
        vector_of, of_vector = first + column // P, column % P
        inside = (vector_of < heads * FEEDS) & (of_vector < d) & (own < d)[None, :]
        at = (vector_of * d + of_vector) * (heads * d) + head * d + own[None, :]
        W = tl.load(W_ptr + at, mask=inside, other=0.0)
        grad = add_product(fed, W, grad, FAST)
    row = (head * samples + sample)[:, None]
    inside = (sample < samples)[:, None] & (own < d)[None, :]
    tl.store(grad_ptr + row * d + own[None, :], grad, mask=inside)


@triton.jit(do_not_specialize=["chunk", "tokens", "per_head", "one"])
def replay_chunk_kernel(
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

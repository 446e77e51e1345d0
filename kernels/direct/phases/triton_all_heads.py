"""Feedback of all heads: the kernels beside phases S and R for a W^y that reads every head's y.

One program cannot hold such a W^y. So a token takes two launches: the product with W^y
(`feed_kernel`), and phase S of this token. In the backward pass they are phase R of this token, and
the product with the transposed W^y (`feed_kernel` again). A program of the product reads the part
of W^y that belongs to a few heads, so that all multiprocessors read at the same time; S and R add
the sums. `replay_chunk_kernel` computes q for a chunk of tokens; a phase R of all tokens does that
itself.

Sample i of head k is sample k S + i of the batch. Letters as in `triton_sweep.py`; H heads, S
samples of a head.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.norms import inverse_norm
from bedouin.kernels.device.sync import await_launch
from bedouin.kernels.direct.phases.device import load_states, pack, places_of_states, unpack
from bedouin.kernels.direct.phases.triton_reverse import load_replayed, replay
from bedouin.kernels.track.device import store_words


@triton.jit
def add_product(
    v,  # (SAMPLES, GROUP, P)
    W,  # (GROUP P, P)
    total,  # (SAMPLES, P)
    FAST: tl.constexpr,
):  # fmt: skip
    """total + v W, with v rounded to the dtype of W."""
    v = tl.reshape(v.to(W.dtype), (v.shape[0], W.shape[0]))
    if FAST:
        return tl.dot(v, W, total, input_precision="ieee")
    else:
        # the interpreter cannot multiply bfloat16
        return tl.dot(v.to(tl.float32), W.to(tl.float32), total)


@triton.jit(do_not_specialize=["start", "heads", "samples", "each"])
def feed_kernel(
    v_ptr,  # (b, t, VECTORS or 1, d)
    v0_ptr,  # (b, d), with EARLIER
    W_ptr,  # (H, VECTORS, d, H d), contiguous
    product_ptr,  # (splits, VECTORS, b, d), written: the products, as sums over the splits
    start,  # the token
    heads,
    samples,  # of a head
    each,  # heads that a program reads, a multiple of GROUP
    v_stride_b,
    v_stride_t,
    d: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,  # heads that are read at once
    SAMPLES: tl.constexpr,  # of a program
    VECTORS: tl.constexpr,  # vectors of a head that have a W^y of their own
    EARLIER: tl.constexpr,  # v is that of the token before, and v0 before the first token
    NORM: tl.constexpr,  # whether v is normalized
    NORM_EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
    FAST: tl.constexpr,
):
    """The product of one vector of a head with some heads' part of W^y, for some samples.

    With EARLIER all vectors of a token have the same v, else each one its own.
    """
    head, vector = tl.program_id(0) // VECTORS, tl.program_id(0) % VECTORS
    split = tl.program_id(1)
    sample = tl.program_id(2) * SAMPLES + tl.arange(0, SAMPLES)
    out = tl.arange(0, P)
    group, p = tl.arange(0, GROUP)[None, :, None], tl.arange(0, P)[None, None, :]
    row_of = sample[:, None, None]
    column = tl.arange(0, GROUP * P)[:, None]
    outputs = W_ptr + (tl.program_id(0) * d + out)[None, :] * (heads * d)
    time = start
    inside_row = p < d
    if EARLIER:
        time = tl.maximum(start - 1, 0)
        inside_row = p < tl.where(start == 0, 0, d)
    v_at = v_ptr + time.to(tl.int64) * v_stride_t
    if not EARLIER:
        v_at += vector * d
    total = tl.zeros((SAMPLES, P), tl.float32)
    for first in range(split * each, tl.minimum(split * each + each, heads), GROUP):
        head_of, of_head = first + column // P, column % P
        inside = (head_of < heads) & (of_head < d) & (out < d)[None, :]
        W = tl.load(outputs + head_of * d + of_head, mask=inside, other=0.0)
        await_launch(OVERLAP)
        row = ((first + group) * samples + row_of).to(tl.int64)
        real = (row_of < samples) & (first + group < heads)
        v = tl.load(v_at + row * v_stride_b + p, mask=real & inside_row, other=0.0).to(tl.float32)
        if EARLIER:
            in_first = p < tl.where(start == 0, d, 0)
            v += tl.load(v0_ptr + row * d + p, mask=real & in_first, other=0.0)
        if NORM:
            v = v * inverse_norm(tl.sum(v * v, 2) / d, NORM_EPS)[:, :, None]
        total = add_product(v, W, total, FAST)
    row = (head * samples + sample)[:, None]
    inside = (sample < samples)[:, None] & (out < d)[None, :]
    to = (split * VECTORS + vector).to(tl.int64) * (heads * samples * d) + row * d + out[None, :]
    tl.store(product_ptr + to, total, mask=inside)


@triton.jit(do_not_specialize=["chunk", "tokens", "per_head"])
def replay_chunk_kernel(
    kept_ptr,  # (b, t, 2, P)
    B_ptr,  # (b, t, N / V), words
    A_ptr,  # (H, n, d), log2(e) A
    states_ptr,  # (b, ceil(t / KEEP), N, P)
    scratch_ptr,  # (b, KEEP, N P / V), int64, written: q
    chunk,
    tokens,
    per_head,
    d: tl.constexpr,
    n: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    NL: tl.constexpr,
    V: tl.constexpr,
    KEEP: tl.constexpr,
    FULL: tl.constexpr,
    FAST: tl.constexpr,
):
    """q of the tokens of a chunk of a sample of a head."""
    SIZE: tl.constexpr = P * N
    WORDS: tl.constexpr = N // V
    sample = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, P)
    A = load_states(A_ptr + sample // per_head * n * d, d, n, P, N, NL, V)
    places = places_of_states(P, N, NL, V)
    chunks = tl.cdiv(tokens, KEEP)
    # chunks are counted from the end: the first may be shorter than the others
    start = tokens - (chunks - chunk) * KEEP
    h = load_states(states_ptr + (sample * chunks + chunk) * SIZE, P, N, P, N, NL, V)
    scratch = scratch_ptr + sample * KEEP * (SIZE // V)
    for i in range(tl.maximum(-start, 0), KEEP):
        delta, written, B_words = load_replayed(
            kept_ptr, B_ptr, sample * tokens + start + i, True, p, P, WORDS, NL
        )
        h, q = replay(h, A, delta, written, unpack(B_words, V, True), V, FULL, FAST)
        store_words(scratch + i * (SIZE // V), places, pack(q, V, FAST))

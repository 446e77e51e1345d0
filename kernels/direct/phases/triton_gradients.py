"""Phase G: the gradients of A, B and C, of many chunks of tokens at once.

From h and its cotangent at the edges of a chunk, which phases S and R have kept, as the backward
pass of an ordinary scan. With dH = H + w C^T the cotangent of h_t:

    B_ = dH^T written,   C_ = h_t^T w,   A_ += dH * Delta (d lambda / d (A Delta)) h_{t-1}

A program has a sample of a head, some chunks and S of the states. It goes through a chunk once to
keep the h before every token in scratch memory, in the dtype of x, and then back. Its memory is a
tuple of V tensors (PR, S, PL) for channel (pr PL + pl) V + v: sums over channels are sums in a
thread and log2(PL) shuffles.
Letters as in `triton_sweep.py`.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.discretize import build_decay
from bedouin.kernels.direct.phases.device import pack, put, reach_of, unpack
from bedouin.kernels.track.device import (
    load_words,
    over_states,
    places_of_channels,
    prefetch,
    store_words,
    wait_for,
)


@triton.jit
def load_values(
    ptr,  # int32 words of B or C
    n, V: tl.constexpr,
):  # fmt: skip
    """The words of B or C that have the states n."""
    return tl.load(ptr + (n if V == 2 else n // 2))


@triton.jit
def values_of(
    word,  # of `load_values`
    n, V: tl.constexpr,
):  # fmt: skip
    """B or C of the states n, (1, S, 1)."""
    if V == 4:
        word = tl.where(n % 2 == 0, word << 16, word)
    return word.to(tl.float32, bitcast=True)[None, :, None]


@triton.jit
def load_vector(
    ptr,  # words of two float32
    places, V: tl.constexpr,
):  # fmt: skip
    """A vector of a token, a tuple of V parts (PR, PL)."""
    if V == 2:
        return unpack(tl.load(ptr + places), 2, False)
    else:
        words = tl.load((ptr + places * 2)[:, :, None] + tl.arange(0, 2)[None, None, :])
        first, second = tl.split(words)
        return unpack(first, 2, False) + unpack(second, 2, False)


@triton.jit
def load_replayed(
    rows,  # pointers to kept rows and to B, of the first token of a sample
    t, t_end, places, state,
    P: tl.constexpr, INTS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Delta, written and words of B of the token t, or of the next one that there is."""
    token = tl.minimum(tl.maximum(t, 0), t_end - 1).to(tl.int64)
    row = rows[0] + token * P
    delta, written = load_vector(row, places, V), load_vector(row + P // 2, places, V)
    return delta, written, load_values(rows[1] + token * INTS, state, V)


@triton.jit
def load_pair(
    rows, t, t_end, places, state,
    P: tl.constexpr, INTS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """`load_replayed` of the tokens t and t + 1."""
    first = load_replayed(rows, t, t_end, places, state, P, INTS, V)
    return first, load_replayed(rows, t + 1, t_end, places, state, P, INTS, V)


@triton.jit
def load_token(
    rows,  # pointers to kept rows, adjoint rows, B and C, of the first token of a sample
    t, places, state,
    P: tl.constexpr, INTS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Delta, written, w, and words of B and C of the token t, or of the first one."""
    token = tl.maximum(t, 0).to(tl.int64)
    row, adjoint = rows[0] + token * P, rows[1] + token * P
    delta, written = load_vector(row, places, V), load_vector(row + P // 2, places, V)
    w, B = load_vector(adjoint, places, V), load_values(rows[2] + token * INTS, state, V)
    return delta, written, w, B, load_values(rows[3] + token * INTS, state, V)


@triton.jit
def _prefetch(
    rows,  # as in `load_token`, and pointers to kept h and H
    start,  # the first token of the chunk
    hidden,  # the states
    slot,  # where h and H of the chunk are
    P: tl.constexpr, INTS: tl.constexpr, S: tl.constexpr, N: tl.constexpr, KEEP: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """What a program reads of a chunk."""
    token = tl.maximum(start + tl.arange(0, KEEP), 0)
    for i in tl.static_range(2):
        prefetch(rows[i], token, P, P, FAST)
        prefetch(rows[2 + i], token, INTS, S * INTS // N, FAST)
        prefetch(rows[4 + i] + slot, hidden, P, P, FAST)


@triton.jit(do_not_specialize=["t_end", "per_head", "splits", "per_split"])
def gradient_kernel(
    kept_ptr,  # (b, t, 2, P / 2), int64
    adjoint_ptr,  # (b, t, 2, P / 2), int64
    B_ptr,  # (b, t, N / V 2), int32
    C_ptr,  # likewise
    A_ptr,  # (H, n, d), log2(e) A
    states_ptr,  # (b, ceil(t / KEEP), N, P)
    edges_ptr,  # likewise
    scratch_ptr,  # (programs, KEEP, S P / V), int64
    grad_B_ptr,  # (b, t, N), written
    grad_C_ptr,  # (b, t, N), written
    grad_A_ptr,  # (b, splits, n, d), written
    per_head,
    t_end,
    splits,
    per_split,  # chunks
    d: tl.constexpr,
    n: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,  # states of a program
    PL: tl.constexpr,
    V: tl.constexpr,
    KEEP: tl.constexpr,
    FULL: tl.constexpr,
    FAST: tl.constexpr,
):
    """Some chunks of a sample of a head, and S of the states."""
    PR: tl.constexpr = P // (PL * V)
    SIZE: tl.constexpr = P * N
    WORDS: tl.constexpr = S * P // V
    INTS: tl.constexpr = N // V * 2  # int32 words of B
    PARTS: tl.constexpr = N // S
    chunks = tl.cdiv(t_end, KEEP)
    state, pr, pl = tl.arange(0, S), tl.arange(0, PR), tl.arange(0, PL)
    vector = (pr * PL)[:, None] + pl[None, :]
    states = places_of_channels(S, PL)
    channel = ((pr * PL)[:, None, None] + pl[None, None, :]) * V
    places = state[None, :, None] * PL + pl[None, None, :], (pr * (S * PL))[:, None, None]
    scratch = scratch_ptr + tl.program_id(0).to(tl.int64) * (KEEP * WORDS)
    # programs of the same rows run at the same time, and find them in the L2 cache
    part, own = tl.program_id(0) % PARTS, (tl.program_id(0) // PARTS).to(tl.int64)
    sample, split = own // splits, (own % splits).to(tl.int32)
    head, hidden = sample // per_head, part * S + state
    edges = hidden[None, :, None] * P + V * pl[None, None, :], (pr * (V * PL))[:, None, None]
    A = ()
    grad_A = ()
    for v in tl.static_range(V):
        at = A_ptr + head * n * d + hidden[None, :, None] * d + (channel + v)
        inside = (hidden[None, :, None] < n) & (channel + v < d)
        A = A + (tl.load(at, mask=inside, other=0.0),)
        grad_A = grad_A + (tl.zeros((PR, S, PL), tl.float32),)
    first = sample * t_end
    rows = (
        kept_ptr + first * P,
        adjoint_ptr + first * P,
        B_ptr + first * INTS + part * (S * INTS // N),  # those of the states of this program
        C_ptr + first * INTS + part * (S * INTS // N),
        states_ptr,
        edges_ptr,
    )
    replayed = (rows[0], rows[2])
    begin = split * per_split
    slot = (sample * chunks + begin) * SIZE
    _prefetch(rows, t_end - (chunks - begin) * KEEP, hidden, slot, P, INTS, S, N, KEEP, FAST)
    last = tl.minimum((split + 1) * per_split, chunks)
    for chunk in range(begin, last):
        # Chunks are counted from the end: the first may begin before the first token.
        start = t_end - (chunks - chunk) * KEEP
        slot = (sample * chunks + chunk) * SIZE
        h = ()
        H = ()
        for v in tl.static_range(V):
            h = h + (load_words(states_ptr + (slot + v), edges),)
            H = H + (load_words(edges_ptr + (slot + v), edges),)
        h = wait_for(h, V)
        if chunk + 1 < last:
            _prefetch(rows, start + KEEP, hidden, slot + SIZE, P, INTS, S, N, KEEP, FAST)
        # What comes next is loaded as soon as what is there has been read, in turns in two places:
        # a thread that waits for one load waits for all that it has issued before.
        even = load_pair(replayed, start, t_end, vector, state, P, INTS, V)
        odd = even
        for four in range(0, KEEP // 4):
            for i in tl.static_range(2):
                place = 4 * four + 2 * i
                pair = even if i == 0 else odd
                decayed = build_decay(A[0] * pair[0][0][0][:, None, :], FULL, FAST) * h[0]
                # The compiler moves neither the loads before this condition nor this product, which
                # waits for the present tokens, behind it.
                if start + place + 2 < t_end:
                    loaded = load_pair(
                        replayed, start + place + 2, t_end, vector, state, P, INTS, V
                    )
                    if i == 0:
                        odd = loaded
                    else:
                        even = loaded
                for j in tl.static_range(2):
                    if start + place + j >= 0:
                        store_words(scratch + (place + j) * WORDS, places, pack(h, V, FAST))
                        delta, written, word = pair[j]
                        B = values_of(word, state, V)
                        after = ()
                        for v in tl.static_range(V):
                            if v + j > 0:
                                decayed = (
                                    build_decay(A[v] * delta[v][:, None, :], FULL, FAST) * h[v]
                                )
                            after = after + (decayed + written[v][:, None, :] * B,)
                        h = after
        t = start + KEEP - 1
        even = load_token(rows, t, vector, state, P, INTS, V)
        even_h = load_words(scratch + (KEEP - 1) * WORDS, places)
        odd, odd_h = even, even_h
        for pair in range(0, KEEP // 2):
            for i in tl.static_range(2):
                place = KEEP - 1 - 2 * pair - i
                t = start + place
                delta, written, w, B, C = even if i == 0 else odd
                h = unpack(even_h if i == 0 else odd_h, V, False)
                B, C = values_of(B, state, V), values_of(C, state, V)
                first_decay = build_decay(A[0] * delta[0][:, None, :], FULL, FAST)
                # as above, between what waits for the present token and the next loads
                if t > 0:
                    token = load_token(rows, t - 1, vector, state, P, INTS, V)
                    memory = load_words(scratch + tl.maximum(place - 1, 0) * WORDS, places)
                    if i == 0:
                        odd, odd_h = token, memory
                    else:
                        even, even_h = token, memory
                if t >= 0:
                    grad_B = tl.zeros((PR, S, PL), tl.float32)
                    grad_C = grad_B
                    before = ()
                    sums = ()
                    for v in tl.static_range(V):
                        w_v, by = w[v][:, None, :], written[v][:, None, :]
                        delta_v = delta[v][:, None, :]
                        decay = first_decay
                        if v > 0:
                            decay = build_decay(A[v] * delta_v, FULL, FAST)
                        a = decay * h[v]
                        grad_h = H[v] + w_v * C
                        grad_B += grad_h * by
                        grad_C += (a + by * B) * w_v
                        reached = reach_of(decay, FULL) * h[v] if FULL else a
                        sums = sums + (grad_A[v] + grad_h * reached * delta_v,)
                        before = before + (grad_h * decay,)
                    H, grad_A = before, sums
                    to = (first + t) * N + part * S
                    put(grad_B_ptr + to, over_states(grad_B), states, states < S, True, S, PL)
                    put(grad_C_ptr + to, over_states(grad_C), states, states < S, True, S, PL)
    for v in tl.static_range(V):
        at = grad_A_ptr + own * n * d + hidden[None, :, None] * d + (channel + v)
        tl.store(at, grad_A[v], mask=(hidden[None, :, None] < n) & (channel + v < d))

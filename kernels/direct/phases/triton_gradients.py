"""Phase G: the gradients of A, B and C, of many chunks of tokens at once.

From h and its cotangent at the edges of a chunk, which phases S and R have kept, as the backward
pass of an ordinary scan. With dH = H + w C^T the cotangent of h_t, and `erased` that of r, which is
-beta^e times that of `written`:

    B_ = dH^T written + a^T erased,   C_ = h_t^T w,
    A_ += (dH + erased B^T) * Delta (d lambda / d (A Delta)) h_{t-1}

A program has a sample of a head and some chunks. Its memory is a tuple of two tensors (PR, N, PL)
for channel (pr PL + pl) 2 + u: sums over channels are sums in a thread and log2(PL) shuffles.
Letters as in `triton_sweep.py`.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# Tuples that grow are tuples of other types.
# mypy: disable-error-code="assignment, misc, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.discretize import build_decay
from bedouin.kernels.direct.phases.device import (
    high,
    join_words,
    over_states,
    places_of_channels,
    prefetch,
    put,
    reach_of,
    unpack,
    word_of_two,
)


@triton.jit
def load_values(
    ptr,  # int32 words of B or C
    n, V: tl.constexpr,
):  # fmt: skip
    """B or C of the states n, from words that `unpack` reads."""
    if V == 2:
        return tl.load(ptr + n).to(tl.float32, bitcast=True)
    else:
        word = tl.load(ptr + n // 2)
        return tl.where(n % 2 == 0, word << 16, word).to(tl.float32, bitcast=True)


@triton.jit
def load_pair(ptr, words, HALF: tl.constexpr):
    """Two vectors of a token that lie side by side, as words of two float32."""
    return tl.load(ptr + words), tl.load(ptr + HALF + words)


@triton.jit(do_not_specialize=["one", "t_end", "per_head", "per_program"])
def gradient_kernel(
    kept_ptr,  # (b, t, ROWS, P / 2), int64
    adjoint_ptr,  # (b, t, 2, P / 2), int64
    scalars_ptr,  # (b, t, SCALARS): B C, beta^e and others
    B_ptr,  # (b, t, N / V 2), int32
    C_ptr,  # likewise
    A_ptr,  # (H, n, d), log2(e) A
    states_ptr,  # (b, ceil(t / KEEP), N P)
    edges_ptr,  # likewise
    scratch_ptr,  # (programs, KEEP, S P / 2), int64, or int32 for V = 4
    grad_B_ptr,  # (b, t, N), written
    grad_C_ptr,  # (b, t, N), written
    grad_A_ptr,  # (b, splits, n, d), written
    per_head,
    t_end,
    one,
    per_program,  # chunks
    d: tl.constexpr,
    n: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,  # states of a program
    PL: tl.constexpr,
    NL: tl.constexpr,  # of the kept memory
    V: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    SCALARS: tl.constexpr,
    FULL: tl.constexpr,
    ERASE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Some chunks of a sample of a head, and S of the states."""
    PR: tl.constexpr = P // (PL * 2)
    SIZE: tl.constexpr = P * N
    HALF: tl.constexpr = P // 2
    INTS: tl.constexpr = N // V * 2  # int32 words of B
    sample, split, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    head, own = sample // per_head, sample * tl.num_programs(1) + split
    chunks = tl.cdiv(t_end, KEEP)
    state, pr, pl = part * S + tl.arange(0, S), tl.arange(0, PR), tl.arange(0, PL)
    words = (pr * PL)[:, None] + pl[None, :]
    inner, lane_of = tl.arange(0, S) * one, pl * one
    hidden = part * S + inner
    states, lane = places_of_channels(one, S, PL)
    channel = ((pr * PL)[:, None, None] + lane_of[None, None, :]) * 2
    kept_at = hidden % V * (SIZE // V) + hidden // (V * NL) * (P * NL) + hidden // V % NL
    places = (pr * (S * PL))[:, None, None] + inner[None, :, None] * PL + lane_of[None, None, :]
    A = ()
    grad_A = ()
    for u in tl.static_range(2):
        at = A_ptr + head * n * d + hidden[None, :, None] * d + (channel + u)
        at = tl.multiple_of(tl.max_contiguous(at, [1, 2, 4]), [1, 1, 1])
        inside = (hidden[None, :, None] < n) & (channel + u < d)
        A = A + (tl.load(at, mask=inside, other=0.0),)
        grad_A = grad_A + (tl.zeros((PR, S, PL), tl.float32),)
    scratch = scratch_ptr + (own * tl.num_programs(2) + part) * KEEP * (S * HALF)
    for chunk in range(split * per_program, tl.minimum(split * per_program + per_program, chunks)):
        # the first chunk may be shorter than the others
        end = t_end - (chunks - 1 - chunk) * KEEP
        start = tl.maximum(end - KEEP, 0)
        first = sample * t_end + start
        count = end - start
        slot = (sample * chunks + chunk) * SIZE
        h = ()
        H = ()
        for u in tl.static_range(2):
            edge = slot + (channel + u) * NL + kept_at[None, :, None]
            from_states = tl.max_contiguous(states_ptr + edge, [1, 2, 4])
            h = h + (tl.load(tl.multiple_of(from_states, [1, 1, 1])),)
            from_edges = tl.max_contiguous(edges_ptr + edge, [1, 2, 4])
            H = H + (tl.load(tl.multiple_of(from_edges, [1, 1, 1])),)
        # loads of a token are issued while the one before it is computed
        delta_words, written_words = load_pair(kept_ptr + first * (ROWS * HALF), words, HALF)
        B_replay = load_values(B_ptr + first * INTS, state, V)
        for i in range(0, count):
            later = first + tl.minimum(i + 1, count - 1)
            delta_next, written_next = load_pair(kept_ptr + later * (ROWS * HALF), words, HALF)
            B_next = load_values(B_ptr + later * INTS, state, V)
            delta, written = unpack(delta_words, 2, False), unpack(written_words, 2, False)
            to = scratch + i * (S * HALF) + places
            to = tl.multiple_of(tl.max_contiguous(to, [1, 2, 4]), [1, 1, 1])
            if V == 4:
                tl.store(to, word_of_two(h[0], h[1], FAST))
            else:
                bits = h[0].to(tl.int32, bitcast=True), h[1].to(tl.int32, bitcast=True)
                tl.store(to, join_words(bits[0], bits[1]))
            after = ()
            for u in tl.static_range(2):
                decay = build_decay(A[u] * delta[u][:, None, :], FULL, FAST)
                after = after + (decay * h[u] + written[u][:, None, :] * B_replay[None, :, None],)
            h = after
            delta_words, written_words, B_replay = delta_next, written_next, B_next
        tl.debug_barrier()
        kept_h = scratch + (count - 1) * (S * HALF) + places
        word = tl.load(tl.multiple_of(tl.max_contiguous(kept_h, [1, 2, 4]), [1, 1, 1]))
        w_words, of_written_words = load_pair(
            adjoint_ptr + (first + count - 1) * (2 * HALF), words, HALF
        )
        for i in range(0, count):
            left = count - 1 - i
            token = first + left
            before_it = tl.maximum(left - 1, 0)
            kept_h = scratch + before_it * (S * HALF) + places
            next_word = tl.load(tl.multiple_of(tl.max_contiguous(kept_h, [1, 2, 4]), [1, 1, 1]))
            w_next, of_written_next = load_pair(
                adjoint_ptr + (first + before_it) * (2 * HALF), words, HALF
            )
            # these are in the first-level cache
            delta, written = load_pair(kept_ptr + token * (ROWS * HALF), words, HALF)
            delta, written = unpack(delta, 2, False), unpack(written, 2, False)
            w, of_written = unpack(w_words, 2, False), unpack(of_written_words, 2, False)
            beta = tl.load(scalars_ptr + token * SCALARS + 1)
            B = load_values(B_ptr + token * INTS, state, V)[None, :, None]
            C = load_values(C_ptr + token * INTS, state, V)[None, :, None]
            if V == 4:
                before = (high(word), (word & -65536).to(tl.float32, bitcast=True))
            else:
                before = unpack(word, 2, False)
            grad_B = tl.zeros((PR, S, PL), tl.float32)
            grad_C = grad_B
            earlier = ()
            sums = ()
            for u in tl.static_range(2):
                of_w, by = w[u][:, None, :], written[u][:, None, :]
                delta_u = delta[u][:, None, :]
                decay = build_decay(A[u] * delta_u, FULL, FAST)
                a = decay * before[u]
                of_h = H[u] + of_w * C
                grad_B += of_h * by
                grad_C += (a + by * B) * of_w
                if ERASE:
                    of_r = of_written[u][:, None, :] * -beta
                    grad_B += a * of_r
                    of_h += of_r * B
                reached = reach_of(decay, FULL) * before[u] if FULL else a
                sums = sums + (grad_A[u] + of_h * reached * delta_u,)
                earlier = earlier + (of_h * decay,)
            H, grad_A = earlier, sums
            put(grad_B_ptr + token * N + part * S, over_states(grad_B), states, lane, S, PL)
            put(grad_C_ptr + token * N + part * S, over_states(grad_C), states, lane, S, PL)
            word, w_words, of_written_words = next_word, w_next, of_written_next
        tl.debug_barrier()
    for u in tl.static_range(2):
        at = grad_A_ptr + own * n * d + hidden[None, :, None] * d + (channel + u)
        at = tl.multiple_of(tl.max_contiguous(at, [1, 2, 4]), [1, 1, 1])
        tl.store(at, grad_A[u], mask=(hidden[None, :, None] < n) & (channel + u < d))

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
def load_rows(
    kept_row, adjoint_row,  # pointers to int64, two float32 each
    words, P: tl.constexpr,
):  # fmt: skip
    """Delta, written, w and the cotangent of `written`, as words."""
    HALF: tl.constexpr = P // 2
    delta, written = tl.load(kept_row + words), tl.load(kept_row + HALF + words)
    return delta, written, tl.load(adjoint_row + words), tl.load(adjoint_row + HALF + words)


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
    scratch_ptr,  # (b, programs of a sample, KEEP, N P / 2), int64, or int32 for V = 4
    grad_B_ptr,  # (b, t, N), written
    grad_C_ptr,  # (b, t, N), written
    grad_A_ptr,  # (b, programs of a sample, n, d), written
    per_head,
    t_end,
    one,
    per_program,  # chunks
    d: tl.constexpr,
    n: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
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
    PR: tl.constexpr = P // (PL * 2)
    SIZE: tl.constexpr = P * N
    HALF: tl.constexpr = P // 2
    INTS: tl.constexpr = N // V * 2  # int32 words of B
    sample, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, own = sample // per_head, sample * tl.num_programs(1) + split
    chunks = tl.cdiv(t_end, KEEP)
    state, pr, pl = tl.arange(0, N), tl.arange(0, PR), tl.arange(0, PL)
    words = (pr * PL)[:, None] + pl[None, :]
    hidden, lane_of = state * one, pl * one
    states, lane = places_of_channels(one, N, PL)
    channel = ((pr * PL)[:, None, None] + lane_of[None, None, :]) * 2
    kept_at = hidden % V * (SIZE // V) + hidden // (V * NL) * (P * NL) + hidden // V % NL
    places = (pr * (N * PL))[:, None, None] + hidden[None, :, None] * PL + lane_of[None, None, :]
    A = ()
    grad_A = ()
    for u in tl.static_range(2):
        at = A_ptr + head * n * d + hidden[None, :, None] * d + (channel + u)
        at = tl.multiple_of(tl.max_contiguous(at, [1, 2, 4]), [1, 1, 1])
        inside = (hidden[None, :, None] < n) & (channel + u < d)
        A = A + (tl.load(at, mask=inside, other=0.0),)
        grad_A = grad_A + (tl.zeros((PR, N, PL), tl.float32),)
    scratch = scratch_ptr + own * KEEP * (SIZE // 2)
    for chunk in range(split * per_program, tl.minimum(split * per_program + per_program, chunks)):
        start = chunk * KEEP
        count = tl.minimum(KEEP, t_end - start)
        slot = (sample * chunks + chunk) * SIZE
        h = ()
        H = ()
        for u in tl.static_range(2):
            edge = slot + (channel + u) * NL + kept_at[None, :, None]
            from_states = tl.max_contiguous(states_ptr + edge, [1, 2, 4])
            h = h + (tl.load(tl.multiple_of(from_states, [1, 1, 1])),)
            from_edges = tl.max_contiguous(edges_ptr + edge, [1, 2, 4])
            H = H + (tl.load(tl.multiple_of(from_edges, [1, 1, 1])),)
        for i in range(0, count):
            token = sample * t_end + start + i
            row = kept_ptr + token * (ROWS * HALF)
            delta = unpack(tl.load(row + words), 2, False)
            written = unpack(tl.load(row + HALF + words), 2, False)
            B = load_values(B_ptr + token * INTS, state, V)[None, :, None]
            to = scratch + i * (SIZE // 2) + places
            to = tl.multiple_of(tl.max_contiguous(to, [1, 2, 4]), [1, 1, 1])
            if V == 4:
                tl.store(to, word_of_two(h[0], h[1], FAST))
            else:
                bits = h[0].to(tl.int32, bitcast=True), h[1].to(tl.int32, bitcast=True)
                tl.store(to, join_words(bits[0], bits[1]))
            after = ()
            for u in tl.static_range(2):
                decay = build_decay(A[u] * delta[u][:, None, :], FULL, FAST)
                after = after + (decay * h[u] + written[u][:, None, :] * B,)
            h = after
        tl.debug_barrier()
        for i in range(0, count):
            left = count - 1 - i
            token = sample * t_end + start + left
            rows = kept_ptr + token * (ROWS * HALF), adjoint_ptr + token * (2 * HALF)
            delta, written, w, of_written = load_rows(rows[0], rows[1], words, P)
            delta, written = unpack(delta, 2, False), unpack(written, 2, False)
            w, of_written = unpack(w, 2, False), unpack(of_written, 2, False)
            beta = tl.load(scalars_ptr + token * SCALARS + 1)
            B = load_values(B_ptr + token * INTS, state, V)[None, :, None]
            C = load_values(C_ptr + token * INTS, state, V)[None, :, None]
            kept_h = scratch + left * (SIZE // 2) + places
            word = tl.load(tl.multiple_of(tl.max_contiguous(kept_h, [1, 2, 4]), [1, 1, 1]))
            if V == 4:
                before = (high(word), (word & -65536).to(tl.float32, bitcast=True))
            else:
                before = unpack(word, 2, False)
            grad_B = tl.zeros((PR, N, PL), tl.float32)
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
            put(grad_B_ptr + token * N, over_states(grad_B), states, lane, N, PL)
            put(grad_C_ptr + token * N, over_states(grad_C), states, lane, N, PL)
        tl.debug_barrier()
    for u in tl.static_range(2):
        at = grad_A_ptr + own * n * d + hidden[None, :, None] * d + (channel + u)
        at = tl.multiple_of(tl.max_contiguous(at, [1, 2, 4]), [1, 1, 1])
        tl.store(at, grad_A[u], mask=(hidden[None, :, None] < n) & (channel + u < d))

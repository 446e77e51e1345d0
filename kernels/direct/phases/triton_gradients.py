"""Phase G: the gradients of A, B and C, of many chunks of tokens at once.

From h and its cotangent at the edges of a chunk, which phases S and R have kept, as the backward
pass of an ordinary scan. With dH = H + w C^T the cotangent of h_t, and `erased` that of r, which is
-beta^e times that of `written`:

    B_ = dH^T written + a^T erased,   C_ = h_t^T w,
    A_ += (dH + erased B^T) * Delta (d lambda / d (A Delta)) h_{t-1}

A program has a sample of a head, some chunks and S of the states. It goes through a chunk once to
keep h before every SUB tokens in scratch memory, and then back, SUB tokens at a time, whose h fit
its registers. Its memory is a tuple of two tensors (PR, S, PL) for channel (pr PL + pl) 2 + u: sums
over channels are sums in a thread and log2(PL) shuffles.
Letters as in `triton_sweep.py`.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# Tuples that grow are tuples of other types.
# mypy: disable-error-code="assignment, misc, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.discretize import build_decay
from bedouin.kernels.direct.phases.device import (
    over_states,
    places_of_channels,
    put,
    reach_of,
    unpack,
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
def load_pair(
    ptr,  # words of two float32
    words, real, HALF: tl.constexpr,
):  # fmt: skip
    """Two vectors of a token that lie side by side, each a tuple of two (PR, PL); zeros unless the
    token is `real`."""
    here = words < tl.where(real, HALF, 0)
    one = tl.load(ptr + words, mask=here, other=0)
    other = tl.load(ptr + HALF + words, mask=here, other=0)
    return unpack(one, 2, False), unpack(other, 2, False)


@triton.jit
def replay_pair(
    h, A, kept_ptr, B_ptr,
    first, t, words, state,
    HALF: tl.constexpr, ROWS: tl.constexpr, INTS: tl.constexpr, V: tl.constexpr,
    FULL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """h_t from h_{t-1}; h_{t-1} for t < 0."""
    token = first + tl.maximum(t, 0)
    delta, written = load_pair(kept_ptr + token * (ROWS * HALF), words, t >= 0, HALF)
    B = load_values(B_ptr + token * INTS, state, V)[None, :, None]
    after = ()
    for u in tl.static_range(2):
        decay = build_decay(A[u] * delta[u][:, None, :], FULL, FAST)
        after = after + (decay * h[u] + written[u][:, None, :] * B,)
    return after


@triton.jit
def store_group(ptr, places, h, SIZE: tl.constexpr):
    """Write a memory (PR, S, PL) of SIZE values to scratch memory."""
    for u in tl.static_range(2):
        at = ptr + u * (SIZE // 2) + places
        tl.store(tl.multiple_of(tl.max_contiguous(at, [1, 2, 4]), [1, 1, 1]), h[u])


@triton.jit
def load_group(ptr, places, SIZE: tl.constexpr):
    """The inverse of `store_group`."""
    h = ()
    for u in tl.static_range(2):
        at = ptr + u * (SIZE // 2) + places
        h = h + (tl.load(tl.multiple_of(tl.max_contiguous(at, [1, 2, 4]), [1, 1, 1])),)
    return h


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
    scratch_ptr,  # (programs, KEEP / SUB, S P)
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
    SUB: tl.constexpr,  # tokens whose h are in registers
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
    scratch = scratch_ptr + (own * tl.num_programs(2) + part) * (KEEP // SUB) * (S * P)
    first = sample * t_end
    for chunk in range(split * per_program, tl.minimum(split * per_program + per_program, chunks)):
        # Chunks are counted from the end, so that the first may be shorter than the others: rows
        # before it are read as zeros, which change nothing.
        start = t_end - (chunks - chunk) * KEEP
        slot = (sample * chunks + chunk) * SIZE
        h = ()
        H = ()
        for u in tl.static_range(2):
            edge = slot + (channel + u) * NL + kept_at[None, :, None]
            from_states = tl.max_contiguous(states_ptr + edge, [1, 2, 4])
            h = h + (tl.load(tl.multiple_of(from_states, [1, 1, 1])),)
            from_edges = tl.max_contiguous(edges_ptr + edge, [1, 2, 4])
            H = H + (tl.load(tl.multiple_of(from_edges, [1, 1, 1])),)
        for group in range(0, KEEP // SUB):
            store_group(scratch + group * (S * P), places, h, S * P)
            for i in tl.static_range(SUB):
                t = start + group * SUB + i
                h = replay_pair(
                    h, A, kept_ptr, B_ptr, first, t, words, state,
                    HALF, ROWS, INTS, V, FULL, FAST,
                )  # fmt: skip
        for turn in range(0, KEEP // SUB):
            group = KEEP // SUB - 1 - turn
            h = load_group(scratch + group * (S * P), places, S * P)
            history = (h,)
            for i in tl.static_range(SUB - 1):
                t = start + group * SUB + i
                h = replay_pair(
                    h, A, kept_ptr, B_ptr, first, t, words, state,
                    HALF, ROWS, INTS, V, FULL, FAST,
                )  # fmt: skip
                history = history + (h,)
            for i in tl.static_range(SUB):
                t = start + group * SUB + SUB - 1 - i
                token = first + tl.maximum(t, 0)
                delta, written = load_pair(kept_ptr + token * (ROWS * HALF), words, t >= 0, HALF)
                w, of_written = load_pair(adjoint_ptr + token * (2 * HALF), words, t >= 0, HALF)
                beta = tl.load(scalars_ptr + token * SCALARS + 1)
                B = load_values(B_ptr + token * INTS, state, V)[None, :, None]
                C = load_values(C_ptr + token * INTS, state, V)[None, :, None]
                grad_B = tl.zeros((PR, S, PL), tl.float32)
                grad_C = grad_B
                earlier = ()
                sums = ()
                for u in tl.static_range(2):
                    before = history[SUB - 1 - i][u]
                    of_w, by = w[u][:, None, :], written[u][:, None, :]
                    delta_u = delta[u][:, None, :]
                    decay = build_decay(A[u] * delta_u, FULL, FAST)
                    a = decay * before
                    of_h = H[u] + of_w * C
                    grad_B += of_h * by
                    grad_C += (a + by * B) * of_w
                    if ERASE:
                        of_r = of_written[u][:, None, :] * -beta
                        grad_B += a * of_r
                        of_h += of_r * B
                    reached = reach_of(decay, FULL) * before if FULL else a
                    sums = sums + (grad_A[u] + of_h * reached * delta_u,)
                    earlier = earlier + (of_h * decay,)
                H, grad_A = earlier, sums
                only = lane & (states < tl.where(t >= 0, S, 0))
                put(grad_B_ptr + token * N + part * S, over_states(grad_B), states, only, S, PL)
                put(grad_C_ptr + token * N + part * S, over_states(grad_C), states, only, S, PL)
    for u in tl.static_range(2):
        at = grad_A_ptr + own * n * d + hidden[None, :, None] * d + (channel + u)
        at = tl.multiple_of(tl.max_contiguous(at, [1, 2, 4]), [1, 1, 1])
        tl.store(at, grad_A[u], mask=(hidden[None, :, None] < n) & (channel + u < d))

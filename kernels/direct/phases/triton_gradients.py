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
    load_places,
    load_words,
    over_states,
    places_of_channels,
    put,
    reach_of,
    store_places,
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
def load_replayed_pair(
    kept_ptr, B_ptr,
    first, t, words, state,
    HALF: tl.constexpr, INTS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Delta, written and B of a token; zeros, which leave h as it is, for t < 0."""
    token = first + tl.maximum(t, 0)
    delta, written = load_pair(kept_ptr + token * (2 * HALF), words, t >= 0, HALF)
    return delta, written, load_values(B_ptr + token * INTS, state, V)


@triton.jit
def load_gradient_token(
    kept_ptr, adjoint_ptr, scalars_ptr, B_ptr, C_ptr,
    first, t, words, state,
    HALF: tl.constexpr, INTS: tl.constexpr, SCALARS: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """Delta, written, w, the cotangent of `written`, beta^e, B and C of a token; without vectors
    for t < 0."""
    token = first + tl.maximum(t, 0)
    delta, written = load_pair(kept_ptr + token * (2 * HALF), words, t >= 0, HALF)
    w, grad_written = load_pair(adjoint_ptr + token * (2 * HALF), words, t >= 0, HALF)
    beta = tl.load(scalars_ptr + token * SCALARS + 1)
    B = load_values(B_ptr + token * INTS, state, V)
    return delta, written, w, grad_written, beta, B, load_values(C_ptr + token * INTS, state, V)


@triton.jit
def replay_pair(
    h, A,
    row,  # of `load_replayed_pair`
    FULL: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """h_t from h_{t-1}."""
    delta, written, B = row
    after = ()
    for u in tl.static_range(2):
        decay = build_decay(A[u] * delta[u][:, None, :], FULL, FAST)
        after = after + (decay * h[u] + written[u][:, None, :] * B[None, :, None],)
    return after


@triton.jit(do_not_specialize=["t_end", "per_head", "per_program"])
def gradient_kernel(
    kept_ptr,  # (b, t, 2, P / 2), int64
    adjoint_ptr,  # (b, t, 2, P / 2), int64
    scalars_ptr,  # (b, t, SCALARS): B C, beta^e and others
    B_ptr,  # (b, t, N / V 2), int32
    C_ptr,  # likewise
    A_ptr,  # (H, n, d), log2(e) A
    states_ptr,  # (b, ceil(t / KEEP), N, P)
    edges_ptr,  # likewise
    scratch_ptr,  # (programs, KEEP / SUB, S P)
    grad_B_ptr,  # (b, t, N), written
    grad_C_ptr,  # (b, t, N), written
    grad_A_ptr,  # (b, splits, n, d), written
    per_head,
    t_end,
    per_program,  # chunks
    d: tl.constexpr,
    n: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,  # states of a program
    PL: tl.constexpr,
    V: tl.constexpr,
    KEEP: tl.constexpr,
    SUB: tl.constexpr,  # tokens whose h are in registers
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
    state, pr, pl = tl.arange(0, S), tl.arange(0, PR), tl.arange(0, PL)
    words = (pr * PL)[:, None] + pl[None, :]
    hidden = part * S + state
    # to the states of this program
    B_ptr += part * (S * INTS // N)
    C_ptr += part * (S * INTS // N)
    states = places_of_channels(S, PL)
    channel = ((pr * PL)[:, None, None] + pl[None, None, :]) * 2
    places = state[None, :, None] * PL + pl[None, None, :], (pr * (S * PL))[:, None, None]
    edges = hidden[None, :, None] * P + 2 * pl[None, None, :], (pr * (2 * PL))[:, None, None]
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
            h = h + (load_words(states_ptr + (slot + u), edges),)
            H = H + (load_words(edges_ptr + (slot + u), edges),)
        # loads of a token are issued while another one is computed
        row = load_replayed_pair(kept_ptr, B_ptr, first, start, words, state, HALF, INTS, V)
        for group in range(0, KEEP // SUB):
            store_places(scratch + group * (S * P), h, places, S * P, 2)
            for i in tl.static_range(SUB):
                t = tl.minimum(start + group * SUB + i + 1, t_end - 1)
                after = load_replayed_pair(kept_ptr, B_ptr, first, t, words, state, HALF, INTS, V)
                h = replay_pair(h, A, row, FULL, FAST)
                row = after
        token = load_gradient_token(
            kept_ptr, adjoint_ptr, scalars_ptr, B_ptr, C_ptr, first, start + KEEP - 1, words, state,
            HALF, INTS, SCALARS, V,
        )  # fmt: skip
        for turn in range(0, KEEP // SUB):
            group = KEEP // SUB - 1 - turn
            h = load_places(scratch + group * (S * P), places, S * P, 2)
            history = (h,)
            for i in tl.static_range(SUB - 1):
                t = start + group * SUB + i
                row = load_replayed_pair(kept_ptr, B_ptr, first, t, words, state, HALF, INTS, V)
                h = replay_pair(h, A, row, FULL, FAST)
                history = history + (h,)
            for i in tl.static_range(SUB):
                t = start + group * SUB + SUB - 1 - i
                earlier = load_gradient_token(
                    kept_ptr, adjoint_ptr, scalars_ptr, B_ptr, C_ptr, first, t - 1, words, state,
                    HALF, INTS, SCALARS, V,
                )  # fmt: skip
                delta, written, w, grad_written, beta, B, C = token
                B, C = B[None, :, None], C[None, :, None]
                grad_B = tl.zeros((PR, S, PL), tl.float32)
                grad_C = grad_B
                before_it = ()
                sums = ()
                for u in tl.static_range(2):
                    before = history[SUB - 1 - i][u]
                    w_u, by = w[u][:, None, :], written[u][:, None, :]
                    delta_u = delta[u][:, None, :]
                    decay = build_decay(A[u] * delta_u, FULL, FAST)
                    a = decay * before
                    grad_h = H[u] + w_u * C
                    grad_B += grad_h * by
                    grad_C += (a + by * B) * w_u
                    if ERASE:
                        grad_r = grad_written[u][:, None, :] * -beta
                        grad_B += a * grad_r
                        grad_h += grad_r * B
                    reached = reach_of(decay, FULL) * before if FULL else a
                    sums = sums + (grad_A[u] + grad_h * reached * delta_u,)
                    before_it = before_it + (grad_h * decay,)
                H, grad_A = before_it, sums
                to = (first + tl.maximum(t, 0)) * N + part * S
                real = states < tl.where(t >= 0, S, 0)
                put(grad_B_ptr + to, over_states(grad_B), states, real, False, S, PL)
                put(grad_C_ptr + to, over_states(grad_C), states, real, False, S, PL)
                token = earlier
    for u in tl.static_range(2):
        at = grad_A_ptr + own * n * d + hidden[None, :, None] * d + (channel + u)
        at = tl.multiple_of(tl.max_contiguous(at, [1, 2, 4]), [1, 1, 1])
        tl.store(at, grad_A[u], mask=(hidden[None, :, None] < n) & (channel + u < d))

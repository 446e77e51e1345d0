"""The gradients of A, B and C, of many chunks of tokens at once.

From the decayed memory a of each token and the cotangent H of h at the edges of a chunk. With
dH = H + w C^T the cotangent of h_t, and read_ = -beta written_ that of a B:

    B_ = dH^T written + a^T read_,   C_ = h_t^T w,   A_ += (dH + read_ B^T) * a Delta

A program is one warp and has a head of a sample, some chunks and S of the states. Its memory is a
tuple of V tensors (PR, SW, PL) for channel pr PL + pl and state sw V + v: sums over channels are
sums in a thread and log2(PL) shuffles. Letters as in `triton_sweep.py`.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import LN2, exp2
from bedouin.kernels.track.device import not_zero, rates_of, unknown_zeros, unpack, wait_for


@triton.jit
def _load_token(rows, step, vector, state, places, s):
    """`rows`: pointers to those of Delta and `written`, w and written_, scalars, B, C, q; zeros."""
    row, adjoint = tl.load(rows[0] + step * s.P + vector), tl.load(rows[1] + step * s.P + vector)
    beta = tl.load(rows[2] + step * 2 + rows[6])
    B, C = tl.load(rows[3] + step * s.WORDS + state), tl.load(rows[4] + step * s.WORDS + state)
    at = rows[5] + step * (s.P * s.WORDS) + places[0] + places[1]
    return row, adjoint, beta, B, C, tl.load(at)


@triton.jit(do_not_specialize=["t_end", "heads"])
def gradients_kernel(
    kept,  # `Kept`
    adjoint_ptr,  # (f, t, P): pairs of w and written_
    memory_ptr,  # (f, t, N P / V), words of q
    A_log_ptr,  # (H, c, n)
    edges_ptr,  # (f, chunks, N, P)
    unit_B_ptr,  # (f, t, N), written
    unit_C_ptr,  # (f, t, N), written
    grad_A_log_ptr,  # (f, parts, c, n), written
    t_end,
    heads,
    s: tl.constexpr,
    S: tl.constexpr,
    PL: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,  # chunks of a program
):
    PR: tl.constexpr = s.P // PL
    SW: tl.constexpr = S // s.V
    # programs of the same rows run at the same time, and find them in the L2 cache
    block, other = tl.program_id(0) % (s.N // S), tl.program_id(0) // (s.N // S)
    chunks, parts = tl.cdiv(t_end, CHUNK), tl.cdiv(t_end, CHUNK * PART)
    part, f = other % parts, (other // parts).to(tl.int64)
    head = f % heads
    pr, pl = tl.arange(0, PR), tl.arange(0, PL)
    vector = (pr * PL)[:, None] + pl[None, :]
    channel = (pr * PL)[:, None, None] + pl[None, None, :]
    word = block * SW + tl.arange(0, SW)
    of_word = word[None, :, None]
    places = (
        (of_word // s.NL * (s.P * s.NL) + of_word % s.NL) + pl[None, None, :] * s.NL,
        (pr * (PL * s.NL))[:, None, None],
    )
    # zeros, of which the compiler does not know that they are, keep the last axis
    sums_at = tl.arange(0, SW)[:, None] * s.V + (pl // PL)[None, :]
    A = ()
    grad_A = ()
    for v in tl.static_range(s.V):
        state = of_word * s.V + v
        inside = (state < s.n) & (channel < s.c)
        at = A_log_ptr + head * s.c * s.n + (channel * s.n + state)
        A = A + (rates_of(tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)),)
        grad_A = grad_A + (tl.zeros((PR, SW, PL), tl.float32),)
    A = wait_for(A)
    inverse_A = ()
    for v in tl.static_range(s.V):
        inverse_A = inverse_A + (1 / not_zero(A[v]),)
    sample = f * t_end
    rows = (
        kept.rows + sample * s.P,
        adjoint_ptr + sample * s.P,
        kept.scalars + sample * 2 + 1,
        kept.B + sample * s.WORDS,
        kept.C + sample * s.WORDS,
        memory_ptr + sample * (s.P * s.WORDS),
        unknown_zeros(pl, t_end, PL),
    )
    begin = part * (PART * CHUNK)
    end = tl.minimum(begin + PART * CHUNK, t_end)
    loaded = _load_token(rows, (end - 1).to(tl.int64), vector, word, places, s)
    for back in range(0, tl.cdiv(end - begin, CHUNK)):
        chunk_begin = begin + (tl.cdiv(end - begin, CHUNK) - 1 - back) * CHUNK
        slot = f * chunks + chunk_begin // CHUNK
        H = ()
        for v in tl.static_range(s.V):
            H = H + (tl.load(edges_ptr + slot * s.SIZE + (of_word * s.V + v) * s.P + channel),)
        H = wait_for(H)
        chunk_end = tl.minimum(chunk_begin + CHUNK, end)
        for passed in range(0, chunk_end - chunk_begin):
            step = (chunk_end - 1 - passed).to(tl.int64)
            row, adjoint, beta, B_words, C_words, q_words = loaded
            delta, written = unpack(row, 2)
            w, grad_written = unpack(adjoint, 2)
            loaded = _load_token(rows, tl.maximum(step - 1, 0), vector, word, places, s)
            B, C = unpack(B_words, s.V), unpack(C_words, s.V)
            q = unpack(q_words, s.V)
            delta, written, w = delta[:, None, :], written[:, None, :], w[:, None, :]
            grad_read = grad_written[:, None, :] * -beta[None, None, :]
            before = ()
            total = ()
            to = (sample + step) * s.N + block * S
            for v in tl.static_range(s.V):
                a = q[v] * inverse_A[v]
                B_v, C_v = B[v][None, :, None], C[v][None, :, None]
                grad_h = H[v] + w * C_v
                of_B = tl.sum(tl.sum(grad_h * written + a * grad_read, 0), 1)
                of_C = tl.sum(tl.sum((a + written * B_v) * w, 0), 1)
                grad_h += grad_read * B_v
                total = total + (grad_A[v] + grad_h * a * delta,)
                before = before + (grad_h * exp2(A[v] * delta),)
                tl.store(unit_B_ptr + to + v + sums_at, tl.broadcast_to(of_B[:, None], (SW, PL)))
                tl.store(unit_C_ptr + to + v + sums_at, tl.broadcast_to(of_C[:, None], (SW, PL)))
            H, grad_A = before, total
    for v in tl.static_range(s.V):
        state = of_word * s.V + v
        at = grad_A_log_ptr + (f * parts + part) * s.c * s.n + (channel * s.n + state)
        of_log = grad_A[v] * A[v] * LN2
        tl.store(at, of_log, mask=(state < s.n) & (channel < s.c))

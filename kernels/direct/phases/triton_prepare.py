"""Phase P: what the raw values of B and C alone determine; its adjoint; and statistics.

Letters: b folded samples, t time, d channels of a head, n state per channel, r raw values,
s tokens of a program; N: n rounded up to a power of two.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.norms import inverse_norm, max_norm
from bedouin.kernels.track.device import high, nearest_word


@triton.jit
def _halves(row, j, inside, n: tl.constexpr):
    """The even and the odd ones of n raw values, (s, N / 2) each."""
    even = tl.load(row[:, None] + 2 * j, mask=inside & (2 * j < n), other=0.0)
    odd = tl.load(row[:, None] + 2 * j + 1, mask=inside & (2 * j + 1 < n), other=0.0)
    return even.to(tl.float32), odd.to(tl.float32)


@triton.jit
def _unit(v, n: tl.constexpr, EPS: tl.constexpr):
    """The unit vectors of raw vectors in halves."""
    even, odd = v
    inverse = inverse_norm(tl.sum(even * even + odd * odd, 1), n * EPS)[:, None]
    return even * inverse, odd * inverse


@triton.jit
def _store_words(ptr, token, j, inside, even, odd, N: tl.constexpr, LOW: tl.constexpr):
    """Write a vector as the words that `unpack` reads; returns the values that they hold."""
    if LOW:
        word = nearest_word(even, odd)
        tl.store(ptr + token[:, None] * (N // 2) + j, word, mask=inside)
        even, odd = high(word), word.to(tl.float32, bitcast=True)
    else:
        at = ptr + token[:, None] * N + 2 * j
        tl.store(at, even.to(tl.int32, bitcast=True), mask=inside)
        tl.store(at + 1, odd.to(tl.int32, bitcast=True), mask=inside)
    return even, odd


@triton.jit(do_not_specialize=["count", "t_end"])
def prepare_phases_kernel(
    raw_ptr,  # (b, t, r), [Delta d | B n | C n | reflections]
    B_ptr,  # (b, t, words), int32, written
    C_ptr,  # likewise
    scalars_ptr,  # (b, t, SCALARS), of which the first is written: B C
    count,  # b t
    t_end,
    raw_stride_b,
    raw_stride_t,
    d: tl.constexpr,
    n: tl.constexpr,
    N: tl.constexpr,
    LOW: tl.constexpr,  # words of two bfloat16 instead of a float32
    SCALARS: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    here, j = token < count, tl.arange(0, N // 2)[None, :]
    inside = here[:, None] & (j < N)
    row = raw_ptr + token // t_end * raw_stride_b + token % t_end * raw_stride_t
    # all loads first: the compiler moves none of them across a barrier or a store
    B, C = _halves(row + d, j, inside, n), _halves(row + d + n, j, inside, n)
    B, C = _unit(B, n, EPS), _unit(C, n, EPS)
    B = _store_words(B_ptr, token, j, inside, B[0], B[1], N, LOW)
    C = _store_words(C_ptr, token, j, inside, C[0], C[1], N, LOW)
    tl.store(scalars_ptr + token * SCALARS, tl.sum(B[0] * C[0] + B[1] * C[1], 1), mask=here)


@triton.jit(do_not_specialize=["count"])
def explicit_statistics_kernel(
    y_ptr,  # (b, t, d)
    statistics_ptr,  # (4, b, t), written: defect, scale, magnitude, pivot
    count,  # b t
    d: tl.constexpr,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The statistics of tokens without reflections, whose y is explicit: no defect, but NaN where
    y is not finite."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    here, p = token < count, tl.arange(0, P)[None, :]
    y = tl.load(y_ptr + token[:, None] * d + p, mask=here[:, None] & (p < d), other=0.0)
    size, row = max_norm(y, 1), tl.cast(count, tl.int64)
    tl.store(statistics_ptr + token, 0 * size, mask=here)
    tl.store(statistics_ptr + row + token, size, mask=here)
    tl.store(statistics_ptr + 2 * row + token, size, mask=here)
    tl.store(statistics_ptr + 3 * row + token, tl.full([TOKENS], 1.0, tl.float32), mask=here)


@triton.jit
def _unit_vjp(row, grad_row, state, inside, EPS: tl.constexpr, n: tl.constexpr):
    """The cotangent of a raw vector (s, N) from that of its unit vector."""
    raw = tl.load(row[:, None] + state, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_row[:, None] + state, mask=inside, other=0.0)
    inverse = inverse_norm(tl.sum(raw * raw, 1), n * EPS)[:, None]
    unit = raw * inverse
    return inverse * (grad - unit * tl.sum(unit * grad, 1)[:, None])


@triton.jit(do_not_specialize=["count", "t_end"])
def finish_phases_kernel(
    raw_ptr,  # (b, t, r)
    grad_delta_ptr,  # (b, t, d), of raw Delta
    grad_B_ptr,  # (b, t, N)
    grad_C_ptr,  # (b, t, N)
    adjoint_ptr,  # (b, t, 2, P), whose first row is w
    grad_raw_ptr,  # (b, t, WIDE), written but for reflections, zeros from r on, fewer than 64
    statistics_ptr,  # (2, b, t), written without reflections: defect and scale of the adjoint
    count,  # b t
    t_end,
    raw_stride_b,
    raw_stride_t,
    d: tl.constexpr,
    n: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    here, p, state = token < count, tl.arange(0, P)[None, :], tl.arange(0, N)[None, :]
    row = raw_ptr + token // t_end * raw_stride_b + token % t_end * raw_stride_t
    to = grad_raw_ptr + token[:, None] * WIDE
    dtype = grad_raw_ptr.dtype.element_ty
    channels = here[:, None] & (p < d)
    grad_delta = tl.load(grad_delta_ptr + token[:, None] * d + p, mask=channels, other=0.0)
    tl.store(to + p, grad_delta.to(dtype), mask=channels)
    states = here[:, None] & (state < n)
    grad = _unit_vjp(row + d, grad_B_ptr + token * N, state, states, EPS, n)
    tl.store(to + d + state, grad.to(dtype), mask=states)
    grad = _unit_vjp(row + d + n, grad_C_ptr + token * N, state, states, EPS, n)
    tl.store(to + d + n + state, grad.to(dtype), mask=states)
    SIZE: tl.constexpr = d + 2 * n + K * (d + 1)
    if K == 0:
        # each w is explicit
        w = tl.load(adjoint_ptr + token[:, None] * (2 * P) + p, mask=here[:, None], other=0.0)
        scale = max_norm(w, 1)
        tl.store(statistics_ptr + token, 0 * scale, mask=here)
        tl.store(statistics_ptr + tl.cast(count, tl.int64) + token, scale, mask=here)
    rest = SIZE + tl.arange(0, 64)[None, :]
    zeros = tl.zeros([TOKENS, 64], tl.float32).to(dtype)
    tl.store(to + rest, zeros, mask=here[:, None] & (rest < WIDE))

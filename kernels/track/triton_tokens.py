"""What the raw values of a token alone determine, and what ends the backward of them.

Letters: b batch, t time, H heads, f folded samples, c channels and n states of a head, s tokens of
a program; N: n rounded up to a power of two.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import sigmoid
from bedouin.kernels.device.norms import inverse_norm
from bedouin.kernels.track.device import high, nearest_word, unpack


@triton.jit
def _halves(row, j, here, n: tl.constexpr):
    """The even and the odd ones of n raw values, (s, N / 2) each."""
    even = tl.load(row[:, None] + 2 * j, mask=here[:, None] & (2 * j < n), other=0.0)
    odd = tl.load(row[:, None] + 2 * j + 1, mask=here[:, None] & (2 * j + 1 < n), other=0.0)
    return even.to(tl.float32), odd.to(tl.float32)


@triton.jit
def _store_unit(ptr, row, j, here, v, n: tl.constexpr, N: tl.constexpr, V: tl.constexpr, EPS: tl.constexpr):  # fmt: skip # noqa: E501
    """Write the unit vectors of raw vectors in halves as the words that `unpack` reads; returns the
    values that they hold."""
    inverse = inverse_norm(tl.sum(v[0] * v[0] + v[1] * v[1], 1), n * EPS)[:, None]
    even, odd, inside = v[0] * inverse, v[1] * inverse, here[:, None] & (j < N)
    if V == 4:
        word = nearest_word(even, odd)
        tl.store(ptr + row[:, None] * (N // 2) + j, word, mask=inside)
        return high(word), word.to(tl.float32, bitcast=True)
    else:
        at = ptr + row[:, None] * N + 2 * j
        tl.store(at, even.to(tl.int32, bitcast=True), mask=inside)
        tl.store(at + 1, odd.to(tl.int32, bitcast=True), mask=inside)
        return even, odd


@triton.jit(do_not_specialize=["count", "t_end", "H"])
def prepare_kernel(
    inputs,  # `Recurrence`
    strides,  # of the samples and tokens of x, B, C, delta and erase
    B_ptr,  # (f, t, words), int32, written
    C_ptr,  # likewise
    scalars_ptr,  # (f, t, 2), written: B C and beta
    count,  # b t
    t_end,
    H,
    n: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
    UNIT_EPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head, here, j = tl.program_id(1), token < count, tl.arange(0, N // 2)[None, :]
    b, t = token // t_end, token % t_end
    row = (b * H + head) * t_end + t
    # all loads first: the compiler moves none of them across a barrier or a store
    B = _halves(inputs.B + b * strides[1][0] + t * strides[1][1] + head * n, j, here, n)
    C = _halves(inputs.C + b * strides[2][0] + t * strides[2][1] + head * n, j, here, n)
    at = inputs.erase + b * strides[4][0] + t * strides[4][1] + head
    erase = tl.load(at, mask=here, other=0.0).to(tl.float32)
    beta = sigmoid(erase + tl.load(inputs.erase_bias + head).to(tl.float32))
    B = _store_unit(B_ptr, row, j, here, B, n, N, V, UNIT_EPS)
    C = _store_unit(C_ptr, row, j, here, C, n, N, V, UNIT_EPS)
    tl.store(scalars_ptr + row * 2, tl.sum(B[0] * C[0] + B[1] * C[1], 1), mask=here)
    tl.store(scalars_ptr + row * 2 + 1, beta, mask=here)


@triton.jit
def _unit_vjp(raw_ptr, grad_ptr, inside, n: tl.constexpr, EPS: tl.constexpr):
    """The cotangents of raw vectors (s, N) from those of their unit vectors."""
    raw = tl.load(raw_ptr, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr, mask=inside, other=0.0)
    inverse = inverse_norm(tl.sum(raw * raw, 1), n * EPS)[:, None]
    unit = raw * inverse
    return inverse * (grad - unit * tl.sum(unit * grad, 1)[:, None])


@triton.jit
def _cast_store(ptr, v, mask):
    tl.store(ptr, v.to(ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count", "t_end", "H"])
def finish_kernel(
    inputs,  # `Recurrence`
    strides,  # of the samples and tokens of x, B, C, delta and erase
    kept,  # `Kept`
    adjoint_ptr,  # (f, t, P): pairs of w and the cotangent of `written`
    read_ptr,  # (f, t, P): a B
    unit_B_ptr,  # (f, t, N): the cotangent of the unit B
    unit_C_ptr,  # (f, t, N)
    grad_fed_ptr,  # (b, t, H, 2, c): the cotangents of raw Delta and, written, of x with feedback
    grads,  # as `inputs`, contiguous, of which x, B, C, delta and erase are written
    normed_ptr,  # (b, t, H, c), written: norm(y_{t-1})
    sums_ptr,  # (programs, H, 2, c), written: of dt_bias, and in the first place of erase_bias
    count,  # b t
    t_end,
    H,
    c: tl.constexpr,
    n: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    UNIT_EPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head, here = tl.program_id(1), token < count
    p, state = tl.arange(0, P)[None, :], tl.arange(0, N)[None, :]
    b, t = token // t_end, token % t_end
    row, wide = ((b * H + head) * t_end + t)[:, None], (token * H + head)[:, None]
    states, channels = here[:, None] & (state < n), here[:, None] & (p < c)
    at = (b * strides[1][0] + t * strides[1][1])[:, None] + head * n + state
    grad = _unit_vjp(inputs.B + at, unit_B_ptr + row * N + state, states, n, UNIT_EPS)
    _cast_store(grads.B + wide * n + state, grad, states)
    at = (b * strides[2][0] + t * strides[2][1])[:, None] + head * n + state
    grad = _unit_vjp(inputs.C + at, unit_C_ptr + row * N + state, states, n, UNIT_EPS)
    _cast_store(grads.C + wide * n + state, grad, states)
    at = row * P + p
    delta, _ = unpack(tl.load(kept.rows + at, mask=channels, other=0), 2)
    _, grad_written = unpack(tl.load(adjoint_ptr + at, mask=channels, other=0), 2)
    grad_mixed = delta * grad_written
    fed = grad_fed_ptr + wide * (2 * c) + p
    grad_delta = tl.load(fed, mask=channels, other=0.0)
    _cast_store(grads.delta + wide * c + p, grad_delta, channels)
    _cast_store(fed + c, grad_mixed, channels)
    _cast_store(grads.x + wide * c + p, grad_mixed, channels)
    y_past, inverse = unpack(tl.load(kept.past + at, mask=channels, other=0), 2)
    _cast_store(normed_ptr + wide * c + p, y_past * inverse, channels)
    read = tl.load(read_ptr + at, mask=channels, other=0.0)
    beta = tl.load(kept.scalars + ((b * H + head) * t_end + t) * 2 + 1, mask=here, other=0.0)
    grad_erase = -tl.sum(read * grad_written, 1) * beta * (1 - beta)
    _cast_store(grads.erase + token * H + head, grad_erase, here)
    channel = tl.arange(0, P)
    sums = sums_ptr + ((tl.program_id(0).to(tl.int64) * H + head) * 2) * c + channel
    tl.store(sums, tl.sum(grad_delta.to(tl.float32), 0), mask=channel < c)
    first = tl.where(channel == 0, tl.sum(grad_erase, 0), 0.0)
    tl.store(sums + c, first, mask=channel < c)

"""The output stage with the gate's feedback, forward and backward.

    out_t = SiLU(gate_t + W_g norm(y_{t-1})) * norm(y_t + D * skip_t) * weight

A program has some tokens of a head. Backward it has rows s = -1 .. t - 1 of a sample, of which each
is y_s: the cotangent of y_s comes from the output of token s and from the gate of token s + 1.
Letters: b batch, t time, H heads, c channels of a head, f folded samples, s rows of a program; P: c
rounded up to a power of two.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import sigmoid
from bedouin.kernels.track.device import load_rounded, norm_of, pair


@triton.jit
def _load(ptr, mask):
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _weights(W_ptr, dtype: tl.constexpr, c: tl.constexpr, P: tl.constexpr, DOT: tl.constexpr):
    """W_g (P, P) for a row of outputs."""
    o, i = tl.arange(0, P)[:, None], tl.arange(0, P)[None, :]
    return load_rounded(W_ptr + 2 * c * c + o * c + i, (o < c) & (i < c), dtype).to(DOT)


@triton.jit
def _times(v, W, DOT: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(v.to(DOT), W, input_precision=PRECISION)


@triton.jit
def _load_y(
    y_ptr,  # (b, t, H c), at the head
    y0_ptr,  # (b, H c), likewise
    b, t, p, inside, t_end, H,
    c: tl.constexpr, STARTED: tl.constexpr,
):  # fmt: skip
    """y_t of rows (s, P), y0 or zeros for t = -1."""
    later = t >= 0
    y = _load(y_ptr + ((b * t_end + t) * (H * c))[:, None] + p, inside & later[:, None])
    if STARTED:
        y += _load(y0_ptr + (b * (H * c))[:, None] + p, inside & (t < 0)[:, None])
    return y


@triton.jit
def _shown(y, skip, D, c: tl.constexpr, EPS: tl.constexpr):
    """norm(y + D skip), and 1 / rms."""
    v = y + D * skip
    inverse = norm_of(v, c, EPS)
    return v * inverse, inverse


@triton.jit
def _gate(
    gate_ptr,  # (b, t, H c)
    stride_b, stride_t, normed, W, b, t, at, inside,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gate with its feedback W_g norm(y_{t-1})."""
    gate = _load(gate_ptr + (b * stride_b + t * stride_t)[:, None] + at, inside)
    return gate + _times(normed, tl.trans(W), DOT, PRECISION)


@triton.jit(do_not_specialize=["count", "t_end", "H"])
def output_kernel(
    skip_ptr,  # (b, t, H c)
    gate_ptr,  # (b, t, H c)
    y_ptr,  # (b, t, H c)
    y0_ptr,  # (b, H c), with STARTED
    D_ptr,  # (H, c)
    weight_ptr,  # (H, c)
    W_ptr,  # (H, 3 c, c)
    out_ptr,  # (b, t, H c), written
    count,  # b t
    t_end,
    H,
    skip_stride_b,
    skip_stride_t,
    gate_stride_b,
    gate_stride_t,
    c: tl.constexpr,
    P: tl.constexpr,
    STARTED: tl.constexpr,
    FEEDBACK_EPS: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head, p = tl.program_id(1), tl.arange(0, P)[None, :]
    b, t, inside = token // t_end, token % t_end, (token < count)[:, None] & (p < c)
    dtype: tl.constexpr = skip_ptr.dtype.element_ty
    W, at = _weights(W_ptr + head * (3 * c * c), dtype, c, P, DOT), head * c + p
    before = _load_y(y_ptr, y0_ptr, b, t - 1, at, inside, t_end, H, c, STARTED)
    normed = (before * norm_of(before, c, FEEDBACK_EPS)).to(dtype)
    gate = _gate(
        gate_ptr, gate_stride_b, gate_stride_t, normed, W, b, t, at, inside, DOT, PRECISION
    )
    y = _load_y(y_ptr, y0_ptr, b, t, at, inside, t_end, H, c, False)
    skip = _load(skip_ptr + (b * skip_stride_b + t * skip_stride_t)[:, None] + at, inside)
    shown, _ = _shown(y, skip, _load(D_ptr + at, p < c), c, EPS)
    out = gate * sigmoid(gate) * shown * _load(weight_ptr + at, p < c)
    tl.store(out_ptr + (token * (H * c))[:, None] + at, out.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["count", "t_end", "H"])
def output_backward_kernel(
    grad_ptr,  # (b, t, H c)
    grad_y_ptr,  # (b, t, H c), with OF_Y: the cotangent of y itself, else zeros
    skip_ptr,  # (b, t, H c)
    gate_ptr,  # (b, t, H c)
    y_ptr,  # (b, t, H c)
    y0_ptr,  # (b, H c), with STARTED
    D_ptr,  # (H, c)
    weight_ptr,  # (H, c)
    W_ptr,  # (H, 3 c, c)
    grad_skip_ptr,  # (b, t, H c), written
    grad_gate_ptr,  # (b, t, H c), written
    grad_fed_ptr,  # (b, t, H, 3, c), of which the last is written: that of the gate's feedback
    normed_ptr,  # (b, t, H, c), written: norm(y_{t-1})
    past_ptr,  # (f, t + 1, P), written: pairs of the cotangent of y_s, and -norm(y_s) / c
    inverse_ptr,  # (f, t + 1), written: 1 / rms of y_s
    sums_ptr,  # (programs, H, 4, c), of which the first two are written: of D and of the weight
    count,  # b (t + 1)
    t_end,
    H,
    grad_stride_b,
    grad_stride_t,
    skip_stride_b,
    skip_stride_t,
    gate_stride_b,
    gate_stride_t,
    c: tl.constexpr,
    P: tl.constexpr,
    STARTED: tl.constexpr,
    OF_Y: tl.constexpr,
    FEEDBACK_EPS: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head, p = tl.program_id(1), tl.arange(0, P)[None, :]
    b, t = row // (t_end + 1), row % (t_end + 1) - 1
    every = (row < count)[:, None] & (p < c)
    own, later = every & (t >= 0)[:, None], every & (t + 1 < t_end)[:, None]
    dtype: tl.constexpr = skip_ptr.dtype.element_ty
    W, at = _weights(W_ptr + head * (3 * c * c), dtype, c, P, DOT), head * c + p
    D, weight = _load(D_ptr + at, p < c), _load(weight_ptr + at, p < c)
    y = _load_y(y_ptr, y0_ptr, b, t, at, every, t_end, H, c, STARTED)
    inverse_y = norm_of(y, c, FEEDBACK_EPS)
    normed = y * inverse_y
    # the gate of token t + 1, whose output has its norm and its cotangent
    wide = ((b * t_end + t) * H)[:, None]
    gate = _gate(
        gate_ptr, gate_stride_b, gate_stride_t, normed.to(dtype), W, b, t + 1, at, later, DOT,
        PRECISION,
    )  # fmt: skip
    y_next = _load_y(y_ptr, y0_ptr, b, t + 1, at, later, t_end, H, c, False)
    skip_next = _load(skip_ptr + (b * skip_stride_b + (t + 1) * skip_stride_t)[:, None] + at, later)
    shown, _ = _shown(y_next, skip_next, D, c, EPS)
    grad = _load(grad_ptr + (b * grad_stride_b + (t + 1) * grad_stride_t)[:, None] + at, later)
    share = sigmoid(gate)
    grad_gate = grad * shown * weight * share * (1 + gate * (1 - share))
    to = wide * c + (H * c + at)
    tl.store(grad_gate_ptr + to, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=later)
    tl.store(normed_ptr + to, normed.to(dtype), mask=later)
    to = (wide + (H + head)) * (3 * c) + (2 * c + p)
    tl.store(grad_fed_ptr + to, grad_gate.to(dtype), mask=later)
    grad_normed = _times(grad_gate.to(dtype), W, DOT, PRECISION)
    along = tl.sum(grad_normed * normed, 1)[:, None] / c
    grad_y = inverse_y * (grad_normed - normed * along)
    # the output of token t
    before = _load_y(y_ptr, y0_ptr, b, t - 1, at, own, t_end, H, c, STARTED)
    normed_before = (before * norm_of(before, c, FEEDBACK_EPS)).to(dtype)
    gate = _gate(
        gate_ptr, gate_stride_b, gate_stride_t, normed_before, W, b, t, at, own, DOT, PRECISION
    )
    skip = _load(skip_ptr + (b * skip_stride_b + t * skip_stride_t)[:, None] + at, own)
    shown, inverse = _shown(y, skip, D, c, EPS)
    grad = _load(grad_ptr + (b * grad_stride_b + t * grad_stride_t)[:, None] + at, own)
    grad *= gate * sigmoid(gate)
    weight_sum = tl.sum(grad * shown, 0)
    grad *= weight
    grad_v = inverse * (grad - shown * (tl.sum(grad * shown, 1)[:, None] / c))
    to = wide * c + at
    tl.store(grad_skip_ptr + to, (D * grad_v).to(grad_skip_ptr.dtype.element_ty), mask=own)
    grad_y += tl.where(own, grad_v, 0.0)
    if OF_Y:
        grad_y += _load(grad_y_ptr + to, own)
    f_row = (b * H + head) * (t_end + 1) + t + 1
    rows = (row < count)[:, None] & (p >= 0)
    tl.store(past_ptr + f_row[:, None] * P + p, pair(grad_y, normed * (-1.0 / c)), mask=rows)
    tl.store(inverse_ptr + f_row, tl.sum(inverse_y, 1), mask=row < count)
    channel = tl.arange(0, P)
    sums = sums_ptr + (tl.program_id(0).to(tl.int64) * H + head) * (4 * c) + channel
    tl.store(sums, tl.sum(grad_v * skip, 0), mask=channel < c)
    tl.store(sums + c, weight_sum, mask=channel < c)

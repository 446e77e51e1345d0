"""Kernels of the output stage: one launch each way, nothing saved but the operands.

One program takes a token, or several where channels are few, with all channels in registers. The
gradients of D and of the norm's weight are sums over tokens: in the backward a program takes every
P-th tile of tokens and writes its part of both sums, which are then added in a fixed order.
With several heads, the second axis of a launch, T counts the tokens of one head, whose rows are
evenly spaced, at any distance from those of the next head.
Letters: b batch, t time, d channels, P programs of a head, H heads (kernels/heads.py).
"""

import triton
import triton.language as tl

from bedouin.kernels.device.norms import inverse_norm


@triton.jit
def _sigmoid(a):
    small = tl.exp(-tl.abs(a))  # at most 1: no overflow
    return tl.where(a >= 0, 1.0, small) / (1 + small)


@triton.jit
def _silu_slope(a, sigmoid):
    return sigmoid * (1 + a * (1 - sigmoid))


@triton.jit
def _load(ptr, mask):
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, v, mask):
    tl.store(ptr, v.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def output_kernel(
    y_ptr,  # (H, T, d)
    x_ptr,  # (H, T, d)
    D_ptr,  # (H, d)
    gate_ptr,  # (H, T, d)
    fed_ptr,  # (H, T, d)
    z_ptr,  # (H, T, d)
    weight_ptr,  # (H, d)
    out_ptr,  # (H, T, d)
    T,
    d,
    out_stride,
    y_stride,
    x_stride,
    gate_stride,
    fed_stride,
    z_stride,
    out_stride_h,
    y_stride_h,
    x_stride_h,
    gate_stride_h,
    fed_stride_h,
    z_stride_h,
    HEADS: tl.constexpr,
    FED: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.arange(0, BLOCK_D)[None, :]
    in_d = channel < d
    mask = (token < T) & in_d
    if HEADS:
        head = tl.program_id(1).to(tl.int64)
        D_ptr += head * d
        weight_ptr += head * d
        y_ptr += head * y_stride_h
        x_ptr += head * x_stride_h
        gate_ptr += head * gate_stride_h
        fed_ptr += head * fed_stride_h
        z_ptr += head * z_stride_h
        out_ptr += head * out_stride_h

    y = _load(y_ptr + token * y_stride + channel, mask)
    x = _load(x_ptr + token * x_stride + channel, mask)
    gate = _load(gate_ptr + token * gate_stride + channel, mask)
    if FED:
        gate += _load(fed_ptr + token * fed_stride + channel, mask)
    D = _load(D_ptr + channel, in_d)
    v = y + D * x
    if NORM:
        gate += _load(z_ptr + token * z_stride + channel, mask)
        weight = _load(weight_ptr + channel, in_d)
        inverse = inverse_norm(tl.sum(v * v, axis=1) / d, EPS)
        out = gate * _sigmoid(gate) * v * inverse[:, None] * weight
    else:
        out = gate * v * _sigmoid(v)
    _store(out_ptr + token * out_stride + channel, out, mask)


@triton.jit
def output_backward_kernel(
    grad_ptr,  # (H, T, d)
    y_ptr,  # (H, T, d)
    x_ptr,  # (H, T, d)
    D_ptr,  # (H, d)
    gate_ptr,  # (H, T, d)
    fed_ptr,  # (H, T, d)
    z_ptr,  # (H, T, d)
    weight_ptr,  # (H, d)
    grad_y_ptr,  # (H, T, d)
    grad_x_ptr,  # (H, T, d)
    grad_gate_ptr,  # (H, T, d)
    sums_ptr,  # (P, 2, H, d), of D and weight; (P, 1, H, d) without weight
    T,
    d,
    grad_stride,
    y_stride,
    x_stride,
    gate_stride,
    fed_stride,
    z_stride,
    grad_stride_h,
    y_stride_h,
    x_stride_h,
    gate_stride_h,
    fed_stride_h,
    z_stride_h,
    HEADS: tl.constexpr,
    FED: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    program = tl.program_id(0)
    channel = tl.arange(0, BLOCK_D)[None, :]
    in_d = channel < d
    if HEADS:
        head = tl.program_id(1).to(tl.int64)
        D_ptr += head * d
        weight_ptr += head * d
        grad_ptr += head * grad_stride_h
        y_ptr += head * y_stride_h
        x_ptr += head * x_stride_h
        gate_ptr += head * gate_stride_h
        fed_ptr += head * fed_stride_h
        z_ptr += head * z_stride_h
        grad_y_ptr += head * T * d
        grad_x_ptr += head * T * d
        grad_gate_ptr += head * T * d
    D = _load(D_ptr + channel, in_d)
    if NORM:
        weight = _load(weight_ptr + channel, in_d)
        weight_sum = tl.zeros((TOKENS, BLOCK_D), dtype=tl.float32)
    D_sum = tl.zeros((TOKENS, BLOCK_D), dtype=tl.float32)

    for tile in range(program, tl.cdiv(T, TOKENS), tl.num_programs(0)):
        token = tl.cast(tile, tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
        mask = (token < T) & in_d
        grad = _load(grad_ptr + token * grad_stride + channel, mask)
        y = _load(y_ptr + token * y_stride + channel, mask)
        x = _load(x_ptr + token * x_stride + channel, mask)
        gate = _load(gate_ptr + token * gate_stride + channel, mask)
        if FED:
            gate += _load(fed_ptr + token * fed_stride + channel, mask)
        v = y + D * x
        if NORM:
            gate += _load(z_ptr + token * z_stride + channel, mask)
            inverse = inverse_norm(tl.sum(v * v, axis=1) / d, EPS)[:, None]
            normed = v * inverse
            sigmoid = _sigmoid(gate)
            grad_gate = grad * normed * weight * _silu_slope(gate, sigmoid)
            gated = grad * gate * sigmoid
            weight_sum += gated * normed
            gated *= weight
            along = tl.sum(gated * normed, axis=1)[:, None] / d
            grad_v = inverse * (gated - normed * along)
        else:
            sigmoid = _sigmoid(v)
            grad_gate = grad * v * sigmoid
            grad_v = grad * gate * _silu_slope(v, sigmoid)
        D_sum += grad_v * x
        _store(grad_y_ptr + token * d + channel, grad_v, mask)
        _store(grad_x_ptr + token * d + channel, D * grad_v, mask)
        _store(grad_gate_ptr + token * d + channel, grad_gate, mask)

    channels = tl.arange(0, BLOCK_D)
    size = d * tl.num_programs(1) if HEADS else d
    sums = sums_ptr + program.to(tl.int64) * (2 if NORM else 1) * size + channels
    if HEADS:
        sums += head * d
    tl.store(sums, tl.sum(D_sum, axis=0), mask=channels < d)
    if NORM:
        tl.store(sums + size, tl.sum(weight_sum, axis=0), mask=channels < d)


@triton.jit
def shifted_norm_kernel(
    y_ptr,  # (b, t, d)
    y0_ptr,  # (b, d)
    out_ptr,  # (b, t, d)
    rows,
    t_end,
    d,
    y_stride_b,
    y_stride_t,
    y0_stride,
    START: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < rows) & (channel < d)
    b, t = row // t_end, row % t_end
    before = y_ptr + b * y_stride_b + (t - 1) * y_stride_t + channel
    v = _load(before, mask & (t > 0))
    if START:
        v += _load(y0_ptr + b * y0_stride + channel, mask & (t == 0))
    if NORM:
        v *= inverse_norm(tl.sum(v * v, axis=1) / d, EPS)[:, None]
    _store(out_ptr + row * d + channel, v, mask)


@triton.jit
def shifted_norm_backward_kernel(
    grad_ptr,  # (b, t, d)
    y_ptr,  # (b, t, d)
    y0_ptr,  # (b, d)
    grad_y_ptr,  # (b, t, d)
    grad_y0_ptr,  # (b, d)
    rows,
    t_end,
    d,
    grad_stride_b,
    grad_stride_t,
    y_stride_b,
    y_stride_t,
    y0_stride,
    START: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < rows) & (channel < d)
    # t + 1 rows a sample: y0, then every y; no token sees the last one
    b, t = row // (t_end + 1), row % (t_end + 1)
    first = mask & (t == 0)
    later = mask & (t > 0)
    grad_row = grad_ptr + b * grad_stride_b + t * grad_stride_t + channel
    grad = _load(grad_row, mask & (t < t_end))
    if NORM:
        before = y_ptr + b * y_stride_b + (t - 1) * y_stride_t + channel
        v = _load(before, later)
        if START:
            v += _load(y0_ptr + b * y0_stride + channel, first)
        inverse = inverse_norm(tl.sum(v * v, axis=1) / d, EPS)[:, None]
        normed = v * inverse
        along = tl.sum(grad * normed, axis=1)[:, None] / d
        grad = inverse * (grad - normed * along)
    _store(grad_y_ptr + (b * t_end + t - 1) * d + channel, grad, later)
    if START:
        _store(grad_y0_ptr + b * d + channel, grad, first)

"""Kernels of the output stage: one launch each way, nothing saved but the operands.

One program takes a token, or several where channels are few, with all channels in registers. The
gradients of D and of the norm's weight are sums over tokens: in the backward a program takes every
P-th tile of tokens and writes its part of both sums, which are then added in a fixed order.
With several heads, the second axis of a launch, T counts the tokens of one head. In the output the
heads of a token are beside each other. So they are in all tensors where BESIDE, as in a memory,
which has no x and no D; otherwise the tokens of a head follow those of the one before. Rows are
evenly spaced.
Letters: b batch, t time, d channels, P programs of a head, H heads (kernels/heads.py).
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import (
    inverse_norm,
    load_wide,
    sigmoid,
    silu_slope,
    store_rounded,
)


@triton.jit
def output_kernel(
    operands,  # `OutputOperands`: y, x and gate (H, T, d); D (H, d); weight likewise, or (d,)
    distances,  # of the rows of y, x and gate
    out_ptr,  # (T, H, d)
    T,
    d,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    BESIDE: tl.constexpr = operands.D is None
    head = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)[None, :]
    in_d = channel < d
    mask = (token < T) & in_d
    row = token if BESIDE else head * T + token
    column = head * d + channel if BESIDE else channel

    v = load_wide(operands.y + (row * distances[0] + column), mask)
    gate = load_wide(operands.gate + (row * distances[2] + column), mask)
    if operands.D is not None:
        x = load_wide(operands.x + (row * distances[1] + column), mask)
        v += load_wide(operands.D + (head * d + channel), in_d) * x
    if operands.weight is not None:
        weight = load_wide(operands.weight + (channel if BESIDE else head * d + channel), in_d)
        inverse = inverse_norm(tl.sum(v * v, axis=1) / d, EPS)
        out = gate * sigmoid(gate) * v * inverse[:, None] * weight
    else:
        out = gate * v * sigmoid(v)
    store_rounded(out_ptr + ((token * tl.num_programs(1) + head) * d + channel), out, mask)


@triton.jit
def output_backward_kernel(
    operands,  # as in `output_kernel`
    distances,  # of the rows of y, x and gate
    grad_ptr,  # (T, H, d)
    grad_row,  # the distance of its rows
    grads,  # as `operands`, contiguous, of which those of y, x and gate are written
    sums_ptr,  # (P, 2, H, d), of D unless BESIDE, and of weight
    T,
    d,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    BESIDE: tl.constexpr = operands.D is None
    program, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)[None, :]
    in_d = channel < d
    column = head * d + channel if BESIDE else channel
    size = d * tl.num_programs(1)
    if operands.D is not None:
        D = load_wide(operands.D + (head * d + channel), in_d)
        D_sum = tl.zeros((TOKENS, BLOCK_D), dtype=tl.float32)
    if operands.weight is not None:
        weight = load_wide(operands.weight + (channel if BESIDE else head * d + channel), in_d)
        weight_sum = tl.zeros((TOKENS, BLOCK_D), dtype=tl.float32)

    for tile in range(program, tl.cdiv(T, TOKENS), tl.num_programs(0)):
        token = tl.cast(tile, tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
        mask = (token < T) & in_d
        row = token if BESIDE else head * T + token
        grad = load_wide(grad_ptr + (token * grad_row + head * d + channel), mask)
        v = load_wide(operands.y + (row * distances[0] + column), mask)
        gate = load_wide(operands.gate + (row * distances[2] + column), mask)
        if operands.D is not None:
            x = load_wide(operands.x + (row * distances[1] + column), mask)
            v += D * x
        if operands.weight is not None:
            inverse = inverse_norm(tl.sum(v * v, axis=1) / d, EPS)[:, None]
            normed = v * inverse
            active = sigmoid(gate)
            grad_gate = grad * normed * weight * silu_slope(gate, active)
            gated = grad * gate * active
            weight_sum += gated * normed
            gated *= weight
            along = tl.sum(gated * normed, axis=1)[:, None] / d
            grad_v = inverse * (gated - normed * along)
        else:
            active = sigmoid(v)
            grad_gate = grad * v * active
            grad_v = grad * gate * silu_slope(v, active)
        to = row * (size if BESIDE else d) + column
        store_rounded(grads.y + to, grad_v, mask)
        store_rounded(grads.gate + to, grad_gate, mask)
        if operands.D is not None:
            D_sum += grad_v * x
            store_rounded(grads.x + to, D * grad_v, mask)

    channels = tl.arange(0, BLOCK_D)
    at = program.to(tl.int64) * 2 * size + head * d + channels
    if operands.D is not None:
        store_rounded(sums_ptr + at, tl.sum(D_sum, axis=0), channels < d)
    if operands.weight is not None:
        store_rounded(sums_ptr + (at + size), tl.sum(weight_sum, axis=0), channels < d)


@triton.jit
def shifted_norm_kernel(
    y_ptr,  # (b, t, d)
    y0_ptr,  # (b, d), or None
    out_ptr,  # (b, t, d)
    rows,
    t_end,
    d,
    y_stride,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < rows) & (channel < d)
    b, t = row // t_end, row % t_end
    v = load_wide(y_ptr + ((row - 1) * y_stride + channel), mask & (t > 0))
    if y0_ptr is not None:
        v += load_wide(y0_ptr + (b * d + channel), mask & (t == 0))
    if EPS is not None:
        v *= inverse_norm(tl.sum(v * v, axis=1) / d, EPS)[:, None]
    store_rounded(out_ptr + (row * d + channel), v, mask)


@triton.jit
def shifted_norm_backward_kernel(
    grad_ptr,  # (b, t, d)
    y_ptr,  # (b, t, d)
    y0_ptr,  # (b, d), or None
    grad_y_ptr,  # (b, t, d)
    grad_y0_ptr,  # (b, d)
    rows,
    t_end,
    d,
    grad_stride,
    y_stride,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < rows) & (channel < d)
    # t + 1 rows a sample: y0, then every y; no token sees the last one
    b, t = row // (t_end + 1), row % (t_end + 1)
    first, later, token = mask & (t == 0), mask & (t > 0), b * t_end + t
    grad = load_wide(grad_ptr + (token * grad_stride + channel), mask & (t < t_end))
    if EPS is not None:
        v = load_wide(y_ptr + ((token - 1) * y_stride + channel), later)
        if y0_ptr is not None:
            v += load_wide(y0_ptr + (b * d + channel), first)
        inverse = inverse_norm(tl.sum(v * v, axis=1) / d, EPS)[:, None]
        normed = v * inverse
        along = tl.sum(grad * normed, axis=1)[:, None] / d
        grad = inverse * (grad - normed * along)
    store_rounded(grad_y_ptr + ((token - 1) * d + channel), grad, later)
    if y0_ptr is not None:
        store_rounded(grad_y0_ptr + (b * d + channel), grad, first)

"""The output stage in Triton: one launch each way, nothing saved but the operands.

One program takes a token, or several where channels are few, with all channels in registers. The
gradients of D and of the norm's weight are sums over tokens: in the backward a program takes every
P-th tile of tokens and writes its part of both sums, which are then added in a fixed order.
Letters: b batch, t time, d channels, P programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bedouin.kernels.householder.triton_kernels import accumulator_of
from bedouin.kernels.launch import ceil_div, next_power_of_two

TILE = 1024
"""Fewest elements of a program's tile where there are as many: four warps, 8 elements a thread."""
MAX_WARPS = 16
PROGRAMS = 1024
"""Most programs of the backward: eight on each multiprocessor of an H100, and few enough that
their parts of the sums are small. The same on every device, so that the sums are."""


@triton.jit
def _sigmoid(a):
    small = tl.exp(-tl.abs(a))  # at most 1: no overflow
    return tl.where(a >= 0, 1.0, small) / (1 + small)


@triton.jit
def _silu_slope(a, sigmoid):
    return sigmoid * (1 + a * (1 - sigmoid))


@triton.jit
def _store(ptr, v, mask):
    if v.dtype == tl.float64 and ptr.dtype.element_ty != tl.float64:
        v = v.to(tl.float32)  # Triton's interpreter converts no double to half precision
    tl.store(ptr, v.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _forward_kernel(
    y_ptr,  # (b t, d)
    x_ptr,  # (b t, d)
    D_ptr,  # (d,)
    gate_ptr,  # (b t, d)
    fed_ptr,  # (b t, d)
    z_ptr,  # (b t, d)
    weight_ptr,  # (d,)
    out_ptr,  # (b t, d)
    T,
    d,
    y_stride,
    x_stride,
    gate_stride,
    fed_stride,
    z_stride,
    FED: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.arange(0, BLOCK_D)[None, :]
    in_d = channel < d
    mask = (token < T) & in_d

    y = tl.load(y_ptr + token * y_stride + channel, mask=mask, other=0.0).to(ACC)
    x = tl.load(x_ptr + token * x_stride + channel, mask=mask, other=0.0).to(ACC)
    gate = tl.load(gate_ptr + token * gate_stride + channel, mask=mask, other=0.0).to(ACC)
    if FED:
        gate += tl.load(fed_ptr + token * fed_stride + channel, mask=mask, other=0.0).to(ACC)
    D = tl.load(D_ptr + channel, mask=in_d, other=0.0).to(ACC)
    v = y + D * x
    if NORM:
        gate += tl.load(z_ptr + token * z_stride + channel, mask=mask, other=0.0).to(ACC)
        weight = tl.load(weight_ptr + channel, mask=in_d, other=0.0).to(ACC)
        inverse = tl.rsqrt(tl.sum(v * v, axis=1) / d + tl.full((), EPS, ACC))
        out = gate * _sigmoid(gate) * v * inverse[:, None] * weight
    else:
        out = gate * v * _sigmoid(v)
    _store(out_ptr + token * d + channel, out, mask)


@triton.jit
def _backward_kernel(
    grad_ptr,  # (b t, d)
    y_ptr,  # (b t, d)
    x_ptr,  # (b t, d)
    D_ptr,  # (d,)
    gate_ptr,  # (b t, d)
    fed_ptr,  # (b t, d)
    z_ptr,  # (b t, d)
    weight_ptr,  # (d,)
    grad_y_ptr,  # (b t, d)
    grad_x_ptr,  # (b t, d)
    grad_gate_ptr,  # (b t, d)
    sums_ptr,  # (P, 2, d), of D and weight; (P, 1, d) without weight
    T,
    d,
    grad_stride,
    y_stride,
    x_stride,
    gate_stride,
    fed_stride,
    z_stride,
    FED: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    program = tl.program_id(0)
    channel = tl.arange(0, BLOCK_D)[None, :]
    in_d = channel < d
    D = tl.load(D_ptr + channel, mask=in_d, other=0.0).to(ACC)
    if NORM:
        weight = tl.load(weight_ptr + channel, mask=in_d, other=0.0).to(ACC)
        weight_sum = tl.zeros((TOKENS, BLOCK_D), dtype=ACC)
    D_sum = tl.zeros((TOKENS, BLOCK_D), dtype=ACC)

    for tile in range(program, tl.cdiv(T, TOKENS), tl.num_programs(0)):
        token = tl.cast(tile, tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
        mask = (token < T) & in_d
        grad = tl.load(grad_ptr + token * grad_stride + channel, mask=mask, other=0.0).to(ACC)
        y = tl.load(y_ptr + token * y_stride + channel, mask=mask, other=0.0).to(ACC)
        x = tl.load(x_ptr + token * x_stride + channel, mask=mask, other=0.0).to(ACC)
        gate = tl.load(gate_ptr + token * gate_stride + channel, mask=mask, other=0.0).to(ACC)
        if FED:
            gate += tl.load(fed_ptr + token * fed_stride + channel, mask=mask, other=0.0).to(ACC)
        v = y + D * x
        if NORM:
            gate += tl.load(z_ptr + token * z_stride + channel, mask=mask, other=0.0).to(ACC)
            inverse = tl.rsqrt(tl.sum(v * v, axis=1) / d + tl.full((), EPS, ACC))[:, None]
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
        at = token * d + channel
        _store(grad_y_ptr + at, grad_v, mask)
        _store(grad_x_ptr + at, (D * grad_v), mask)
        _store(grad_gate_ptr + at, grad_gate, mask)

    channels = tl.arange(0, BLOCK_D)
    sums = sums_ptr + program.to(tl.int64) * (2 if NORM else 1) * d + channels
    tl.store(sums, tl.sum(D_sum, axis=0), mask=channels < d)
    if NORM:
        tl.store(sums + d, tl.sum(weight_sum, axis=0), mask=channels < d)


@triton.jit
def _shifted_norm_kernel(
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
    ACC: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < rows) & (channel < d)
    b, t = row // t_end, row % t_end
    before = y_ptr + b * y_stride_b + (t - 1) * y_stride_t + channel
    v = tl.load(before, mask=mask & (t > 0), other=0.0).to(ACC)
    if START:
        v += tl.load(y0_ptr + b * y0_stride + channel, mask=mask & (t == 0), other=0.0).to(ACC)
    if NORM:
        v *= tl.rsqrt(tl.sum(v * v, axis=1) / d + tl.full((), EPS, ACC))[:, None]
    _store(out_ptr + row * d + channel, v, mask)


@triton.jit
def _shifted_norm_backward_kernel(
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
    ACC: tl.constexpr,
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
    grad = tl.load(grad_row, mask=mask & (t < t_end), other=0.0).to(ACC)
    if NORM:
        before = y_ptr + b * y_stride_b + (t - 1) * y_stride_t + channel
        v = tl.load(before, mask=later, other=0.0).to(ACC)
        if START:
            v += tl.load(y0_ptr + b * y0_stride + channel, mask=first, other=0.0).to(ACC)
        inverse = tl.rsqrt(tl.sum(v * v, axis=1) / d + tl.full((), EPS, ACC))[:, None]
        normed = v * inverse
        along = tl.sum(grad * normed, axis=1)[:, None] / d
        grad = inverse * (grad - normed * along)
    grad_y = grad_y_ptr + (b * t_end + t - 1) * d + channel
    _store(grad_y, grad, later)
    if START:
        _store(grad_y0_ptr + b * d + channel, grad, first)


def output_forward(
    y: Tensor,  # (b, t, d)
    x: Tensor,  # (b, t, d)
    D: Tensor,  # (d,)
    gate: Tensor,  # (b, t, d)
    fed: Tensor | None,  # (b, t, d)
    z: Tensor | None,  # (b, t, d)
    weight: Tensor | None,  # (d,)
    eps: float,
    dtype: torch.dtype,
) -> Tensor:  # (b, t, d)
    """The gated output in `dtype`. No size may be 0."""
    out = torch.empty(y.shape, dtype=dtype, device=y.device)
    rows = _operands(y, x, gate, fed, z)
    norm_weight = D if weight is None else weight.contiguous()
    d, blocks = y.shape[-1], _blocks(y)
    tokens = y.numel() // d
    _forward_kernel[(ceil_div(tokens, blocks["TOKENS"]),)](
        *(rows[0], rows[1], D.contiguous(), *rows[2:], norm_weight, out),
        *(tokens, d),
        *(v.stride(0) for v in rows),
        FED=fed is not None,
        NORM=weight is not None,
        EPS=eps,
        ACC=accumulator_of(y),
        **blocks,
    )
    return out


def output_backward(
    grad: Tensor,  # (b, t, d)
    y: Tensor,  # (b, t, d)
    x: Tensor,  # (b, t, d)
    D: Tensor,  # (d,)
    gate: Tensor,  # (b, t, d)
    fed: Tensor | None,  # (b, t, d)
    z: Tensor | None,  # (b, t, d)
    weight: Tensor | None,  # (d,)
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of y, x and gate, which is also that of fed and z, and of D and weight (2, d).

    Without weight the last is that of D alone (1, d).
    """
    grads = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in (y, x, gate)]
    (grad_rows,) = _operands(grad)
    rows = _operands(y, x, gate, fed, z)
    norm_weight = D if weight is None else weight.contiguous()
    d, blocks = y.shape[-1], _blocks(y)
    tokens = y.numel() // d
    programs = min(PROGRAMS, ceil_div(tokens, blocks["TOKENS"]))
    sums = y.new_empty(programs, 2 if weight is not None else 1, d)
    _backward_kernel[(programs,)](
        *(grad_rows, rows[0], rows[1], D.contiguous(), *rows[2:], norm_weight, *grads, sums),
        *(tokens, d, grad_rows.stride(0)),
        *(v.stride(0) for v in rows),
        FED=fed is not None,
        NORM=weight is not None,
        EPS=eps,
        ACC=accumulator_of(y),
        **blocks,
    )
    return grads[0], grads[1], grads[2], sums.sum(0)


def shifted_norm_forward(
    y: Tensor,  # (b, t, d)
    y0: Tensor | None,  # (b, d); None: zeros
    eps: float | None,
    dtype: torch.dtype,
) -> Tensor:  # (b, t, d)
    """RMSNorm of y_{t-1} in `dtype`. No size may be 0."""
    out = torch.empty(y.shape, dtype=dtype, device=y.device)
    y = _channels_last(y)
    first = y if y0 is None else _channels_last(y0)
    (b, t_end, d), blocks = y.shape, _blocks(y)
    _shifted_norm_kernel[(ceil_div(b * t_end, blocks["TOKENS"]),)](
        *(y, first, out, b * t_end, t_end, d, *y.stride()[:2], first.stride(0)),
        START=y0 is not None,
        NORM=eps is not None,
        EPS=eps or 0.0,
        ACC=accumulator_of(y),
        **blocks,
    )
    return out


def shifted_norm_backward(
    grad: Tensor,  # (b, t, d)
    y: Tensor,  # (b, t, d)
    y0: Tensor | None,  # (b, d); None: zeros
    eps: float | None,
) -> tuple[Tensor, Tensor]:
    """Cotangents of y and y0, the second empty for None."""
    grads = [y.new_empty(y.shape), y.new_empty(0) if y0 is None else y0.new_empty(y0.shape)]
    grad, y = _channels_last(grad), _channels_last(y)
    first = y if y0 is None else _channels_last(y0)
    (b, t_end, d), blocks = y.shape, _blocks(y)
    rows = b * (t_end + 1)
    _shifted_norm_backward_kernel[(ceil_div(rows, blocks["TOKENS"]),)](
        *(grad, y, first, *grads, rows, t_end, d),
        *(*grad.stride()[:2], *y.stride()[:2], first.stride(0)),
        START=y0 is not None,
        NORM=eps is not None,
        EPS=eps or 0.0,
        ACC=accumulator_of(y),
        **blocks,
    )
    return grads[0], grads[1]


def _operands(first: Tensor, *others: Tensor | None) -> list[Tensor]:
    """Operands (b t, d) in the same memory if tokens are rows at one distance; None: the first."""
    first = _flat(first)
    return [first, *(first if v is None else _flat(v) for v in others)]


def _flat(v: Tensor) -> Tensor:
    return _channels_last(v.reshape(-1, v.shape[-1]))


def _channels_last(v: Tensor) -> Tensor:
    return v if v.stride(-1) == 1 else v.contiguous()


def _blocks(y: Tensor) -> dict[str, int]:
    """How many tokens one program takes at a time, with all their channels, and its warps."""
    block_d = next_power_of_two(y.shape[-1])
    tokens = max(1, min(next_power_of_two(y.numel() // y.shape[-1]), TILE // block_d))
    warps = max(1, min(MAX_WARPS, tokens * block_d // 256))
    return {"TOKENS": tokens, "BLOCK_D": block_d, "num_warps": warps}

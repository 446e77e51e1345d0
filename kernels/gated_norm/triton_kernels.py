"""Kernels of the gated norm: a program takes tiles of ROWS rows with all channels of a head.

The gradient of the weight is a sum over rows: a program writes its part, and the parts are added in
a fixed order.
Letters: r rows, v channels.
"""

import triton
import triton.language as tl


@triton.jit
def _load(ptr, at, mask):
    return tl.load(ptr + at, mask, 0.0).to(tl.float32)


@triton.jit
def _load_gate(gate_ptr, row, channel, mask, h, gate_row, V: tl.constexpr):
    """The gates of rows, of which a token has h."""
    at = (row // h * gate_row + row % h * V)[:, None] + channel[None, :]
    return _load(gate_ptr, at, mask)


@triton.jit
def gated_norm_kernel(
    o_ptr,  # (r, v)
    gate_ptr,  # (r, v), h rows beside each other
    weight_ptr,  # (v,)
    out_ptr,  # (r, v)
    r,
    h,
    gate_row,
    EPS: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    at = row[:, None] * V + channel[None, :]
    mask = (row < r)[:, None] & (channel < V)[None, :]
    o, gate = _load(o_ptr, at, mask), _load_gate(gate_ptr, row, channel, mask, h, gate_row, V)
    weight = _load(weight_ptr, channel, channel < V)
    inverse = tl.rsqrt(tl.sum(o * o, 1) / V + EPS)
    out = o * inverse[:, None] * weight[None, :] * (gate * tl.sigmoid(gate))
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def gated_norm_backward_kernel(
    grad_ptr,  # (r, v)
    o_ptr,  # (r, v)
    gate_ptr,  # (r, v), h rows beside each other
    weight_ptr,  # (v,)
    grad_o_ptr,  # (r, v)
    grad_gate_ptr,  # (r, v)
    sums_ptr,  # (programs, v)
    r,
    h,
    gate_row,
    tiles,
    EPS: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    exists = channel < V
    weight = _load(weight_ptr, channel, exists)[None, :]
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in range(program, tiles, tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        at = row[:, None] * V + channel[None, :]
        mask = (row < r)[:, None] & exists[None, :]
        grad, o = _load(grad_ptr, at, mask), _load(o_ptr, at, mask)
        gate = _load_gate(gate_ptr, row, channel, mask, h, gate_row, V)
        inverse = tl.rsqrt(tl.sum(o * o, 1) / V + EPS)[:, None]
        normed = o * inverse
        sigmoid = tl.sigmoid(gate)
        active = gate * sigmoid
        total += tl.sum(grad * active * normed, 0)
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        grad_gate = grad * normed * weight * slope
        tl.store(grad_gate_ptr + at, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask)
        grad = grad * active * weight
        along = tl.sum(grad * normed, 1)[:, None] / V
        grad_o = inverse * (grad - normed * along)
        tl.store(grad_o_ptr + at, grad_o.to(grad_o_ptr.dtype.element_ty), mask)
    tl.store(sums_ptr + program * V + channel, total, exists)

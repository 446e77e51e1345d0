"""Kernels around the sweeps of a whole layer: what precedes and what follows them, a launch each.

Letters: b folded samples, t time, d channels of a head, n state per channel, r raw values of a
head, H heads.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import LOG2E, sigmoid, softplus


@triton.jit
def _zero(ptr, at, size):
    tl.store(ptr + at, tl.zeros(at.shape, ptr.dtype.element_ty), mask=at < size)


@triton.jit
def _convert(from_ptr, to_ptr, at, size):
    v = tl.load(from_ptr + at, mask=at < size, other=0.0)
    tl.store(to_ptr + at, v.to(to_ptr.dtype.element_ty), mask=at < size)


@triton.jit
def _bias_entry(dt_bias_ptr, raw_bias_ptr, head, index, mask, r, d, BIAS: tl.constexpr):
    """Entries of the bias of W^x of a head, [that of Delta d | r others], where `mask` holds."""
    v = tl.load(dt_bias_ptr + head * d + index, mask=mask & (index < d), other=0.0)
    if BIAS:
        others = raw_bias_ptr + head * r + index - d
        others = tl.load(others, mask=mask & (index >= d), other=0.0)
        v = tl.where(index < d, v, others.to(v.dtype))
    return v


@triton.jit(do_not_specialize=["h_size", "batch", "normed_stride"])
def start_kernel(
    decay_ptr,  # (H, d, n), the parameter behind A
    dt_bias_ptr,  # (H, d)
    raw_bias_ptr,  # (H, r): the bias of all other raw values and of the gate
    A_ptr,  # (H, n, d), written: log2(e) A
    bias_ptr,  # (H, wide + d), written: [bias of the raw values r | zeros | bias of the gate d]
    h_ptr,  # (b, n, d), zeroed
    normed_ptr,  # (b, t, d), of which the first token is zeroed
    counters_ptr,  # (3,), zeroed
    W_x_ptr,  # (W_x_size,)
    W_x_low_ptr,  # (W_x_size,), written: W^x in another dtype
    W_y_ptr,  # (W_y_size,)
    W_y_low_ptr,  # (W_y_size,), written: W^y in another dtype
    h_size,  # b n d, or 0
    batch,
    normed_stride,
    A_size,  # H n d
    W_x_size,  # 0: it has the dtype of its products already
    W_y_size,
    r,
    wide,
    d: tl.constexpr,
    n: tl.constexpr,
    DECAY: tl.constexpr,
    SHARPNESS: tl.constexpr,
    BIAS: tl.constexpr,
    NORMED: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    if program == 0:
        _zero(counters_ptr, tl.arange(0, 4), 3)
    _zero(h_ptr, program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), h_size)
    _convert(W_x_ptr, W_x_low_ptr, at, W_x_size)
    _convert(W_y_ptr, W_y_low_ptr, at, W_y_size)
    if program * BLOCK < A_size:
        mask = at < A_size
        head, inside = at // (n * d), at % (n * d)
        from_at = head * (n * d) + inside % d * n + inside // d
        parameter = tl.load(decay_ptr + from_at, mask=mask, other=0.0).to(ACC)
        if DECAY == "exp":
            A = -tl.exp(parameter)
        else:
            A = -SHARPNESS * softplus(parameter)
        tl.store(A_ptr + at, A * LOG2E, mask=mask)
    bias_size = A_size // (n * d) * (wide + d)
    if program * BLOCK < bias_size:
        head, column = at // (wide + d), at % (wide + d)
        mask = (at < bias_size) & ((column < r) | (column >= wide))
        index = tl.where(column < wide, column, column - wide + r)
        bias = _bias_entry(dt_bias_ptr, raw_bias_ptr, head, index, mask, r, d, BIAS)
        tl.store(bias_ptr + at, bias.to(bias_ptr.dtype.element_ty), mask=at < bias_size)
    if NORMED:
        if program * BLOCK < batch * d:
            row = normed_ptr + (at // d).to(tl.int64) * normed_stride + at % d
            tl.store(row, tl.zeros([BLOCK], normed_ptr.dtype.element_ty), mask=at < batch * d)


@triton.jit(do_not_specialize=["size", "rows"])
def clear_kernel(
    flat_ptr,  # (size,), zeroed
    padded_ptr,  # (rows, wide), of which the columns from r on are zeroed
    size,
    rows,
    r,
    wide,
    PADDING: tl.constexpr,  # a power of two, at least wide - r
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    _zero(flat_ptr, program * BLOCK + tl.arange(0, BLOCK), size)
    ROWS: tl.constexpr = BLOCK // PADDING
    row = program * ROWS + tl.arange(0, ROWS)[:, None]
    column = r + tl.arange(0, PADDING)[None, :]
    zeros = tl.zeros([ROWS, PADDING], padded_ptr.dtype.element_ty)
    tl.store(padded_ptr + row * wide + column, zeros, mask=(row < rows) & (column < wide))


@triton.jit
def finish_kernel(
    grad_A_ptr,  # (H, n, d)
    decay_ptr,  # (H, d, n), the parameter behind A
    grad_ptr,  # (H, d, n), written: the cotangent of the parameter
    bias_ptr,  # (H, r + d), of the bias of W^x, or nothing
    dt_bias_ptr,  # (H, d), written: its first part
    raw_bias_ptr,  # (H, r), written: its second part
    W_x_low_ptr,  # (W_x_size,), of W^x
    W_x_ptr,  # (W_x_size,), written: the same in another dtype
    W_y_low_ptr,  # (W_y_size,), of W^y
    W_y_ptr,  # (W_y_size,), written: the same in another dtype
    A_size,  # H n d
    bias_size,  # H (r + d), or 0
    W_x_size,  # 0: it has its dtype already
    W_y_size,
    r,
    d: tl.constexpr,
    n: tl.constexpr,
    DECAY: tl.constexpr,
    SHARPNESS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients as the parameters have them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _convert(W_x_low_ptr, W_x_ptr, at, W_x_size)
    _convert(W_y_low_ptr, W_y_ptr, at, W_y_size)
    if tl.program_id(0) * BLOCK < bias_size:
        head, column = at // (r + d), at % (r + d)
        v = tl.load(bias_ptr + at, mask=at < bias_size, other=0.0)
        of_delta = (at < bias_size) & (column < d)
        of_element = v.to(dt_bias_ptr.dtype.element_ty)
        tl.store(dt_bias_ptr + head * d + column, of_element, mask=of_delta)
        of_others = (at < bias_size) & (column >= d)
        of_element = v.to(raw_bias_ptr.dtype.element_ty)
        tl.store(raw_bias_ptr + head * r + column - d, of_element, mask=of_others)
    if tl.program_id(0) * BLOCK < A_size:
        mask = at < A_size
        head, inside = at // (n * d), at % (n * d)
        grad_at = head * (n * d) + inside % n * d + inside // n
        grad = tl.load(grad_A_ptr + grad_at, mask=mask, other=0.0)
        parameter = tl.load(decay_ptr + at, mask=mask, other=0.0).to(ACC)
        if DECAY == "exp":
            grad *= -tl.exp(parameter)
        else:
            grad *= -SHARPNESS * tl.where(parameter > 20, 1.0, sigmoid(parameter))
        tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=mask)

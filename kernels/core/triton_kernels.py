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
    # in 64 bits: a number that overflows is negative, and so below every size
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    if program == 0:
        _zero(counters_ptr, tl.arange(0, 4), 3)
    _zero(h_ptr, at, h_size)
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
        size = tl.cast(batch, tl.int64) * d
        if program * BLOCK < size:
            row = normed_ptr + at // d * normed_stride + at % d
            tl.store(row, tl.zeros([BLOCK], normed_ptr.dtype.element_ty), mask=at < size)


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
def _sum_rows(
    ptr,  # (BLOCK,), the columns of the first row
    stride,  # from row to row
    rows,
    readable,  # (BLOCK,), which columns are loaded: those of padding, too, so that loads are wide
    to_ptr,  # (BLOCK,), written
    wanted,  # (BLOCK,), which sums are stored
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums over this program's share of the rows."""
    each = tl.cdiv(rows, tl.num_programs(0))
    start = tl.program_id(0) * each
    end = tl.minimum(start + each, rows)
    total = tl.zeros([ROWS, readable.shape[0]], ACC)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        from_ptr = ptr[None, :] + row.to(tl.int64)[:, None] * stride
        total += tl.load(from_ptr, mask=(row < end)[:, None] & readable[None, :], other=0.0).to(ACC)
    tl.store(to_ptr, tl.sum(total, 0), mask=wanted)


@triton.jit(do_not_specialize=["rows", "batch", "count"])
def sum_kernel(
    grad_A_ptr,  # (H, batch, n, d)
    raw_ptr,  # (H, rows, wide)
    gate_ptr,  # (H, rows, d)
    of_channels_ptr,  # (count, PARTS, H, d), of D and of the norm's weight
    sums_ptr,  # (parts, H, n d + r + d + PARTS d), written: sums of the above, in that order
    rows,
    batch,
    count,
    r,
    wide,
    gate_head,
    gate_row,
    d: tl.constexpr,
    n: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,  # whether the sums of raw and gate are wanted
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums over rows in as many parts as there are programs along the first axis of the grid, one
    block of columns of one head a program."""
    block, head, heads = tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(2)
    columns = n * d + r + d + PARTS * d
    to_ptr = sums_ptr + (tl.program_id(0) * heads + head) * columns
    at = tl.arange(0, BLOCK)
    of_A: tl.constexpr = (n * d + BLOCK - 1) // BLOCK
    of_channels: tl.constexpr = (PARTS * d + BLOCK - 1) // BLOCK
    of_gate: tl.constexpr = (d + BLOCK - 1) // BLOCK
    if block < of_A:
        column = block * BLOCK + at
        mask = column < n * d
        grad_A_ptr += head * batch * (n * d)
        _sum_rows(grad_A_ptr + column, n * d, batch, mask, to_ptr + column, mask, ACC, ROWS)
    elif block < of_A + of_channels:
        # a row has those of all heads, first for D and then for the weight
        column = (block - of_A) * BLOCK + at
        mask = column < PARTS * d
        of_channels_ptr += head * d
        to_ptr += n * d + r + d
        _sum_rows(
            of_channels_ptr + column // d * (heads * d) + column % d, PARTS * heads * d, count,
            mask, to_ptr + column, mask, ACC, ROWS,
        )  # fmt: skip
    elif BIAS:
        if block < of_A + of_channels + of_gate:
            column = (block - of_A - of_channels) * BLOCK + at
            mask = column < d
            gate_ptr += head * gate_head
            to_ptr += n * d + r
            _sum_rows(gate_ptr + column, gate_row, rows, mask, to_ptr + column, mask, ACC, ROWS)
        else:
            column = (block - of_A - of_channels - of_gate) * BLOCK + at
            raw_ptr += head * rows * wide
            to_ptr += n * d
            _sum_rows(
                raw_ptr + column, wide, rows, column < wide, to_ptr + column, column < r, ACC, ROWS
            )


@triton.jit
def _add_parts(ptr, stride, parts, mask, SHARES: tl.constexpr):
    """The sum of all parts, loaded at once: one load after the other would take as many times the
    latency of memory."""
    part = tl.arange(0, SHARES)[:, None]
    v = tl.load(ptr[None, :] + part * stride, mask=(part < parts) & mask[None, :], other=0.0)
    return tl.sum(v, 0)


@triton.jit
def finish_kernel(
    sums_ptr,  # (parts, H, n d + r + d + PARTS d), see `sum_kernel`
    decay_ptr,  # (H, d, n), the parameter behind A
    grad_ptr,  # (H, d, n), written: the cotangent of the parameter
    D_ptr,  # (H, d), written
    weight_ptr,  # (H, d), written
    dt_bias_ptr,  # (H, d), written: the first part of the bias of W^x
    raw_bias_ptr,  # (H, r), written: its second part
    W_x_low_ptr,  # (W_x_size,), of W^x
    W_x_ptr,  # (W_x_size,), written: the same in another dtype
    W_y_low_ptr,  # (W_y_size,), of W^y
    W_y_ptr,  # (W_y_size,), written: the same in another dtype
    parts,
    heads,
    W_x_size,  # 0: it has its dtype already
    W_y_size,
    r,
    d: tl.constexpr,
    n: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,  # whether the gradient of the bias is wanted
    DECAY: tl.constexpr,
    SHARPNESS: tl.constexpr,
    ACC: tl.constexpr,
    SHARES: tl.constexpr,  # a power of two, at least `parts`
    BLOCK: tl.constexpr,
):
    """Gradients as the parameters have them."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    _convert(W_x_low_ptr, W_x_ptr, at, W_x_size)
    _convert(W_y_low_ptr, W_y_ptr, at, W_y_size)
    columns = n * d + r + d + PARTS * d
    stride = heads * columns
    if BIAS:
        bias_size = heads * (r + d)
        if first < bias_size:
            head, column, mask = at // (r + d), at % (r + d), at < bias_size
            v = _add_parts(sums_ptr + head * columns + n * d + column, stride, parts, mask, SHARES)
            to_ptr = dt_bias_ptr + head * d + column
            tl.store(to_ptr, v.to(dt_bias_ptr.dtype.element_ty), mask=mask & (column < d))
            to_ptr = raw_bias_ptr + head * r + column - d
            tl.store(to_ptr, v.to(raw_bias_ptr.dtype.element_ty), mask=mask & (column >= d))
    if first < heads * d:
        head, column, mask = at // d, at % d, at < heads * d
        from_ptr = sums_ptr + head * columns + n * d + r + d + column
        v = _add_parts(from_ptr, stride, parts, mask, SHARES)
        tl.store(D_ptr + at, v.to(D_ptr.dtype.element_ty), mask=mask)
        if PARTS == 2:
            v = _add_parts(from_ptr + d, stride, parts, mask, SHARES)
            tl.store(weight_ptr + at, v.to(weight_ptr.dtype.element_ty), mask=mask)
    A_size = heads * n * d
    if first < A_size:
        mask = at < A_size
        head, inside = at // (n * d), at % (n * d)
        from_ptr = sums_ptr + head * columns + inside % n * d + inside // n
        grad = _add_parts(from_ptr, stride, parts, mask, SHARES)
        parameter = tl.load(decay_ptr + at, mask=mask, other=0.0).to(ACC)
        if DECAY == "exp":
            grad *= -tl.exp(parameter)
        else:
            grad *= -SHARPNESS * tl.where(parameter > 20, 1.0, sigmoid(parameter))
        tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=mask)

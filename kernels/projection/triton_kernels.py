"""Kernels of one part of the projected input: from all heads side by side to each head by itself.

    v'_t = SiLU(sum_i weight[:, i] v_{t - w + 1 + i})         of a convolved part
    v'_t = v_t + bias                                         of another one

A program of the forward has some tokens of a head's part. Letters: b batch, t time, s values of the
part for each head, c convolved channels of all parts, w width of the convolution, H heads.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# Tuples that grow are tuples of other types.
# mypy: disable-error-code="assignment, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import sigmoid


@triton.jit
def _load_input(
    row,  # of the first token of a sample
    window,  # of the first token of its window
    time,  # (tokens, 1)
    columns,
    inside, stride_t, c, t_end,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Inputs (tokens, columns), those before the first token from the window, zeros after the last
    one."""
    here = (time >= 0) & (time < t_end) & inside
    at = row + time.to(tl.int64) * stride_t + columns
    v = tl.load(at, mask=here, other=0.0).to(tl.float32)
    if WIDTH > 1:
        before = (time < 0) & (time >= 1 - WIDTH) & inside
        v += tl.load(window + (time + WIDTH - 1) * c + columns, mask=before, other=0.0)
    return v


@triton.jit
def _load_weights(weight, columns, inside, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr):
    """The weights (1, columns) of the convolution, from the earliest token's to the present one's;
    without a weight nothing."""
    out = ()
    if WEIGHTED:
        for i in tl.static_range(WIDTH):
            w = tl.load(weight + columns * WIDTH + i, mask=inside, other=0.0)
            out = out + (w.to(tl.float32),)
    return out


@triton.jit
def _convolve(inputs, weights):
    """The sum of weights times inputs, or without weights the only input."""
    if len(weights) > 0:
        total = weights[0] * inputs[0]
        for i in tl.static_range(1, len(weights)):
            total += weights[i] * inputs[i]
    else:
        total = inputs[0]
    return total


@triton.jit(do_not_specialize=["t_end", "num_heads"])
def split_kernel(
    from_ptr,  # (b, t, H s)
    bias_ptr,  # (H, s)
    weight_ptr,  # (H s, w)
    window_ptr,  # (b, w - 1, H s), float32
    to_ptr,  # (H b, t, s), written
    t_end,
    num_heads,
    s,
    c,
    from_stride_b,
    from_stride_t,
    bias_stride,  # from head to head
    to_stride_b,
    to_stride_t,
    WIDTH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ACTIVATED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < s
    time = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    first = head * s
    row = from_ptr + sample * from_stride_b + first
    window = window_ptr + sample * (WIDTH - 1) * c + first
    weights = _load_weights(weight_ptr + first * WIDTH, columns, inside, WIDTH, WEIGHTED)
    inputs = ()
    for i in tl.static_range(WIDTH):
        earlier = time - (WIDTH - 1 - i)
        v = _load_input(row, window, earlier, columns, inside, from_stride_t, c, t_end, WIDTH)
        inputs = inputs + (v,)
    v = _convolve(inputs, weights)
    if ACTIVATED:
        v *= sigmoid(v)
    if BIASED:
        bias = tl.load(bias_ptr + head * bias_stride + columns, mask=inside, other=0.0)
        v += bias.to(tl.float32)
    at = to_ptr + (head * tl.num_programs(2) + sample) * to_stride_b
    at += time.to(tl.int64) * to_stride_t + columns
    tl.store(at, v.to(to_ptr.dtype.element_ty), mask=(time < t_end) & inside)


@triton.jit(do_not_specialize=["t_end", "num_heads", "length"])
def split_backward_kernel(
    from_ptr,  # (b, t, H s)
    weight_ptr,  # (H s, w)
    window_ptr,  # (b, w - 1, H s), float32
    grad_ptr,  # (H b, t, s), of the result
    grad_from_ptr,  # (b, t, H s), written
    grad_window_ptr,  # (b, w - 1, H s), written
    grad_bias_ptr,  # (b blocks, H, s), written
    grad_weight_ptr,  # (b blocks, w, H s), written
    t_end,
    num_heads,
    length,  # tokens of a row
    s,
    c,
    from_stride_b,
    from_stride_t,
    grad_stride_b,
    grad_stride_t,
    to_stride_b,
    to_stride_t,
    bias_row,  # H r, between two rows of grad_bias
    bias_stride,
    WIDTH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ACTIVATED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each row of a tile walks over tokens of its own, with the last inputs and cotangents in
    registers:

    g_t = grad_t SiLU'(sum_i weight[:, i] v_{t - w + 1 + i}),  grad v_t = sum_j weight[:, w - 1 - j]
    g_{t + j}
    """
    block, head, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    own = sample * tl.num_programs(0) + block
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < s
    first = head * s
    row = from_ptr + sample * from_stride_b + first
    window = window_ptr + sample * (WIDTH - 1) * c + first
    weights = _load_weights(weight_ptr + first * WIDTH, columns, inside, WIDTH, WEIGHTED)
    grads = grad_ptr + (head * tl.num_programs(2) + sample) * grad_stride_b + columns
    to = grad_from_ptr + sample * to_stride_b + first + columns
    dtype = grad_from_ptr.dtype.element_ty
    begin = (block * ROWS + tl.arange(0, ROWS)[:, None]) * length
    end = tl.minimum(begin + length, t_end)
    # the first row also has the tokens of the window
    start = tl.where(begin == 0, 1 - WIDTH, begin)
    zeros = tl.zeros([ROWS, BLOCK], tl.float32)
    of_bias = zeros
    of_weights = (zeros,) * WIDTH
    g = (zeros,) * WIDTH
    inputs = (zeros,)
    for i in tl.static_range(WIDTH - 1):
        earlier = start + (i - WIDTH + 1)
        v = _load_input(row, window, earlier, columns, inside, from_stride_t, c, t_end, WIDTH)
        inputs = inputs + (v,)
    for i in range(0, length + 2 * (WIDTH - 1)):
        time = start + i
        here = (time >= 0) & (time < t_end) & inside
        grad = tl.load(grads + time.to(tl.int64) * grad_stride_t, mask=here, other=0.0)
        of_v = grad.to(tl.float32)
        mine = (time >= begin) & (time < end)
        if BIASED:
            of_bias += tl.where(mine, of_v, 0.0)
        if ACTIVATED:
            v = _load_input(row, window, time, columns, inside, from_stride_t, c, t_end, WIDTH)
            inputs = inputs[1:WIDTH] + (v,)
            v = _convolve(inputs, weights)
            share = sigmoid(v)
            of_v *= share * (1 + v * (1 - share))
        if WEIGHTED:
            g = g[1:WIDTH] + (of_v,)
            of_mine = tl.where(mine, of_v, 0.0)
            added = ()
            of_v = weights[WIDTH - 1] * g[0]
            for j in tl.static_range(WIDTH):
                added = added + (of_weights[j] + of_mine * inputs[j],)
                if j > 0:
                    of_v += weights[WIDTH - 1 - j] * g[j]
            of_weights = added
        at = time - (WIDTH - 1)
        complete = (at >= start) & (at < end) & inside
        tl.store(to + at.to(tl.int64) * to_stride_t, of_v.to(dtype), mask=complete & (at >= 0))
        if WIDTH > 1:
            at_window = grad_window_ptr + (sample * (WIDTH - 1) + at + WIDTH - 1) * c + first
            tl.store(at_window + columns, of_v, mask=complete & (at < 0))
    if BIASED:
        at_bias = grad_bias_ptr + own * bias_row + head * bias_stride + columns
        tl.store(at_bias, tl.sum(of_bias, 0)[None, :], mask=inside)
    if WEIGHTED:
        for i in tl.static_range(WIDTH):
            at_sum = grad_weight_ptr + (own * WIDTH + i) * c + first + columns
            tl.store(at_sum, tl.sum(of_weights[i], 0)[None, :], mask=inside)

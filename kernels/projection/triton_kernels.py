"""Kernels of the projected input: from all heads side by side to each head by itself.

    v'_t = SiLU(sum_i weight[:, i] v_{t - w + 1 + i})         of a convolved part
    v'_t = v_t + bias                                         of another one

A program has some tokens of one part of one head; programs of all parts are in one launch. Letters:
b batch, t time, p channels and r raw values of a head, q those with a bias, s values of a part of a
head, c convolved channels of all parts and heads, w width of the convolution, H heads.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import sigmoid
from bedouin.kernels.projection.parts import X

FIELDS = tl.constexpr(9)
"""Numbers of a part in `PARTS`: its size, that as a power of two, its place (parts.py), whether it
is convolved or at least activated, its first column, its first convolved channel, the rows of a
program's tile, its first value with a bias, and the place of this bias among those of a head."""

AT_X = tl.constexpr(X)


@triton.jit
def _load_input(
    row,  # of the first token of a sample
    window,  # of the first token of its window
    time,  # (tokens, 1)
    columns,
    inside, stride_t, c, t_end,
    WIDTH: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Inputs (tokens, columns), those before the first token from the window or else zeros, zeros
    after the last one."""
    here = (time >= 0) & (time < t_end) & inside
    at = row + time.to(tl.int64) * stride_t + columns
    v = tl.load(at, mask=here, other=0.0).to(tl.float32)
    if WIDTH > 1 and WINDOWED:
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


@triton.jit
def _split_part(
    pointers, strides,  # those of `split_kernel`
    t_end, block, head, sample, i: tl.constexpr, PARTS: tl.constexpr,
    SIZES: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """A block of tokens of the i-th part."""
    from_ptr, bias_ptr, weight_ptr, window_ptr, x_ptr, raw_ptr, gate_ptr = pointers
    from_stride_b, from_stride_t, bias_stride = strides
    P: tl.constexpr = SIZES[0]
    R: tl.constexpr = SIZES[1]
    C: tl.constexpr = SIZES[2]
    WIDTH: tl.constexpr = SIZES[4]
    s: tl.constexpr = PARTS[FIELDS * i]
    BLOCK: tl.constexpr = PARTS[FIELDS * i + 1]
    place: tl.constexpr = PARTS[FIELDS * i + 2]
    ACTIVATED: tl.constexpr = PARTS[FIELDS * i + 3]
    WEIGHTED: tl.constexpr = ACTIVATED and WIDTH > 0
    W: tl.constexpr = WIDTH if WEIGHTED else 1
    TOKENS: tl.constexpr = PARTS[FIELDS * i + 6]
    UNBIASED: tl.constexpr = PARTS[FIELDS * i + 7]
    bias_at: tl.constexpr = PARTS[FIELDS * i + 8]
    begin = block * TOKENS
    folded = head * tl.num_programs(2) + sample
    if begin < t_end:
        columns = tl.arange(0, BLOCK)[None, :]
        inside = columns < s
        time = begin + tl.arange(0, TOKENS)[:, None]
        first = PARTS[FIELDS * i + 5] + head * s
        row = from_ptr + sample * from_stride_b + PARTS[FIELDS * i + 4] + head * s
        window = window_ptr + sample * (W - 1) * C + first
        weights = _load_weights(weight_ptr + first * W, columns, inside, W, WEIGHTED)
        inputs = ()
        for j in tl.static_range(W):
            at = time - (W - 1 - j)
            v = _load_input(row, window, at, columns, inside, from_stride_t, C, t_end, W, WINDOWED)
            inputs = inputs + (v,)
        v = _convolve(inputs, weights)
        if ACTIVATED:
            v *= sigmoid(v)
        if UNBIASED < s:
            bias = bias_ptr + head * bias_stride + (bias_at - UNBIASED) + columns
            here = inside & (columns >= UNBIASED)
            v += tl.load(bias, mask=here, other=0.0).to(tl.float32)
        if place >= 0:
            at = raw_ptr + (folded * t_end + time) * R + place + columns
        elif place == AT_X:
            at = x_ptr + (folded * t_end + time) * P + columns
        else:
            at = gate_ptr + (folded * t_end + time) * P + columns
        tl.store(at, v.to(x_ptr.dtype.element_ty), mask=(time < t_end) & inside)


@triton.jit(do_not_specialize=["t_end"])
def split_kernel(
    from_ptr,  # (b, t, columns)
    bias_ptr,  # (H, q)
    weight_ptr,  # (c, w)
    window_ptr,  # (b, w - 1, c), float32, with WINDOWED, else its inputs are zeros
    x_ptr,  # (H b, t, p), written
    raw_ptr,  # (H b, t, r), written
    gate_ptr,  # (H b, t, p), written
    t_end,
    from_stride_b,
    from_stride_t,
    bias_stride,  # from head to head
    PARTS: tl.constexpr,  # `FIELDS` of each part
    SIZES: tl.constexpr,  # p, r, c, q, and w, 0 for no convolution
    WINDOWED: tl.constexpr,
):
    COUNT: tl.constexpr = len(PARTS) // FIELDS
    head, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    pointers = from_ptr, bias_ptr, weight_ptr, window_ptr, x_ptr, raw_ptr, gate_ptr
    strides = from_stride_b, from_stride_t, bias_stride
    block = tl.program_id(0) // COUNT
    for i in tl.static_range(COUNT):
        if tl.program_id(0) % COUNT == i:
            _split_part(pointers, strides, t_end, block, head, sample, i, PARTS, SIZES, WINDOWED)


@triton.jit
def _split_part_vjp(
    pointers, strides,  # those of `split_backward_kernel`
    t_end, splits, block, head, sample, i: tl.constexpr, PARTS: tl.constexpr,
    SIZES: tl.constexpr, WINDOWED: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """A block of tokens of the i-th part. Each row of a tile walks over tokens of its own, with the
    last inputs and cotangents in registers:

    g_t = grad_t SiLU'(sum_i weight[:, i] v_{t - w + 1 + i}),  grad v_t = sum_j weight[:, w - 1 - j]
    g_{t + j}
    """
    from_ptr, weight_ptr, window_ptr, grad_ptrs, grad_from_ptr = pointers[0:5]
    grad_window_ptr, sums_ptr = pointers[5:7]
    from_stride_b, from_stride_t, grad_strides, to_stride_b, to_stride_t = strides
    C: tl.constexpr = SIZES[2]
    Q: tl.constexpr = SIZES[3]
    WIDTH: tl.constexpr = SIZES[4]
    s: tl.constexpr = PARTS[FIELDS * i]
    BLOCK: tl.constexpr = PARTS[FIELDS * i + 1]
    place: tl.constexpr = PARTS[FIELDS * i + 2]
    ACTIVATED: tl.constexpr = PARTS[FIELDS * i + 3]
    WEIGHTED: tl.constexpr = ACTIVATED and WIDTH > 0
    W: tl.constexpr = WIDTH if WEIGHTED else 1
    ROWS: tl.constexpr = PARTS[FIELDS * i + 6]
    UNBIASED: tl.constexpr = PARTS[FIELDS * i + 7]
    bias_at: tl.constexpr = PARTS[FIELDS * i + 8]
    # of x, of the raw values or of the gate
    which: tl.constexpr = 1 if place >= 0 else 0 if place == AT_X else 2
    stride_t = grad_strides[2 * which + 1]
    length = tl.maximum(LENGTH if WEIGHTED else 1, tl.cdiv(t_end, ROWS * splits))
    folded = head * tl.num_programs(2) + sample
    dtype = grad_from_ptr.dtype.element_ty
    if block * ROWS * length < t_end:
        columns = tl.arange(0, BLOCK)[None, :]
        inside = columns < s
        first = PARTS[FIELDS * i + 5] + head * s
        column = PARTS[FIELDS * i + 4] + head * s
        row = from_ptr + sample * from_stride_b + column
        to = grad_from_ptr + sample * to_stride_b + column + columns
        window = window_ptr + sample * (W - 1) * C + first
        weights = _load_weights(weight_ptr + first * W, columns, inside, W, WEIGHTED)
        grads = grad_ptrs[which] + folded * grad_strides[2 * which] + columns
        if place >= 0:
            grads += place
        begin = (block * ROWS + tl.arange(0, ROWS)[:, None]) * length
        end = tl.minimum(begin + length, t_end)
        # the first row also has the tokens of the window
        start = tl.where(begin == 0, 1 - W, begin)
        zeros = tl.zeros([ROWS, BLOCK], tl.float32)
        bias_sum = zeros
        grad_weights = (zeros,) * W
        g = (zeros,) * W
        inputs = (zeros,)
        for j in tl.static_range(W - 1):
            at = start + (j - W + 1)
            v = _load_input(row, window, at, columns, inside, from_stride_t, C, t_end, W, WINDOWED)
            inputs = inputs + (v,)
        for step in range(0, length + 2 * (W - 1)):
            time = start + step
            here = (time >= 0) & (time < t_end) & inside
            grad = tl.load(grads + time.to(tl.int64) * stride_t, mask=here, other=0.0)
            grad_v = grad.to(tl.float32)
            mine = (time >= begin) & (time < end)
            if UNBIASED < s:
                bias_sum += tl.where(mine, grad_v, 0.0)
            if ACTIVATED:
                v = _load_input(
                    row, window, time, columns, inside, from_stride_t, C, t_end, W, WINDOWED
                )
                inputs = inputs[1:W] + (v,)
                v = _convolve(inputs, weights)
                share = sigmoid(v)
                grad_v *= share * (1 + v * (1 - share))
            if WEIGHTED:
                g = g[1:W] + (grad_v,)
                grad_mine = tl.where(mine, grad_v, 0.0)
                added = ()
                grad_v = weights[W - 1] * g[0]
                for j in tl.static_range(W):
                    added = added + (grad_weights[j] + grad_mine * inputs[j],)
                    if j > 0:
                        grad_v += weights[W - 1 - j] * g[j]
                grad_weights = added
            at = time - (W - 1)
            complete = (at >= start) & (at < end) & inside
            tl.store(
                to + at.to(tl.int64) * to_stride_t, grad_v.to(dtype), mask=complete & (at >= 0)
            )
            if W > 1 and WINDOWED:
                at_window = grad_window_ptr + (sample * (W - 1) + at + W - 1) * C + first
                tl.store(at_window + columns, grad_v, mask=complete & (at < 0))
        biases = tl.num_programs(1) * Q
        sums = sums_ptr + (sample * splits + block) * (biases + C * WIDTH)
        if UNBIASED < s:
            at_bias = sums + head * Q + (bias_at - UNBIASED) + columns
            here = inside & (columns >= UNBIASED)
            tl.store(at_bias, tl.sum(bias_sum, 0)[None, :], mask=here)
        if WEIGHTED:
            for j in tl.static_range(W):
                at_sum = sums + biases + (first + columns) * W + j
                tl.store(at_sum, tl.sum(grad_weights[j], 0)[None, :], mask=inside)


@triton.jit(do_not_specialize=["t_end", "splits"])
def split_backward_kernel(
    from_ptr,  # (b, t, columns)
    weight_ptr,  # (c, w)
    window_ptr,  # (b, w - 1, c), float32, with WINDOWED
    grad_x_ptr,  # (H b, t, p)
    grad_raw_ptr,  # (H b, t, r)
    grad_gate_ptr,  # (H b, t, p)
    grad_from_ptr,  # (b, t, columns), written
    grad_window_ptr,  # (b, w - 1, c), written with WINDOWED
    # (b splits, H q + c w), zeros: parts of the gradients of the biases and weights, written where
    # there are tokens
    sums_ptr,
    t_end,
    splits,
    from_stride_b,
    from_stride_t,
    x_stride_b,
    x_stride_t,
    raw_stride_b,
    raw_stride_t,
    gate_stride_b,
    gate_stride_t,
    to_stride_b,
    to_stride_t,
    PARTS: tl.constexpr,  # `FIELDS` of each part
    SIZES: tl.constexpr,  # p, r, c, q, and w, 0 for no convolution
    WINDOWED: tl.constexpr,
    LENGTH: tl.constexpr,  # fewest tokens of a row of a convolved part
):
    COUNT: tl.constexpr = len(PARTS) // FIELDS
    block, head = tl.program_id(0) // COUNT, tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64)
    grad_ptrs = grad_x_ptr, grad_raw_ptr, grad_gate_ptr
    given = from_ptr, weight_ptr, window_ptr, grad_ptrs, grad_from_ptr
    pointers = given + (grad_window_ptr, sums_ptr)
    grad_strides = x_stride_b, x_stride_t, raw_stride_b, raw_stride_t, gate_stride_b, gate_stride_t
    strides = from_stride_b, from_stride_t, grad_strides, to_stride_b, to_stride_t
    for i in tl.static_range(COUNT):
        if tl.program_id(0) % COUNT == i:
            _split_part_vjp(
                pointers, strides, t_end, splits, block, head, sample, i, PARTS, SIZES,
                WINDOWED, LENGTH,
            )  # fmt: skip

"""Kernels of the short convolution: one launch forward, two backward, no intermediate forward.

A program has TOKENS tokens of one sample and a block of channels, which is one group where some
have unit length. The backward first computes the cotangent of the convolution's result, and then
from it those of x and of the window, and each program's part of the gradient of the weight.
Letters: b batch, t time, c channels, w width, a channels to which something is added, n tiles of
tokens of a sample.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import silu_slope


@triton.jit
def _places(t, c, TOKENS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Of this program: the sample, the indices of its tile of tokens and of its block of channels,
    the tokens and the channels of both, and which of the channels exist."""
    program = tl.program_id(0).to(tl.int64)
    block, rest = program % tl.cdiv(c, SIZE), program // tl.cdiv(c, SIZE)
    tile, sample = rest % tl.cdiv(t, TOKENS), rest // tl.cdiv(t, TOKENS)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    within = tl.arange(0, BLOCK)
    channel = block * SIZE + within
    exists = (within < SIZE) & (channel < c)
    return sample, tile, block, token, channel, exists


@triton.jit
def _load_weight(inputs, i, channel, exists, WIDTH: tl.constexpr):
    """weight[:, i]."""
    return tl.load(inputs[1] + channel * WIDTH + i, exists, 0.0).to(tl.float32)


@triton.jit
def _shifted(inputs, row, place, t, c, x_row, WIDTH: tl.constexpr):
    """x at the rows, of which those before the first token are in the window."""
    sample, tile, _, _, channel, exists = place
    inside = (row >= 0) & (row < t)
    at = (sample * t + row)[:, None] * x_row + channel[None, :]
    v = tl.load(inputs[0] + at, inside[:, None] & exists[None, :], 0.0).to(tl.float32)
    if tile == 0:
        before = row + (WIDTH - 1)
        in_window = (row < 0) & (before >= 0)
        at = (sample * (WIDTH - 1) + before)[:, None] * c + channel[None, :]
        v += tl.load(inputs[2] + at, in_window[:, None] & exists[None, :], 0.0).to(tl.float32)
    return v


@triton.jit
def _convolved(inputs, place, t, c, x_row, WIDTH: tl.constexpr):
    """conv(x)."""
    _, _, _, token, channel, exists = place
    v = tl.zeros((token.shape[0], channel.shape[0]), tl.float32)
    for i in tl.static_range(WIDTH):
        weight = _load_weight(inputs, i, channel, exists, WIDTH)
        row = token - (WIDTH - 1 - i)
        v += weight[None, :] * _shifted(inputs, row, place, t, c, x_row, WIDTH)
    return v


@triton.jit
def convolution_kernel(
    inputs,  # x (b, t, c), weight (c, w), window (b, w - 1, c), added (b, t, a) or None
    out_ptr,  # (b, t, c + a)
    after_ptr,  # (b, w - 1, c), the inputs before the token after the last one
    t,
    c,
    x_row,
    a,
    added_row,
    count,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = _places(t, c, TOKENS, SIZE, BLOCK)
    sample, tile, block, token, channel, exists = place
    v = _convolved(inputs, place, t, c, x_row, WIDTH)
    row = (sample * t + token)[:, None]
    at, mask = row * (c + a) + channel[None, :], (token < t)[:, None] & exists[None, :]
    if inputs[3] is not None:
        has_more = mask & (channel < a)[None, :]
        more = v + tl.load(inputs[3] + row * added_row + channel[None, :], has_more, 0.0)
        more *= tl.sigmoid(more)
        tl.store(out_ptr + at + c, more.to(out_ptr.dtype.element_ty), has_more)
    v *= tl.sigmoid(v)
    inverse = tl.rsqrt(tl.sum(v * v, 1) + EPS)
    v *= tl.where(block < count, inverse, 1.0)[:, None]
    tl.store(out_ptr + at, v.to(out_ptr.dtype.element_ty), mask)
    if tile == tl.cdiv(t, TOKENS) - 1:
        first = sample, tile * 0, block, token, channel, exists
        for i in tl.static_range(WIDTH - 1):
            end = t - (WIDTH - 1 - i) + tl.zeros((1,), tl.int64)
            last = _shifted(inputs, end, first, t, c, x_row, WIDTH)
            to = (sample * (WIDTH - 1) + i) * c + channel[None, :]
            tl.store(after_ptr + to, last.to(after_ptr.dtype.element_ty), exists[None, :])


@triton.jit
def cotangent_kernel(
    grad_ptr,  # (b, t, c + a)
    inputs,  # as in `convolution_kernel`
    out_ptr,  # (b, t, c), the cotangent of conv(x)
    grad_added_ptr,  # (b, t, a)
    t,
    c,
    x_row,
    a,
    added_row,
    count,
    grad_row,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = _places(t, c, TOKENS, SIZE, BLOCK)
    sample, _, block, token, channel, exists = place
    v = _convolved(inputs, place, t, c, x_row, WIDTH)
    row, mask = (sample * t + token)[:, None], (token < t)[:, None] & exists[None, :]
    at = row * grad_row + channel[None, :]
    grad = tl.load(grad_ptr + at, mask, 0.0).to(tl.float32)
    sigmoid = tl.sigmoid(v)
    active = v * sigmoid
    inverse = tl.rsqrt(tl.sum(active * active, 1) + EPS)[:, None]
    along = tl.sum(active * grad, 1)[:, None] * inverse * inverse
    grad = tl.where(block < count, inverse * (grad - active * along), grad)
    grad *= silu_slope(v, sigmoid)
    if inputs[3] is not None:
        has_more = mask & (channel < a)[None, :]
        more = v + tl.load(inputs[3] + row * added_row + channel[None, :], has_more, 0.0)
        grad_more = tl.load(grad_ptr + at + c, has_more, 0.0).to(tl.float32)
        grad_more *= silu_slope(more, tl.sigmoid(more))
        at = row * a + channel[None, :]
        tl.store(grad_added_ptr + at, grad_more.to(grad_added_ptr.dtype.element_ty), has_more)
        grad += grad_more
    at = row * c + channel[None, :]
    tl.store(out_ptr + at, grad.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _load_token(ptr, sample, token, channel, exists, t, c):
    """The channels of a token of (b, t, c), zeros after the last token."""
    inside = exists & (token + channel * 0 < t)
    return tl.load(ptr + (sample * t + token) * c + channel, inside, 0.0).to(tl.float32)


@triton.jit
def input_kernel(
    grad_ptr,  # (b, t, c), the cotangent of conv(x)
    inputs,  # as in `convolution_kernel`
    out_ptr,  # (b, t, c)
    grad_window_ptr,  # (b, w - 1, c)
    sums_ptr,  # (b n, w, c), this program's part of the gradient of the weight
    t,
    c,
    x_row,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The cotangents of x, sum_i weight[:, i] * grad_{t + w - 1 - i}, and of the window, which has
    the inputs at the times 1 - w, ..., -1, and the gradient of weight[:, i], which is the sum over
    t of x_t * grad_{t + w - 1 - i}."""
    sample, tile, _, token, channel, exists = _places(t, c, TOKENS, SIZE, BLOCK)
    mask = (token < t)[:, None] & exists[None, :]
    at = (sample * t + token)[:, None] * x_row + channel[None, :]
    x = tl.load(inputs[0] + at, mask, 0.0).to(tl.float32)
    before = sample * (WIDTH - 1) * c + channel
    v = tl.zeros((TOKENS, BLOCK), tl.float32)
    for i in tl.static_range(WIDTH):
        row = token + (WIDTH - 1 - i)
        at = (sample * t + row)[:, None] * c + channel[None, :]
        grad = tl.load(grad_ptr + at, (row < t)[:, None] & exists[None, :], 0.0).to(tl.float32)
        v += _load_weight(inputs, i, channel, exists, WIDTH)[None, :] * grad
        total = tl.sum(grad * x, 0)
        if tile == 0:
            for j in tl.static_range(i, WIDTH - 1):
                grad_j = _load_token(grad_ptr, sample, j - i, channel, exists, t, c)
                total += grad_j * tl.load(inputs[2] + before + j * c, exists, 0.0).to(tl.float32)
        part = (sample * tl.cdiv(t, TOKENS) + tile) * WIDTH + i
        tl.store(sums_ptr + part * c + channel, total, exists)
    at = (sample * t + token)[:, None] * c + channel[None, :]
    tl.store(out_ptr + at, v.to(out_ptr.dtype.element_ty), mask)
    if tile == 0:
        for j in tl.static_range(WIDTH - 1):
            back = tl.zeros((BLOCK,), tl.float32)
            for i in tl.static_range(j + 1):
                grad_j = _load_token(grad_ptr, sample, j - i, channel, exists, t, c)
                back += _load_weight(inputs, i, channel, exists, WIDTH) * grad_j
            to = grad_window_ptr + before + j * c
            tl.store(to, back.to(grad_window_ptr.dtype.element_ty), exists)

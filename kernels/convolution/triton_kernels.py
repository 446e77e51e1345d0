"""Kernels of the short convolution: one launch forward, two backward, no intermediate forward.

A program has TOKENS tokens of one sample and a block of channels, which is one group where some
have unit length. The backward first computes the cotangent of the convolution's result, and then
from it those of x and of the window, and each program's part of the gradient of the weight.
Letters: b batch, t time, c channels, w width, a channels to which something is added, n tiles of
tokens of a sample. `inputs`: `ConvolutionInputs`; `how`: `Tiles`.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import load_wide, silu_slope, store_rounded


@triton.jit
def _places(t, c, how):
    """Of this program: the sample, the indices of its tile of tokens and of its block of channels,
    the tokens and the channels of both, and which of the channels exist."""
    program = tl.program_id(0).to(tl.int64)
    block, rest = program % tl.cdiv(c, how.SIZE), program // tl.cdiv(c, how.SIZE)
    tile, sample = rest % tl.cdiv(t, how.TOKENS), rest // tl.cdiv(t, how.TOKENS)
    token = tile * how.TOKENS + tl.arange(0, how.TOKENS)
    within = tl.arange(0, how.BLOCK)
    channel = block * how.SIZE + within
    exists = (within < how.SIZE) & (channel < c)
    return sample, tile, block, token, channel, exists


@triton.jit
def _load_weight(inputs, i, channel, exists, how):
    """weight[:, i]."""
    return load_wide(inputs.weight + channel * how.WIDTH + i, exists)


@triton.jit
def _shifted(inputs, row, place, t, c, x_row, how):
    """x at the rows, of which those before the first token are in the window."""
    sample, tile, _, _, channel, exists = place
    inside = (row >= 0) & (row < t)
    at = (sample * t + row)[:, None] * x_row + channel[None, :]
    v = load_wide(inputs.x + at, inside[:, None] & exists[None, :])
    if tile == 0:
        before = row + (how.WIDTH - 1)
        in_window = (row < 0) & (before >= 0)
        at = (sample * (how.WIDTH - 1) + before)[:, None] * c + channel[None, :]
        v += load_wide(inputs.window + at, in_window[:, None] & exists[None, :])
    return v


@triton.jit
def _convolved(inputs, place, t, c, x_row, how):
    """conv(x)."""
    _, _, _, token, channel, exists = place
    v = tl.zeros((token.shape[0], channel.shape[0]), tl.float32)
    for i in tl.static_range(how.WIDTH):
        weight = _load_weight(inputs, i, channel, exists, how)
        row = token - (how.WIDTH - 1 - i)
        v += weight[None, :] * _shifted(inputs, row, place, t, c, x_row, how)
    return v


@triton.jit
def convolution_kernel(
    inputs,
    out_ptr,  # (b, t, c + a)
    after_ptr,  # (b, w - 1, c), the inputs before the token after the last one
    t,
    c,
    x_row,
    a,
    added_row,
    count,
    how: tl.constexpr,
):
    place = _places(t, c, how)
    sample, tile, block, token, channel, exists = place
    v = _convolved(inputs, place, t, c, x_row, how)
    row = (sample * t + token)[:, None]
    at, mask = row * (c + a) + channel[None, :], (token < t)[:, None] & exists[None, :]
    if inputs.added is not None:
        has_more = mask & (channel < a)[None, :]
        more = v + tl.load(inputs.added + row * added_row + channel[None, :], has_more, 0.0)
        more *= tl.sigmoid(more)
        store_rounded(out_ptr + at + c, more, has_more)
    v *= tl.sigmoid(v)
    inverse = tl.rsqrt(tl.sum(v * v, 1) + how.EPS)
    v *= tl.where(block < count, inverse, 1.0)[:, None]
    store_rounded(out_ptr + at, v, mask)
    if tile == tl.cdiv(t, how.TOKENS) - 1:
        first = sample, tile * 0, block, token, channel, exists
        for i in tl.static_range(how.WIDTH - 1):
            end = t - (how.WIDTH - 1 - i) + tl.zeros((1,), tl.int64)
            last = _shifted(inputs, end, first, t, c, x_row, how)
            to = (sample * (how.WIDTH - 1) + i) * c + channel[None, :]
            store_rounded(after_ptr + to, last, exists[None, :])


@triton.jit
def cotangent_kernel(
    grad_ptr,  # (b, t, c + a)
    inputs,
    out_ptr,  # (b, t, c), the cotangent of conv(x)
    grad_added_ptr,  # (b, t, a)
    t,
    c,
    x_row,
    a,
    added_row,
    count,
    grad_row,
    how: tl.constexpr,
):
    place = _places(t, c, how)
    sample, _, block, token, channel, exists = place
    v = _convolved(inputs, place, t, c, x_row, how)
    row, mask = (sample * t + token)[:, None], (token < t)[:, None] & exists[None, :]
    at = row * grad_row + channel[None, :]
    grad = load_wide(grad_ptr + at, mask)
    sigmoid = tl.sigmoid(v)
    active = v * sigmoid
    inverse = tl.rsqrt(tl.sum(active * active, 1) + how.EPS)[:, None]
    along = tl.sum(active * grad, 1)[:, None] * inverse * inverse
    grad = tl.where(block < count, inverse * (grad - active * along), grad)
    grad *= silu_slope(v, sigmoid)
    if inputs.added is not None:
        has_more = mask & (channel < a)[None, :]
        more = v + tl.load(inputs.added + row * added_row + channel[None, :], has_more, 0.0)
        grad_more = load_wide(grad_ptr + at + c, has_more)
        grad_more *= silu_slope(more, tl.sigmoid(more))
        at = row * a + channel[None, :]
        store_rounded(grad_added_ptr + at, grad_more, has_more)
        grad += grad_more
    at = row * c + channel[None, :]
    store_rounded(out_ptr + at, grad, mask)


@triton.jit
def _load_token(ptr, sample, token, channel, exists, t, c):
    """The channels of a token of (b, t, c), zeros after the last token."""
    inside = exists & (token + channel * 0 < t)
    return load_wide(ptr + (sample * t + token) * c + channel, inside)


@triton.jit
def input_kernel(
    grad_ptr,  # (b, t, c), the cotangent of conv(x)
    inputs,
    out_ptr,  # (b, t, c)
    grad_window_ptr,  # (b, w - 1, c)
    sums_ptr,  # (b n, w, c), this program's part of the gradient of the weight
    t,
    c,
    x_row,
    how: tl.constexpr,
):
    """The cotangents of x, sum_i weight[:, i] * grad_{t + w - 1 - i}, and of the window, which has
    the inputs at the times 1 - w, ..., -1, and the gradient of weight[:, i], which is the sum over
    t of x_t * grad_{t + w - 1 - i}."""
    sample, tile, _, token, channel, exists = _places(t, c, how)
    mask = (token < t)[:, None] & exists[None, :]
    at = (sample * t + token)[:, None] * x_row + channel[None, :]
    x = load_wide(inputs.x + at, mask)
    before = sample * (how.WIDTH - 1) * c + channel
    v = tl.zeros((how.TOKENS, how.BLOCK), tl.float32)
    for i in tl.static_range(how.WIDTH):
        row = token + (how.WIDTH - 1 - i)
        at = (sample * t + row)[:, None] * c + channel[None, :]
        grad = load_wide(grad_ptr + at, (row < t)[:, None] & exists[None, :])
        v += _load_weight(inputs, i, channel, exists, how)[None, :] * grad
        total = tl.sum(grad * x, 0)
        if tile == 0:
            for j in tl.static_range(i, how.WIDTH - 1):
                grad_j = _load_token(grad_ptr, sample, j - i, channel, exists, t, c)
                total += grad_j * load_wide(inputs.window + before + j * c, exists)
        part = (sample * tl.cdiv(t, how.TOKENS) + tile) * how.WIDTH + i
        tl.store(sums_ptr + part * c + channel, total, exists)
    at = (sample * t + token)[:, None] * c + channel[None, :]
    store_rounded(out_ptr + at, v, mask)
    if tile == 0:
        for j in tl.static_range(how.WIDTH - 1):
            back = tl.zeros((how.BLOCK,), tl.float32)
            for i in tl.static_range(j + 1):
                grad_j = _load_token(grad_ptr, sample, j - i, channel, exists, t, c)
                back += _load_weight(inputs, i, channel, exists, how) * grad_j
            store_rounded(grad_window_ptr + before + j * c, back, exists)

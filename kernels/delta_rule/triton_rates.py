"""Kernels of `delta_rates`: a program has TOKENS tokens of one of the k h columns of beta.

The programs of the first h columns also compute the decays of these heads. The gradients of A_log
and dt_bias are sums over tokens: a program writes its part, and the parts are added in a fixed
order. Letters: r = b t tokens, c = k h columns, h heads, p key channels.
"""

import triton
import triton.language as tl


@triton.jit
def _softplus(v):
    return tl.where(v > 20.0, v, tl.log(1.0 + tl.exp(tl.minimum(v, 20.0))))


@triton.jit
def _inverse_excess(key_ptr, token, exists, column, key_row, P: tl.constexpr, BLOCK: tl.constexpr):
    """1 / max(1, |key|^2) of the tokens."""
    channel = tl.arange(0, BLOCK)
    at = token[:, None] * key_row + column * P + channel[None, :]
    key = tl.load(key_ptr + at, exists[:, None] & (channel < P)[None, :], 0.0).to(tl.float32)
    return 1.0 / tl.maximum(tl.sum(key * key, 1), 1.0)


@triton.jit
def rates_kernel(
    b_ptr,  # (r, c)
    key_ptr,  # (r, c, p)
    a_ptr,  # (r, h)
    A_log_ptr,  # (h,)
    dt_bias_ptr,  # (h,)
    beta_ptr,  # (r, c)
    decay_ptr,  # (r, h)
    r,
    c,
    h,
    b_row,
    key_row,
    a_row,
    scale,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.program_id(0) % c
    token = (tl.program_id(0) // c).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    exists = token < r
    inverse = _inverse_excess(key_ptr, token, exists, column, key_row, P, BLOCK)
    b = tl.load(b_ptr + token * b_row + column, exists, 0.0).to(tl.float32)
    tl.store(beta_ptr + token * c + column, scale * tl.sigmoid(b) * inverse, exists)
    if column < h:
        rate = tl.exp(tl.load(A_log_ptr + column).to(tl.float32))
        a = tl.load(a_ptr + token * a_row + column, exists, 0.0).to(tl.float32)
        a += tl.load(dt_bias_ptr + column).to(tl.float32)
        tl.store(decay_ptr + token * h + column, -rate * _softplus(a), exists)


@triton.jit
def rates_backward_kernel(
    grad_beta_ptr,  # (r, c)
    grad_decay_ptr,  # (r, h)
    b_ptr,  # (r, c)
    key_ptr,  # (r, c, p)
    a_ptr,  # (r, h)
    A_log_ptr,  # (h,)
    dt_bias_ptr,  # (h,)
    grad_b_ptr,  # (r, c)
    grad_a_ptr,  # (r, h)
    sums_ptr,  # (tiles, 2, h): parts of the gradients of A_log and dt_bias
    r,
    c,
    h,
    b_row,
    key_row,
    a_row,
    scale,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column, tile = tl.program_id(0) % c, (tl.program_id(0) // c).to(tl.int64)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    exists = token < r
    inverse = _inverse_excess(key_ptr, token, exists, column, key_row, P, BLOCK)
    sigmoid = tl.sigmoid(tl.load(b_ptr + token * b_row + column, exists, 0.0).to(tl.float32))
    grad = tl.load(grad_beta_ptr + token * c + column, exists, 0.0)
    grad *= scale * sigmoid * (1.0 - sigmoid) * inverse
    tl.store(grad_b_ptr + token * c + column, grad.to(grad_b_ptr.dtype.element_ty), exists)
    if column < h:
        rate = tl.exp(tl.load(A_log_ptr + column).to(tl.float32))
        a = tl.load(a_ptr + token * a_row + column, exists, 0.0).to(tl.float32)
        a += tl.load(dt_bias_ptr + column).to(tl.float32)
        grad = -rate * tl.load(grad_decay_ptr + token * h + column, exists, 0.0)
        tl.store(sums_ptr + tile * 2 * h + column, tl.sum(grad * _softplus(a), 0))
        grad *= tl.sigmoid(a)
        tl.store(sums_ptr + (tile * 2 + 1) * h + column, tl.sum(grad, 0))
        tl.store(grad_a_ptr + token * h + column, grad.to(grad_a_ptr.dtype.element_ty), exists)

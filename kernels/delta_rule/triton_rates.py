"""Kernels of `delta_rates`: a program has TOKENS tokens of one of the k h columns of beta.

The programs of the first h columns also compute the decays of these heads. The gradients of A_log
and dt_bias are sums over tokens: a program writes its part, and the parts are added in a fixed
order. Letters: r = b t tokens, c = k h columns, h heads, p key channels.
"""

import triton
import triton.language as tl

from bedouin.kernels.device.elementary import activate, load_wide, store_rounded


@triton.jit
def _inverse_excess(inputs, distances, token, exists, column, P: tl.constexpr, BLOCK: tl.constexpr):
    """1 / max(1, |key|^2) of the tokens."""
    channel = tl.arange(0, BLOCK)
    at = token[:, None] * distances[1] + column * P + channel[None, :]
    key = load_wide(inputs.key + at, exists[:, None] & (channel < P)[None, :])
    return 1.0 / tl.maximum(tl.sum(key * key, 1), 1.0)


@triton.jit
def _rate_and_a(inputs, distances, token, exists, column):
    """exp(A_log) of a head, and a + dt_bias of the tokens."""
    rate = tl.exp(tl.load(inputs.A_log + column).to(tl.float32))
    a = load_wide(inputs.a + token * distances[2] + column, exists)
    return rate, a + tl.load(inputs.dt_bias + column).to(tl.float32)


@triton.jit
def rates_kernel(
    inputs,  # `RateInputs`: b (r, c), key (r, c, p), a (r, h)
    distances,  # of the rows of b, key and a
    beta_ptr,  # (r, c)
    decay_ptr,  # (r, h)
    r,
    c,
    h,
    scale,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.program_id(0) % c
    token = (tl.program_id(0) // c).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    exists = token < r
    inverse = _inverse_excess(inputs, distances, token, exists, column, P, BLOCK)
    b = load_wide(inputs.b + token * distances[0] + column, exists)
    tl.store(beta_ptr + token * c + column, scale * tl.sigmoid(b) * inverse, exists)
    if column < h:
        rate, a = _rate_and_a(inputs, distances, token, exists, column)
        tl.store(decay_ptr + token * h + column, -rate * activate(a, "softplus"), exists)


@triton.jit
def rates_backward_kernel(
    inputs,  # `RateInputs`: b (r, c), key (r, c, p), a (r, h)
    distances,  # of the rows of b, key and a
    grad_beta_ptr,  # (r, c)
    grad_decay_ptr,  # (r, h)
    grad_b_ptr,  # (r, c)
    grad_a_ptr,  # (r, h)
    sums_ptr,  # (tiles, 2, h): parts of the gradients of A_log and dt_bias
    r,
    c,
    h,
    scale,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column, tile = tl.program_id(0) % c, (tl.program_id(0) // c).to(tl.int64)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    exists = token < r
    inverse = _inverse_excess(inputs, distances, token, exists, column, P, BLOCK)
    sigmoid = tl.sigmoid(load_wide(inputs.b + token * distances[0] + column, exists))
    grad = tl.load(grad_beta_ptr + token * c + column, exists, 0.0)
    grad *= scale * sigmoid * (1.0 - sigmoid) * inverse
    store_rounded(grad_b_ptr + token * c + column, grad, exists)
    if column < h:
        rate, a = _rate_and_a(inputs, distances, token, exists, column)
        grad = -rate * tl.load(grad_decay_ptr + token * h + column, exists, 0.0)
        tl.store(sums_ptr + tile * 2 * h + column, tl.sum(grad * activate(a, "softplus"), 0))
        grad *= tl.sigmoid(a)
        tl.store(sums_ptr + (tile * 2 + 1) * h + column, tl.sum(grad, 0))
        store_rounded(grad_a_ptr + token * h + column, grad, exists)

"""Kernels of Householder products: Q v and (I - Q) v, forward and backward.

One program takes one token, or several where channels are few, with v in registers. The reflections
are applied one after the other: each row of u passes through once, its norm and its product with v
are one reduction each, and the next row is on its way meanwhile. The backward reads u a second time
(from the cache) and restores what entered each reflection by adding back what that took away.
Letters: t tokens, k reflections, d channels.
"""

import triton
import triton.language as tl


@triton.jit
def product_kernel(
    v_ptr,  # (t, d)
    u_ptr,  # (t, k, d)
    beta_ptr,  # (t, k)
    out_ptr,  # (t, d)
    T,
    d,
    v_stride,
    u_stride_t,
    u_stride_k,
    beta_stride_t,
    beta_stride_k,
    K: tl.constexpr,
    COMPLEMENT: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, BLOCK_D)
    in_t = token < T
    mask = in_t[:, None] & (channel < d)[None, :]
    u_row = u_ptr + token[:, None] * u_stride_t + channel[None, :]
    beta_row = beta_ptr + token * beta_stride_t

    floor = d * tl.full((), EPS, ACC)  # the constant in double where that is computed in

    u_next = tl.load(u_row + (K - 1) * u_stride_k, mask=mask, other=0.0)
    v = tl.load(v_ptr + token[:, None] * v_stride + channel[None, :], mask=mask, other=0.0)
    v = v.to(ACC)
    taken = tl.zeros((TOKENS, BLOCK_D), dtype=ACC)
    for j in tl.static_range(K):
        i = K - 1 - j
        u = u_next.to(ACC)
        if i > 0:
            u_next = tl.load(u_row + (i - 1) * u_stride_k, mask=mask, other=0.0)
        beta = tl.load(beta_row + i * beta_stride_k, mask=in_t, other=0.0).to(ACC)
        factor = beta * tl.sum(u * v, axis=1) / (tl.sum(u * u, axis=1) + floor)
        step = factor[:, None] * u
        v -= step
        if COMPLEMENT:
            taken += step
    out = taken if COMPLEMENT else v
    out_row = out_ptr + token[:, None] * d + channel[None, :]
    tl.store(out_row, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def product_backward_kernel(
    grad_ptr,  # (t, d)
    v_ptr,  # (t, d)
    u_ptr,  # (t, k, d)
    beta_ptr,  # (t, k)
    grad_v_ptr,  # (t, d)
    grad_u_ptr,  # (t, k, d)
    grad_beta_ptr,  # (t, k)
    T,
    d,
    grad_stride,
    v_stride,
    u_stride_t,
    u_stride_k,
    beta_stride_t,
    beta_stride_k,
    K: tl.constexpr,
    COMPLEMENT: tl.constexpr,
    EPS: tl.constexpr,
    ACC: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, BLOCK_D)
    reflection = tl.arange(0, BLOCK_K)[None, :]
    in_t = token < T
    mask = in_t[:, None] & (channel < d)[None, :]
    u_row = u_ptr + token[:, None] * u_stride_t + channel[None, :]
    beta_row = beta_ptr + token * beta_stride_t

    floor = d * tl.full((), EPS, ACC)

    # What enters reflection i is v_i; each leaves u_i v_i and the inverse of its squared norm.
    u_next = tl.load(u_row + (K - 1) * u_stride_k, mask=mask, other=0.0)
    v = tl.load(v_ptr + token[:, None] * v_stride + channel[None, :], mask=mask, other=0.0)
    v = v.to(ACC)
    products = tl.zeros((TOKENS, BLOCK_K), dtype=ACC)
    inverses = tl.zeros((TOKENS, BLOCK_K), dtype=ACC)
    for j in tl.static_range(K):
        i = K - 1 - j
        u = u_next.to(ACC)
        # the row after the last is the first one of the way back
        ahead = i - 1 if i > 0 else 0
        u_next = tl.load(u_row + ahead * u_stride_k, mask=mask, other=0.0)
        beta = tl.load(beta_row + i * beta_stride_k, mask=in_t, other=0.0).to(ACC)
        product = tl.sum(u * v, axis=1)
        inverse = 1 / (tl.sum(u * u, axis=1) + floor)
        products = tl.where(reflection == i, product[:, None], products)
        inverses = tl.where(reflection == i, inverse[:, None], inverses)
        v -= (beta * product * inverse)[:, None] * u

    # I - Q is walked back with the cotangent -g, and g comes on top at its end.
    g = tl.load(grad_ptr + token[:, None] * grad_stride + channel[None, :], mask=mask, other=0.0)
    g = -g.to(ACC) if COMPLEMENT else g.to(ACC)
    taken = tl.zeros((TOKENS, BLOCK_D), dtype=ACC)
    grad_beta = tl.zeros((TOKENS, BLOCK_K), dtype=ACC)
    for i in tl.static_range(K):
        u = u_next.to(ACC)
        if i + 1 < K:
            u_next = tl.load(u_row + (i + 1) * u_stride_k, mask=mask, other=0.0)
        beta = tl.load(beta_row + i * beta_stride_k, mask=in_t, other=0.0).to(ACC)
        product = tl.sum(tl.where(reflection == i, products, 0.0), axis=1)
        inverse = tl.sum(tl.where(reflection == i, inverses, 0.0), axis=1)
        pulled = tl.sum(u * g, axis=1)
        factor = beta * inverse
        v += (factor * product)[:, None] * u
        step = (factor * pulled)[:, None] * u
        along = 2 * factor * inverse * product * pulled
        grad_u = along[:, None] * u - factor[:, None] * (pulled[:, None] * v + product[:, None] * g)
        g -= step
        if COMPLEMENT:
            taken -= step
        grad_beta = tl.where(reflection == i, -(inverse * product * pulled)[:, None], grad_beta)
        out = grad_u_ptr + (token[:, None] * K + i) * d + channel[None, :]
        tl.store(out, grad_u.to(grad_u_ptr.dtype.element_ty), mask=mask)
    grad_v = taken if COMPLEMENT else g
    out = grad_v_ptr + token[:, None] * d + channel[None, :]
    tl.store(out, grad_v.to(grad_v_ptr.dtype.element_ty), mask=mask)
    out = grad_beta_ptr + token[:, None] * K + reflection
    in_k = in_t[:, None] & (reflection < K)
    tl.store(out, grad_beta.to(grad_beta_ptr.dtype.element_ty), mask=in_k)

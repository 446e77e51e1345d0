"""Householder products in Triton: Q v and (I - Q) v, forward and backward.

One program takes one token, or several where channels are few, with v in registers. The reflections
are applied one after the other: each row of u passes through once, its norm and its product with v
are one reduction each, and the next row is on its way meanwhile. The backward reads u a second time
(from the cache) and restores what entered each reflection by adding back what that took away.
Letters: t tokens, k reflections, d channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bedouin.kernels.householder.reference import UNIT_EPS
from bedouin.kernels.launch import ceil_div, next_power_of_two

FORWARD_WARP, BACKWARD_WARP = 1024, 512
"""Channels in one warp, 32 and 16 a thread: more sums without a barrier against more registers, and
the backward holds twice as many vectors. Half of that in float64."""
MAX_WARPS = 16


@triton.jit
def _forward_kernel(
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
def _backward_kernel(
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


def product_forward(
    v: Tensor,  # (..., d)
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
    *,
    complement: bool,
) -> Tensor:  # (..., d)
    """Q v, or (I - Q) v. No size may be 0."""
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    v, u, beta = tokens_first(v, u, beta)
    acc = accumulator_of(v, u, beta)
    (t, k, d), blocks = u.shape, _blocks(u, FORWARD_WARP, acc)
    _forward_kernel[(ceil_div(t, blocks["TOKENS"]),)](
        *(v, u, beta, out, t, d, v.stride(0), u.stride(0), u.stride(1), *beta.stride()),
        K=k,
        COMPLEMENT=complement,
        EPS=UNIT_EPS,
        ACC=acc,
        **blocks,
    )
    return out


def product_backward(
    grad: Tensor,  # (..., d)
    v: Tensor,  # (..., d)
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
    *,
    complement: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of v, u and beta. No size may be 0."""
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (v, u, beta)]
    (grad,) = tokens_first(grad)
    v, u, beta = tokens_first(v, u, beta)
    acc = accumulator_of(v, u, beta)
    (t, k, d), blocks = u.shape, _blocks(u, BACKWARD_WARP, acc)
    _backward_kernel[(ceil_div(t, blocks["TOKENS"]),)](
        *(grad, v, u, beta, *grads, t, d),
        *(grad.stride(0), v.stride(0), u.stride(0), u.stride(1), *beta.stride()),
        K=k,
        COMPLEMENT=complement,
        EPS=UNIT_EPS,
        ACC=acc,
        BLOCK_K=next_power_of_two(k),
        **blocks,
    )
    return grads[0], grads[1], grads[2]


def _blocks(u: Tensor, warp: int, acc: tl.dtype) -> dict[str, int]:
    """How many tokens one program takes, with all their channels, and its warps."""
    if acc == tl.float64:
        warp //= 2
    block_d = next_power_of_two(u.shape[-1])
    tokens = max(1, warp // block_d)
    warps = max(1, min(MAX_WARPS, tokens * block_d // warp))
    return {"TOKENS": tokens, "BLOCK_D": block_d, "num_warps": warps}


def tokens_first(v: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The operands with one leading axis; v (..., d), u (..., k, d), beta (..., k).

    Copied only where leading axes do not merge or channels are scattered.
    """
    lead = v.dim() - 1
    flat = (x.reshape(-1, *x.shape[lead:]) for x in (v, *others))
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in flat)


def accumulator_of(*operands: Tensor) -> tl.dtype:
    """float32, or float64 where an operand has it."""
    double = any(x.dtype == torch.float64 for x in operands)
    return tl.float64 if double else tl.float32

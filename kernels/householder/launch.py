"""Launches of Householder products and of their factor.

Letters: t tokens, k reflections, d channels.
"""

import torch
from torch import Tensor

from bedouin.kernels.householder.reference import UNIT_EPS
from bedouin.kernels.householder.triton_factor import factor_backward_kernel, factor_kernel
from bedouin.kernels.householder.triton_kernels import product_backward_kernel, product_kernel
from bedouin.kernels.launch import (
    accumulator,
    ceil_div,
    last_axis_contiguous,
    next_power_of_two,
    triton_dtype,
)

FORWARD_WARP, BACKWARD_WARP = 1024, 512
"""Channels per warp, which are 32 and 16 per thread; half of that in float64. More channels per
warp avoid barriers in sums but need more registers, and the backward holds twice as many
vectors."""
MAX_WARPS = 16
PARTIALS = 2048
"""Partial sums of a Gram matrix per warp, which are 64 per thread."""


def product_forward(
    v: Tensor,  # (..., d)
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
    *,
    complement: bool,
) -> Tensor:  # (..., d)
    """Q v, or (I - Q) v. No size may be 0."""
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    v, u, beta = _flat_tokens(v, u, beta)
    acc = accumulator(v.dtype, u.dtype, beta.dtype)
    t, k, d = u.shape
    blocks = _product_blocks(d, FORWARD_WARP, acc)
    product_kernel[(ceil_div(t, blocks["TOKENS"]),)](
        *(v, u, beta, out, t, d, v.stride(0), u.stride(0), u.stride(1), *beta.stride()),
        K=k,
        COMPLEMENT=complement,
        EPS=UNIT_EPS,
        ACC=triton_dtype(acc),
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
    (grad,) = _flat_tokens(grad)
    v, u, beta = _flat_tokens(v, u, beta)
    acc = accumulator(v.dtype, u.dtype, beta.dtype)
    t, k, d = u.shape
    blocks = _product_blocks(d, BACKWARD_WARP, acc)
    product_backward_kernel[(ceil_div(t, blocks["TOKENS"]),)](
        *(grad, v, u, beta, *grads, t, d),
        *(grad.stride(0), v.stride(0), u.stride(0), u.stride(1), *beta.stride()),
        K=k,
        COMPLEMENT=complement,
        EPS=UNIT_EPS,
        ACC=triton_dtype(acc),
        BLOCK_K=next_power_of_two(k),
        **blocks,
    )
    return grads[0], grads[1], grads[2]


def _product_blocks(d: int, warp: int, acc: torch.dtype) -> dict[str, int]:
    """Tokens per program, with all their channels, and the number of warps."""
    if acc == torch.float64:
        warp //= 2
    block_d = next_power_of_two(d)
    tokens = max(1, warp // block_d)
    warps = max(1, min(MAX_WARPS, tokens * block_d // warp))
    return {"TOKENS": tokens, "BLOCK_D": block_d, "num_warps": warps}


def factor_forward(
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
) -> Tensor:  # (..., k, k)
    """T in float32, or float64 for such operands. No size may be 0, and k at most 8."""
    dtype = accumulator(u.dtype, beta.dtype)
    factor = torch.empty(*beta.shape, beta.shape[-1], dtype=dtype, device=u.device)
    beta, u = _flat_tokens(beta, u)
    t, k, d = u.shape
    factor_kernel[(t,)](
        *(u, beta, factor, d, u.stride(0), u.stride(1), *beta.stride()),
        K=k,
        EPS=UNIT_EPS,
        ACC=triton_dtype(accumulator(u.dtype, beta.dtype)),
        **_factor_blocks(k, d),
    )
    return factor


def factor_backward(
    grad: Tensor,  # (..., k, k)
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
) -> tuple[Tensor, Tensor]:
    """Cotangents of u and beta, for the sizes of `factor_forward`."""
    grad_u, grad_beta = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (u, beta))
    grad = grad.contiguous()
    beta, u = _flat_tokens(beta, u)
    t, k, d = u.shape
    factor_backward_kernel[(t,)](
        *(grad, u, beta, grad_u, grad_beta, d, u.stride(0), u.stride(1), *beta.stride()),
        K=k,
        EPS=UNIT_EPS,
        ACC=triton_dtype(accumulator(u.dtype, beta.dtype)),
        **_factor_blocks(k, d),
    )
    return grad_u, grad_beta


def _factor_blocks(k: int, d: int) -> dict[str, int]:
    """Tile sizes of a program, which handles one token with all reflections, in blocks of
    channels."""
    block_k = next_power_of_two(k)
    block_d = min(PARTIALS // block_k**2, next_power_of_two(d), 1024)
    return {"BLOCK_K": block_k, "BLOCK_D": block_d, "num_warps": 1}


def _flat_tokens(
    v: Tensor,  # (..., d) or (..., k)
    *others: Tensor,  # with the same leading axes
) -> tuple[Tensor, ...]:
    """The operands with one leading axis and a contiguous last axis.

    An operand is copied only if its leading axes cannot be merged or its last axis is not
    contiguous.
    """
    lead = v.dim() - 1
    return tuple(last_axis_contiguous(x.reshape(-1, *x.shape[lead:])) for x in (v, *others))

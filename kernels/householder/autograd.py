"""Householder products in Triton as operations of torch.library.

Triton is imported when an operation runs. Letters: d channels, k reflections; leading axes are
free.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.launch import accumulator
from bedouin.kernels.operation import operation


@operation("householder_product")
def apply_product(
    v: Tensor,  # (..., d)
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
    complement: bool,
) -> Tensor:  # (..., d)
    """Q v, or with `complement` (I - Q) v."""
    from bedouin.kernels.householder.launch import product_forward

    return product_forward(v, u, beta, complement=complement)


@apply_product.register_fake
def _apply_product_fake(
    v: Tensor,  # (..., d)
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
    complement: bool,
) -> Tensor:
    return v.new_empty(v.shape)


@operation("householder_product_backward")
def _product_backward(
    grad: Tensor,  # (..., d)
    v: Tensor,  # (..., d)
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
    complement: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from bedouin.kernels.householder.launch import product_backward

    return product_backward(grad, v, u, beta, complement=complement)


@_product_backward.register_fake
def _product_backward_fake(
    grad: Tensor,  # (..., d)
    v: Tensor,  # (..., d)
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
    complement: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty(v.shape), u.new_empty(u.shape), beta.new_empty(beta.shape)


def _save_product(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: Tensor,  # (..., d)
) -> None:
    *operands, ctx.complement = inputs
    ctx.save_for_backward(*operands)


def _backward_product(
    ctx: Any,
    grad: Tensor,  # (..., d)
) -> tuple[Tensor | None, ...]:
    operands = ctx.saved_tensors
    with torch.no_grad():
        grads = _product_backward(grad, *operands, ctx.complement)
    return *refuse_second_derivative(grads, [grad, *operands]), None


apply_product.register_autograd(_backward_product, setup_context=_save_product)


@operation("householder_factor")
def build_factor(
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
) -> Tensor:  # (..., k, k)
    """T of Q = I - U^T T U."""
    from bedouin.kernels.householder.launch import factor_forward

    return factor_forward(u, beta)


@build_factor.register_fake
def _build_factor_fake(
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
) -> Tensor:
    dtype = accumulator(u.dtype, beta.dtype)
    return u.new_empty(*beta.shape, beta.shape[-1], dtype=dtype)


@operation("householder_factor_backward")
def _factor_backward(
    grad: Tensor,  # (..., k, k)
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
) -> tuple[Tensor, Tensor]:
    from bedouin.kernels.householder.launch import factor_backward

    return factor_backward(grad, u, beta)


@_factor_backward.register_fake
def _factor_backward_fake(
    grad: Tensor,  # (..., k, k)
    u: Tensor,  # (..., k, d)
    beta: Tensor,  # (..., k)
) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape), beta.new_empty(beta.shape)


def _save_factor(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: Tensor,  # (..., k, k)
) -> None:
    ctx.save_for_backward(*inputs)


def _backward_factor(
    ctx: Any,
    grad: Tensor,  # (..., k, k)
) -> tuple[Tensor | None, ...]:
    operands = ctx.saved_tensors
    with torch.no_grad():
        grads = _factor_backward(grad, *operands)
    return refuse_second_derivative(grads, [grad, *operands])


build_factor.register_autograd(_backward_factor, setup_context=_save_factor)

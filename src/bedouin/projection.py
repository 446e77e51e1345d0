"""A product whose outputs are wanted in two parts, as the kernels and the library like them.

Rows of r values with r no multiple of eight start at addresses that wide loads and the fast paths
of cuBLAS do not take. So the first part is a view of a wider product, whose last columns are
nobody's, and its cotangent is used as it comes: autograd's own view would copy it into a tensor of
zeros. The gradients of the two halves of the matrix are written where they belong: autograd's own
split would join them by a copy.

Letters: i rows, d channels, r outputs of the first part, s of the second.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.backend import is_batched
from bedouin.kernels.linear import in_eights, padding


class _SplitLinear(torch.autograd.Function):
    """rows W^T + bias as (i, r), rows r + padding(r) apart, and (i, s)."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, r: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, weight)
        ctx.r = r
        wide = r + padding(r)
        first, first_bias = weight[:wide], bias[:wide]
        if len(first) < wide:
            # fewer outputs than columns to fill
            missing = wide - len(first)
            first, first_bias = F.pad(first, (0, 0, 0, missing)), F.pad(first_bias, (0, missing))
        # a copy starts at an aligned address, as the bias of a fast product must
        rest_bias = bias[r:].clone()
        return F.linear(rows, first, first_bias)[:, :r], F.linear(rows, weight[r:], rest_bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_rest: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        wants, r = ctx.needs_input_grad, ctx.r
        grads, weights = (*in_eights(grad, 1), grad_rest), (*in_eights(weight[:r], 0), weight[r:])
        with torch.autocast(rows.device.type, enabled=False):
            grad_rows = _rows_gradient(grads, weights) if wants[0] else None
            grad_weight = _joined(_weight_gradient, grads, rows, weight) if wants[1] else None
            halves = (grad, grad_rest)
            grad_bias = _joined(_bias_gradient, halves, rows, weight[:, 0]) if wants[2] else None
        return grad_rows, grad_weight, grad_bias, None


def _rows_gradient(grads: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> Tensor:
    """The sum of grads @ weights, the last first."""
    *others, (grad, weight) = zip(grads, weights, strict=True)
    total = grad @ weight
    # a sum in place has no room for the batch axis of another cotangent
    add = torch.Tensor.addmm if is_batched(*grads) else torch.Tensor.addmm_
    for grad, weight in reversed(others):
        total = add(total, grad, weight)
    return total


def _weight_gradient(grad: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.mm(grad.mT, rows, out=out)


def _bias_gradient(grad: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.sum(grad, 0, out=out)


def _joined(
    compute: Callable[..., Tensor], grads: tuple[Tensor, ...], rows: Tensor, like: Tensor
) -> Tensor:
    """The parts of a gradient, one below the other, in one tensor of the shape of `like`."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_batched(*grads):
        # neither autograd nor a graph takes a given output, nor do batched cotangents
        return torch.cat([compute(grad, rows) for grad in grads])
    joined = like.new_empty(like.shape)
    for grad, out in zip(grads, joined.split([v.shape[1] for v in grads]), strict=True):
        compute(grad, rows, out=out)
    return joined


def split_linear(
    rows: Tensor,  # (i, d)
    weight: Tensor,  # (r + s, d)
    bias: Tensor,  # (r + s,)
    *,
    r: int,
) -> tuple[Tensor, Tensor]:  # (i, r), (i, s)
    """`torch.nn.functional.linear`, its first r columns and the others, of operands of one dtype;
    autocast must have cast them."""
    with torch.autocast(rows.device.type, enabled=False):
        parts: tuple[Tensor, Tensor] = _SplitLinear.apply(rows, weight, bias, r)  # type: ignore[no-untyped-call]
    return parts

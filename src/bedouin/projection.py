"""A linear projection whose output is split into two parts without copies.

Rows of r values start at aligned addresses only if r is a multiple of eight; wide loads and
cuBLAS's fast kernels require that. The first part is therefore a view of a wider product, whose
extra columns are not used. Its cotangent is multiplied as it is, whereas autograd of a view would
copy it into a tensor of zeros. The gradients of the two parts of the weight are written directly
into one tensor, whereas autograd of a split would concatenate them.

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
    """rows W^T + bias as (i, r), with a row stride of r + padding(r), and (i, s)."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,  # (i, d)
        weight: Tensor,  # (r + s, d)
        bias: Tensor,  # (r + s,)
        r: int,
    ) -> tuple[Tensor, Tensor]:  # (i, r), (i, s)
        ctx.save_for_backward(rows, weight)
        ctx.r = r
        wide = r + padding(r)
        first, first_bias = weight[:wide], bias[:wide]
        if len(first) < wide:
            # s < padding(r): there are not enough other rows of the weight for the extra columns
            missing = wide - len(first)
            first, first_bias = F.pad(first, (0, 0, 0, missing)), F.pad(first_bias, (0, missing))
        # copied to an aligned address, which cuBLAS's fast kernels require of the bias
        rest_bias = bias[r:].clone()
        return F.linear(rows, first, first_bias)[:, :r], F.linear(rows, weight[r:], rest_bias)

    @staticmethod
    def backward(
        ctx: Any,
        grad: Tensor,  # (i, r)
        grad_rest: Tensor,  # (i, s)
    ) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        wants, r = ctx.needs_input_grad, ctx.r
        grads, weights = (*in_eights(grad, 1), grad_rest), (*in_eights(weight[:r], 0), weight[r:])
        with torch.autocast(rows.device.type, enabled=False):
            grad_rows = _rows_gradient(grads, weights) if wants[0] else None
            grad_weight = _joined(_weight_gradient, grads, rows, weight) if wants[1] else None
            halves = (grad, grad_rest)
            grad_bias = _joined(_bias_gradient, halves, rows, weight[:, 0]) if wants[2] else None
        return grad_rows, grad_weight, grad_bias, None


def _rows_gradient(
    grads: tuple[Tensor, ...],  # (i, c) for parts of c columns
    weights: tuple[Tensor, ...],  # (c, d) for the same parts
) -> Tensor:  # (i, d)
    """The sum of grad @ weight over the parts, starting with the last."""
    *others, (grad, weight) = zip(grads, weights, strict=True)
    total = grad @ weight
    # under vmap only some of the cotangents may have a batch axis, which an in-place sum rejects
    add = torch.Tensor.addmm if is_batched(*grads) else torch.Tensor.addmm_
    for grad, weight in reversed(others):
        total = add(total, grad, weight)
    return total


def _weight_gradient(
    grad: Tensor,  # (i, c)
    rows: Tensor,  # (i, d)
    out: Tensor | None = None,  # (c, d)
) -> Tensor:  # (c, d)
    return torch.mm(grad.mT, rows, out=out)


def _bias_gradient(
    grad: Tensor,  # (i, c)
    rows: Tensor,  # (i, d), unused: the signature of _weight_gradient
    out: Tensor | None = None,  # (c,)
) -> Tensor:  # (c,)
    return torch.sum(grad, 0, out=out)


def _joined(
    compute: Callable[..., Tensor],
    grads: tuple[Tensor, ...],  # (i, c) for parts of c columns
    rows: Tensor,  # (i, d)
    like: Tensor,  # (r + s, d) or (r + s,)
) -> Tensor:  # as like
    """The gradients of all parts, one below the other."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_batched(*grads):
        # autograd, torch.compile and batched cotangents do not support out=
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
    """The first r columns of `torch.nn.functional.linear(rows, weight, bias)`, and the others.

    All operands have the same dtype; the caller casts them under autocast.
    """
    with torch.autocast(rows.device.type, enabled=False):
        parts: tuple[Tensor, Tensor] = _SplitLinear.apply(rows, weight, bias, r)  # type: ignore[no-untyped-call]
    return parts

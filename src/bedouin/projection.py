"""A linear projection whose output is split into two parts without copies.

Rows of r values start at aligned addresses only if r is a multiple of eight; wide loads and
cuBLAS's fast kernels require that. The first part is therefore a view of a wider product, whose
extra columns are not used. Its cotangent is multiplied as it is, whereas autograd of a view would
copy it into a tensor of zeros. The gradients of the two parts of the weight are written directly
into one tensor, whereas autograd of a split would concatenate them.

Letters: i rows, d channels, r outputs of the first part, s of the second, H heads.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.backend import is_batched
from bedouin.kernels.heads import per_sample
from bedouin.kernels.linear import WIDTH, in_eights, padding


class _SplitLinear(torch.autograd.Function):
    """rows W^T + bias as (i, r), with a row stride of r + padding(r), and (i, s).

    With heads every tensor has a leading axis H.
    """

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
        first, first_bias = weight[..., :wide, :], bias[..., :wide]
        if first_bias.shape[-1] < wide:
            # s < padding(r): there are not enough other rows of the weight for the extra columns
            missing = wide - first_bias.shape[-1]
            first, first_bias = F.pad(first, (0, 0, 0, missing)), F.pad(first_bias, (0, missing))
        # copied to an aligned address, which cuBLAS's fast kernels require of the bias
        rest_bias = bias[..., r:].clone()
        out = _linear(rows, first, first_bias)[..., :r]
        return out, _linear(rows, weight[..., r:, :], rest_bias)

    @staticmethod
    def backward(
        ctx: Any,
        grad: Tensor,  # (i, r)
        grad_rest: Tensor,  # (i, s)
    ) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        wants, r = ctx.needs_input_grad, ctx.r
        grads = *in_eights(grad, -1), grad_rest
        weights = *in_eights(weight[..., :r, :], -2), weight[..., r:, :]
        with torch.autocast(rows.device.type, enabled=False):
            grad_rows = _rows_gradient(grads, weights) if wants[0] else None
            grad_weight = _joined(_weight_gradient, grads, rows, weight, -2) if wants[1] else None
            halves, like = (grad, grad_rest), weight[..., 0]
            grad_bias = _joined(_bias_gradient, halves, rows, like, -1) if wants[2] else None
        return grad_rows, grad_weight, grad_bias, None


def _linear(
    rows: Tensor,  # (i, d) or (H, i, d)
    weight: Tensor,  # (c, d) or (H, c, d)
    bias: Tensor,  # (c,) or (H, c)
) -> Tensor:  # (i, c) or (H, i, c)
    if weight.dim() == 2:
        return F.linear(rows, weight, bias)
    return torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)


def _rows_gradient(
    grads: tuple[Tensor, ...],  # (i, c) or (H, i, c) for parts of c columns
    weights: tuple[Tensor, ...],  # (c, d) or (H, c, d) for the same parts
) -> Tensor:  # (i, d) or (H, i, d)
    """The sum of grad @ weight over the parts, starting with the last."""
    *others, (grad, weight) = zip(grads, weights, strict=True)
    total = (torch.mm if weight.dim() == 2 else torch.bmm)(grad, weight)
    # under vmap only some of the cotangents may have a batch axis, which an in-place sum rejects
    name = "addmm" if weight.dim() == 2 else "baddbmm"
    add = getattr(torch.Tensor, name if is_batched(*grads) else f"{name}_")
    for grad, weight in reversed(others):
        total = add(total, grad, weight)
    return total


def _weight_gradient(
    grad: Tensor,  # (i, c) or (H, i, c)
    rows: Tensor,  # (i, d) or (H, i, d)
    out: Tensor | None = None,  # (c, d) or (H, c, d)
) -> Tensor:  # as out
    product = torch.mm if rows.dim() == 2 else torch.bmm
    c = grad.shape[-1]
    if c >= WIDTH:
        return product(grad.mT, rows, out=out)
    # cuBLAS's product for fewer columns takes many times as long
    wide = product(F.pad(grad, (0, WIDTH - c)).mT, rows)[..., :c, :]
    return wide if out is None else out.copy_(wide)


def _bias_gradient(
    grad: Tensor,  # (i, c) or (H, i, c)
    rows: Tensor,  # unused: the signature of _weight_gradient
    out: Tensor | None = None,  # (c,) or (H, c)
) -> Tensor:  # as out
    return torch.sum(grad, -2, out=out)


def _joined(
    compute: Callable[..., Tensor],
    grads: tuple[Tensor, ...],  # (i, c) or (H, i, c) for parts of c columns
    rows: Tensor,  # (i, d) or (H, i, d)
    like: Tensor,  # (r + s, d) or (r + s,), with heads (H, r + s, d) or (H, r + s)
    axis: int,  # of r + s
) -> Tensor:  # as like
    """The gradients of all parts, joined along the axis."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_batched(*grads):
        # autograd, torch.compile and batched cotangents do not support out=
        return torch.cat([compute(grad, rows) for grad in grads], axis)
    joined = like.new_empty(like.shape)
    sizes = [v.shape[-1] for v in grads]
    for grad, out in zip(grads, joined.split(sizes, axis), strict=True):
        compute(grad, rows, out=out)
    return joined


def split_linear(
    rows: Tensor,  # (i, d) or (H, i, d)
    weight: Tensor,  # (r + s, d) or (H, r + s, d)
    bias: Tensor,  # (r + s,) or (H, r + s)
    *,
    r: int,
) -> tuple[Tensor, Tensor]:  # (i, r), (i, s) or (H, i, r), (H, i, s)
    """The first r columns of `torch.nn.functional.linear(rows, weight, bias)`, and the others; with
    heads those of each head.

    All operands have the same dtype; the caller casts them under autocast.
    """
    with torch.autocast(rows.device.type, enabled=False):
        parts: tuple[Tensor, Tensor] = _SplitLinear.apply(rows, weight, bias, r)  # type: ignore[no-untyped-call]
    return parts


def project_raw(
    x: Tensor,  # (b, t, d)
    weight: Tensor,  # (r + d, d) or (H, r + d, d)
    bias: Tensor,  # (r + d,) or (H, r + d)
    *,
    r: int,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # (b, t, r), (b, t, d)
    """W^x x: the raw values and the gate, with the W^x of the sample's head.

    dtype None: in one product, cast as autocast does. A dtype: for kernels, in that dtype and in
    two products, so that each result and its cotangent are contiguous. The backward pass of a split
    would concatenate the cotangents, which copies all of them.
    """
    # flattened, because torch fuses the bias into the product only if x is a matrix
    rows = x.flatten(0, 1) if weight.dim() == 2 else x.reshape(len(weight), -1, x.shape[2])
    if dtype is not None:
        raw, gate = split_linear(*(v.to(dtype) for v in (rows, weight, bias)), r=r)
    elif weight.dim() == 2:
        raw, gate = F.linear(x, weight, bias).split([r, len(weight) - r], -1)
        return raw, gate
    else:
        raw, gate = _linear(rows, weight, bias).split([r, weight.shape[1] - r], -1)
    return raw.reshape(*x.shape[:2], r), gate.reshape(x.shape)


def split_projected(
    projected: Tensor,  # (b, t, r + d), the output of a module in place of W^x
    bias: Tensor,  # (r + d,) or (H, r + d)
    *,
    r: int,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # (b, t, r), (b, t, d)
    """The result of `project_raw` from a product that another module has computed.

    Raises ValueError if its last axis does not have r + d entries.
    """
    if projected.shape[-1] != bias.shape[-1]:
        raise ValueError(
            f"x_proj must return r + head_dim = {bias.shape[-1]} values for each vector, got "
            f"{tuple(projected.shape)}: replace it with a module of that width"
        )
    if bias.dim() == 2:
        bias = per_sample(bias, projected.shape[0]).unsqueeze(1)
    total = projected + bias
    raw, gate = total.split([r, total.shape[2] - r], -1)
    if dtype is None:
        return raw, gate
    return raw.to(dtype).contiguous(), gate.to(dtype).contiguous()

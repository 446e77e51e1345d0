"""A product with an awkward number of outputs, as the kernels and the library like it.

Rows of r values with r no multiple of eight start at addresses that wide loads and the fast paths
of cuBLAS do not take. So the matrix gets rows of zeros, the result is a view of the wider one, and
its cotangent is used as it comes: autograd's own view would copy it into a tensor of zeros.

Letters: i rows, d channels, r outputs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ALIGNMENT = 64


class _PaddedLinear(torch.autograd.Function):
    """rows W^T + bias (i, r), whose rows lie a multiple of ALIGNMENT apart."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        r = weight.shape[0]
        zeros = -r % ALIGNMENT
        return F.linear(rows, F.pad(weight, (0, 0, 0, zeros)), F.pad(bias, (0, zeros)))[:, :r]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        wants = ctx.needs_input_grad
        with torch.autocast(rows.device.type, enabled=False):
            return (
                grad @ weight if wants[0] else None,
                grad.mT @ rows if wants[1] else None,
                grad.sum(0) if wants[2] else None,
            )


def padded_linear(
    rows: Tensor,  # (i, d)
    weight: Tensor,  # (r, d)
    bias: Tensor,  # (r,)
) -> Tensor:  # (i, r)
    """`torch.nn.functional.linear` of operands of one dtype; autocast must have cast them."""
    with torch.autocast(rows.device.type, enabled=False):
        result: Tensor = _PaddedLinear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return result

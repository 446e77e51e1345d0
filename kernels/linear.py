"""Products with the weights of heads, and shapes of matrices for which cuBLAS is fast.

If the contiguous extent of an operand or of the result is not a multiple of eight, cuBLAS falls
back to kernels that take at least twice as long. Letters: b batch, d channels, r rows, H heads
(kernels/heads.py).
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

ALIGNMENT = 64


def padding(r: int) -> int:
    """The number to add to r for a multiple of ALIGNMENT, so that rows of r values are aligned."""
    return -r % ALIGNMENT


def apply_weight(
    v: Tensor,  # (b, ..., d)
    W: Tensor,  # (r, d) or (H, r, d)
) -> Tensor:  # (b, ..., r)
    """W v for all vectors in v, with the W of the sample's head if there are several heads: in one
    product or one batched product."""
    if W.dim() == 2:
        return linear(v, W)
    rows = v.reshape(W.shape[0], -1, W.shape[2])
    return reshape_whole(torch.bmm(rows, W.mT), *v.shape[:-1], W.shape[1])


def reshape_whole(
    v: Tensor,  # any shape
    *shape: int,
) -> Tensor:
    """`v.reshape(shape)` for a tensor that is contiguous or has to be copied.

    It goes by way of a single axis: the strides of symbolic sizes that are merged and then split
    are otherwise minima, for which torch.export finds that they are wrong for a size of 0.
    """
    return v.reshape(-1).reshape(shape)


def weight_gradient(
    grad: Tensor,  # (b, ..., r), the cotangent of `apply_weight(v, W)`; W may be padded to r rows
    v: Tensor,  # (b, ..., d)
    W: Tensor,  # (r, d) or (H, r, d)
) -> Tensor:  # (r, d) or (H, r, d)
    """The gradient of W, in one product or one batched product."""
    # reshape, because flatten has no batching rule for batched cotangents
    rows = grad.reshape(*W.shape[:-2], -1, grad.shape[-1])
    # not `@`, which takes six operations for a batched product
    product = torch.mm if W.dim() == 2 else torch.bmm
    return product(rows.mT, v.reshape(*W.shape[:-2], -1, W.shape[-1]))

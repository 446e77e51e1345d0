"""Tensors that belong to heads, and products with their weights.

The batch is H groups of b/H samples, one group for each head: sample i belongs to head i // (b/H).
A tensor of a head, A (d, n) for example, has a leading axis H where there are several heads, and
the same shape as without heads where there is one.
If the contiguous extent of an operand or of the result is not a multiple of eight, cuBLAS falls
back to kernels that take at least twice as long.
Letters: b samples, all heads' counted; d channels, r rows, H heads.
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


def count_heads(
    A: Tensor,  # (d, n) or (H, d, n)
) -> int:
    """H, which the number of axes of A says."""
    return A.shape[0] if A.dim() == 3 else 1


def check_heads(num_heads: int, b: int, source: str) -> None:
    """Raise ValueError unless b samples are `num_heads` equal groups; `source` has that many."""
    if num_heads < 1:
        raise ValueError(f"{source} must have at least one head, got {num_heads}")
    if b % num_heads:
        raise ValueError(
            f"the batch must be {num_heads} groups of samples of one size, since {source} has "
            f"{num_heads} heads, got {b} samples; give a multiple of {num_heads} samples, head by "
            f"head, or a tensor of one head"
        )


def fold(
    v: Tensor,  # (b, ..., H p)
    num_heads: int,
) -> Tensor:  # (H b, ..., p)
    """The channels of each head as a sample of its own."""
    if num_heads == 1:
        return v
    # reshape, because unflatten and flatten have no batching rule for batched cotangents
    b, *between, d = v.shape
    by_channels = v.reshape(b, *between, num_heads, d // num_heads).movedim(-2, 0)
    return reshape_whole(by_channels, num_heads * b, *between, d // num_heads)


def unfold(
    v: Tensor,  # (H b, ..., p)
    num_heads: int,
) -> Tensor:  # (b, ..., H p)
    """The inverse of `fold`."""
    if num_heads == 1:
        return v
    folded, *between, p = v.shape
    by_samples = v.reshape(num_heads, folded // num_heads, *between, p).movedim(0, -2)
    return reshape_whole(by_samples, folded // num_heads, *between, num_heads * p)


def per_sample(
    v: Tensor,  # (H, ...)
    b: int,
) -> Tensor:  # (b, ...)
    """For each of b samples the tensor of its head."""
    groups = v.unsqueeze(1).expand(-1, b // v.shape[0], *(-1,) * (v.dim() - 1))
    return groups.flatten(0, 1)


def sum_samples(
    grad: Tensor,  # (b, ...)
    num_heads: int,
) -> Tensor:  # (H, ...)
    """The sum over the samples of each head, the adjoint of `per_sample`."""
    # reshape, because unflatten has no batching rule for batched cotangents
    return grad.reshape(num_heads, -1, *grad.shape[1:]).sum(1)

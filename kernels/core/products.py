"""The products of a layer's core: one matrix, or for several heads a matrix for each.

Rows and weights of several heads have a leading axis. Operands and results are views of whatever
memory has them: cuBLAS takes any distance between rows and between heads, without a copy.

Letters: b batch, t time, d channels, p channels of a head, H heads, i = b t rows, c columns.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.core.types import CoreSizes
from bedouin.kernels.feedback import padded_rows
from bedouin.kernels.linear import padding

MANY_ROWS = 4096
"""From so many rows on, a product of each head is cheaper than writing the bias of all of them
before one batched product, which reads it again: only a product of one matrix adds it itself."""


def rows_of(
    v: Tensor,  # (b, t, d)
    num_heads: int,
) -> Tensor:  # (i, d) or (H, i, p)
    """The channels of each head of all tokens, a view where the rows of v are evenly spaced."""
    rows = v.flatten(0, 1)
    return rows if num_heads == 1 else rows.unflatten(1, (num_heads, -1)).transpose(0, 1)


def columns_of(
    v: Tensor,  # (b, t, w)
    start: int,
    num_heads: int,
    p: int,
) -> Tensor:  # (i, p) or (H, i, p)
    """`rows_of` of the H p channels from `start` on, in one view where possible: several cost the
    host as much as a launch."""
    if not v.is_contiguous():
        return rows_of(v[..., start : start + num_heads * p], num_heads)
    b, t, w = v.shape
    at = v.storage_offset() + start
    if num_heads == 1:
        return v.as_strided((b * t, p), (w, 1), at)
    return v.as_strided((num_heads, b * t, p), (p, w, 1), at)


def samples_of(
    v: Tensor,  # (b, t, d)
    num_heads: int,
) -> Tensor:  # (b, t, d) or (H, b, t, p)
    """The channels of each head, a view."""
    return v if num_heads == 1 else v.unflatten(2, (num_heads, -1)).movedim(2, 0)


def first_rows(
    W: Tensor,  # (rows, c) or (H, rows, c)
    wide: int,
) -> Tensor:  # (wide, c) or (H, wide, c)
    """The first rows of W, with zeros where it has fewer."""
    missing = wide - W.shape[-2]
    return F.pad(W, (0, 0, 0, missing)) if missing > 0 else W.narrow(-2, 0, wide)


def loop_rows(
    W_y: Tensor | None,  # (f + p, p) or (H, f + p, p)
    sizes: CoreSizes,
) -> Tensor | None:
    """W^y of the raw values with as many rows as the kernels of the sweep read, zeros from f on."""
    return None if W_y is None else padded_rows(W_y[..., : sizes.f, :], sizes.r)


def project(
    rows: Tensor,  # (i, p) or (H, i, p)
    W: Tensor,  # (c, p) or (H, c, p)
    bias: Tensor,  # (c,) or (H, c)
) -> Tensor:  # (i, c) or (H, i, c)
    """rows W^T + bias."""
    if rows.dim() == 2:
        return F.linear(rows, W, bias)
    if rows.shape[1] < MANY_ROWS:
        return torch.baddbmm(bias.unsqueeze(1), rows, W.mT)
    out = rows.new_empty(*rows.shape[:2], W.shape[1])
    for of_head in zip(bias, rows, W.mT, out, strict=True):
        torch.addmm(*of_head[:3], out=of_head[3])
    return out


def multiply(
    a: Tensor,  # (i, p) or (H, i, p)
    b: Tensor,  # (p, c) or (H, p, c)
    out: Tensor | None = None,  # (i, c) or (H, i, c)
) -> Tensor:  # (i, c) or (H, i, c)
    return torch.mm(a, b, out=out) if a.dim() == 2 else torch.bmm(a, b, out=out)


def add_product_(
    total: Tensor,  # (i, c) or (H, i, c)
    a: Tensor,  # (i, p) or (H, i, p)
    b: Tensor,  # (p, c) or (H, p, c)
) -> Tensor:  # total
    """total += a b, in place."""
    return total.addmm_(a, b) if total.dim() == 2 else total.baddbmm_(a, b)


def joined_gradient(
    grad_raw: Tensor,  # (i, r + padding) or (H, i, r + padding)
    grad_gate: Tensor,  # (i, p) or (H, i, p)
    rows: Tensor,  # (i, p) or (H, i, p)
    size: int,
) -> Tensor:  # (size + p, p) or (H, size + p, p)
    """The gradient of a weight that yields the first `size` raw values and the gate of `rows`."""
    # some more columns, so that the product is aligned
    grad_raw = grad_raw[..., : size + padding(size)]
    wide, p = grad_raw.shape[-1], grad_gate.shape[-1]
    joined = rows.new_empty(*rows.shape[:-2], max(wide, size + p), p)
    multiply(grad_raw.mT, rows, joined.narrow(-2, 0, wide))
    # overwrites the rows of the others
    multiply(grad_gate.mT, rows, joined.narrow(-2, size, p))
    return joined if joined.shape[-2] == size + p else joined.narrow(-2, 0, size + p)

"""The pivoted elimination of the k x k system, by torch's LAPACK or written out for exporters.

ONNX and other runtimes have no LU decomposition. Under torch.export the elimination therefore
consists of elementary operations, with its loop over k unrolled, and computes the inverse; the
pivots are the same.
"""

import torch
from torch import Tensor

from bedouin.kernels.householder import times


def factorize(
    matrix: Tensor,  # (..., k, k)
) -> tuple[Tensor, Tensor]:  # (..., k, k), (..., k)
    """L and U in one matrix, and the rows that were exchanged, or what `_invert` returns. Never
    raises or synchronizes."""
    if torch.compiler.is_exporting():
        return _invert(matrix)
    LU, pivots, _ = torch.linalg.lu_factor_ex(matrix)
    return LU, pivots


def substitute(
    LU: Tensor,  # (..., k, k)
    pivots: Tensor,  # (..., k), or the inverse
    right: Tensor,  # (..., k)
    *,
    adjoint: bool = False,
) -> Tensor:  # (..., k)
    """The solution for a right-hand side, from the result of `factorize`; `adjoint`: of the
    transposed system, which is not exported."""
    if torch.compiler.is_exporting() and not adjoint:
        return times(pivots, right)
    # by rows, because of a factor by columns, as torch returns it, lu_solve reads the wrong numbers
    # under two vmaps for a batch of one sample
    rows = LU.contiguous()
    solved: Tensor = torch.linalg.lu_solve(rows, pivots, right.unsqueeze(-1), adjoint=adjoint)
    return solved.squeeze(-1)


def _invert(
    matrix: Tensor,  # (..., k, k)
) -> tuple[Tensor, Tensor]:  # both (..., k, k)
    """The pivots on a diagonal, and the inverse."""
    k = matrix.shape[-1]
    numbers = torch.arange(k, device=matrix.device)
    identity = torch.eye(k, dtype=matrix.dtype, device=matrix.device).expand(matrix.shape)
    rows, pivots = torch.cat([matrix, identity], -1), identity
    for i in range(k):
        candidates = rows[..., i].abs().masked_fill(numbers < i, -1.0)
        pivot, is_own = candidates.argmax(-1, keepdim=True), (numbers == i).unsqueeze(-1)
        exchange = torch.where(numbers == i, pivot, numbers.expand(candidates.shape))
        exchange = torch.where(numbers == pivot, i, exchange)
        rows = rows.gather(-2, exchange.unsqueeze(-1).expand(rows.shape))
        pivots = torch.where(is_own, rows[..., i, i, None, None] * identity, pivots)
        row = rows[..., i, None, :] / rows[..., i, i, None, None]
        rows = torch.where(is_own, row, rows - rows[..., i, None] * row)
    return pivots, rows[..., k:]

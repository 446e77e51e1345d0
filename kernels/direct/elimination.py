"""The pivoted elimination of the k x k system, by torch's LAPACK or written out for exporters.

ONNX and other runtimes have no LU decomposition. Under torch.export the elimination therefore
consists of elementary operations, with its loops over k unrolled; the pivots are the same.
"""

import torch
from torch import Tensor


def factorize(
    matrix: Tensor,  # (..., k, k)
) -> tuple[Tensor, Tensor]:  # (..., k, k), (..., k)
    """L and U in one matrix, and the rows that were exchanged. Never raises or synchronizes."""
    if torch.compiler.is_exporting():
        return _factorize(matrix)
    LU, pivots, _ = torch.linalg.lu_factor_ex(matrix)
    return LU, pivots


def substitute(
    LU: Tensor,  # (..., k, k)
    pivots: Tensor,  # (..., k)
    right: Tensor,  # (..., k)
    *,
    adjoint: bool = False,
) -> Tensor:  # (..., k)
    """The solution for a right-hand side, from the result of `factorize`; `adjoint`: of the
    transposed system, which is not exported."""
    if torch.compiler.is_exporting() and not adjoint:
        return _substitute(LU, pivots, right)
    # by rows, because of a factor by columns, as torch returns it, lu_solve reads the wrong numbers
    # under two vmaps for a batch of one sample
    rows = LU.contiguous()
    solved: Tensor = torch.linalg.lu_solve(rows, pivots, right.unsqueeze(-1), adjoint=adjoint)
    return solved.squeeze(-1)


def _factorize(
    matrix: Tensor,  # (..., k, k)
) -> tuple[Tensor, Tensor]:  # (..., k, k), (..., k)
    """The second result is the order of the rows; LAPACK's would be their exchanges."""
    k = matrix.shape[-1]
    numbers = torch.arange(k, device=matrix.device)
    order = numbers.expand(matrix.shape[:-1])
    for i in range(k):
        candidates = matrix[..., i].abs().masked_fill(numbers < i, -1.0)
        pivot = candidates.argmax(-1, keepdim=True)
        exchange = torch.where(numbers == i, pivot, numbers.expand(order.shape))
        exchange = torch.where(numbers == pivot, i, exchange)
        order = order.gather(-1, exchange)
        matrix = matrix.gather(-2, exchange.unsqueeze(-1).expand(matrix.shape))
        # below the diagonal L, as in LAPACK's form, and the rows that are left
        below = numbers > i
        factor = torch.where(below, matrix[..., i] / matrix[..., i, i, None], 0.0)
        row = torch.where(below, matrix[..., i, :], 0.0)
        reduced = matrix - factor.unsqueeze(-1) * row.unsqueeze(-2)
        is_factor = below.unsqueeze(-1) & (numbers == i)
        matrix = torch.where(is_factor, factor.unsqueeze(-1), reduced)
    return matrix, order


def _substitute(
    LU: Tensor,  # (..., k, k)
    order: Tensor,  # (..., k)
    right: Tensor,  # (..., k)
) -> Tensor:  # (..., k)
    k, values = LU.shape[-1], right.gather(-1, order)
    known: list[Tensor] = []
    for i in range(k):
        known.append(values[..., i] - sum(LU[..., i, j] * known[j] for j in range(i)))
    for i in reversed(range(k)):
        rest = known[i] - sum(LU[..., i, j] * known[j] for j in range(i + 1, k))
        known[i] = rest / LU[..., i, i]
    return torch.stack(known, -1) if known else right

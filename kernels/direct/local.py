"""The local equation of one token (DESIGN: the fixed point is block lower-triangular in time).

With I - Q = diag(e) + U^T M U the fixed point of one token obeys

    (I - diag(sigma)(I - Q)) y = rhs,

solved by Woodbury around D = 1 - sigma e with one pivoted k x k system K = I - S M,
S = U diag(sigma / D) U^T. Letters: d channels, k reflections; leading axes are free.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.householder import combine_rows, rows_dot


class LocalFactors(NamedTuple):
    """What the solves with one token's matrix and with its transpose share."""

    D: Tensor  # (..., d)
    gain: Tensor  # (..., d), sigma / D
    U: Tensor  # (..., k, d)
    M: Tensor  # (..., k, k)
    LU: Tensor  # (..., k, k), of K
    pivots: Tensor  # (..., k)


def factor_local(
    sigma: Tensor,  # (..., d)
    e: Tensor,  # (..., 1) or (..., d)
    U: Tensor,  # (..., k, d)
    M: Tensor,  # (..., k, k)
) -> LocalFactors:
    """Factors of I - diag(sigma)(I - Q); never raises or synchronizes, singular or not."""
    D = 1 - sigma * e
    gain = sigma / D
    S = (U * gain.unsqueeze(-2)) @ U.mT
    K = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device) - S @ M
    LU, pivots, _ = torch.linalg.lu_factor_ex(K)
    return LocalFactors(D, gain, U, M, LU, pivots)


def solve_local(rhs: Tensor, factors: LocalFactors) -> Tensor:
    """y with (I - diag(sigma)(I - Q)) y = rhs (..., d); Inf or NaN where the matrix is singular.

    One step of iterative refinement keeps the residual at rounding level where K is near singular.
    """
    y = _woodbury(rhs, factors)
    return y + _woodbury(rhs - _apply_local(y, factors), factors)


def _woodbury(rhs: Tensor, factors: LocalFactors) -> Tensor:
    D, gain, U, M, LU, pivots = factors
    r = rhs / D
    a = M @ torch.linalg.lu_solve(LU, pivots, rows_dot(U, r).unsqueeze(-1))
    return r + gain * combine_rows(a.squeeze(-1), U)


def _apply_local(y: Tensor, factors: LocalFactors) -> Tensor:
    """(I - diag(sigma)(I - Q)) y = D * (y - gain * U^T M U y)."""
    D, gain, U, M, *_ = factors
    a = M @ rows_dot(U, y).unsqueeze(-1)
    return D * (y - gain * combine_rows(a.squeeze(-1), U))


def solve_local_transposed(rhs: Tensor, factors: LocalFactors) -> Tensor:
    """w with (I - (I - Q)^T diag(sigma)) w = rhs (..., d)."""
    D, gain, U, M, LU, pivots = factors
    a = M.mT @ rows_dot(U, gain * rhs).unsqueeze(-1)
    a = torch.linalg.lu_solve(LU, pivots, a, adjoint=True)
    return (rhs + combine_rows(a.squeeze(-1), U)) / D


def smallest_pivot(factors: LocalFactors) -> Tensor:
    """min |pivot| over the k x k factor and D (...): 0 for an exactly singular token."""
    pivot = factors.LU.diagonal(dim1=-2, dim2=-1).abs().amin(-1)
    return torch.fmin(pivot, factors.D.abs().amin(-1)).detach()

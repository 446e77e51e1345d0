"""The local equation of one token.

The fixed point is block lower-triangular in time: given the memory h_{t-1} and the output y_{t-1},
y_t follows from an equation of token t alone.

With I - Q = diag(e) + U^T M U the fixed point of one token obeys

    y = p + sigma * x~,   x~ = (1 - e) x + e y + U^T M U (y - x).

With w = U (y - x) and D = 1 - sigma e, y = (p + sigma (1 - e) x + sigma U^T M w) / D: a pivoted
k x k system K w = U (r - x), K = I - S M, S = U diag(sigma / D) U^T, r = (p + sigma (1 - e) x) / D.
No term is larger than y and Q x, so a small Q causes no cancellation, which x - (I - Q) x would.

Where D is nearly 0, for example where a gate saturates and e = 1, the division by D loses all
digits although the equation need not be singular: U^T M U has rank k and can compensate for k such
channels. So the k channels with the smallest |D| are not eliminated: their values z = y are
unknowns beside w, with rows of their own in the system:

    [ I - S M              -U_z ] [w]   [U (r - x)                      ]
    [ -sigma_z U_z^T M   diag(D_z) ] [z] = [p_z + sigma_z (1 - e_z) x_z],   with S and r 0 there.

The choice of these channels affects nothing but rounding.

The system is solved by torch's LAPACK. ONNX and other runtimes have no LU decomposition, so under
torch.export the elimination consists of elementary operations, with its loop over k unrolled, and
computes the inverse; the pivots are the same.

Letters: d channels, k reflections, m = min(k, d) channels with rows of their own; leading axes are
free.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bedouin.kernels.householder import combine_rows, rows_dot, times


class LocalFactors(NamedTuple):
    """Factors shared by the solves with the matrix of a token and with its transpose.

    The last four are None for e = 0: then D = 1, and no channel needs a row of its own.
    """

    sigma: Tensor  # (..., d)
    gain: Tensor  # (..., d), sigma / D, 0 in the channels `at`
    U: Tensor  # (..., k, d)
    M: Tensor  # (..., k, k)
    LU: Tensor  # (..., k + m, k + m), of the matrix above, or (..., k, k), of K
    pivots: Tensor  # (..., k + m) or (..., k)
    e: Tensor | None  # (..., 1) or (..., d)
    D: Tensor | None  # (..., d)
    at: Tensor | None  # (..., m), the channels with rows of their own
    shrink: Tensor | None  # (..., k + m), factors by which the rows of the matrix were scaled

    @property
    def divisor(self) -> Tensor:
        """D (..., d), with 1 in the channels `at`, which are not divided."""
        assert self.D is not None and self.at is not None
        return self.D.scatter(-1, self.at, 1.0)


def factorize(
    matrix: Tensor,  # (..., k, k)
) -> tuple[Tensor, Tensor]:  # (..., k, k), (..., k)
    """L and U in one matrix, and the rows that were exchanged, or what `_invert` returns. Never
    raises or synchronizes."""
    if torch.compiler.is_exporting():
        return _invert(matrix)
    LU, pivots, _ = torch.linalg.lu_factor_ex(matrix)
    return LU, pivots


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


def factor_local(
    sigma: Tensor,  # (..., d)
    e: Tensor | None,  # (..., 1) or (..., d); None: 0
    U: Tensor,  # (..., k, d)
    M: Tensor,  # (..., k, k)
    gap: Tensor | None = None,  # (..., d)
) -> LocalFactors:
    """Factors of I - diag(sigma)(I - Q). Never raises or synchronizes, even for a singular matrix.

    `gap` is 1 - sigma, if the caller can compute it more accurately than by the difference.
    """
    identity = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    if e is None:
        K = identity - (U * sigma.unsqueeze(-2)) @ U.mT @ M
        LU, pivots = factorize(K)
        return LocalFactors(sigma, sigma, U, M, LU, pivots, None, None, None, None)
    # 1 - sigma e in a form without rounding errors for e = 0, and for e = 1 with a given gap
    D = (1 - e) + e * (1 - sigma if gap is None else gap)
    at = D.detach().abs().topk(min(U.shape[-2:]), largest=False, sorted=False).indices
    gain = (sigma / D.scatter(-1, at, 1.0)).scatter(-1, at, 0.0)
    K = identity - (U * gain.unsqueeze(-2)) @ U.mT @ M
    U_z = U.gather(-1, at.unsqueeze(-2).expand(*U.shape[:-1], at.shape[-1]))
    rows = -(U_z * sigma.gather(-1, at).unsqueeze(-2)).mT @ M
    own = torch.diag_embed(D.gather(-1, at))
    bordered = torch.cat([torch.cat([K, -U_z], -1), torch.cat([rows, own], -1)], -2)
    # a small remaining D makes large rows; scaled, their rounding errors are no false pivots
    shrink = 1 / pad(bordered.detach().abs(), (0, 1), value=1.0).amax(-1)  # k may be 0
    LU, pivots = factorize(shrink.unsqueeze(-1) * bordered)
    return LocalFactors(sigma, gain, U, M, LU, pivots, e, D, at, shrink)


def solve_local(
    p: Tensor,  # (..., d)
    factors: LocalFactors,
    x: Tensor,  # (..., d)
) -> Tensor:  # (..., d)
    """y (..., d) with (I - diag(sigma)(I - Q)) y = p + sigma * Q x; Inf or NaN where singular.

    One step of iterative refinement keeps the residual at rounding level where the system is near
    singular.
    """
    U, at, e, k = factors.U, factors.at, factors.e, factors.U.shape[-2]
    r = known = p + factors.sigma * (x if e is None else (1 - e) * x)
    if at is not None:
        r = (known / factors.divisor).scatter(-1, at, 0.0)
    right = rows_dot(U, r - x)
    if at is not None:
        right = torch.cat([right, known.gather(-1, at)], -1)
    unknowns = _lu_solve(right, factors)
    y, moved = _compose(unknowns, r, factors)
    defect = rows_dot(U, y - x) - unknowns[..., :k]
    if at is not None:
        assert factors.D is not None
        own = known + factors.sigma * moved
        own = own.gather(-1, at) - factors.D.gather(-1, at) * unknowns[..., k:]
        defect = torch.cat([defect, own], -1)
    return _compose(unknowns + _lu_solve(defect, factors), r, factors)[0]


def _compose(
    unknowns: Tensor,  # (..., k) or (..., k + m)
    r: Tensor,  # (..., d), known / D, 0 in the channels with rows of their own
    factors: LocalFactors,
) -> tuple[Tensor, Tensor]:
    """y and U^T M w, both (..., d), from the unknowns w and z."""
    k = factors.U.shape[-2]
    moved = combine_rows(times(factors.M, unknowns[..., :k]), factors.U)
    y = r + factors.gain * moved
    return y if factors.at is None else y.scatter(-1, factors.at, unknowns[..., k:]), moved


def _lu_solve(
    right: Tensor,  # (..., k) or (..., k + m)
    factors: LocalFactors,
    *,
    adjoint: bool = False,
) -> Tensor:  # as `right`
    """The solution of the system, with `adjoint` of the transposed one, which is not exported."""
    shrink = factors.shrink
    if shrink is not None and not adjoint:
        right = shrink * right
    if torch.compiler.is_exporting() and not adjoint:
        return times(factors.pivots, right)
    # torch returns the factor in column-major order, of which lu_solve under two vmaps reads the
    # wrong numbers for a batch of one sample
    given = factors.LU.contiguous(), factors.pivots, right.unsqueeze(-1)
    solved: Tensor = torch.linalg.lu_solve(*given, adjoint=adjoint).squeeze(-1)
    return solved if shrink is None or not adjoint else shrink * solved


def solve_local_transposed(
    rhs: Tensor,  # (..., d)
    factors: LocalFactors,
) -> Tensor:  # (..., d)
    """w with (I - (I - Q)^T diag(sigma)) w = rhs (..., d)."""
    U, M, at = factors.U, factors.M, factors.at
    right = times(M.mT, rows_dot(U, factors.gain * rhs))
    if at is None:
        return rhs + combine_rows(_lu_solve(right, factors, adjoint=True), U)
    solved = _lu_solve(torch.cat([right, rhs.gather(-1, at)], -1), factors, adjoint=True)
    a, own = solved.split([U.shape[-2], at.shape[-1]], -1)
    return ((rhs + combine_rows(a, U)) / factors.divisor).scatter(-1, at, own)


def smallest_pivot(factors: LocalFactors) -> Tensor:
    """min |pivot| over the small factor and D, at most 1 (...): 0 for an exactly singular token."""
    sigma, small = factors.sigma, factors.LU.diagonal(dim1=-2, dim2=-1).abs()
    if factors.at is None:
        pivot = sigma.new_ones(sigma.shape[:-1])
    else:
        pivot = torch.fmin(factors.divisor.abs().amin(-1), sigma.new_ones(()))
    # without reflections there is no small factor
    return (torch.fmin(small.amin(-1), pivot) if small.shape[-1] else pivot).detach()

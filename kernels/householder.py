"""Products of Householder matrices, Q = H_1 H_2 ... H_k with H_i = I - beta_i u_i u_i^T.

Letters: d channels, k reflections; leading axes are free. Compact WY form:
I - Q = diag(e) + U^T M U, with e = 0 and M = T (upper triangular) for a Householder product.
"""

import math

import torch
from torch import Tensor

UNIT_EPS = 1e-6


def inverse_norm(
    squares: Tensor,  # any shape, a sum or mean of squares
    floor: float,
) -> Tensor:  # as `squares`
    """rsqrt(squares + floor), but NaN where the squares have overflowed, so that the sample is
    reported: the factor 0 would make a zero of the vector."""
    return torch.rsqrt(squares.nan_to_num(math.nan, math.nan) + floor)


def unit(
    v: Tensor,  # (..., d)
    eps: float = UNIT_EPS,
) -> Tensor:  # (..., d)
    """v * rsqrt(|v|^2 + d eps) over the last axis.

    With eps inside the root, the derivative at v = 0 is finite, 1 / sqrt(d eps). NaN where |v|^2
    overflows.
    """
    return unit_and_factor(v, eps)[0]


def unit_and_factor(
    v: Tensor,  # (..., d)
    eps: float = UNIT_EPS,
) -> tuple[Tensor, Tensor]:  # (..., d), (..., 1)
    """`unit`, and the factor by which it multiplies v."""
    factor = inverse_norm(v.square().sum(-1, keepdim=True), v.shape[-1] * eps)
    return v * factor, factor


def unit_vjp(
    grad: Tensor,  # (..., d), the cotangent of the result
    unit: Tensor,  # (..., d), the result
    factor: Tensor,  # (..., 1)
) -> Tensor:  # (..., d)
    """The cotangent of the argument of `unit_and_factor`."""
    along = (grad * unit).sum(-1, keepdim=True)
    return torch.addcmul(grad, unit, along, value=-1).mul_(factor)


def rows_dot(
    rows: Tensor,  # (..., k, d)
    v: Tensor,  # (..., d)
) -> Tensor:  # (..., k)
    """U v. On a CPU a product and a sum are five times faster than a batched gemv with few rows."""
    if rows.is_cuda:
        return (rows @ v.unsqueeze(-1)).squeeze(-1)
    return (rows * v.unsqueeze(-2)).sum(-1)


def combine_rows(
    a: Tensor,  # (..., k)
    rows: Tensor,  # (..., k, d)
) -> Tensor:  # (..., d)
    """U^T a, as a row vector times U: batched products are faster in this layout."""
    return (a.unsqueeze(-2) @ rows).squeeze(-2)


def times(
    M: Tensor,  # (..., k, k)
    v: Tensor,  # (..., k)
) -> Tensor:  # (..., k)
    """M v, in the layout of `combine_rows`."""
    return combine_rows(v, M.mT)


def wy_factor(
    U: Tensor,  # (..., k, d) unit rows
    beta: Tensor,  # (..., k)
) -> Tensor:  # (..., k, k)
    """T, upper triangular, with H_1 H_2 ... H_k = I - U^T T U (compact WY form).

    T_ii = beta_i and T_{:i,i} = -beta_i T_{:i,:i} U_{:i} u_i. In closed form
    T = (I + N)^-1 diag(beta) with N = diag(beta) striu(U U^T), and since N is nilpotent (N^k = 0)
    the inverse is the finite product (I - N)(I + N^2)(I + N^4)...
    """
    return wy_factor_of(U @ U.mT, beta)


def wy_factor_of(
    dots: Tensor,  # (..., k, k), U U^T
    beta: Tensor,  # (..., k)
) -> Tensor:  # (..., k, k)
    """`wy_factor` where the products of the rows are known."""
    k = dots.shape[-1]
    N = beta.unsqueeze(-1) * torch.triu(dots, diagonal=1)
    identity = torch.eye(k, dtype=N.dtype, device=N.device)
    inverse = identity - N
    power, squared = 2, N
    while power < k:
        squared = squared @ squared
        inverse = inverse @ (identity + squared)
        power *= 2
    return inverse * beta.unsqueeze(-2)


def apply_complement(
    v: Tensor,  # (..., d)
    e: Tensor | None,  # (..., 1) or (..., d); None: 0
    U: Tensor,  # (..., k, d)
    M: Tensor,  # (..., k, k)
) -> Tensor:  # (..., d)
    """(I - Q) v = e * v + U^T M U v."""
    moved = combine_rows(times(M, rows_dot(U, v)), U)
    return moved if e is None else e * v + moved


def mix_channels(
    x: Tensor,  # (..., d)
    y: Tensor,  # (..., d)
    e: Tensor | None,  # (..., 1) or (..., d); None: 0
    U: Tensor,  # (..., k, d)
    M: Tensor,  # (..., k, k)
) -> Tensor:  # (..., d)
    """x~ = Q (x - y) + y, as (1 - e) x + e y + U^T M U (y - x).

    For e = 1 and a small Q, the form x + (I - Q)(y - x) would add x and subtract it again, which
    loses digits to cancellation.
    """
    moved = apply_complement(y - x, None, U, M)
    return moved + (x if e is None else (1 - e) * x + e * y)


def apply_complement_transposed(
    v: Tensor,  # (..., d)
    e: Tensor | None,  # (..., 1) or (..., d); None: 0
    U: Tensor,  # (..., k, d)
    M: Tensor,  # (..., k, k)
) -> Tensor:  # (..., d)
    """(I - Q)^T v = e * v + U^T M^T U v."""
    return apply_complement(v, e, U, M.mT)

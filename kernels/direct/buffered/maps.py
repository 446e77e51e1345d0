"""The adjoint of a token's mixer as a linear map of k numbers.

With m the cotangent of x~, S, R, T, E and e = T w as in rows.py (w = U v, v = y - x), X =
(I + diag(beta) R)^-1, so that T = X diag(beta), and q = X^T U m, the cotangents are

    of beta:  q * (w - R e), where beta * (w - R e) = e
    of u_i:   |u_i|^-1 (e_i m + beta_i q_i v + sum_j G_ij U_j - 2 e_i q_i U_i)

with G_ij = -beta_i q_i e_j above the diagonal and its transpose below, from the triangular form of
T. The last term is the projection of the normalization of u_i: the product of U_i and the terms
before it is 2 e_i q_i. Only m and q depend on cotangents. Of the vector m_0 = m - sigma * z, which
the adjoint sweep has before z = U^T (beta * q), q is E^-T U m_0.

Letters: i rows, d channels, k reflections.
"""

import torch
from torch import Tensor

from bedouin.kernels.direct.buffered.rows import RowMaker, Rows


def map_width(k: int) -> int:
    """k', the number of values that `fill_maps` computes for a token."""
    return 2 * k + k * (k + 2)


def fill_maps(
    maker: RowMaker,
    rows: Rows,
    e: Tensor,  # (i, 1, k)
    maps: Tensor,  # (i, k, k'), overwritten
    constant: Tensor,  # (i, 1, k'), overwritten
) -> None:
    """For every row, U m_0 @ maps + constant has beta * q (k,), the cotangents of the raw alpha
    (k,), and a matrix (k, k + 2) whose product with the rows U, v and m is the cotangent of u."""
    k, identity, above = maker.k, maker.identity, maker.above
    beta, scale, column = rows.beta.mT, rows.u_norms, e.mT
    own = column * identity
    # G - 2 e q is the sum of a product with q_i and one with q_j
    with_row = -scale * (rows.beta * e * above + own)
    with_column = -scale * (column * beta * above.mT + own)
    with_U = identity.unsqueeze(-1) * with_row.unsqueeze(1)
    with_U += identity.unsqueeze(1) * with_column.unsqueeze(1)
    with_v = (identity * (scale * rows.beta)).unsqueeze(-1)
    with_u = torch.cat([with_U, with_v, torch.zeros_like(with_v)], -1).flatten(2)
    per_q = torch.cat([identity * beta, identity * (e * (1 - rows.gate.mT)), with_u], -1)
    torch.bmm(rows.inverse, per_q, out=maps)
    constant.zero_()
    constant[:, 0, 2 * k :].unflatten(-1, (k, k + 2))[..., -1:] = scale * column

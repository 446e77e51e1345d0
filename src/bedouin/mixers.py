"""Channel mixers Q_t: how the raw values of a token become a d x d matrix, never formed.

Letters: d channels, k reflections or rank, r raw values.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bedouin.checks import positive_int
from bedouin.kernels.householder import apply_complement, mix_channels, unit, wy_factor
from bedouin.solvers.base import check_number


class WYForm(NamedTuple):
    """I - Q = diag(e) + U^T M U: what the exact local solve needs."""

    e: Tensor  # (..., 1) or (..., d)
    U: Tensor  # (..., k, d)
    M: Tensor  # (..., k, k)


class ChannelMixer(nn.Module, ABC):
    """A family of matrices Q. The layer owns the projection that makes the raw values."""

    @abstractmethod
    def raw_size(self, d_inner: int) -> int:
        """How many raw values a token needs for d_inner channels."""

    @abstractmethod
    def complement(self, raw: Tensor, v: Tensor) -> Tensor:
        """(I - Q) v (..., d) for the Q that raw (..., raw_size) stands for."""

    def mix(self, raw: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """x~ = Q (x - y) + y (..., d).

        As x + (I - Q)(y - x), which loses the digits of a Q far smaller than 1: a mixer with such Q
        computes Q (x - y) + y instead.
        """
        return x + self.complement(raw, y - x)


class StructuredMixer(ChannelMixer):
    """A mixer with I - Q = diag(e) + U^T M U: `Direct` and `Jacobi` need one."""

    @abstractmethod
    def forward(self, raw: Tensor) -> WYForm:
        """Bind raw values (..., raw_size) to (e, U, M)."""

    def complement(self, raw: Tensor, v: Tensor) -> Tensor:
        return apply_complement(v, *self(raw))

    def mix(self, raw: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return mix_channels(x, y, *self(raw))


class HouseholderProduct(StructuredMixer):
    """Q = H_1 H_2 ... H_k with H_i = I - beta_i u_i u_i^T, u_i unit.

    beta_i = beta_max sigmoid(alpha_i). beta_max = 1 gives every H_i eigenvalues in [0, 1]; 2 allows
    reflections, and singular local systems (see `SolveStats.conditioning`). Raw values of a
    token: k d for u, then k for alpha.
    Source: arXiv 2503.10799, section 4; arXiv 2502.10297. Raises ValueError for num_householder < 1
    or beta_max outside (0, 2].
    """

    def __init__(self, num_householder: int = 2, beta_max: float = 1.0) -> None:
        super().__init__()
        check_number("beta_max", beta_max, 0, 2, open_low=True)
        self.num_householder = positive_int("num_householder", num_householder)
        self.beta_max = float(beta_max)

    def raw_size(self, d_inner: int) -> int:
        return self.num_householder * (d_inner + 1)

    def forward(self, raw: Tensor) -> WYForm:
        k = self.num_householder
        u, alpha = raw[..., :-k], raw[..., -k:]
        U = unit(u.unflatten(-1, (k, u.shape[-1] // k)))
        T = wy_factor(U, self.beta_max * torch.sigmoid(alpha))
        return WYForm(torch.zeros_like(raw[..., :1]), U, T)

    def extra_repr(self) -> str:
        return f"num_householder={self.num_householder}, beta_max={self.beta_max}"


class LowRank(StructuredMixer):
    """Q = sum_i alpha_i u_i u_i^T with u_i unit and alpha_i = sigmoid(raw): no identity part.

    I - Q has full rank (e = 1, M = -diag(alpha)); the local systems can be singular where the input
    gain reaches 1, in more than `rank` channels above all. Raw values of a token: k d for u, then k
    for alpha. Raises ValueError for rank < 1.
    """

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.rank = positive_int("rank", rank)

    def raw_size(self, d_inner: int) -> int:
        return self.rank * (d_inner + 1)

    def forward(self, raw: Tensor) -> WYForm:
        k = self.rank
        u, alpha = raw[..., :-k], raw[..., -k:]
        U = unit(u.unflatten(-1, (k, u.shape[-1] // k)))
        return WYForm(torch.ones_like(raw[..., :1]), U, torch.diag_embed(-torch.sigmoid(alpha)))

    def extra_repr(self) -> str:
        return f"rank={self.rank}"

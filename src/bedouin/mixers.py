"""Channel mixers: the matrices Q_t (d, d) as functions of the raw values of a token.

Q is never formed; a mixer multiplies by I - Q. Letters: d channels, k reflections or rank, r raw
values; leading axes (...) are batch and time.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bedouin.checks import known_options, positive_int
from bedouin.kernels.householder import apply_complement, mix_channels, unit, wy_factor
from bedouin.solvers.base import check_number


class WYForm(NamedTuple):
    """I - Q = diag(e) + U^T M U, the form that the exact solution of the local equation needs."""

    e: Tensor  # (..., 1) or (..., d)
    U: Tensor  # (..., k, d), or for k = 0 with any number of columns, since raw values have no d
    M: Tensor  # (..., k, k)

    def of_channels(self, d: int) -> "WYForm":
        """The form for vectors of d channels: U has d columns also for k = 0."""
        e, U, M = self
        return self if U.shape[-2] else WYForm(e, U.new_empty(*U.shape[:-1], d), M)


class ChannelMixer(nn.Module, ABC):
    """A family of matrices Q, parameterized by raw values that the layer projects for each token.

    In a layer of several heads each head has a Q of its own channels: d is then the number of
    channels of a head, heads are part of the batch, and the mixer's parameters are shared by them.
    To add a mixer, derive from this class and write `raw_size` and `complement`, or derive from
    `StructuredMixer`.
    """

    @abstractmethod
    def raw_size(self, d_inner: int) -> int:
        """The number r of raw values that a token needs for d_inner channels."""

    @property
    def bias_size(self) -> int:
        """How many raw values of a token, the last ones, have a bias in a layer that projects them
        from its input."""
        return 0

    @abstractmethod
    def complement(
        self,
        raw: Tensor,  # (..., r)
        v: Tensor,  # (..., d)
    ) -> Tensor:  # (..., d)
        """(I - Q) v for the Q that `raw` parameterizes."""

    def mix(
        self,
        raw: Tensor,  # (..., r)
        x: Tensor,  # (..., d)
        y: Tensor,  # (..., d)
    ) -> Tensor:  # (..., d)
        """x~ = Q (x - y) + y, computed as x + (I - Q)(y - x).

        That form loses digits if Q is much smaller than the identity; a mixer with such Q overrides
        this method and computes Q (x - y) + y.
        """
        return x + self.complement(raw, y - x)


class StructuredMixer(ChannelMixer):
    """A mixer with I - Q = diag(e) + U^T M U, which `Direct` and `Jacobi` need."""

    @abstractmethod
    def forward(
        self,
        raw: Tensor,  # (..., r)
    ) -> WYForm:
        """(e, U, M) of the Q that `raw` parameterizes."""

    def complement(
        self,
        raw: Tensor,  # (..., r)
        v: Tensor,  # (..., d)
    ) -> Tensor:  # (..., d)
        return apply_complement(v, *WYForm(*self(raw)).of_channels(v.shape[-1]))

    def mix(
        self,
        raw: Tensor,  # (..., r)
        x: Tensor,  # (..., d)
        y: Tensor,  # (..., d)
    ) -> Tensor:  # (..., d)
        return mix_channels(x, y, *WYForm(*self(raw)).of_channels(x.shape[-1]))


class HouseholderProduct(StructuredMixer):
    """Q = H_1 H_2 ... H_k with H_i = I - beta_i u_i u_i^T, u_i unit.

    beta_i = beta_max sigmoid(alpha_i). With beta_max = 1 every H_i has eigenvalues in [0, 1];
    beta_max = 2 allows reflections, and local systems that are singular (see
    `SolveStats.conditioning`). Raw values of a token: k d for u, then k for alpha. The product of
    no reflections is `NoMixing`.
    Source: arXiv 2503.10799, section 4; arXiv 2502.10297.
    Raises TypeError for a num_householder that is not an int, ValueError for num_householder < 1 or
    beta_max outside (0, 2].
    """

    @known_options
    def __init__(self, num_householder: int = 2, beta_max: float = 1.0) -> None:
        super().__init__()
        check_number("beta_max", beta_max, 0, 2, open_low=True)
        self.num_householder = positive_int("num_householder", num_householder)
        self.beta_max = float(beta_max)

    def raw_size(self, d_inner: int) -> int:
        return self.num_householder * (d_inner + 1)

    @property
    def bias_size(self) -> int:
        return self.num_householder

    def forward(self, raw: Tensor) -> WYForm:
        k = self.num_householder
        u, alpha = raw[..., :-k], raw[..., -k:]
        U = unit(u.unflatten(-1, (k, u.shape[-1] // k)))  # (..., k, d)
        T = wy_factor(U, self.beta_max * torch.sigmoid(alpha))
        return WYForm(torch.zeros_like(raw[..., :1]), U, T)

    def extra_repr(self) -> str:
        return f"num_householder={self.num_householder}, beta_max={self.beta_max}"


class NoMixing(HouseholderProduct):
    """Q = I, the product of k = 0 reflections, which has no raw values.

    The fixed point is y_t = h_t C_t with h_t = lambda_t h_{t-1} + (s_t x_t) B_t^T, so that tokens
    influence later ones through the diagonal memory and the feedback alone.
    """

    def __init__(self) -> None:
        # not the constructor of the product, which requires a reflection
        StructuredMixer.__init__(self)
        self.num_householder, self.beta_max = 0, 1.0

    def forward(self, raw: Tensor) -> WYForm:
        axes = raw.shape[:-1]
        empty = raw.new_empty(*axes, 0, 0)
        return WYForm(raw.new_zeros(*axes, 1), empty, empty)

    def extra_repr(self) -> str:
        return ""


def householder_product(num_householder: int, beta_max: float) -> HouseholderProduct:
    """The product of so many reflections, `NoMixing` for none."""
    return HouseholderProduct(num_householder, beta_max) if num_householder else NoMixing()


class LowRank(StructuredMixer):
    """Q = sum_i alpha_i u_i u_i^T with u_i unit and alpha_i = sigmoid(raw): no identity part.

    I - Q has full rank (e = 1, M = -diag(alpha)). The local systems can be singular if the input
    gain reaches 1, in particular if it does so in more than `rank` channels. Raw values of a token:
    k d for u, then k for alpha.
    Raises TypeError for a rank that is not an int, ValueError for rank < 1.
    """

    @known_options
    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.rank = positive_int("rank", rank)

    def raw_size(self, d_inner: int) -> int:
        return self.rank * (d_inner + 1)

    @property
    def bias_size(self) -> int:
        return self.rank

    def forward(self, raw: Tensor) -> WYForm:
        k = self.rank
        u, alpha = raw[..., :-k], raw[..., -k:]
        U = unit(u.unflatten(-1, (k, u.shape[-1] // k)))
        return WYForm(torch.ones_like(raw[..., :1]), U, torch.diag_embed(-torch.sigmoid(alpha)))

    def extra_repr(self) -> str:
        return f"rank={self.rank}"

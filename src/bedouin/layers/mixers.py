"""Channel mixers: the matrices Q_t (d, d) as functions of the raw values of a token.

Q is never formed; a mixer multiplies by I - Q. Letters: d channels, k reflections or rank, r raw
values; leading axes (...) are batch and time.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from bedouin.checks import known_options, positive_int
from bedouin.kernels.checks import check_number
from bedouin.kernels.householder import apply_complement, mix_channels, unit, wy_factor
from bedouin.wrapped import is_untouched

MAX_DENSE = 128  # most channels of a head whose local system is solved as a dense one


class WYForm(NamedTuple):
    """I - Q = diag(e) + U^T M U, with e (..., d), (..., 1), or (..., 0) for e = 0, U (..., k, d)
    and M (..., k, k). For k = 0 U may have any number of columns, since raw values have no d."""

    e: Tensor
    U: Tensor
    M: Tensor

    def of_channels(self, d: int) -> "WYForm":
        """The form for vectors of d channels: U has d columns also for k = 0."""
        e, U, M = self
        return self if U.shape[-2] else WYForm(e, U.new_empty(*U.shape[:-1], d), M)


class ChannelMixer(nn.Module, ABC):
    """A family of matrices Q, parameterized by raw values that the layer projects for each token. d
    are the channels of a head; heads are part of the batch and share the mixer's parameters. To add
    a mixer, derive from this class and write `raw_size` and `complement`, or derive from
    `StructuredMixer`; a `BedouinConfig` saves it if its options are attributes of their names. A
    mixer that also has a method `dense` is structured for heads of at most 128 channels, whose
    local systems are then solved as dense ones: a token costs O(d^3) operations and O(d^2) memory,
    in plain PyTorch, instead of O(d k^2) and O(d k)."""

    saved_options: ClassVar[tuple[str, ...]] = ()
    """Attributes that a layer saves and compares with its own options."""

    @abstractmethod
    def raw_size(self, d_inner: int) -> int:
        """The number r of raw values that a token needs for d_inner channels."""

    @abstractmethod
    def complement(self, raw: Tensor, v: Tensor) -> Tensor:  # (..., r), (..., d) -> (..., d)
        """(I - Q) v for the Q that `raw` (..., r) parameterizes, of the shape of v (..., d)."""

    def mix(self, raw: Tensor, x: Tensor, y: Tensor) -> Tensor:  # (..., r), (..., d) twice
        """x~ = Q (x - y) + y, as x + (I - Q)(y - x), which loses digits where Q is small."""
        return x + self.complement(raw, y - x)

    def dense(self, raw: Tensor) -> Tensor:  # (..., r) -> (..., d, d)
        """Q as a matrix (..., d, d)."""
        raise NotImplementedError(f"{type(self).__name__} declares no dense(raw)")

    def is_structured(self, d_inner: int) -> bool:
        """Whether `forward` returns (e, U, M), for `Direct`, `Jacobi` and the exact adjoint."""
        return type(self).dense is not ChannelMixer.dense and d_inner <= MAX_DENSE

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.saved_options)

    def forward(self, raw: Tensor) -> WYForm:  # raw: (..., r)
        """(e, U, M) of the Q that `raw` parameterizes: e = 0, U = I and M = I - Q."""
        Q = self.dense(raw)
        identity = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device).expand_as(Q)
        return WYForm(raw[..., :0], identity, identity - Q)


class StructuredMixer(ChannelMixer):
    """A mixer with I - Q = diag(e) + U^T M U, which `Direct` and `Jacobi` need."""

    def is_structured(self, d_inner: int) -> bool:
        return True

    @abstractmethod
    def forward(self, raw: Tensor) -> WYForm:  # raw: (..., r)
        """(e, U, M) of the Q that `raw` parameterizes."""

    def complement(self, raw: Tensor, v: Tensor) -> Tensor:
        return apply_complement(v, *WYForm(*self(raw)).of_channels(v.shape[-1]))

    def mix(self, raw: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return mix_channels(x, y, *WYForm(*self(raw)).of_channels(x.shape[-1]))


def _unit_rows(raw: Tensor, k: int) -> tuple[Tensor, Tensor]:  # (..., k d + k)
    """U (..., k, d), whose rows have unit length, and alpha (..., k)."""
    u, alpha = raw[..., :-k], raw[..., -k:]
    return unit(u.unflatten(-1, (k, u.shape[-1] // k))), alpha


class HouseholderProduct(StructuredMixer):
    """Q = H_1 H_2 ... H_k with H_i = I - beta_i u_i u_i^T, u_i unit.

    beta_i = beta_max sigmoid(alpha_i). With beta_max = 1 every H_i has eigenvalues in [0, 1];
    beta_max = 2 allows reflections, and local systems that are singular (see
    `SolveStats.conditioning`). Raw values of a token: k d for u, then k for alpha.
    Layers with a subclass run in the kernels, too, unless it overrides `__call__`, `forward`,
    `complement`, `mix` or `raw_size`, which a warning tells on a GPU.
    Source: arXiv 2503.10799, section 4; arXiv 2502.10297.
    Raises TypeError for a num_householder that is not an int, ValueError for num_householder < 1 or
    beta_max outside (0, 2].
    """

    saved_options = ("num_householder", "beta_max")

    @known_options
    def __init__(self, num_householder: int = 2, beta_max: float = 1.0) -> None:
        super().__init__()
        check_number("beta_max", beta_max, 0, 2, open_low=True)
        self.num_householder = positive_int("num_householder", num_householder)
        self.beta_max = float(beta_max)

    def raw_size(self, d_inner: int) -> int:
        return self.num_householder * (d_inner + 1)

    def forward(self, raw: Tensor) -> WYForm:
        U, alpha = _unit_rows(raw, self.num_householder)
        T = wy_factor(U, self.beta_max * torch.sigmoid(alpha))
        return WYForm(torch.zeros_like(raw[..., :1]), U, T)


class NoMixing(HouseholderProduct):
    """Q = I, the product of no reflections, without raw values: y_t = h_t C_t with h_t = lambda_t
    h_{t-1} + (s_t x_t) B_t^T."""

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


def kernel_gap(mixer: ChannelMixer) -> str | None:
    """What no kernel computes of a mixer, as a part of a message; None where kernels compute it:
    products of reflections from their two options, also in subclasses that keep them."""
    kind = type(mixer)
    if not is_untouched(mixer):
        return f"the mixer {kind.__name__} with hooks"
    if not isinstance(mixer, HouseholderProduct):
        return f"the mixer {kind.__name__} (only HouseholderProduct)"
    base = NoMixing if isinstance(mixer, NoMixing) else HouseholderProduct
    computing = ("__call__", "forward", "complement", "mix", "raw_size") if kind is not base else ()
    own = [name for name in computing if getattr(kind, name) is not getattr(base, name)]
    if isinstance(mixer.beta_max, Tensor):
        own.append("a tensor beta_max")
    if own:
        return f"{', '.join(own)} of the mixer {kind.__name__} (only those of HouseholderProduct)"
    return None


class LowRank(StructuredMixer):
    """Q = sum_i alpha_i u_i u_i^T with u_i unit and alpha_i = sigmoid(raw): no identity part. I - Q
    has full rank (e = 1, M = -diag(alpha)). The local systems can be singular if the input gain
    reaches 1, in particular in more than `rank` channels. Raw values of a token: k d for u, then k
    for alpha. Raises TypeError for a rank that is not an int, ValueError for rank < 1."""

    saved_options = ("rank",)

    @known_options
    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.rank = positive_int("rank", rank)

    def raw_size(self, d_inner: int) -> int:
        return self.rank * (d_inner + 1)

    def forward(self, raw: Tensor) -> WYForm:
        U, alpha = _unit_rows(raw, self.rank)
        return WYForm(torch.ones_like(raw[..., :1]), U, torch.diag_embed(-torch.sigmoid(alpha)))


def _small_matrices(raw: Tensor, n: int, p: int) -> Tensor:  # (..., n p p) -> (..., n, p, p)
    """n matrices scaled to a Frobenius norm below 1, which bounds the spectral norm."""
    matrices: Tensor = unit(raw.unflatten(-1, (n, p * p)), 1 / (p * p)).unflatten(-1, (p, p))
    return matrices


class FactoredMixer(ChannelMixer):
    """A Q made of small matrices, where vectors of d = i j channels are matrices (i, j). Q mixes
    each column by an I - R (i, i), then each row by an I - S (j, j). The R and S have norms below
    1, so that Q is invertible; raw values of 0 give Q = I. Raw values of a token: all R, then all
    S. factors: i and j; None: the two factors of d that are nearest to each other, i <= j. Source:
    arXiv 2503.10799, section 4; the bound of R and S is this library's choice. Raises TypeError for
    factors that are not a pair of ints, ValueError for factors below 1, and in `raw_size` for a d
    that is not their product."""

    saved_options = ("factors",)

    @known_options
    def __init__(self, factors: tuple[int, int] | None = None) -> None:
        super().__init__()
        if factors is not None:
            if not isinstance(factors, tuple | list) or len(factors) != 2:
                raise TypeError(f"factors must be None or a pair of ints, got {factors!r}")
            factors = positive_int("factors", factors[0]), positive_int("factors", factors[1])
        self.factors = factors

    def split(self, d: int) -> tuple[int, int]:
        """i and j, which are then fixed."""
        if self.factors is None:
            i = next(i for i in range(math.isqrt(d), 0, -1) if d % i == 0)
            self.factors = i, d // i
        i, j = self.factors
        if i * j != d:
            raise ValueError(
                f"factors must have the product {d}, the channels of a head, got {self.factors}: "
                "make a mixer of its own for each size of a head"
            )
        return i, j

    @abstractmethod
    def counts(self, i: int, j: int) -> tuple[int, int]:
        """How many R there are, 1 or j, and how many S, 1 or i."""

    def raw_size(self, d_inner: int) -> int:
        i, j = self.split(d_inner)
        num_R, num_S = self.counts(i, j)
        return num_R * i * i + num_S * j * j

    def matrices(self, raw: Tensor, d: int) -> tuple[Tensor, Tensor]:  # raw: (..., r)
        """R (..., 1 or j, i, i) and S (..., 1 or i, j, j)."""
        i, j = self.split(d)
        num_R, num_S = self.counts(i, j)
        R, S = raw.split([num_R * i * i, num_S * j * j], -1)
        return _small_matrices(R, num_R, i), _small_matrices(S, num_S, j)

    def complement(self, raw: Tensor, v: Tensor) -> Tensor:
        R, S = self.matrices(raw, v.shape[-1])
        V = v.unflatten(-1, self.split(v.shape[-1]))
        columns = torch.einsum("...jab,...bj->...aj", R, V)
        rows = torch.einsum("...iab,...ib->...ia", S, V - columns)
        return (columns + rows).flatten(-2)

    def dense(self, raw: Tensor) -> Tensor:
        assert self.factors is not None, "a layer calls raw_size first"
        R, S = self.matrices(raw, math.prod(self.factors))
        columns, rows = (torch.eye(v.shape[-1], dtype=v.dtype, device=v.device) - v for v in (R, S))
        # Q[a j + n, b j + m] = (I - R_m)[a, b] (I - S_a)[n, m], as (..., a, n, b, m)
        Q: Tensor = columns.movedim(-3, -1).unsqueeze(-3) * rows.unsqueeze(-2)
        return Q.flatten(-4, -3).flatten(-2)


class Kronecker(FactoredMixer):
    """Q = (I - R) x (I - S), a Kronecker product: all columns share one R, and all rows one S.
    Arguments and errors are those of `FactoredMixer`."""

    def counts(self, i: int, j: int) -> tuple[int, int]:
        return 1, 1


class Monarch(FactoredMixer):
    """A product of two block-diagonal factors: each column has an R of its own, each row an S.
    Arguments and errors are those of `FactoredMixer`. Source: arXiv 2204.00595."""

    def counts(self, i: int, j: int) -> tuple[int, int]:
        return j, i

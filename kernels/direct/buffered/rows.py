"""What the raw values of tokens determine, in memory that is allocated once.

With S = U diag(sigma) U^T, the strict upper triangle R of U U^T and U (y - x) = w, the fixed point
of a token obeys y = p + sigma * x~, x~ = x + U^T e, e = T w with T = (I + diag(beta) R)^-1
diag(beta) (kernels/householder.py). Without y and T,

    E e = diag(beta) U (p + sigma * x - x),    E = I + diag(beta) (R - S),

so that the k numbers e are all that couples the channels. E has the determinant of the matrix
I - S T of kernels/direct/local.py, whose pivots the statistics report. For k > 1 its inverse is
computed in float64, so that in float32 e is as accurate as after an elimination with pivots.

With a = lambda * h_{t-1}, p is a C, and with erase a C - beta^e (B C) a B, where beta^e a B is
called erased. With feedback of x, x is x^ here and in the modules beside this one.

Letters: i rows, one for each token of each sample, token by token; b batch, d channels, n state per
channel, k reflections, r raw values. Vectors have an axis of size 1, so that no call needs a view.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.backend import is_batched, is_transformed
from bedouin.kernels.direct.layout import is_covered
from bedouin.kernels.householder import UNIT_EPS
from bedouin.kernels.norms import overflow_to_nan_
from bedouin.kernels.operands import Operands, Parameterization, RawLayout

LOG2E, LN2 = 1 / math.log(2), math.log(2)
_softplus: Any = torch._C._nn.softplus
"""torch.nn.functional.softplus, whose annotations lack the argument `out`."""


def takes_buffers(
    operands: Operands,
    parameterization: Parameterization,
    bind_parameters: tuple[Tensor, ...],  # any shapes
    *cotangents: Tensor | None,  # any shapes
) -> bool:
    """Whether the functions of this package can compute a sweep: for raw values that a layout
    describes, with tensors that have values and that no transform has batched, and at least one
    token."""
    x, raw = operands.x, operands.raw
    if x.device.type == "meta" or not x.numel() or is_transformed():
        return False
    if is_batched(*cotangents) or torch.compiler.is_compiling():
        return False
    return is_covered(parameterization.layout, raw, operands.A, bind_parameters)


def count_fed(operands: Operands, options: Parameterization) -> int:
    """f, raw values with feedback: at most d, if those of B, C, u, alpha and beta^e depend on x
    alone."""
    if operands.W_y is None:
        return 0
    return operands.W_y.shape[-2] - (operands.A.shape[-2] if options.feeds_x else 0)


class RowMemory(NamedTuple):
    """Tensors of i rows that share no memory, from which `Rows` are views."""

    raw: Tensor  # (i, 1, r), or with feedback of x (i, 1, r + d): then x^ is the end of it
    delta: Tensor  # (i, 1, d)
    s: Tensor  # (i, 1, d), empty where the input scale is Delta
    norms: Tensor  # (i, 2 + k, 1)
    units: Tensor  # (i, 2, n)
    BC: Tensor  # (i, 1, 1) or (i, 1, n)
    sigma: Tensor  # (i, 1, d)
    U: Tensor  # (i, k, d)
    dots: Tensor  # (i, k, k)
    gate: Tensor  # (i, k, 1)
    beta: Tensor  # (i, k, 1), empty where beta_max is 1
    inverse: Tensor  # (i, k, k)
    erase: Tensor  # (i, 1, 1), as the next empty where nothing is erased
    erased: Tensor  # (i, 1, d)


class Rows(NamedTuple):
    """The quantities of i rows, views of one another where this is noted."""

    raw: Tensor  # (i, 1, r)
    raw_delta: Tensor  # (i, 1, d), a view of raw
    raw_memory: Tensor | None  # (i, 2, n), a view of raw: B and C; None if these are 1
    raw_u: Tensor  # (i, k, d), a view of raw
    raw_alpha: Tensor  # (i, k, 1), a view of raw
    raw_erase: Tensor  # (i, 1, 1 or 0), a view of raw
    delta: Tensor  # (i, 1, d)
    s: Tensor  # (i, 1, d), the input scale; for "one_minus_decay" its largest value over n
    inverse_norms: Tensor  # (i, 2 + k, 1), of B, C and u
    memory_norms: Tensor  # (i, 2, 1), a view of inverse_norms
    u_norms: Tensor  # (i, k, 1), a view of inverse_norms
    units: Tensor  # (i, 2, n), B and C
    B: Tensor  # (i, 1, n), a view of units
    C: Tensor  # (i, 1, n), a view of units
    B_column: Tensor  # (i, n, 1), a view of units
    C_column: Tensor  # (i, n, 1), a view of units
    BC: Tensor  # (i, 1, 1), B C^T, or (i, 1, n), B * C, for "one_minus_decay"
    sigma: Tensor  # (i, 1, d)
    scaled: Tensor  # (i, k, d), sigma * U
    U: Tensor  # (i, k, d)
    U_columns: Tensor  # (i, d, k), a view of U
    S: Tensor  # (i, k, k)
    dots: Tensor  # (i, k, k), U U^T
    gate: Tensor  # (i, k, 1), sigmoid(alpha)
    beta: Tensor  # (i, k, 1)
    upper: Tensor  # (i, k, k), I + diag(beta) R
    E: Tensor  # (i, k, k)
    inverse: Tensor  # (i, k, k), of E
    inverse_columns: Tensor  # (i, k, k), a view of inverse, transposed
    erase: Tensor  # (i, 1, 1), beta^e; (i, 1, 0) where nothing is erased
    erased: Tensor  # (i, 1, d), which the sweep computes; or (i, 1, 0)

    def first(self, count: int) -> "Rows":
        """Views of the first rows."""
        return self if count == len(self.raw) else Rows(*first_rows(self, count))

    def tokens(self, b: int, shared: "Rows | None" = None) -> list["Rows"]:
        """Views of the b rows of each token; of the fields `LASTING` only, if the tokens share the
        memory of the other fields."""
        if shared is None:
            return [Rows(*parts) for parts in zip(*split_tokens(self, b), strict=True)]
        columns = split_tokens((getattr(self, name) for name in LASTING), b)
        rows = zip(*columns, strict=True)
        return [shared._replace(**dict(zip(LASTING, row, strict=True))) for row in rows]


LASTING = ("delta", "s", "sigma", "U", "U_columns", "S", "dots", "gate", "beta")
"""The fields of `Rows` that the statistics of a chunk read, and their views."""


def first_rows(
    values: Iterable[Tensor | None],  # (i, ...)
    count: int,
) -> Iterator[Any]:  # (count, ...)
    """Views of the first rows of each of the values."""
    return (None if v is None else v[:count] for v in values)


def split_tokens(
    values: Iterable[Tensor | None],  # (i, ...)
    b: int,
) -> Iterator[Sequence[Any]]:  # i / b of (b, ...)
    """Views of the b rows of each token, for each of the values."""
    values = list(values)
    c = next(len(v) for v in values if v is not None) // b
    return ([None] * c if v is None else torch.unsafe_split(v, b) for v in values)


def by_token(
    v: Tensor,  # (i, 1, r)
    b: int,
) -> Tensor:  # (b, c, r)
    """The rows of each sample, in the order of the public tensors."""
    return v.view(-1, b, v.shape[-1]).transpose(0, 1)


class RowMaker:
    """Allocates `Rows`, and computes them from their raw values."""

    def __init__(
        self,
        sizes: tuple[int, int],  # d and n
        options: Parameterization,
        like: Tensor,  # any shape
    ) -> None:
        """`like` gives the dtype."""
        (self.d, self.n), self.options = sizes, options
        self.layout: RawLayout = options.known_layout()
        self.coupled = options.input_scale == "one_minus_decay"
        self.erases = self.layout.erase > 0
        self.like, self.k = like, self.layout.num_householder
        # all constants are filled in where they are: a copy to a GPU cannot be captured
        lengths = like.new_full((2 + self.k, 1), self.d)
        lengths[:2].fill_(self.n)
        self.norm_eps = UNIT_EPS * lengths
        self.identity = like.new_ones(self.k).diag()
        self.one = like.new_ones(())  # a number would be converted at every use
        self.above = like.new_ones(self.k, self.k).triu(1)
        # the adjugate of a flattened 2 x 2 matrix is its product with this
        # [[0, 0, 0, 1], [0, -1, 0, 0], [0, 0, -1, 0], [1, 0, 0, 0]]
        self.adjugate = like.new_full((4,), -1, dtype=torch.float64).diag()
        self.adjugate[::3, ::3].add_(1)

    def split(
        self,
        raw: Tensor,  # (i, 1, r)
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """Views of the raw values of Delta (i, 1, d), of B and C (i, 2, n), None if these are 1,
        of u (i, k, d), of alpha (i, k, 1) and of beta^e (i, 1, 1 or 0)."""
        d, n, k = self.d, self.n, self.k
        memory = [2 * n] * self.layout.selective
        delta, *pairs, u, alpha, erase = raw.split([d, *memory, k * d, k, int(self.erases)], -1)
        pair = pairs[0].squeeze(1).unflatten(-1, (2, n)) if pairs else None
        return delta, pair, u.squeeze(1).unflatten(-1, (k, d)), alpha.mT, erase

    def allocate(self, i: int) -> RowMemory:
        """New memory."""
        d, n, k = self.d, self.n, self.k
        new, selective = self.like.new_empty, self.layout.selective
        r = self.layout.size(d, n) + (d if self.options.feeds_x else 0)
        norms = new(i, 2 + k, 1) if selective else self.like.new_ones(i, 2 + k, 1)
        return RowMemory(
            raw=new(i, 1, r),
            delta=new(i, 1, d),
            s=new(0) if self.options.input_scale == "delta" else new(i, 1, d),
            norms=norms,
            units=new(i, 2, n) if selective else self.like.new_ones(i, 2, n),
            BC=new(i, 1, n if self.coupled else 1),
            sigma=new(i, 1, d),
            U=new(i, k, d),
            dots=new(i, k, k),
            gate=new(i, k, 1),
            beta=new(0) if self.layout.beta_max == 1 else new(i, k, 1),
            inverse=new(i, k, k),
            erase=new(i, 1, int(self.erases)),
            erased=new(i, 1, d if self.erases else 0),
        )

    def rows_of(self, memory: RowMemory) -> Rows:
        """Views of the memory, with new memory for what only `fill` and the statistics read."""
        d, k = self.d, self.k
        raw, delta, s, norms, units, BC, sigma, U, dots, gate, beta, inverse, *erasing = memory
        raw = raw[..., : self.layout.size(d, self.n)]
        raw_delta, raw_memory, raw_u, raw_alpha, raw_erase = self.split(raw)
        new, i = self.like.new_empty, len(raw)
        B, C = units[:, :1], units[:, 1:]
        return Rows(
            raw=raw,
            raw_delta=raw_delta,
            raw_memory=raw_memory,
            raw_u=raw_u,
            raw_alpha=raw_alpha,
            raw_erase=raw_erase,
            delta=delta,
            s=s if s.numel() else delta,
            inverse_norms=norms,
            memory_norms=norms[:, :2],
            u_norms=norms[:, 2:],
            units=units,
            B=B,
            C=C,
            B_column=B.mT,
            C_column=C.mT,
            BC=BC,
            sigma=sigma,
            scaled=new(i, k, d),
            U=U,
            U_columns=U.mT,
            S=new(i, k, k),
            dots=dots,
            gate=gate,
            beta=beta if self.layout.beta_max != 1 else gate,
            upper=new(i, k, k),
            E=new(i, k, k),
            inverse=inverse,
            inverse_columns=inverse.mT,
            erase=erasing[0],
            erased=erasing[1],
        )

    def fill(self, rows: Rows) -> None:
        """Everything except what depends on the input scale of "one_minus_decay"."""
        self.fill_directions(rows)
        self.fill_gains(rows)

    def fill_directions(self, rows: Rows) -> None:
        """What does not depend on Delta: B, C, u, beta, their products, and beta^e."""
        if rows.raw_memory is not None:
            torch.linalg.vector_norm(rows.raw_memory, 2, -1, True, out=rows.memory_norms)
        if self.k:
            torch.linalg.vector_norm(rows.raw_u, 2, -1, True, out=rows.u_norms)
        norms = rows.inverse_norms
        overflow_to_nan_(torch.addcmul(self.norm_eps, norms, norms, out=norms)).rsqrt_()
        if rows.raw_memory is not None:
            torch.mul(rows.raw_memory, rows.memory_norms, out=rows.units)
        if self.k:
            torch.mul(rows.raw_u, rows.u_norms, out=rows.U)
            torch.sigmoid(rows.raw_alpha, out=rows.gate)
            if self.layout.beta_max != 1:
                torch.mul(rows.gate, self.layout.beta_max, out=rows.beta)
            torch.bmm(rows.U, rows.U_columns, out=rows.dots)
            torch.mul(rows.dots, self.above, out=rows.upper)
            torch.addcmul(self.identity, rows.upper, rows.beta, out=rows.upper)
        if self.erases:
            torch.sigmoid(rows.raw_erase, out=rows.erase).mul_(self.layout.erase)
        if self.coupled:
            torch.mul(rows.B, rows.C, out=rows.BC)
        else:
            torch.bmm(rows.B, rows.C_column, out=rows.BC)

    def fill_gains(self, rows: Rows) -> None:
        """Delta, and what depends on it; of "one_minus_decay" the rest comes with the decay."""
        self._fill_delta(rows)
        if not self.coupled:
            torch.mul(rows.s, rows.BC, out=rows.sigma)
            self.fill_system(rows)

    def _fill_delta(self, rows: Rows) -> None:
        raw, delta, activation = rows.raw_delta, rows.delta, self.layout.activation
        if activation == "sigmoid":
            torch.sigmoid(raw, out=delta)
        elif activation == "softplus":
            _softplus(raw, out=delta)
        else:
            _softplus(torch.neg(raw, out=delta), out=delta)
        if self.options.input_scale == "bounded_delta":
            torch.div(delta, torch.add(delta, self.one, out=rows.s), out=rows.s)

    def fill_system(self, rows: Rows) -> None:
        """E and its inverse, from sigma."""
        if not self.k:
            return
        torch.mul(rows.U, rows.sigma, out=rows.scaled)
        torch.bmm(rows.scaled, rows.U_columns, out=rows.S)
        E = torch.addcmul(rows.upper, rows.S, rows.beta, value=-1, out=rows.E)
        if self.k == 1:
            torch.reciprocal(E, out=rows.inverse)
        elif self.k == 2 and E.dtype != torch.float64:
            # in float64 Cramer's rule is accurate enough for float32, and has a third of the calls
            wide = E.double()
            adjugate = torch.mm(wide.view(-1, 4), self.adjugate).view(-1, 2, 2)
            determinant = torch.bmm(wide[:, :1], adjugate[:, :, :1])
            rows.inverse.copy_(adjugate.div_(determinant))
        else:
            rows.inverse.copy_(torch.linalg.inv_ex(E.double())[0])

    def decay(
        self,
        rows: Rows,
        A: Tensor,  # (n, d) or (i, n, d), log2(e) A
        power: Tensor,  # (i, n, d), overwritten
        scale: Tensor | None,  # (i, n, d), overwritten, for "one_minus_decay"; else None
    ) -> None:
        """exp(A delta) in `power`; the input scale of "one_minus_decay" in `scale`, and what
        depends on it in `rows`."""
        self.exponentials(rows.delta, A, power, scale)
        if scale is not None:
            torch.amax(scale, -2, keepdim=True, out=rows.s)
            torch.bmm(rows.BC, scale, out=rows.sigma)
            self.fill_system(rows)

    def exponentials(
        self,
        delta: Tensor,  # (i, 1, d)
        A: Tensor,  # (n, d) or (i, n, d), log2(e) A
        power: Tensor,  # (i, n, d), overwritten
        scale: Tensor | None,  # (i, n, d), overwritten, for "one_minus_decay"; else None
    ) -> None:
        """exp(A delta) in `power`; the input scale of "one_minus_decay" in `scale`."""
        torch.mul(delta, A, out=power)
        if scale is not None:
            torch.mul(power, LN2, out=scale).expm1_().neg_()
        # torch computes exp by a library that takes three times as long on some processors
        power.exp2_()
        if scale is not None and self.options.eigenvalues == "full":
            torch.minimum(scale, power, out=scale).mul_(2)

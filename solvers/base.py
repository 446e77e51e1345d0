"""What every solver shares: the abstract Solver, the protocols of maps, and checks of options.

Letters: b batch, t tokens of a sample, c the values of a token. Convergence is judged token by
token. With `time_dim=1`, for a map that is causal in time, the axis t is time; otherwise a sample
is a single token and t = 1.
"""

import difflib
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch
from torch import Tensor

from bedouin.kernels.iteration import IterationRule, Progress
from bedouin.kernels.outside import outside_of_graphs
from bedouin.solvers.solution import BackwardStats, Solution
from bedouin.solvers.watch import Watch

Map = Callable[[Tensor], Tensor]
TimeDim = Literal[1] | None


class SweepResult(Protocol):
    """Result of a direct sweep: y (b, t, c), the norms defect, scale and magnitude (b, t), and the
    smallest pivot (b,). It may also have the attributes residual and converged (b,) of
    SolveStats."""

    @property
    def y(self) -> Tensor: ...
    @property
    def defect(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor: ...
    @property
    def magnitude(self) -> Tensor: ...
    @property
    def pivot(self) -> Tensor: ...


@runtime_checkable
class BlockMap(Protocol):
    """A map whose local equation can be solved token by token, as `Jacobi` requires."""

    def __call__(
        self,
        y: Tensor,  # (b, t, c)
    ) -> Tensor: ...  # (b, t, c)

    def block_solve(
        self,
        y: Tensor,  # (b, t, c)
    ) -> tuple[Tensor, Tensor]:
        """G(y) (b, t, c) and the smallest pivot (b,). G solves the local equation of each token for
        the values of the other tokens in y."""


class TriangularMap(Protocol):
    """A map that is block lower-triangular in time, as `Direct` requires."""

    def __call__(
        self,
        y: Tensor,  # (b, t, c)
    ) -> Tensor: ...  # (b, t, c)

    def sweep(self, unroll: bool, cell: BackwardStats) -> SweepResult:
        """Solve token after token. The result carries the exact implicit gradient, whose backward
        pass reports into `cell`; with `unroll`, that of back-propagation through the loop."""


def is_triangular(f: object) -> TypeGuard[TriangularMap]:
    """Whether f is a `TriangularMap`, for which isinstance takes several times as long."""
    return callable(getattr(f, "sweep", None))


class Steps(Protocol):
    """A running iteration: its state, and how it is advanced and judged."""

    def advance(self) -> None:
        """Evaluate the map at y, freeze converged tokens, update the others, and count the step."""

    def certify(self) -> None:
        """Evaluate the map at y and judge convergence, without an update of y or of the count."""

    def finished(self) -> bool:
        """Whether every sample has converged or failed; synchronizes with the device."""

    @property
    def progress(self) -> Progress: ...


@runtime_checkable
class FusedMap(Protocol):
    """A map that runs whole steps of some solvers itself: it evaluates, judges, freezes and updates
    y, usually in one kernel."""

    def fuse(self, y: Tensor, rule: IterationRule) -> Steps | None:
        """Steps from y (b, t, c), or None if the plain loop must be used."""


@runtime_checkable
class GraphMap(Protocol):
    """A map whose solves can be single operations in a graph of torch.compile."""

    def solve_in_graph(
        self,
        solver: "Solver",
        y0: Tensor,  # (b, t, c)
        max_steps: int,
    ) -> Solution | None:
        """The solve from y0 without gradient; None if the solver or the map do not allow it."""

    def attach_in_graph(
        self,
        solver: "Solver",
        y_star: Tensor,  # (b, t, c)
        max_steps: int,
    ) -> Tensor | None:  # (b, t, c)
        """y_star with the implicit gradient, whose adjoint equation the solver solves; None as
        above."""


class PaddedMap(Protocol):
    """A map of sequences of several lengths, each followed by padding, where its values are 0."""

    @property
    def real(self) -> Tensor | None:
        """(b, t) bool, False in the padding, which counts as converged; None: no padding."""


def counted_tokens(f: object) -> Tensor | None:
    """`real` (b, t) of a `PaddedMap`; None for other maps."""
    real: Tensor | None = getattr(f, "real", None)
    return real


class ExactAdjointMap(Protocol):
    """A map that offers the exact reverse sweep."""

    def attach(
        self,
        y_star: Tensor,  # (b, t, c)
        cell: BackwardStats,
    ) -> Tensor:  # (b, t, c)
        """y_star with the exact implicit gradient; the reverse sweep reports into `cell`."""


def is_exact_adjoint(f: object) -> TypeGuard[ExactAdjointMap]:
    """Whether f is an `ExactAdjointMap`; see `is_triangular`."""
    return callable(getattr(f, "attach", None))


@runtime_checkable
class TransposedBlockMap(Protocol):
    """A map whose adjoint equation can be solved token by token, by Jacobi backward in time."""

    def block_transpose(
        self,
        y_star: Tensor,  # (b, t, c)
    ) -> tuple[Callable[[Tensor], Tensor], ...]:
        """Two functions on (b, t, c): w -> L^T w and r -> (I - L^T)^-1 r, where L is the block
        diagonal of the Jacobian at y_star."""


SolverT = TypeVar("SolverT", bound=type)


def strict_options(cls: SolverT) -> SolverT:
    """Class decorator: an unknown option raises a TypeError that lists the valid names."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    valid = [f.name for f in fields(cls) if f.init]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in valid:
                raise TypeError(unknown_option(cls.__name__, name, valid))
        if len(args) > len(valid):
            raise TypeError(f"{cls.__name__} takes {len(valid)} options {valid}, got {len(args)}")
        init(self, *args, **options)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def unknown_option(owner: str, name: str, valid: list[str]) -> str:
    """The error message for an option that `owner` does not have."""
    near = difflib.get_close_matches(name, valid, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else "."
    options = ", ".join(valid) if valid else "no options at all"
    return f"{owner} has no option {name!r}{guess} Valid: {options}"


def check_number(name: str, value: float, low: float, high: float, *, open_low: bool) -> None:
    """Raise ValueError unless low <= value <= high, or low < value <= high with `open_low`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must lie in {bracket}{low}, {high}], got {value!r}")


class Solver(ABC):
    """A method that finds y with f(y) = y. Solvers are frozen dataclasses that hold options
    only."""

    can_unroll = True
    """Whether back-propagation through the solve is possible."""

    is_exact = False
    """Whether the solver takes exactly one step by definition, so that `max_steps` has no
    effect."""

    @abstractmethod
    def solve(
        self,
        f: Map,
        y0: Tensor,  # (b, ...)
        *,
        max_steps: int,
        time_dim: TimeDim,
        unroll: bool,
        watch: Watch | None = None,
    ) -> Solution:
        """Solve from y0. With `unroll` the value carries the gradient of the loop; `watch` is
        called at each evaluation of the map."""


def solve_outside_of_graphs(reason: str) -> Callable[..., Solution]:
    """A function (solver, f, y0, max_steps, time_dim, unroll, watch) -> Solution that calls
    `solver.solve` where torch.compile breaks the graph; `reason` as in `outside_of_graphs`."""

    @outside_of_graphs(reason)
    def solve_outside(
        solver: Solver,
        f: Map,
        y0: Tensor,  # (b, ...)
        max_steps: int,
        time_dim: TimeDim,
        unroll: bool,
        watch: Watch | None,
    ) -> Solution:
        options: dict[str, Any] = {"time_dim": time_dim, "unroll": unroll, "watch": watch}
        return solver.solve(f, y0, max_steps=max_steps, **options)

    return solve_outside


class MapWrapper:
    """A map around another map. Error messages name the inner map, which the user passed."""

    def __init__(self, f: Map) -> None:
        self.f = f


def map_name(f: Map) -> str:
    """The name of the type of the map that the user passed, inside of any wrappers."""
    while isinstance(f, MapWrapper):
        f = f.f
    return type(f).__name__


class TokenMap(MapWrapper):
    """`f`, which takes tensors of `shape`, as a map of tensors of the shape `tokens`, (b, t, c)."""

    def __init__(self, f: Map, shape: torch.Size, tokens: torch.Size) -> None:
        super().__init__(f)
        self.shape, self.tokens = shape, tokens

    def __call__(
        self,
        y: Tensor,  # (b, t, c)
    ) -> Tensor:  # (b, t, c)
        return self.f(y.reshape(self.shape)).reshape(self.tokens)


def as_tokens(y: Tensor, time_dim: TimeDim) -> Tensor:
    """y (b, ...) as (b, t, c): axis 1 is time with `time_dim=1`, otherwise a sample is one
    token."""
    if time_dim == 1:
        return y.reshape(y.shape[0], y.shape[1], math.prod(y.shape[2:]))
    return y.reshape(y.shape[0], 1, math.prod(y.shape[1:]))

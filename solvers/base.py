"""What every solver shares: the abstract Solver, the protocols of maps, and checks of options.

Letters: b batch, t tokens of a sample, c the values of a token. Convergence is judged token by
token. With `time_dim=1`, for a map that is causal in time, the axis t is time; otherwise a sample
is a single token and t = 1.
"""

import difflib
import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, cast

from torch import Tensor

from bedouin.kernels.iteration import Progress
from bedouin.solvers.convergence import ATOL
from bedouin.solvers.solution import Measured

Map = Callable[[Tensor], Tensor]
"""Of any tensor. A map may have more, which `offers` finds, than that it can be called:

real: (b, t) bool, False in the padding of sequences of several lengths, where its values are 0 and
    count as converged; None where there is no padding.
block_solve(y): for `Jacobi`. G(y) (b, t, c) and the smallest pivot (b,). G solves the local
    equation of each token for the values of the other tokens in y.
block_transpose(y_star): for Jacobi backward in time. Two functions on (b, t, c): w -> L^T w and
    r -> (I - L^T)^-1 r, where L is the block diagonal of the Jacobian at y_star (b, t, c).
sweep(unroll, report): for `Direct`. Solves token after token, with the exact implicit gradient or
    with `unroll` that of the loop. Of its result y (b, t, c), the norms defect, scale and magnitude
    (b, t) and the pivots (b,) or (b, t) are read.
attach(y_star, report): y_star (b, t, c) with the exact implicit gradient, for any solver. In the
    backward pass `report`, if not None, gets defect and scale (b, t) of the adjoint equation.
parts: the samples that lie side by side in a value and do not read each other, such as heads. The
    map apart() takes each for a sample of its own; folded(y) and unfolded(y) convert its values.
fuse(y, rule): `Steps` from y (b, t, c) that evaluate, judge, freeze and update y, usually in one
    kernel, or None if the plain loop must be used.
"""

TimeDim = Literal[1] | None
ReportBackward = Callable[[Tensor, Tensor], None]

Solved = tuple[Tensor, Measured]
"""What a solver returns: the value, in the shape of y0, and what it has measured."""


@dataclass(frozen=True)
class Problem:
    """What a solver solves: y = f(y) from y0, in at most max_steps steps.

    With `unroll` the value carries the gradient of the loop; the residual (b,) of each evaluation
    of the map is appended to `history`. `report` is that of the map's sweep.
    """

    f: Map
    y0: Tensor  # (b, ...)
    max_steps: int
    time_dim: TimeDim
    unroll: bool = False
    history: list[Tensor] | None = None
    report: ReportBackward | None = None

    def tokens(self) -> tuple[Map, Tensor]:
        """The map and y0 in the shape (b, t, c)."""
        y0, axes = self.y0, 1 if self.time_dim is None else 2
        t = 1 if self.time_dim is None else y0.shape[1]
        y = y0.reshape(y0.shape[0], t, math.prod(y0.shape[axes:]))
        return (self.f if y.shape == y0.shape else TokenMap(self.f, y0)), y


class TokenMap:
    """The map `inner`, of tensors like y0, as a map of tensors (b, t, c)."""

    def __init__(self, inner: Map, y0: Tensor) -> None:
        self.inner, self.shape = inner, y0.shape

    def __call__(self, y: Tensor) -> Tensor:  # (b, t, c) -> (b, t, c)
        return self.inner(y.reshape(self.shape)).reshape(y.shape)


def map_name(f: object) -> str:
    """The name of the type of the map that the user passed, inside of any wrappers."""
    while hasattr(f, "inner"):
        f = f.inner
    return type(f).__name__


def offers(f: object, method: str) -> bool:
    """Whether the map has this method."""
    return callable(getattr(f, method, None))


class Steps(Protocol):
    """A running iteration."""

    def advance(self) -> None:
        """Evaluate the map at y, freeze converged tokens, update the others, and count the step."""

    def certify(self) -> None:
        """Evaluate the map at y and judge convergence, without an update of y or of the count."""

    def finished(self) -> bool:
        """Whether every sample has converged or failed; synchronizes with the device."""

    @property
    def progress(self) -> Progress: ...


class Solver(ABC):
    """A method that finds y with f(y) = y. Solvers are frozen dataclasses that hold options
    only."""

    can_unroll = True
    """Whether back-propagation through the solve is possible."""

    is_exact = False
    """Whether the solver takes exactly one step by definition, so that `max_steps` has no
    effect."""

    @abstractmethod
    def solve(self, problem: Problem) -> Solved:
        """Solve the problem."""


@dataclass(frozen=True)
class TolerantSolver(Solver):
    """A solver that stops within a tolerance. Raises ValueError for one outside of [0, 1e6]."""

    rtol: float = 1e-4
    atol: float = ATOL

    def __post_init__(self) -> None:
        check_number("rtol", self.rtol, 0, 1e6, open_low=False)
        check_number("atol", self.atol, 0, 1e6, open_low=False)


SolverT = TypeVar("SolverT", bound=type)
InitT = TypeVar("InitT", bound=Callable[..., None])


def strict_options(cls: SolverT) -> SolverT:
    """Class decorator: an unknown option raises a TypeError that lists the valid names."""
    cls.__init__ = known_options(cls.__init__)  # type: ignore[misc]
    return cls


def known_options(init: InitT) -> InitT:
    """Decorator of a constructor: an unknown option raises a TypeError that lists the valid ones,
    or gives the reason that the class has in `absent_options`. The signature stays what it is for
    type checkers and help(). A class with `settable_options` finds all options in `_options` when
    it is made, and may then refuse that others are set."""
    valid = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: object, *args: Any, **options: Any) -> None:
        owner = type(self).__name__
        for name in options:
            if name not in valid:
                reason = getattr(type(self), "absent_options", {}).get(name)
                if reason is not None:
                    raise TypeError(f"{owner} has no option {name}: {reason}")
                raise TypeError(unknown_option(owner, name, valid))
        if len(args) > len(valid):
            raise TypeError(f"{owner} takes {len(valid)} options {valid}, got {len(args)}")
        init(self, *args, **options)
        if hasattr(self, "settable_options"):
            self.__dict__["_options"] = tuple(valid)

    return cast(InitT, checked)


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


def check_count(name: str, value: object, least: int = 1, *, optional: bool = False) -> None:
    """Raise ValueError unless `value` is an int of at least `least`, or with `optional` None."""
    if (optional and value is None) or (type(value) is int and value >= least):
        return
    none = "None or " if optional else ""
    raise ValueError(f"{name} must be {none}an int >= {least}, got {value!r}")


def positive_int(name: str, value: Any, otherwise: str = "") -> int:
    """Return `value`. Raises TypeError unless it is an int, ValueError if it is below 1.
    otherwise: for the message, what else it may be."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int >= 1{otherwise}, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value

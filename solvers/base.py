"""What every solver shares: the abstract Solver and what a map may offer.

Letters: b batch, t tokens of a sample, c the values of a token. Convergence is judged token by
token: of a map that is causal in time, t is time; otherwise a sample is a single token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.checks import check_number
from bedouin.kernels.direct import ReportBackward
from bedouin.solvers.convergence import ATOL
from bedouin.solvers.reporting import Measured

Map = Callable[[Tensor], Tensor]
"""(b, t, c) -> (b, t, c). A map may have more, which `offers` finds, than that it can be called:

real: (b, t) bool, False in the padding, where values are 0 and count as converged, or None.
block_solve(y): for `Jacobi`. G(y) (b, t, c) and the smallest pivot (b,). G solves the local
    equation of each token for the values of the other tokens in y.
block_transpose(y_star): for Jacobi backward in time. Two functions on (b, t, c): w -> L^T w and
    r -> (I - L^T)^-1 r, where L is the block diagonal of the Jacobian at y_star (b, t, c).
sweep(unroll, report): for `Direct`. Solves token after token, with the exact implicit gradient or
    with `unroll` that of the loop. Of its result y (b, t, c), the norms defect, scale and magnitude
    (b, t) and the pivots (b,) or (b, t) are read.
attach(y_star, report): y_star (b, t, c) with the exact implicit gradient, for any solver. In the
    backward pass `report`, if not None, gets defect and scale (b, t) of the adjoint equation.
parts: how many samples lie side by side in a value and do not read each other, such as heads. The
    map apart() takes each for a sample of its own; folded(y) and unfolded(y) convert values.
fuse(y, rule): kernels.iteration.FusedIteration from y (b, t, c), whose steps evaluate, judge,
    freeze and update y; None if the plain loop must be used.
"""

Solved = tuple[Tensor, Measured]
"""What a solver returns: the value (b, t, c), and what it has measured."""


@dataclass(frozen=True)
class Problem:
    """What a solver solves: y = f(y) from y0, in at most max_steps steps. With `unroll` the value
    carries the gradient of the loop; the residual (b,) of each evaluation of the map is appended to
    `history`; `report` is for the map's sweep."""

    f: Map
    y0: Tensor  # (b, t, c)
    max_steps: int
    unroll: bool = False
    history: list[Tensor] | None = None
    report: ReportBackward | None = None


class TokenMap:
    """A function of tensors of `shape` that the user passed, as a map of tensors (b, t, c). It
    checks the result, which gets the dtype of the argument, and that the argument is unchanged,
    since otherwise the defect would be 0."""

    def __init__(self, inner: Any, shape: torch.Size) -> None:
        self.inner, self.shape = inner, shape
        if offers(inner, "sweep"):
            self.sweep = inner.sweep
            self.attach = lambda y, report: inner.attach(y.reshape(shape), report)

    def __call__(self, y: Tensor) -> Tensor:  # (b, t, c) -> (b, t, c)
        # inference tensors have no version, but a copy may change
        version = None if y.is_inference() else y._version
        f_y: object = self.inner((y.clone() if version is None else y).reshape(self.shape))
        if version is not None and y._version != version:
            raise ValueError(
                "f must not change its argument in place, got one that writes into y: return a new "
                "tensor, or begin with y.clone()"
            )
        if not isinstance(f_y, Tensor):
            raise TypeError(f"f must return a tensor like y, got {type(f_y).__name__}")
        if torch.promote_types(f_y.dtype, y.dtype) != y.dtype:
            raise TypeError(
                f"f must keep the dtype of y: expected {y.dtype}, got {f_y.dtype}: convert the "
                "result, or pass y0 in that dtype"
            )
        if f_y.shape != self.shape:
            raise ValueError(
                f"f must keep the shape of y: expected {tuple(self.shape)}, got {tuple(f_y.shape)}"
            )
        # autocast makes results of lower precision
        return f_y.to(y.dtype).reshape(y.shape)


def map_name(f: object) -> str:
    """The name of the type of the map that the user passed."""
    return type(getattr(f, "inner", f)).__name__


def offers(f: object, method: str) -> bool:
    return callable(getattr(f, method, None))


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

"""`solve`: a fixed point of any tensor function, with the gradient and the report one asks for."""

import warnings
from typing import Literal, get_args

from torch import Tensor

from bedouin.solvers.adjoint import Adjoint, ImplicitAdjoint, Problem
from bedouin.solvers.base import Map, MapWrapper, Solver, TimeDim
from bedouin.solvers.caps import Cap, as_cap
from bedouin.solvers.solution import (
    ConvergenceError,
    ConvergenceWarning,
    Result,
    Solution,
    SolveStats,
    can_read_device,
    describe,
    read_result,
)

OnUnconverged = Literal["warn", "raise", "ignore"]


def solve(
    f: Map,
    y0: Tensor,
    solver: Solver,
    *,
    max_steps: int | Cap = 100,
    adjoint: Adjoint | None = None,
    on_unconverged: OnUnconverged = "warn",
    time_dim: TimeDim = None,
    draw: int | None = None,
    subject: str = "solve",
) -> Solution:
    """Find y* = f(y*) from y0 (b, ...), axis 0 being the batch.

    Args:
        f: y -> f(y) of the same shape; what it closes over gets gradients through `adjoint`.
        solver: Picard, Jacobi, Direct, Anderson or Broyden.
        max_steps: an int or a Cap; a Cap's `limit` holds unless `draw` gives the number of a
            training call.
        adjoint: None for ImplicitAdjoint().
        on_unconverged: "raise" a ConvergenceError, "warn" with a ConvergenceWarning (on a GPU after
            Direct or a few steps: not here, see `Result.unknown`), or "ignore". A solve cut by a
            random cap is only recorded.
        time_dim: 1 if f is causal along axis 1: convergence is then judged token by token. None: a
            sample converges as a whole.
        subject: named in messages.

    Returns a Solution: value (the shape of y0), stats (each (b,)), result.
    Raises TypeError or ValueError for arguments of the wrong kind, for a map without the structure
    that the solver needs, and for an f that changes shape; ConvergenceError on request.
    """
    check_solve_arguments(solver, adjoint, on_unconverged)
    _check_start(y0, time_dim)
    cap = as_cap(max_steps)
    steps = cap.limit if draw is None else cap.draw(draw)
    cut = draw is not None and cap.is_random
    policy: OnUnconverged = "ignore" if cut else on_unconverged

    def report_backward(stats: SolveStats, result: Result) -> None:
        report(stats, result, policy, f"{subject}, adjoint solve")

    problem = Problem(_CheckedMap.wrap(f, y0), y0, solver, steps, time_dim, report_backward)
    solution = (adjoint or ImplicitAdjoint()).apply(problem)
    report(solution.stats, solution.result, policy, subject)
    return solution


def report(stats: SolveStats, result: Result, policy: OnUnconverged, subject: str) -> None:
    """Raise or warn as `policy` says; an outcome not yet read is read for "raise" only."""
    if result is Result.unknown and policy == "raise" and can_read_device(stats.converged):
        result = read_result(stats)
    if result in (Result.converged, Result.unknown) or policy == "ignore":
        return
    message = describe(stats, result, subject)
    if policy == "raise":
        raise ConvergenceError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=3)


def check_solve_arguments(solver: object, adjoint: object, on_unconverged: object) -> None:
    """TypeError or ValueError that names the argument of the wrong kind."""
    if not isinstance(solver, Solver):
        raise TypeError(
            f"solver must be a solver object such as Picard(rtol=1e-4) or Direct(), got {solver!r}"
        )
    if adjoint is not None and not isinstance(adjoint, Adjoint):
        raise TypeError(
            f"adjoint must be None or an adjoint object such as OneStepAdjoint(), got {adjoint!r}"
        )
    if on_unconverged not in get_args(OnUnconverged):
        raise ValueError(
            f"on_unconverged must be one of {get_args(OnUnconverged)}, got {on_unconverged!r}"
        )


def _check_start(y0: Tensor, time_dim: TimeDim) -> None:
    if time_dim not in (None, 1):
        raise ValueError(f"time_dim must be None or 1, got {time_dim!r}")
    least = 2 if time_dim == 1 else 1
    if y0.dim() < least:
        raise ValueError(f"y0 must have at least {least} axes, batch first, got {tuple(y0.shape)}")
    if not y0.is_floating_point():
        raise TypeError(f"y0 must have a floating dtype, got {y0.dtype}")


class _CheckedMap(MapWrapper):
    """An ordinary function whose result must have the shape of its argument."""

    @staticmethod
    def wrap(f: Map, y0: Tensor) -> Map:
        """Maps with structure (objects with a sweep or a block solve) check themselves."""
        return f if hasattr(f, "block_solve") or hasattr(f, "sweep") else _CheckedMap(f)

    def __call__(self, y: Tensor) -> Tensor:
        f_y = self.f(y)
        if f_y.shape != y.shape:
            raise ValueError(
                f"f must keep the shape of y: expected {tuple(y.shape)}, got {tuple(f_y.shape)}"
            )
        return f_y

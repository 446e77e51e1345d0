"""`solve`: a fixed point of any tensor function, with the gradient and the report one asks for."""

from typing import get_args

from torch import Tensor

from bedouin.solvers.adjoint import Adjoint, ImplicitAdjoint
from bedouin.solvers.base import Map, MapWrapper, Solver, TimeDim
from bedouin.solvers.caps import Cap, as_cap
from bedouin.solvers.deferred import DeferredWarning
from bedouin.solvers.problem import Problem
from bedouin.solvers.reporting import OnUnconverged, Reporting
from bedouin.solvers.solution import Solution

_DEFERRED = DeferredWarning(every=True)
"""Outcomes of plain solves on a GPU, which the next one reports."""


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
    deferred: DeferredWarning | None = None,
) -> Solution:
    """Find y* = f(y*) from y0 (b, ...), axis 0 being the batch.

    Args:
        f: y -> f(y) of the same shape; what it closes over gets gradients through `adjoint`.
        solver: Picard, Jacobi, Direct, Anderson or Broyden.
        max_steps: an int or a Cap; a Cap's `limit` holds unless `draw` gives the number of a
            training call.
        adjoint: None for ImplicitAdjoint().
        on_unconverged: "raise" a ConvergenceError (reads the outcome from a GPU), "warn" with a
            ConvergenceWarning (on a GPU after Direct, a few steps or an exact adjoint one call
            late, from an asynchronous copy), or "ignore"; the adjoint's own solve in the backward
            pass likewise. Finite samples that a drawn cap below its limit cuts short are only
            recorded in the statistics. Under torch.compile, torch.func transforms and graph
            capture nothing is read, see `Result.unknown`.
        time_dim: 1 if f is causal along axis 1: convergence is then judged token by token. None: a
            sample converges as a whole.
        subject: named in messages.
        deferred: counts and delays the warnings of one caller; None: every call warns.

    Returns a Solution: value (the shape of y0), stats (each (b,)), result.
    Raises TypeError or ValueError for arguments of the wrong kind, for a map without the structure
    that the solver needs, and for an f that changes shape; ConvergenceError on request.
    """
    check_solve_arguments(solver, adjoint, on_unconverged)
    _check_start(y0, time_dim)
    if deferred is None:
        deferred = _DEFERRED
        deferred.flush()
    cap = as_cap(max_steps)
    steps = cap.limit if draw is None else cap.draw(draw)
    cut_at = steps if steps < cap.limit else None
    reporting = Reporting(on_unconverged, subject, deferred, cut_at)
    problem = Problem(_CheckedMap.wrap(f, y0), y0, solver, steps, time_dim, reporting)
    solution = (adjoint or ImplicitAdjoint()).apply(problem)
    reporting.forward(solution, capped=not solver.is_exact)
    return solution


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

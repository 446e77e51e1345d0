"""`solve`: a fixed point of any tensor function, with its gradient and a report on convergence.

Letters: b batch, t tokens of a sample, c the values of a token.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, check_backend
from bedouin.kernels.checks import check_count, one_of
from bedouin.solvers.adjoint import Adjoint, ImplicitAdjoint
from bedouin.solvers.base import Map, Problem, Solver, TokenMap, offers
from bedouin.solvers.caps import Cap, as_cap
from bedouin.solvers.reporting import Caller, DeferredWarning, OnUnconverged, Report, Solution

_DEFERRED = DeferredWarning(every=True)
"""Outcomes of calls of `solve` on a GPU, which are reported at the next call."""


@dataclass(frozen=True)
class SolveOptions:
    """The arguments of `solve` that a layer keeps, and the backend of its maps. adjoint None stands
    for ImplicitAdjoint(). Raises a TypeError or ValueError that names the field."""

    solver: Solver
    adjoint: Adjoint | None
    cap: Cap
    on_unconverged: OnUnconverged
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        for name, kind, expected in (
            ("solver", Solver, "a solver object such as Picard(rtol=1e-4) or Direct()"),
            ("adjoint", Adjoint | None, "None or an adjoint object such as OneStepAdjoint()"),
            ("cap", Cap, "a Cap such as FixedCap(20) or GammaCap(), or an int as max_steps"),
        ):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} must be {expected}, got {getattr(self, name)!r}")
        one_of("on_unconverged", self.on_unconverged, get_args(OnUnconverged))
        check_backend(self.backend)

    def solve(self, f: Map, y0: Tensor, caller: Caller) -> Solution:
        """Like the function `solve` for a map of tensors (b, t, c), from y0 (b, t, c)."""
        limit = self.cap.limit
        steps = limit if caller.draw is None else self.cap.draw(caller.draw)
        report = Report(caller, self.on_unconverged, steps if steps < limit else None)
        history: list[Tensor] | None = [] if caller.record_history else None
        # a compiled graph cannot call it
        heard = None if torch.compiler.is_compiling() else report.take_reverse_sweep
        problem = Problem(f, y0, steps, history=history, report=heard)
        value, measured = (self.adjoint or ImplicitAdjoint()).apply(problem, self.solver, report)
        if history is not None:
            none = measured.defect.new_empty(0, len(measured.defect))
            measured = replace(measured, history=torch.stack(history) if history else none)
        if y0.numel():
            measured = replace(measured, real=getattr(f, "real", None))
        report.forward.take(measured)
        if caller.record is not None:
            caller.record(report.forward)
        report.check_forward()
        return Solution(value, report.forward)


def solve(
    f: Map,
    y0: Tensor,  # (b, ...)
    solver: Solver,
    *,
    max_steps: int | Cap = 100,
    adjoint: Adjoint | None = None,
    on_unconverged: OnUnconverged = "warn",
    time_dim: Literal[1] | None = None,
    draw: int | None = None,
    record_history: bool = False,
) -> Solution:
    """Find y* = f(y*) from y0 (b, ...), axis 0 being the batch.

    Args:
        f: y -> f(y) of the same shape; the tensors that it closes over get gradients through
            `adjoint`.
        solver: Picard, Jacobi, Direct, Anderson or Broyden.
        max_steps: an int or a Cap. The `limit` of a Cap is used unless `draw` is given.
        adjoint: None for ImplicitAdjoint().
        on_unconverged: of the forward and the adjoint solve: "raise" raises a ConvergenceError,
            which synchronizes with a GPU; "warn" issues a ConvergenceWarning, on a GPU one call
            late and from an asynchronous copy if the solver is Direct, takes only a few steps, or
            has an exact adjoint; "ignore" does neither. Finite samples that a drawn cap below its
            limit cuts short are only recorded in the statistics. Under torch.compile, torch.func
            transforms and graph capture the outcome is not read, see `Result.unknown`.
        time_dim: 1 if f is causal along axis 1, so that convergence is judged token by token. None:
            a sample converges as a whole.
        draw: the number of a training call, from which a random Cap draws its number of steps.
        record_history: whether stats.history has the residual at each evaluation of f in the
            forward solve.

    Returns a Solution: value (like y0), stats (each (b,)), result.
    Raises TypeError or ValueError for arguments of the wrong kind, for a map without the structure
    that the solver needs, and for an f that changes shape or dtype, or y in place; ConvergenceError
    on request.
    """
    if not callable(f):
        raise TypeError(f"f must be a function of y, got {f!r}")
    check_count("draw", draw, 0, optional=True)
    options = SolveOptions(solver, adjoint, as_cap(max_steps), on_unconverged)
    _check_start(y0, time_dim)
    _DEFERRED.flush()
    of_parts: Any = f
    parts: int = getattr(f, "parts", 1)
    if parts > 1:
        f, y0 = of_parts.apart(), of_parts.folded(y0)
    caller = Caller("solve", _DEFERRED, draw, num_parts=parts, record_history=record_history)
    shape, t = y0.shape, 1 if time_dim is None else y0.shape[1]
    tokens = y0.reshape(shape[0], t, math.prod(shape[1:]) // max(t, 1))
    if tokens.shape != shape or not (offers(f, "block_solve") or offers(f, "sweep")):
        f = TokenMap(f, shape)
    solution = options.solve(f, tokens, caller)
    value = solution.value.reshape(shape)
    return replace(solution, value=of_parts.unfolded(value) if parts > 1 else value)


def _check_start(y0: Tensor, time_dim: object) -> None:  # y0: (b, ...)
    if not isinstance(y0, Tensor):
        raise TypeError(f"y0 must be a tensor (b, ...), got {type(y0).__name__}: join its tensors")
    if time_dim not in (None, 1):
        raise ValueError(f"time_dim must be None or 1, got {time_dim!r}")
    least = 2 if time_dim else 1
    if y0.dim() < least:
        raise ValueError(f"y0 must have at least {least} axes, batch first, got {tuple(y0.shape)}")
    if not y0.is_floating_point():
        raise TypeError(f"y0 must have a floating dtype, got {y0.dtype}")

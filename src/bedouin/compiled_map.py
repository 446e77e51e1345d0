"""Iterative solves as operations of torch.library, which torch.compile puts into its graph.

An operation runs the eager solve, which stops early, and takes tensors and scalars only. The map is
therefore described by its `RawLayout`, and rebuilt in the operation. There are three: the solve;
the solve of the adjoint equation; and the fixed point with that solve as its gradient.

Letters: b batch, t time, d channels, n state per channel, r raw values, H heads.
"""

import math
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from bedouin.fixed_point_map import FixedPointMap, StructuredMap, split_by_layout
from bedouin.kernels.backend import Backend, is_transformed
from bedouin.kernels.direct.layout import is_covered
from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.operands import NUM_SCALARS, SCALARS, Operands, Parameterization
from bedouin.kernels.operation import operation, recording
from bedouin.mixers import make_householder
from bedouin.solvers import Jacobi, Picard, Solver, SolveStats
from bedouin.solvers.adjoint import solve_adjoint
from bedouin.solvers.base import Problem
from bedouin.solvers.iterate import IterativeSolver
from bedouin.solvers.solution import BackwardStats, Result, Solution

SolverScalars = tuple[str, float, float, float, int | None, float, str]
"""kind, rtol, atol, and of Picard damping, patience, shrink, stop_rule."""

OPERANDS = "Tensor x, Tensor raw, Tensor? W_y, Tensor A, Tensor? h0, Tensor? y0, Tensor? lengths"
"""The arguments of an operation that `Operands` holds, and the lengths (b,) of the samples."""
OPTIONS = (
    f"{SCALARS}, str kind, float rtol, float atol, float damping, int? patience, float shrink, "
    "str stop_rule, int max_steps, str backend"
)
"""Its arguments that are no tensors: the scalars of the map, those of the solver, and the rest."""


class CompiledMap(StructuredMap):
    """A map that is traced by torch.compile: a `GraphMap`."""

    def solve_in_graph(
        self,
        solver: Solver,
        y0: Tensor,  # (b, t, d), or of joined heads
        max_steps: int,
    ) -> Solution | None:
        """The solve as an operation; None if it can be none."""
        scalars = self._scalars(solver, max_steps)
        if scalars is None:
            return None
        y, steps, residual, converged, pivot = iterate(y0, *self.operands, self.lengths, *scalars)
        known = pivot if isinstance(solver, Jacobi) else None
        # BackwardStats is passed because torch.compile cannot trace a default_factory
        stats = SolveStats(steps, residual, converged, known, BackwardStats())
        return Solution(y, stats, Result.unknown)

    def attach_in_graph(
        self,
        solver: Solver,
        y_star: Tensor,  # (b, t, d), or of joined heads
        max_steps: int,
    ) -> Tensor | None:  # as y_star
        """y_star with the gradient that the solver finds, in an operation; None if it can be
        none."""
        scalars = self._scalars(solver, max_steps)
        if scalars is None:
            return None
        detached = [None if v is None else v.detach() for v in (*self.operands, self.lengths)]
        value: Tensor = implicit(self(y_star), y_star, *detached, *scalars)
        return value

    def _scalars(self, solver: Solver, max_steps: int) -> tuple[Any, ...] | None:
        """The arguments of an operation that are no tensors."""
        options, (_, raw, _, A, _, _) = solver_scalars(solver), self.operands
        covered = is_covered(self.parameterization.layout, raw, A, self.mixer_values)
        if options is None or not covered or is_transformed():
            return None
        return (*self.parameterization.scalars(), *options, max_steps, self.backend)


def choose_map(is_structured: bool) -> type[FixedPointMap]:
    """The map of a call of a layer whose mixer has the form (e, U, M), or does not."""
    if not is_structured:
        return FixedPointMap
    return CompiledMap if torch.compiler.is_compiling() else StructuredMap


def solver_scalars(solver: Solver) -> SolverScalars | None:
    """The options of a solver one by one; None for other solvers than Picard and Jacobi."""
    if type(solver) is Jacobi:
        return "jacobi", solver.rtol, solver.atol, 1.0, None, 1.0, "prefix"
    if type(solver) is not Picard:
        return None
    how = solver.damping, solver.patience, solver.shrink, solver.stop_rule
    return "picard", solver.rtol, solver.atol, *how


def solver_from_scalars(kind: str, *options: Any) -> IterativeSolver:
    """The inverse of `solver_scalars`."""
    return Jacobi(*options[:2]) if kind == "jacobi" else Picard(*options)


def rebuild(
    operands: Operands,
    lengths: Tensor | None,  # (b,)
    options: Parameterization,
    backend: str,
    joined: int,
) -> StructuredMap:
    """The map that an operation was given in parts."""
    layout, (d, n) = options.known_layout(), operands.A.shape[-2:]
    mixer = make_householder(layout.num_householder, layout.beta_max)
    split = partial(split_by_layout, layout, (d, n))
    return StructuredMap(operands, options, mixer, split, cast(Backend, backend), lengths, joined)


def _problem(
    y: Tensor,  # (b, t, d), or of joined heads
    flat: tuple[Any, ...],
) -> tuple[StructuredMap, IterativeSolver, int]:
    """Map of y, solver and its most steps, from the arguments OPERANDS and OPTIONS."""
    tensors, scalars, rest = flat[:7], flat[7 : 7 + NUM_SCALARS], flat[7 + NUM_SCALARS :]
    *solver, max_steps, backend = rest
    options, operands = Parameterization.from_scalars(*scalars), Operands(*tensors[:6])
    joined = y.shape[-1] // operands.x.shape[-1]
    f = rebuild(operands, tensors[6], options, backend, joined)
    return f, solver_from_scalars(*solver), max_steps


@operation(
    "iterate",
    f"(Tensor start, {OPERANDS}, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def iterate(
    start: Tensor,  # (b, t, d)
    *flat: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fixed point, and of its statistics num_steps, residual, converged and the smallest pivot,
    (b,) each, the last one empty for Picard."""
    f, solver, max_steps = _problem(start, flat)
    with torch.no_grad(), torch.autocast(start.device.type, enabled=False):
        solution = solver.solve(Problem(f, start, max_steps, 1))
    stats, pivot = solution.stats, solution.stats.conditioning
    if pivot is None:  # of Picard, and where there are no tokens
        pivot = start.new_full((len(start) if isinstance(solver, Jacobi) else 0,), math.inf)
    return solution.value.contiguous(), stats.num_steps, stats.residual, stats.converged, pivot


@iterate.register_fake
def _iterate_fake(
    start: Tensor,  # (b, t, d)
    x: Tensor,  # (b, t, d)
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    b, kind = start.shape[0], options[6 + NUM_SCALARS]
    y = start.new_empty(start.shape)
    steps, converged = (start.new_empty(b, dtype=dtype) for dtype in (torch.int64, torch.bool))
    return y, steps, start.new_empty(b), converged, start.new_empty(b if kind == "jacobi" else 0)


@operation("iterate_adjoint", f"(Tensor grad, Tensor y_star, {OPERANDS}, {OPTIONS}) -> Tensor")
def iterate_adjoint(
    grad: Tensor,  # (b, t, d)
    y_star: Tensor,  # (b, t, d)
    *flat: Any,
) -> Tensor:
    """w = J^T w + grad, with J = dF/dy at y_star."""
    f, solver, max_steps = _problem(y_star, flat)
    with torch.autocast(grad.device.type, enabled=False), recording():
        y = y_star.detach().clone().requires_grad_()
        tracked = f(y)
        with torch.no_grad():
            w, _ = solve_adjoint(Problem(f, y, max_steps, 1), solver, y, tracked, grad)
    return w.contiguous()


def _like_y_star(first: Tensor, y_star: Tensor, *options: Any) -> Tensor:
    return y_star.new_empty(y_star.shape)


iterate_adjoint.register_fake(_like_y_star)


@operation("implicit", f"(Tensor tracked, Tensor y_star, {OPERANDS}, {OPTIONS}) -> Tensor")
def implicit(
    tracked: Tensor,  # (b, t, d), F(y_star)
    y_star: Tensor,  # (b, t, d)
    *unused: Any,
) -> Tensor:
    """y_star on the graph of `tracked`, to which the solution of the adjoint equation is passed;
    the operands, which that equation depends on, get no gradient here."""
    return y_star.clone(memory_format=torch.contiguous_format)


implicit.register_fake(_like_y_star)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:9])
    ctx.scalars = inputs[9:]


def _vjp(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # grad: (b, t, d)
    with torch.no_grad():
        w = iterate_adjoint(grad, *ctx.saved_tensors, *ctx.scalars)
    (marked,) = refuse_second_derivative([w], [grad, *ctx.saved_tensors])
    return (marked, *[None] * (8 + len(ctx.scalars)))


implicit.register_autograd(_vjp, setup_context=_save)

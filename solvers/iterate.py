"""The iteration that all iterative solvers share: `IterativeSolver` and its loop.

Letters: b batch, t tokens of a sample, c the values of a token.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import can_read_device, outside_of_graphs
from bedouin.kernels.iteration import IterationRule, Progress
from bedouin.kernels.launch import accumulator
from bedouin.solvers.base import Map, Problem, Solved, TolerantSolver, offers
from bedouin.solvers.convergence import (
    front,
    holds_so_far,
    largest_so_far,
    relative_residual,
    within_tolerance,
)
from bedouin.solvers.reporting import Measured

CHECK_EVERY = 4
"""Evaluations between two checks for termination on a GPU, each a synchronization. A superfluous
evaluation changes nothing, since converged tokens stay frozen and steps are counted on the device.
A solve of at most this many steps never waits for the device."""

MAX_TRACED_STEPS = 16
"""Most steps that torch.compile unrolls, each some hundred nodes; a graph cannot stop early."""


class IterativeSolver(TolerantSolver):
    """A solver that updates all tokens at once, with one evaluation of the map in each step, until
    they have converged (solvers.convergence). A new method needs `update` alone."""

    def evaluate(self, f: Map, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """The value at y (b, t, c) of the map that is iterated, F or for Jacobi G, and the smallest
        pivot (b,) if there are pivots."""
        return f(y), None

    def update(self, y: Tensor, f_y: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """The next iterate from y and the value there, all (b, t, c), and what the solver keeps for
        the next step; in the first step `memory` is None."""
        return f_y, None

    def within_tolerance(self, defect: Tensor, scale: Tensor) -> Tensor:  # all (b, t)
        """Which tokens have a defect within tolerance; the caller requires it of all before, too.
        The scale is |F(y)_t|."""
        return within_tolerance(defect, largest_so_far(scale), self.rtol, self.atol)

    def rule(self) -> IterationRule | None:
        """The step as data, for a map with `fuse`; None: this solver cannot be fused."""
        return None

    @property
    def returns_evaluation(self) -> bool:
        """Whether a solve returns its last evaluation f(y), with the defect measured in that step,
        rather than the y at which it was measured."""
        return False

    def solve(self, problem: Problem) -> Solved:
        y, max_steps = problem.y0, problem.max_steps
        if torch.compiler.is_compiling() and max_steps > MAX_TRACED_STEPS:
            return _solve_outside(self, problem)
        if not y.numel():
            return y.clone(), Measured.nothing(y)
        steps = self._steps(problem.f, problem)
        # with so few steps an early stop saves less than the synchronization costs
        waits = can_read_device(y) and not (y.is_cuda and max_steps <= CHECK_EVERY)
        check_every, taken, halfway = CHECK_EVERY if y.is_cuda else 1, 0, None
        while taken < max_steps:
            steps.advance()
            taken += 1
            if waits and taken % check_every == 0 and steps.finished():
                break
            if waits and taken == max_steps // 2 >= 4:  # of fewer steps no half is compared
                halfway = front(steps.progress.frozen, steps.progress.defect)
        else:
            # y was updated after the last evaluation, so its own defect is not known yet
            if not self.returns_evaluation:
                steps.certify()
        y, frozen, failed, num_steps, defect, scale, pivot, value = steps.progress
        unsolved = (failed.unsqueeze(1) & ~frozen).unsqueeze(-1)
        value = torch.where(unsolved, torch.nan, y if value is None else value)
        measured = Measured(defect, scale, pivot, None, frozen, num_steps)
        return value, replace(measured, halfway=halfway, waited=waits)

    def _steps(self, f: Any, problem: Problem) -> Any:
        # fused steps overwrite the y that they have measured, and record no autograd graph
        plain = problem.unroll or problem.history is not None or torch.is_grad_enabled()
        rule = None if plain or not offers(f, "fuse") else self.rule()
        fused = None if rule is None else f.fuse(problem.y0, rule)
        return fused or _PlainSteps(self, problem)


_solve_outside = outside_of_graphs(
    f"bedouin runs an iteration of more than {MAX_TRACED_STEPS} steps outside of the graph, "
    "where it can stop early: use Direct, a smaller max_steps, or torch.compile with "
    "fullgraph=False",
)(IterativeSolver.solve)


class _PlainSteps:
    """Steps of any solver on any map in plain torch, which autograd can differentiate."""

    def __init__(self, solver: IterativeSolver, problem: Problem) -> None:
        self.solver, self.f, self.history = solver, problem.f, problem.history
        self.real: Tensor | None = getattr(self.f, "real", None)
        self.memory, y = None, problem.y0
        frozen = torch.zeros_like(y[..., 0], dtype=torch.bool)
        failed, norm = frozen[:, 0], torch.zeros_like(y[..., 0])
        self.progress = Progress(y, frozen, failed, failed.to(torch.int64), norm, norm, None)

    def advance(self) -> None:
        """Evaluate the map at y, freeze converged tokens, update the others, and count the step."""
        before = self.progress
        active = ~before.failed & ~before.frozen.all(1)
        f_y, pivot = self.solver.evaluate(self.f, before.y)
        now = self._judge(f_y.detach(), pivot)
        y_next, self.memory = self.solver.update(before.y, f_y, self.memory)
        keep = (now.frozen | now.failed.unsqueeze(1)).unsqueeze(-1)
        # the evaluation of a frozen y does not change, so the last one holds for every token
        self.progress = now._replace(
            y=torch.where(keep, before.y, y_next),
            num_steps=before.num_steps + active,
            value=f_y if self.solver.returns_evaluation else None,
        )

    def certify(self) -> None:
        """Evaluate the map at y and judge convergence, without an update of y or of the count."""
        f_y, pivot = self.solver.evaluate(self.f, self.progress.y)
        self.progress = self._judge(f_y.detach(), pivot)

    def finished(self) -> bool:
        """Whether every sample has converged or failed; synchronizes with the device."""
        return bool((self.progress.failed | self.progress.frozen.all(1)).all())

    def _judge(self, f_y: Tensor, pivot: Tensor | None) -> Progress:
        """The progress that the value f_y (b, t, c) of the map at y shows."""
        before, dtype = self.progress, accumulator(f_y.dtype)
        # small tolerances would underflow to zero in float16
        defect, scale = (v.abs().amax(-1).to(dtype) for v in (f_y - before.y.detach(), f_y))
        small = self.solver.within_tolerance(defect, scale) | before.frozen
        frozen = holds_so_far(small if self.real is None else small | ~self.real)
        # tokens after the first open one may be non-finite during the iteration and still converge
        failed = before.failed | (~front(frozen, scale)[1].isfinite() & ~frozen.all(1))
        if self.history is not None:
            self.history.append(relative_residual(defect, scale))
        return Progress(before.y, frozen, failed, before.num_steps, defect, scale, pivot)

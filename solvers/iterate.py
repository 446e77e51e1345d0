"""The iteration that all iterative solvers share: `IterativeSolver` and its loop.

Letters: b batch, t tokens of a sample, c the values of a token.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import can_read_device
from bedouin.kernels.guard import KernelDoesNotFit, answer
from bedouin.kernels.iteration import IterationRule, Progress
from bedouin.kernels.launch import accumulator
from bedouin.kernels.outside import outside_of_graphs
from bedouin.solvers.base import Map, Problem, Solved, TolerantSolver, offers
from bedouin.solvers.convergence import (
    first_open_token_is_nonfinite,
    front,
    holds_so_far,
    largest_so_far,
    relative_residual,
    within_tolerance,
)
from bedouin.solvers.solution import Measured

CHECK_EVERY = 4
"""Evaluations between two checks for termination on a GPU. A check costs a synchronization; a
superfluous evaluation changes nothing, since converged tokens stay frozen and steps are counted on
the device. A solve of at most this many steps never waits for the device."""

LEAST_HALF = 4
"""Fewest steps in half of the cap for which the halves of a solve are compared."""

MAX_TRACED_STEPS = 16
"""Most steps that torch.compile unrolls: each adds some hundred nodes to the graph, and a graph
cannot stop early."""


class IterativeSolver(TolerantSolver):
    """A solver that updates all tokens at once, with one evaluation of the map in each step.

    A token that has converged (solvers.convergence) keeps the y at which its defect was measured.
    A new method needs `update` alone.
    """

    def evaluate(self, f: Map, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """The value at y (b, t, c) of the map that is iterated, F or for Jacobi G, and the smallest
        pivot (b,) if there are pivots."""
        return f(y), None

    def update(self, y: Tensor, f_y: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """The next iterate from y and the value there, all (b, t, c), and what the solver keeps for
        the next step; in the first step `memory` is None."""
        return f_y, None

    def within_tolerance(self, defect: Tensor, scale: Tensor) -> Tensor:  # all (b, t)
        """Which tokens have a defect within tolerance, regardless of the tokens before them, of
        which the caller requires the same; scale is |F(y)_t|."""
        return within_tolerance(defect, largest_so_far(scale), self.rtol, self.atol)

    def rule(self) -> IterationRule | None:
        """The step as data, for a map with `fuse`; None: this solver cannot be fused. With
        `whole_sequence` the solve returns its last evaluation f(y), with the defect measured in
        that step, rather than the y at which it was measured."""
        return None

    def solve(self, problem: Problem) -> Solved:
        f, y, max_steps = problem.f, problem.y0, problem.max_steps
        if torch.compiler.is_compiling() and max_steps > MAX_TRACED_STEPS:
            return _solve_outside(self, problem)
        if not y.numel():
            return y.clone(), Measured.nothing(y)
        steps = self._steps(f, y, problem)
        # with so few steps an early stop saves less than the synchronization costs
        waits = can_read_device(y) and not (y.is_cuda and max_steps <= CHECK_EVERY)
        check_every, taken, halfway = CHECK_EVERY if y.is_cuda else 1, 0, None
        while taken < max_steps:
            try:
                steps.advance()
            except KernelDoesNotFit as error:
                answer(error, error.backend)
                steps, taken = _PlainSteps(self, f, y), 0
                continue
            taken += 1
            if waits and taken % check_every == 0 and steps.finished():
                break
            if waits and taken == max_steps // 2 >= LEAST_HALF:
                halfway = front(steps.progress.frozen, steps.progress.defect)
        else:
            # y was updated after the last evaluation, so its own defect is not known yet
            if not _returns_evaluation(self):
                steps.certify()
        y, frozen, failed, num_steps, defect, scale, pivot, value = steps.progress
        unsolved = (failed.unsqueeze(1) & ~frozen).unsqueeze(-1)
        value = torch.where(unsolved, torch.nan, y if value is None else value)
        measured = Measured(defect, scale, pivot, None, frozen, num_steps)
        return value, measured._replace(halfway=halfway, waited=waits)

    def _steps(self, f: Any, y: Tensor, problem: Problem) -> Any:  # y: (b, t, c)
        # fused steps overwrite the y that they have measured, and record no autograd graph
        plain = problem.unroll or problem.history is not None or torch.is_grad_enabled()
        rule = None if plain or not offers(f, "fuse") else self.rule()
        fused = None if rule is None else f.fuse(y, rule)
        return fused or _PlainSteps(self, f, y, problem.history)


_solve_outside = outside_of_graphs(
    f"bedouin runs an iteration of more than {MAX_TRACED_STEPS} steps outside of the graph, "
    "where it can stop early: use Direct, a smaller max_steps, or torch.compile with "
    "fullgraph=False",
)(IterativeSolver.solve)


def _returns_evaluation(solver: IterativeSolver) -> bool:
    rule = solver.rule()
    return rule is not None and rule.whole_sequence


class _PlainSteps:
    """Steps of any solver on any map in plain torch, which autograd can differentiate.

    `advance` evaluates the map at y, freezes converged tokens and updates the others; `certify`
    judges y without an update or a count; `finished` tells whether every sample has converged or
    failed, for which it synchronizes with the device.
    """

    def __init__(
        self,
        solver: IterativeSolver,
        f: Map,
        y: Tensor,  # (b, t, c)
        history: list[Tensor] | None = None,
    ) -> None:
        self.solver, self.f, self.history = solver, f, history
        self.real: Tensor | None = getattr(f, "real", None)
        self.memory = None
        frozen = torch.zeros_like(y[..., 0], dtype=torch.bool)
        failed, norm = frozen[:, 0], torch.zeros_like(y[..., 0])
        self.progress = Progress(y, frozen, failed, failed.to(torch.int64), norm, norm, None)

    def advance(self) -> None:
        before = self.progress
        active = ~before.failed & ~before.frozen.all(1)
        f_y, now = self._judge()
        y_next, self.memory = self.solver.update(before.y, f_y, self.memory)
        keep = (now.frozen | now.failed.unsqueeze(1)).unsqueeze(-1)
        # the evaluation of a frozen y does not change, so the last one holds for every token
        self.progress = now._replace(
            y=torch.where(keep, before.y, y_next),
            num_steps=before.num_steps + active,
            value=f_y if _returns_evaluation(self.solver) else None,
        )

    def certify(self) -> None:
        _, self.progress = self._judge()

    def finished(self) -> bool:
        return bool((self.progress.failed | self.progress.frozen.all(1)).all())

    def _judge(self) -> tuple[Tensor, Progress]:
        """The value of the map at y (b, t, c), and the progress that it shows."""
        before = self.progress
        value, pivot = self.solver.evaluate(self.f, before.y)
        f_y, y = value.detach(), before.y.detach()
        # small tolerances would underflow to zero in float16
        dtype = accumulator(f_y.dtype)
        defect, scale = (v.abs().amax(-1).to(dtype) for v in (f_y - y, f_y))
        small = self.solver.within_tolerance(defect, scale) | before.frozen
        frozen = holds_so_far(small if self.real is None else small | ~self.real)
        failed = before.failed | first_open_token_is_nonfinite(frozen, scale)
        if self.history is not None:
            self.history.append(relative_residual(defect, scale))
        return value, Progress(before.y, frozen, failed, before.num_steps, defect, scale, pivot)

"""The iteration that all iterative solvers share: `IterativeSolver` and its loop.

Letters: b batch, t tokens of a sample, c the values of a token.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.guard import KernelDoesNotFit, answer
from bedouin.kernels.iteration import IterationRule, Progress
from bedouin.kernels.launch import accumulator
from bedouin.kernels.outside import outside_of_graphs
from bedouin.solvers.base import (
    FusedMap,
    Map,
    Problem,
    Steps,
    TolerantSolver,
    counted_parts,
    counted_tokens,
)
from bedouin.solvers.convergence import (
    first_open_token_is_nonfinite,
    holds_so_far,
    in_all_parts,
    largest_of_parts,
    largest_so_far,
    reported_residual,
    sizes_of_parts,
    within_tolerance,
)
from bedouin.solvers.solution import (
    BackwardStats,
    Result,
    Solution,
    SolveStats,
    can_read_device,
    empty_solution,
    read_result,
)

CHECK_EVERY = 4
"""Evaluations between two checks for termination on a GPU. A check costs a synchronization; a
superfluous evaluation changes nothing, since converged tokens stay frozen and steps are counted on
the device. A solve of at most this many steps does not read its outcome (`Result.unknown`)."""

LEAST_HALF = 4
"""Fewest steps in half of the cap for which the halves of a solve are compared."""

MAX_TRACED_STEPS = 16
"""Most steps that torch.compile unrolls: each adds some hundred nodes to the graph, and a graph
cannot stop early."""


class IterativeSolver(TolerantSolver):
    """A solver that updates all tokens at once, with one evaluation of the map in each step.

    A token that has converged (solvers.convergence) keeps the y at which its defect was measured.
    """

    @property
    def returns_evaluation(self) -> bool:
        """Whether a solve returns its last evaluation f(y), with the defect measured in that step,
        rather than the y at which it was measured."""
        return False

    def start(self, y0: Tensor) -> Any:  # y0: (b, t, c)
        """What the solver keeps between steps; None for solvers without memory."""
        return None

    def evaluate(self, f: Map, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """The value at y (b, t, c) of the map that is iterated, F or for Jacobi G, and the smallest
        pivot (b,) if there are pivots."""
        return f(y), None

    def update(self, y: Tensor, f_y: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """The next iterate from y and the value there, all (b, t, c), and the next memory."""
        return f_y, None

    def within_tolerance(self, defect: Tensor, scale: Tensor) -> Tensor:  # all (b p, t)
        """Which parts of tokens have a defect within tolerance, regardless of the tokens before
        them, of which the caller requires the same; scale is |F(y)_t|."""
        return within_tolerance(defect, largest_so_far(scale), self.rtol, self.atol)

    def rule(self) -> IterationRule | None:
        """The solver's step as data, for a `FusedMap`; None: this solver cannot be fused."""
        return None

    def solve(self, problem: Problem) -> Solution:
        y0, max_steps = problem.y0, problem.max_steps
        if torch.compiler.is_compiling() and max_steps > MAX_TRACED_STEPS:
            return _solve_outside(self, problem)
        f, y = problem.tokens()
        if y.numel() == 0:
            return empty_solution(y0.clone())
        steps = self._steps(f, y, problem)
        # with so few steps an early stop saves less than the synchronization costs
        readable = can_read_device(y) and not (y.is_cuda and max_steps <= CHECK_EVERY)
        check_every, taken = CHECK_EVERY if y.is_cuda else 1, 0
        parts, halfway = counted_parts(f), None
        while taken < max_steps:
            try:
                steps.advance()
            except KernelDoesNotFit as error:
                answer(error, error.backend)
                steps, taken = _PlainSteps(self, f, y), 0
                continue
            taken += 1
            if readable and taken % check_every == 0 and steps.finished():
                break
            if readable and taken == max_steps // 2 >= LEAST_HALF:
                halfway = self._front(steps.progress, parts)
        else:
            # y was updated after the last evaluation, so its own defect is not known yet
            if not self.returns_evaluation:
                steps.certify()
        solution = _conclude(steps.progress, y0.shape, readable, parts)
        if halfway is None or solution.result is not Result.max_steps_reached:
            return solution
        (count, defect), stats = self._front(steps.progress, parts), solution.stats
        nearer = (count > halfway[0]) | ((count == halfway[0]) & (defect < halfway[1]))
        return replace(solution, stats=replace(stats, _stalled=~(stats.converged | nearer)))

    def _front(
        self,
        progress: Progress,
        parts: int,
    ) -> tuple[Tensor, Tensor]:  # (b,), (b,)
        """How many tokens are within the tolerance before the first one that is not, and the
        defect of that one. A contraction makes this smaller in every step."""
        defect, scale = progress.defect, progress.scale
        small = within_tolerance(defect, largest_so_far(scale), self.rtol, self.atol)
        count = holds_so_far(in_all_parts(small, parts)).sum(1)
        first = count.clamp(max=defect.shape[1] - 1).unsqueeze(1)
        return count, largest_of_parts(defect, parts).gather(1, first).squeeze(1)

    def _steps(self, f: Map, y: Tensor, problem: Problem) -> Steps:  # y: (b, t, c)
        # fused steps overwrite the y that they have measured, and record no autograd graph
        plain = problem.unroll or problem.history is not None or torch.is_grad_enabled()
        rule = None if plain else self.rule()
        if rule is not None and isinstance(f, FusedMap):
            return f.fuse(y, rule) or _PlainSteps(self, f, y)
        return _PlainSteps(self, f, y, problem.history)


@outside_of_graphs(
    f"bedouin runs an iteration of more than {MAX_TRACED_STEPS} steps outside of the graph, "
    "where it can stop early: use Direct, a smaller max_steps, or torch.compile with "
    "fullgraph=False",
)
def _solve_outside(solver: IterativeSolver, problem: Problem) -> Solution:
    return solver.solve(problem)


class _PlainSteps:
    """Steps of any solver on any map in plain torch, which autograd can differentiate."""

    def __init__(
        self,
        solver: IterativeSolver,
        f: Map,
        y: Tensor,  # (b, t, c)
        history: list[Tensor] | None = None,
    ) -> None:
        self.solver, self.f, self.history, self.real = solver, f, history, counted_tokens(f)
        self.parts = counted_parts(f)
        self.memory = solver.start(y)
        frozen = torch.zeros_like(y[..., 0], dtype=torch.bool)
        failed, norm = frozen[:, 0], torch.zeros_like(y[..., 0])
        self.progress = Progress(y, frozen, failed, failed.to(torch.int64), norm, norm, None)

    def advance(self) -> None:
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
        f_y, pivot = self.solver.evaluate(self.f, self.progress.y)
        self.progress = self._judge(f_y.detach(), pivot)

    def finished(self) -> bool:
        return bool((self.progress.failed | self.progress.frozen.all(1)).all())

    def _judge(
        self,
        f_y: Tensor,  # (b, t, c), the value of the map at y
        pivot: Tensor | None,  # (b,)
    ) -> Progress:
        """The progress that a value shows."""
        before = self.progress
        # small tolerances would underflow to zero in float16
        dtype = accumulator(f_y.dtype)
        defect = sizes_of_parts(f_y - before.y.detach(), self.parts).to(dtype)
        scale = sizes_of_parts(f_y, self.parts).to(dtype)
        small = in_all_parts(self.solver.within_tolerance(defect, scale), self.parts)
        small = small | before.frozen
        frozen = holds_so_far(small if self.real is None else small | ~self.real)
        largest = largest_of_parts(scale, self.parts)
        failed = before.failed | first_open_token_is_nonfinite(frozen, largest)
        if self.history is not None:
            self.history.append(largest_of_parts(reported_residual(defect, scale), self.parts))
        return Progress(before.y, frozen, failed, before.num_steps, defect, scale, pivot)


def _conclude(progress: Progress, shape: torch.Size, readable: bool, parts: int) -> Solution:
    unsolved = (progress.failed.unsqueeze(1) & ~progress.frozen).unsqueeze(-1)
    found = progress.y if progress.value is None else progress.value
    value = torch.where(unsolved, torch.nan, found).reshape(shape)
    residual = largest_of_parts(reported_residual(progress.defect, progress.scale), parts)
    residual = torch.where(progress.failed, torch.nan, residual)
    converged = progress.frozen.all(1)
    # BackwardStats is passed because torch.compile cannot trace a default_factory
    stats = SolveStats(progress.num_steps, residual, converged, progress.pivot, BackwardStats())
    return Solution(value, stats, read_result(stats) if readable else Result.unknown)

"""Direct: the exact fixed point in one sweep over time."""

from dataclasses import dataclass

import torch

from bedouin.kernels.branches import beside
from bedouin.solvers.base import Problem, Solver, map_name, offers, strict_options
from bedouin.solvers.convergence import relative_residual, within_rounding
from bedouin.solvers.solution import (
    BackwardStats,
    DeferredStats,
    Result,
    Solution,
    SolveStats,
    can_read_device,
    empty_solution,
    read_result,
)


@strict_options
@dataclass(frozen=True)
class Direct(Solver):
    """Solve token 1, then token 2, ...: exact, no tolerance, no cap; the decoder's own solve.

    Works for any Q whose local matrices are invertible, contractive or not. Takes one step by
    definition and ignores y0 and max_steps. A singular token makes its own sample non-finite from
    that token on, and unconverged; stats.conditioning is the smallest pivot.
    Needs a map with `sweep`: TypeError otherwise.
    """

    is_exact = True

    def solve(self, problem: Problem) -> Solution:
        f, y0 = problem.f, problem.y0
        if not offers(f, "sweep"):
            raise TypeError(
                f"Direct needs a map with a method sweep, got {map_name(f)}: use Picard, "
                "Anderson or Broyden for a plain function or a mixer without the form (e, U, M)"
            )
        cell = BackwardStats()
        swept = f.sweep(problem.unroll, cell)
        if y0.numel() == 0:
            return empty_solution(swept.y)
        # (b,) each, where the sweep has reduced the norms of tokens
        residual, converged = getattr(swept, "residual", None), getattr(swept, "converged", None)
        if residual is None or converged is None:
            defect, scale, magnitude = swept.defect, swept.scale, swept.magnitude
            with beside("statistics", defect, scale, magnitude):
                residual = relative_residual(defect, scale)
                converged = within_rounding(defect, scale, magnitude)
        if problem.history is not None:
            problem.history.append(residual)
        if not can_read_device(residual):
            with beside("statistics", residual):
                steps = torch.ones_like(residual, dtype=torch.int64)
            plain = SolveStats(steps, residual, converged, swept.pivot, cell)
            return Solution(swept.y, plain, Result.unknown)
        stats = DeferredStats(None, residual, converged, swept.pivot, cell)
        # reading a GPU would stop the host once a layer: the caller may read it later
        return Solution(swept.y, stats, Result.unknown if residual.is_cuda else read_result(stats))

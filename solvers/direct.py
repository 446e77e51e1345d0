"""Direct: the exact fixed point in one sweep over time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bedouin.solvers.base import (
    Map,
    Solver,
    SweepResult,
    TimeDim,
    is_triangular,
    map_name,
    strict_options,
)
from bedouin.solvers.convergence import relative_residual, within_rounding
from bedouin.solvers.solution import (
    BackwardStats,
    DeferredStats,
    Result,
    Solution,
    SolveStats,
    can_read_device,
    empty_stats,
    read_result,
)
from bedouin.solvers.watch import Watch


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

    def solve(
        self,
        f: Map,
        y0: Tensor,  # (b, t, c)
        *,
        max_steps: int,
        time_dim: TimeDim,
        unroll: bool,
        watch: Watch | None = None,
    ) -> Solution:
        if not is_triangular(f):
            raise TypeError(
                f"Direct needs a map with a method sweep, got {map_name(f)}: use Picard, "
                "Anderson or Broyden for a plain function or a mixer without the form (e, U, M)"
            )
        cell = BackwardStats()
        swept = f.sweep(unroll, cell)
        if y0.numel() == 0:
            return Solution(swept.y, empty_stats(y0), Result.converged)
        residual, converged = self._judge(swept)
        if watch is not None:
            watch(swept.y, residual)
        if not can_read_device(residual):
            steps = torch.ones_like(residual, dtype=torch.int64)
            plain = SolveStats(steps, residual, converged, swept.pivot, cell)
            return Solution(swept.y, plain, Result.unknown)
        stats = DeferredStats(None, residual, converged, swept.pivot, cell)
        # a look at a GPU would stop the host once a layer: the caller may look later
        return Solution(swept.y, stats, Result.unknown if residual.is_cuda else read_result(stats))

    def _judge(self, swept: SweepResult) -> tuple[Tensor, Tensor]:
        """The residual, and whether rounding explains it, (b,) each."""
        # where the sweep has reduced them
        residual: Tensor | None = getattr(swept, "residual", None)
        converged: Tensor | None = getattr(swept, "converged", None)
        if residual is not None and converged is not None:
            return residual, converged
        defect, scale = swept.defect, swept.scale
        return relative_residual(defect, scale), within_rounding(defect, scale, swept.magnitude)

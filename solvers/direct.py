"""Direct: the exact fixed point in one sweep over time."""

from typing import Any

from bedouin.kernels.checks import frozen_options
from bedouin.solvers.base import Problem, Solved, Solver, map_name, offers
from bedouin.solvers.convergence import relative_residual
from bedouin.solvers.reporting import Measured


@frozen_options
class Direct(Solver):
    """Solve token 1, then token 2, ...: exact, no tolerance, no cap; the decoder's own solve.

    Works for any Q whose local matrices are invertible, contractive or not. Takes one step by
    definition and ignores y0 and max_steps. A singular token makes its own sample non-finite from
    that token on, and unconverged; stats.conditioning is the smallest pivot.
    Needs a map with `sweep`: TypeError otherwise.
    """

    is_exact = True

    def solve(self, problem: Problem) -> Solved:
        f: Any = problem.f
        if not offers(f, "sweep"):
            raise TypeError(
                f"Direct needs a map with a method sweep, got {map_name(f)}: use Picard, "
                "Anderson or Broyden for a plain function or a mixer without the form (e, U, M)"
            )
        swept = f.sweep(problem.unroll, problem.report)
        if not problem.y0.numel():
            return swept.y, Measured.nothing(swept.y)
        if problem.history is not None:
            problem.history.append(relative_residual(swept.defect, swept.scale))
        return swept.y, Measured(swept.defect, swept.scale, swept.pivot, swept.magnitude)

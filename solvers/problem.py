"""The arguments of one solve as a single object, which an adjoint receives."""

from dataclasses import dataclass

from torch import Tensor

from bedouin.solvers.base import Map, Solver, TimeDim
from bedouin.solvers.reporting import Reporting
from bedouin.solvers.solution import Solution
from bedouin.solvers.watch import Watch


@dataclass(frozen=True)
class Problem:
    """A map, an initial value and the options of the solve, which `run` executes.

    max_steps is the number of steps that the cap gives for this call.
    """

    f: Map
    y0: Tensor  # (b, ...)
    solver: Solver
    max_steps: int
    time_dim: TimeDim
    reporting: Reporting
    watch: Watch | None = None

    def run(self, unroll: bool = False) -> Solution:
        """Solve; with `unroll` the value carries the gradient of the loop."""
        return self.solver.solve(
            self.f,
            self.y0,
            max_steps=self.max_steps,
            time_dim=self.time_dim,
            unroll=unroll,
            watch=self.watch,
        )

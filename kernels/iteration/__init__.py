"""The parallel iterations: one step of Picard or Jacobi from the projections in a few launches.

The plain version is the map (bedouin.fixed_point_map) in the loop of bedouin.solvers.iterate.
"""

from bedouin.kernels.iteration.fused import (
    FusedIteration,
    IterationInputs,
    IterationRule,
    Progress,
    choose_iteration,
)

__all__ = [
    "FusedIteration",
    "IterationInputs",
    "IterationRule",
    "Progress",
    "choose_iteration",
]

"""Block Jacobi in time: all tokens in parallel, with each token's local equation solved exactly."""

from typing import Any

from torch import Tensor

from bedouin.kernels.checks import frozen_options
from bedouin.solvers.base import map_name, offers
from bedouin.solvers.iterate import IterativeSolver


@frozen_options
class Jacobi(IterativeSolver):
    """y <- G(y), where G solves every token's local equation given the other tokens of y.

    The error operator is strictly lower triangular in time, so the iteration is exact after at most
    t steps from any start and for any Q, contractive or not; one more step confirms convergence.
    Fewer steps suffice if memory decays fast or feedback is off. rtol and atol are those of
    `Picard`, for G in place of f. Raises ValueError for values out of range, and TypeError in
    `solve` for a map without `block_solve`.
    """

    def evaluate(self, f: Any, y: Tensor) -> Any:
        if not offers(f, "block_solve"):
            raise TypeError(
                "Jacobi needs a map with a method block_solve(y), and time_dim=1, got "
                f"{map_name(f)}: use Picard, Anderson or Broyden for a plain function or a mixer "
                "without the form (e, U, M)"
            )
        return f.block_solve(y)

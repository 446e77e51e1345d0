"""The parallel iteration: one step of Picard from the projections in a few launches.

The plain version is the map (bedouin.layers.map) in the loop of bedouin.solvers.iterate. A
step of Jacobi is the local solve in plain torch around a scan (bedouin.kernels.scan).

Letters: b batch, t time, d channels.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from bedouin.kernels.backend import Backend
from bedouin.kernels.iteration.limits import choose_iteration
from bedouin.kernels.iteration.types import IterationRule, Progress
from bedouin.kernels.operands import Operands, Parameterization

if TYPE_CHECKING:
    from bedouin.kernels.iteration.steps import FusedIteration

__all__ = ["IterationRule", "Progress", "choose_iteration", "fuse_iteration"]


def fuse_iteration(
    operands: Operands,
    y: Tensor,  # (b, t, d), the start
    parameterization: Parameterization,
    bind_parameters: tuple[Tensor, ...],
    rule: IterationRule,
    *,
    lengths: Tensor | None = None,  # (b,)
    backend: Backend = "auto",
) -> "FusedIteration | None":
    """An iteration from y with the Triton kernels; None where the plain loop is to be used.

    lengths: the tokens of each sample that are judged, before its padding; None: all.
    Raises ValueError where `backend="triton"` cannot run, or heads, W_y and batch do not fit.
    """
    operands.check(parameterization.feeds_x)
    chosen = choose_iteration(backend, operands, y, parameterization, bind_parameters, rule)
    if chosen == "reference":
        return None
    # imports Triton, which the plain loop does without
    from bedouin.kernels.iteration.steps import FusedIteration

    return FusedIteration(operands, y, parameterization, rule, lengths=lengths)

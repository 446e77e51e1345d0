"""The parallel iteration: one step of Picard from the projections in a few launches.

The plain version is the map (bedouin.layers.map) in the loop of bedouin.solvers.iterate. A
step of Jacobi is the local solve in plain torch around a scan (bedouin.kernels.scan).

Letters: b batch, t time, d channels, n state per channel.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, Implementation, choose_backend, warn_of_reference
from bedouin.kernels.direct.layout import is_covered
from bedouin.kernels.iteration.types import IterationRule, Progress
from bedouin.kernels.launch import next_power_of_two
from bedouin.kernels.operands import Operands, Parameterization

if TYPE_CHECKING:
    from bedouin.kernels.iteration.steps import FusedIteration

__all__ = ["IterationRule", "Progress", "choose_iteration", "fuse_iteration"]

MAX_REFLECTIONS = 8
"""Most reflections, whose k x k algebra is unrolled at compile time."""

MAX_TILE = 16384
"""Most elements of u_1 .. u_k of a token, both axes rounded up to a power of two: one program of
the local solve holds them in registers."""
MAX_STATES = 1024


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
    operands.check()
    chosen = choose_iteration(backend, operands, y, parameterization, bind_parameters, rule)
    if chosen == "reference":
        return None
    # imports Triton, which the plain loop does without
    from bedouin.kernels.iteration.steps import FusedIteration

    return FusedIteration(operands, y, parameterization, rule, lengths=lengths)


def choose_iteration(
    backend: Backend,
    operands: Operands,
    y: Tensor,  # (b, t, d)
    parameterization: Parameterization,
    bind_parameters: tuple[Tensor, ...],
    rule: IterationRule,
) -> Implementation:
    """The implementation of the steps, "reference" for Jacobi; raises as `choose_backend` does.

    Warns of a mixer without kernels on a GPU, unless it is in float64, for which there are none at
    all.
    """
    if rule.method == "jacobi":
        return "reference"
    unsupported = _unsupported(operands, y, parameterization, bind_parameters, rule)
    chosen = choose_backend(backend, y.device, y.dtype, unsupported)
    if parameterization.layout is None and backend == "auto" and y.dtype != torch.float64:
        warn_of_reference(y.device, parameterization.without_layout)
    return chosen


def _unsupported(
    operands: Operands,
    y: Tensor,  # (b, t, d)
    parameterization: Parameterization,
    bind_parameters: tuple[Tensor, ...],
    rule: IterationRule,
) -> str | None:
    """What the kernels do not cover, as a part of a message; None where they cover everything."""
    x, raw, _, A, _, _ = operands
    layout, (d, n) = parameterization.layout, A.shape[-2:]
    if torch.compiler.is_compiling():
        return "torch.compile"
    if rule.adaptive:
        return "adaptive damping (patience)"
    if layout is None or not is_covered(layout, raw, A, bind_parameters):
        return parameterization.without_layout
    k = layout.num_householder
    if k > MAX_REFLECTIONS:
        return f"{k} reflections (at most {MAX_REFLECTIONS})"
    if (y.dtype, A.dtype) != (torch.float32, torch.float32) or x.dtype == torch.float64:
        found = f"{x.dtype}, {y.dtype}, {A.dtype}"
        return f"x, y and A of {found} (y and A must be float32, x at most that)"
    if not 1 <= n <= MAX_STATES:
        return f"{n} states (at most {MAX_STATES})"
    if next_power_of_two(d) * next_power_of_two(max(k, 1)) > MAX_TILE:
        return f"{k} reflections of {d} channels"
    return None

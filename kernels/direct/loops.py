"""The choice between the two loops over time in eager PyTorch.

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bedouin.kernels.direct.buffered import buffered_reverse, buffered_sweep, takes_buffers
from bedouin.kernels.direct.forward import forward_sweep
from bedouin.kernels.direct.reference import Sweep
from bedouin.kernels.direct.reverse import ReportBackward, SolvedSweep, reverse_sweep
from bedouin.kernels.operands import Bind, Operands, Parameterization


def choose_sweep(
    operands: Operands,  # as `Operands.wide` gives them
    parameterization: Parameterization,
    bind: Bind,
    bind_parameters: tuple[Tensor, ...],  # any shapes
    keep_every: int,
    full_raw: Tensor | None = None,  # (t, b, r)
) -> Callable[[], tuple[Sweep, list[Tensor]]]:
    """A function that computes the result of `forward_sweep`, in buffers where these can be used;
    then it also writes `full_raw`, which `allocate_raw` has returned."""
    if takes_buffers(operands, parameterization, bind_parameters):
        return partial(buffered_sweep, operands, parameterization, keep_every, full_raw)
    return partial(forward_sweep, operands, parameterization, bind, bind_parameters, keep_every)


def allocate_raw(
    operands: Operands,  # as `Operands.wide` gives them
    parameterization: Parameterization,
    bind_parameters: tuple[Tensor, ...],  # any shapes
) -> Tensor | None:  # (t, b, r)
    """Memory for the raw values that include the feedback; None where there is no feedback or
    `choose_sweep` chooses the other loop."""
    if operands.W_y is None or not takes_buffers(operands, parameterization, bind_parameters):
        return None
    b, t_end, r = operands.raw.shape
    return operands.raw.new_empty(t_end, b, r)


def run_reverse(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor | None,  # (b, d, n); None: zeros
    kept: Tensor,  # (b, ceil(t / keep_every), n, d)
    keep_every: int,
    solved: SolvedSweep,
    report: ReportBackward | None,
) -> tuple[Tensor | None, ...]:
    """The result of `reverse_sweep`, in buffers where these can be used."""
    operands, options, parameters = solved.operands, solved.parameterization, solved.bind_parameters
    if takes_buffers(operands, options, parameters, grad_y, grad_h):
        return buffered_reverse(grad_y, grad_h, kept, keep_every, solved, report)
    if grad_h is None:
        grad_h = torch.zeros_like(operands.start()[0])
    return reverse_sweep(grad_y, grad_h, kept, keep_every, solved, report)

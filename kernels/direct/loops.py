"""The choice between the two loops over time in eager PyTorch.

Letters: b batch, t time, d channels, n state per channel.
"""

from collections.abc import Callable
from functools import partial

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
) -> Callable[[], tuple[Sweep, list[Tensor]]]:
    """A function that computes the result of `forward_sweep`, in buffers where these can be
    used."""
    if takes_buffers(operands, parameterization, bind_parameters):
        return partial(buffered_sweep, operands, parameterization, keep_every)
    return partial(forward_sweep, operands, parameterization, bind, bind_parameters, keep_every)


def run_reverse(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor,  # (b, d, n)
    kept: Tensor,  # (b, ceil(t / keep_every), n, d)
    keep_every: int,
    solved: SolvedSweep,
    report: ReportBackward | None,
) -> tuple[Tensor | None, ...]:
    """The result of `reverse_sweep`, in buffers where these can be used."""
    operands, options, parameters = solved.operands, solved.parameterization, solved.bind_parameters
    buffered = takes_buffers(operands, options, parameters, grad_y, grad_h)
    run = buffered_reverse if buffered else reverse_sweep
    return run(grad_y, grad_h, kept, keep_every, solved, report)

"""The choice between the two loops over time in eager PyTorch.

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bedouin.kernels.direct.buffered import (
    allocate_steps,
    buffered_reverse,
    buffered_sweep,
    takes_buffers,
)
from bedouin.kernels.direct.forward import forward_sweep
from bedouin.kernels.direct.reference import Sweep
from bedouin.kernels.direct.reverse import ReportBackward, SolvedSweep, reverse_sweep
from bedouin.kernels.operands import Bind, Operands, Parameterization


def choose_loop(
    operands: Operands,  # as `Operands.wide` gives them
    parameterization: Parameterization,
    bind: Bind,
    bind_parameters: tuple[Tensor, ...],  # any shapes
    keep_every: int,
    memory: tuple[Tensor, ...] = (),
) -> Callable[[], tuple[Sweep, list[Tensor]]]:
    """A function that computes the result of `forward_sweep`, in buffers where these can be used;
    then it also writes `memory`, which `allocate_steps` has returned."""
    if takes_buffers(operands, parameterization, bind_parameters):
        return partial(buffered_sweep, operands, parameterization, keep_every, memory)
    return partial(forward_sweep, operands, parameterization, bind, bind_parameters, keep_every)


def choose_memory(
    operands: Operands,  # as `Operands.wide` gives them
    parameterization: Parameterization,
    bind_parameters: tuple[Tensor, ...],  # any shapes
    keep_every: int,
) -> tuple[Tensor, ...]:
    """Memory for what a sweep in buffers leaves to its adjoint; none where `choose_loop` chooses
    the other loop."""
    if not takes_buffers(operands, parameterization, bind_parameters):
        return ()
    return allocate_steps(operands, parameterization, keep_every)


def run_reverse(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor | None,  # (b, d, n); None: zeros
    kept: Tensor,  # (b, ceil(t / keep_every), n, d); for the memory of a single chunk unused
    keep_every: int,
    solved: SolvedSweep,
    report: ReportBackward | None,
) -> tuple[Tensor | None, ...]:
    """The result of `reverse_sweep`, in buffers where these can be used."""
    operands, options, parameters = solved.operands, solved.parameterization, solved.bind_parameters
    if takes_buffers(operands, options, parameters, grad_y, grad_h):
        return buffered_reverse(grad_y, grad_h, kept, keep_every, solved, report)
    if solved.h is not None:
        # h before the first token; the memory ends with h before each
        kept = solved.memory[-1][:1].transpose(0, 1)
    if grad_h is None:
        grad_h = torch.zeros_like(operands.start()[0])
    return reverse_sweep(grad_y, grad_h, kept, keep_every, solved, report)

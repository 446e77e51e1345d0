"""The sweep in eager PyTorch as a differentiable function with the exact adjoint: in buffers, and
by the plain loop for what these do not take, custom mixers and transforms of torch.func.

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from bedouin.kernels.backend import without_autocast
from bedouin.kernels.direct.buffered import (
    allocate_steps,
    buffered_reverse,
    buffered_sweep,
    takes_buffers,
)
from bedouin.kernels.direct.buffers import CHUNK
from bedouin.kernels.direct.layout import choose_bind
from bedouin.kernels.direct.reference import Sweep, memory_of, sweep_tokens
from bedouin.kernels.direct.reverse import ReportBackward, SolvedSweep, reverse_sweep
from bedouin.kernels.double_backward import refuse_forward_mode, refuse_second_derivative
from bedouin.kernels.operands import Bind, Operands, Parameterization
from bedouin.kernels.outside import outside_of_graphs


class _DirectSweep(torch.autograd.Function):
    """Returns y*, last h, kept h, defect, scale, magnitude, pivot, and then the tensors of
    `allocate_steps` for a sweep in buffers. y* is `y_star` if given, and otherwise solved for.

    The tensors of `Operands.wide` and the bind parameters are passed one by one, because torch does
    not find tensors that require gradients inside a NamedTuple.
    """

    generate_vmap_rule = True
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(
        parameterization: Parameterization,
        bind: Bind,
        report: ReportBackward | None,
        keeps_memory: bool,
        y_star: Tensor | None,  # (b, t, d)
        *tensors: Any,  # the six operands, then the bind parameters, of any shapes
    ) -> tuple[Tensor, ...]:
        operands, parameters = Operands(*tensors[:6]), tensors[6:]
        options = parameterization, bind, parameters, CHUNK
        memory: tuple[Tensor, ...] = ()
        if y_star is None and takes_buffers(operands, parameterization, parameters):
            if keeps_memory:
                memory = allocate_steps(operands, parameterization, CHUNK)
            sweep, kept = buffered_sweep(operands, parameterization, CHUNK, memory)
        elif y_star is None:
            sweep, kept = sweep_tokens(operands, *options)
        else:
            h, kept = memory_of(y_star, operands, *options)
            x = operands.x
            norm, pivot = x.new_zeros(x.shape[:2]), x.new_zeros(x.shape[:1])
            sweep = Sweep(y_star.clone(), h, norm, norm, norm, pivot)
        first = operands.start()[0].mT
        checkpoints = torch.stack(kept, 1) if kept else first.unsqueeze(1)[:, :0].clone()
        y, h, *statistics = sweep[:6]
        if not operands.x.shape[1]:
            h = h.clone()  # it may be h0 itself
        return y, h, checkpoints, *statistics, *memory

    @staticmethod
    def setup_context(
        ctx: FunctionCtx,
        inputs: tuple[Any, ...],
        output: tuple[Tensor, ...],  # those that `forward` returns
    ) -> None:
        parameterization, bind, report, _, _, x, raw, W_y, A, _, y0, *parameters = inputs
        y, h, *others = output
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)  # avoids zeros of the size of h
        checkpoints, memory = others[0], others[5:]
        # of a sequence of several chunks the memory is that of the raw values
        last = h if len(memory) > 1 else None
        saved = y, checkpoints, last, x, raw, W_y, A, y0, *parameters
        ctx.save_for_backward(*saved, *memory)
        ctx.count = len(saved)  # type: ignore[attr-defined]
        ctx.options, ctx.report = (parameterization, bind), report  # type: ignore[attr-defined]

    @staticmethod
    def backward(
        ctx: Any,
        grad_y: Tensor | None,  # (b, t, d); None: zeros
        grad_h: Tensor | None,  # (b, d, n); None: zeros
        *unused: None,
    ) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        y, checkpoints, h, x, raw, W_y, A, y0, *parameters = saved[: ctx.count]
        # h0 is not needed: `checkpoints` begin with the memory before the first token
        operands = Operands(x, raw, W_y, A, None, y0)
        with torch.no_grad(), without_autocast(x.device):
            parameterization, bind = ctx.options
            grad_y = torch.zeros_like(y) if grad_y is None else grad_y
            known = tuple(parameters), saved[ctx.count :], h
            solved = SolvedSweep.of(y, operands, parameterization, bind, *known)
            if takes_buffers(operands, parameterization, solved.bind_parameters, grad_y, grad_h):
                grads = buffered_reverse(grad_y, grad_h, checkpoints, CHUNK, solved, ctx.report)
            else:
                if h is not None:
                    # h before the first token; the memory ends with h before each
                    checkpoints = solved.memory[-1][:1].transpose(0, 1)
                if grad_h is None:
                    grad_h = torch.zeros_like(operands.start()[0])
                grads = reverse_sweep(grad_y, grad_h, checkpoints, CHUNK, solved, ctx.report)
        sources = [grad_y, grad_h, x, raw, W_y, A, y0, *parameters]
        return (None, None, None, None, None, *refuse_second_derivative(grads, sources))


def eager_sweep(
    operands: Operands,
    parameterization: Parameterization,
    bind: Bind | None,
    bind_parameters: tuple[Tensor, ...],  # any shapes
    y_star: Tensor | None,  # (b, t, d)
    report: ReportBackward | None,
) -> Sweep:
    """`direct_sweep` in eager PyTorch."""
    bind = choose_bind(bind, parameterization, operands.A)
    tensors = *operands.wide(), *bind_parameters
    needs_gradient = any(v is not None and v.requires_grad for v in tensors)
    keeps_memory = torch.is_grad_enabled() and needs_gradient
    y, h, _, *found = _DirectSweep.apply(
        parameterization, bind, report, keeps_memory, y_star, *tensors
    )  # type: ignore[no-untyped-call]
    return Sweep(y, h, *(value.detach() for value in found[:4]))


uncompiled_sweep = outside_of_graphs(
    "bedouin's sweep runs outside of the graph for a mixer whose raw values only Python can read: "
    "use HouseholderProduct, or torch.compile with fullgraph=False"
)(eager_sweep)

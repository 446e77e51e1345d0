"""The loops of reference.py and reverse.py as a differentiable function, for mixers without a
layout and for transforms of torch.func.

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from bedouin.kernels.backend import outside_of_graphs, without_autocast
from bedouin.kernels.direct.layout import bind_by_layout
from bedouin.kernels.direct.reference import Sweep, memory_of, sweep_tokens
from bedouin.kernels.direct.reverse import ReportBackward, reverse_sweep
from bedouin.kernels.operands import Bind, Operands, Parameterization
from bedouin.kernels.operation import refuse_forward_mode, refuse_second_derivative


class _LoopSweep(torch.autograd.Function):
    """Returns y*, last h, kept h, defect, scale, magnitude, pivot. y* is `y_star` if given, and
    otherwise solved for.

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
        y_star: Tensor | None,  # (b, t, d)
        *tensors: Any,  # the six operands, then the bind parameters, of any shapes
    ) -> tuple[Tensor, ...]:
        operands = Operands(*tensors[:6])
        options = parameterization, bind, tensors[6:]
        if y_star is None:
            (y, h, *found), kept = sweep_tokens(operands, *options)
        else:
            y, (h, kept) = y_star.clone(), memory_of(y_star, operands, *options)
            found = [h.new_zeros(y.shape[:axes]) for axes in (2, 2, 2, 1)]
        return y, h, kept, *found

    @staticmethod
    def setup_context(
        ctx: FunctionCtx,
        inputs: tuple[Any, ...],
        output: tuple[Tensor, ...],  # those that `forward` returns
    ) -> None:
        parameterization, bind, report, _, x, raw, W_y, A, _, y0, *parameters = inputs
        y, _, *others = output
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)  # avoids zeros of the size of h
        ctx.save_for_backward(y, others[0], x, raw, W_y, A, y0, *parameters)
        ctx.options, ctx.report = (parameterization, bind), report  # type: ignore[attr-defined]

    @staticmethod
    def backward(
        ctx: Any,
        grad_y: Tensor | None,  # (b, t, d); None: zeros
        grad_h: Tensor | None,  # (b, d, n); None: zeros
        *unused: None,
    ) -> tuple[Any, ...]:
        y, kept, x, raw, W_y, A, y0, *parameters = ctx.saved_tensors
        # h0 is not needed: `kept` begins with the memory before the first token
        operands = Operands(x, raw, W_y, A, None, y0)
        with torch.no_grad(), without_autocast(x.device):
            parameterization, bind = ctx.options
            grad_y = torch.zeros_like(y) if grad_y is None else grad_y
            grad_h = torch.zeros_like(operands.start()[0]) if grad_h is None else grad_h
            map_of = operands, parameterization, bind, tuple(parameters)
            grads = reverse_sweep(grad_y, grad_h, y, kept, *map_of, ctx.report)
        sources = [grad_y, grad_h, x, raw, W_y, A, y0, *parameters]
        return (None, None, None, None, *refuse_second_derivative(grads, sources))


def loop_sweep(
    operands: Operands,
    parameterization: Parameterization,
    bind: Bind | None,
    bind_parameters: tuple[Tensor, ...],  # any shapes
    y_star: Tensor | None,  # (b, t, d)
    report: ReportBackward | None,
) -> Sweep:
    """`direct_sweep` in eager PyTorch."""
    bind = bind or bind_by_layout(parameterization.known_layout(), operands.A)
    tensors = *operands.wide(), *bind_parameters
    y, h, _, *found = _LoopSweep.apply(parameterization, bind, report, y_star, *tensors)  # type: ignore[no-untyped-call]
    return Sweep(y, h, *(value.detach() for value in found))


uncompiled_sweep = outside_of_graphs(
    "bedouin's sweep runs outside of the graph for a mixer whose raw values only Python can read: "
    "use HouseholderProduct, or torch.compile with fullgraph=False"
)(loop_sweep)

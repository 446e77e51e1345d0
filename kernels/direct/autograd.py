"""The direct sweep as one differentiable operation with the exact adjoint of reverse.py."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from bedouin.kernels.backend import Backend, without_autocast
from bedouin.kernels.direct.forward import forward_sweep, remember
from bedouin.kernels.direct.fused import choose_sweep
from bedouin.kernels.direct.layout import is_covered
from bedouin.kernels.direct.reference import (
    Sweep,
    SweepOptions,
    full_raw,
    start_tensors,
)
from bedouin.kernels.direct.registered import direct_sweep_registered
from bedouin.kernels.direct.reverse import ReportBackward, reverse_sweep, saved_inputs
from bedouin.kernels.double_backward import refuse_forward_mode, refuse_second_derivative
from bedouin.kernels.outside import outside_of_graphs

CHUNK = 16
"""Tokens between two kept h: the backward's workspace is this many (b, d, n) tensors."""

WORKSPACE = 2**23
"""Most elements of h (32 MB in float32) that the Triton sweep's backward holds for a chunk."""


class _DirectSweep(torch.autograd.Function):
    """y*, last h, kept h, defect, scale, magnitude, pivot; y* is solved, or `y_star` if given."""

    generate_vmap_rule = True
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(
        options: SweepOptions,
        report: ReportBackward | None,
        y_star: Tensor | None,
        x: Tensor,
        raw: Tensor,
        W_y: Tensor | None,
        A: Tensor,
        h0: Tensor,
        y0: Tensor,
        *bind_parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        if y_star is None:
            sweep, kept = forward_sweep(x, raw, W_y, A, h0, y0, bind_parameters, options, CHUNK)
        else:
            full = full_raw(y_star, raw, W_y, y0, options)
            coefficients = options.bind(full, *bind_parameters)
            h, kept = remember(y_star, x, coefficients, A, h0, options, CHUNK)
            norm, pivot = x.new_zeros(x.shape[:2]), x.new_zeros(x.shape[:1])
            sweep = Sweep(y_star.clone(), h, norm, norm, norm, pivot)
        checkpoints = torch.stack(kept, 1) if kept else h0.mT.unsqueeze(1)[:, :0]
        y, h, *statistics = sweep[:6]
        return y, h.clone(), checkpoints, *statistics

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
    ) -> None:
        options, report, _, x, raw, W_y, A, h0, y0, *bind_parameters = inputs
        y, _, checkpoints, *statistics = output
        ctx.mark_non_differentiable(checkpoints, *statistics)
        ctx.save_for_backward(y, checkpoints, x, raw, W_y, A, y0, *bind_parameters)
        ctx.options, ctx.report = options, report  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_h: Tensor, *unused: Tensor) -> tuple[Any, ...]:
        y, checkpoints, x, raw, W_y, A, y0, *bind_parameters = ctx.saved_tensors
        with torch.no_grad(), without_autocast(x.device):
            inputs = saved_inputs(y, x, raw, W_y, A, y0, tuple(bind_parameters), ctx.options)
            grads = reverse_sweep(
                grad_y, grad_h, checkpoints, CHUNK, inputs, ctx.options, ctx.report
            )
        sources = [grad_y, grad_h, x, raw, W_y, A, y0, *bind_parameters]
        return (None, None, None, *refuse_second_derivative(grads, sources))


def direct_sweep(
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor | None,
    y0: Tensor | None,
    bind_parameters: tuple[Tensor, ...],
    options: SweepOptions,
    *,
    y_star: Tensor | None = None,
    report: ReportBackward | None = None,
    backend: Backend = "auto",
) -> Sweep:
    """The exact fixed point with the exact implicit gradient; shapes as `direct_sweep_reference`,
    h0 and y0 None for zeros.

    With `y_star`, a fixed point found elsewhere, nothing is solved: the result is y_star with that
    gradient (the statistics are then zero). `report` gets defect and scale of the adjoint equation,
    but not under torch.compile, whose graphs call no Python back. There the sweep is one operation
    if `options.layout` says how raw values are read, else it runs outside of the graph.
    The Triton kernels need `options.layout`; raises ValueError where `backend="triton"` cannot run.
    x and raw may have a lower dtype than A, whose dtype the state and the result have.
    Once differentiable. Saves O(b t (d + r)) and h at every CHUNK-th token.
    """
    if choose_sweep(backend, x, raw, A, bind_parameters, options) == "triton":
        operands = (x, raw, W_y, A, h0, y0)
        return direct_sweep_registered(
            *operands, options, _chunk(x, A), y_star, report, plain=False
        )
    if not torch.compiler.is_compiling():
        return _plain_sweep(x, raw, W_y, A, h0, y0, bind_parameters, options, y_star, report)
    if is_covered(options.layout, raw, A, bind_parameters):
        operands = (x, raw, W_y, A, h0, y0)
        return direct_sweep_registered(*operands, options, CHUNK, y_star, report, plain=True)
    arguments = (x, raw, W_y, A, h0, y0, bind_parameters, options, y_star, report)
    return _uncompiled_sweep(*arguments)


def _plain_sweep(
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor | None,
    y0: Tensor | None,
    bind_parameters: tuple[Tensor, ...],
    options: SweepOptions,
    y_star: Tensor | None,
    report: ReportBackward | None,
) -> Sweep:
    x, raw = x.to(A.dtype), raw.to(A.dtype)
    h0, y0 = start_tensors(h0, y0, x, A)
    y, h, _, *statistics = _DirectSweep.apply(
        options, report, y_star, x, raw, W_y, A, h0, y0, *bind_parameters
    )  # type: ignore[no-untyped-call]
    return Sweep(y, h, *(value.detach() for value in statistics))


_uncompiled_sweep = outside_of_graphs(
    "bedouin's sweep runs outside of the graph for a mixer whose raw values only Python can read: "
    "use HouseholderProduct, or torch.compile with fullgraph=False"
)(_plain_sweep)


def _chunk(x: Tensor, A: Tensor) -> int:
    """Tokens between two kept h in Triton: down to 4, so that WORKSPACE will do."""
    fit = (chunk for chunk in (CHUNK, CHUNK // 2) if chunk * x.shape[0] * A.numel() <= WORKSPACE)
    return next(fit, CHUNK // 4)

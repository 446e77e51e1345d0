"""The Triton sweep as operations of torch.library, so that torch.compile keeps whole graphs.

A solve, the same gradient for a y that is known, and the reverse sweep of both. The operations
import Triton when they run: registering them costs nothing where it is not chosen.

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from bedouin.kernels.backend import is_transformed
from bedouin.kernels.direct.fused import (
    fused_memory,
    fused_reverse,
    fused_sweep,
    padding,
    smallest_pivots,
)
from bedouin.kernels.direct.reference import Activation, RawLayout, Sweep, SweepOptions
from bedouin.kernels.direct.reverse import ReportBackward
from bedouin.kernels.once import refuse_second_derivative
from bedouin.kernels.scan import Eigenvalues, InputScale

Solved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""y (b, t, d), last h (b, d, n), norm(y_{t-1}) (b, t, d), kept h (b, slots, n, d), statistics
(4, b, t)."""

Pulled = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Gradients of x, raw, W_y, A, h0, y0, and the statistics (2, b, t) of the adjoint equation."""


@torch.library.custom_op("bedouin::direct_sweep", mutates_args=())
def _sweep(
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor,
    y0: Tensor,
    activation: str,
    selective: bool,
    num_householder: int,
    beta_max: float,
    input_scale: str,
    eigenvalues: str,
    norm_eps: float | None,
    keep_every: int,
) -> Solved:
    layout = _layout(activation, selective, num_householder, beta_max)
    options = _options(layout, input_scale, eigenvalues, norm_eps)
    return fused_sweep(x, raw, W_y, A, h0, y0, options, keep_every)


@_sweep.register_fake
def _sweep_fake(
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor,
    y0: Tensor,
    activation: str,
    selective: bool,
    num_householder: int,
    beta_max: float,
    input_scale: str,
    eigenvalues: str,
    norm_eps: float | None,
    keep_every: int,
) -> Solved:
    b, t, d = x.shape
    h, normed, kept = _memory_like(x, W_y, A, y0, keep_every)
    return A.new_empty(b, t, d), h, normed, kept, A.new_empty(4, b, t)


@torch.library.custom_op("bedouin::direct_sweep_known", mutates_args=())
def _known(
    y_star: Tensor,
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor,
    y0: Tensor,
    activation: str,
    selective: bool,
    num_householder: int,
    beta_max: float,
    input_scale: str,
    eigenvalues: str,
    norm_eps: float | None,
    keep_every: int,
) -> Solved:
    layout = _layout(activation, selective, num_householder, beta_max)
    options = _options(layout, input_scale, eigenvalues, norm_eps)
    h, normed, kept = fused_memory(y_star, x, raw, W_y, A, h0, y0, options, keep_every)
    y = y_star.clone(memory_format=torch.contiguous_format)
    return y, h, normed, kept, A.new_zeros(4, *x.shape[:2])


@_known.register_fake
def _known_fake(
    y_star: Tensor,
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor,
    y0: Tensor,
    activation: str,
    selective: bool,
    num_householder: int,
    beta_max: float,
    input_scale: str,
    eigenvalues: str,
    norm_eps: float | None,
    keep_every: int,
) -> Solved:
    h, normed, kept = _memory_like(x, W_y, A, y0, keep_every)
    return y_star.new_empty(y_star.shape), h, normed, kept, A.new_empty(4, *x.shape[:2])


def _memory_like(
    x: Tensor, W_y: Tensor | None, A: Tensor, y0: Tensor, keep_every: int
) -> tuple[Tensor, Tensor, Tensor]:
    (b, t, d), n = x.shape, A.shape[1]
    h = A.new_empty(b, n, d).mT
    normed = y0.new_empty(b, 0, d) if W_y is None else W_y.new_empty(b, t + 1, d)[:, :t]
    return h, normed, A.new_empty(b, (t + keep_every - 1) // keep_every, n, d)


@torch.library.custom_op("bedouin::direct_sweep_backward", mutates_args=())
def _sweep_backward(
    grad_y: Tensor,
    grad_h: Tensor,
    y: Tensor,
    normed: Tensor,
    kept: Tensor,
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    y0: Tensor,
    activation: str,
    selective: bool,
    num_householder: int,
    beta_max: float,
    input_scale: str,
    eigenvalues: str,
    norm_eps: float | None,
    keep_every: int,
) -> Pulled:
    layout = _layout(activation, selective, num_householder, beta_max)
    options = _options(layout, input_scale, eigenvalues, norm_eps)
    saved = (kept, normed, keep_every, y, x, raw, W_y, A, y0)
    with torch.autocast(x.device.type, enabled=False):
        return fused_reverse(grad_y, grad_h, *saved, options)


@_sweep_backward.register_fake
def _sweep_backward_fake(
    grad_y: Tensor,
    grad_h: Tensor,
    y: Tensor,
    normed: Tensor,
    kept: Tensor,
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    y0: Tensor,
    activation: str,
    selective: bool,
    num_householder: int,
    beta_max: float,
    input_scale: str,
    eigenvalues: str,
    norm_eps: float | None,
    keep_every: int,
) -> Pulled:
    (b, t, d), n, r = x.shape, A.shape[1], raw.shape[2]
    rows = r if W_y is None else r + padding(r)
    grad_W_y = A.new_empty(0) if W_y is None else W_y.new_empty(W_y.shape)
    first = x.new_empty(x.shape), raw.new_empty(b, t, rows)[..., :r], grad_W_y
    then = A.new_empty(n, d).mT, A.new_empty(b, n, d).mT, y0.new_empty(y0.shape)
    return *first, *then, A.new_empty(2, b, t)


def _save(ctx: Any, operands: tuple[Any, ...], options: tuple[Any, ...], output: Solved) -> None:
    y, _, *others = output
    ctx.mark_non_differentiable(*others)
    ctx.set_materialize_grads(False)  # those of the others would be written for nothing
    ctx.save_for_backward(y, *others[:2], *operands)
    ctx.options = options
    ctx.report = None


def _save_sweep(ctx: Any, inputs: tuple[Any, ...], output: Solved) -> None:
    _save(ctx, inputs[:6], inputs[6:], output)


def _save_known(ctx: Any, inputs: tuple[Any, ...], output: Solved) -> None:
    _save(ctx, inputs[1:7], inputs[7:], output)


def _pull(ctx: Any, grad_y: Tensor | None, grad_h: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of x, raw, W_y, A, h0 and y0."""
    y, normed, kept, x, raw, W_y, A, h0, y0 = ctx.saved_tensors
    grad_y = torch.zeros_like(y) if grad_y is None else grad_y
    grad_h = torch.zeros_like(h0) if grad_h is None else grad_h
    saved = (y, normed, kept, x, raw, W_y, A, y0)
    with torch.no_grad():
        *grads, statistics = _sweep_backward(grad_y, grad_h, *saved, *ctx.options)
    if ctx.report is not None and y.shape[1] and not is_transformed():
        # last token first, as the reverse sweep meets them
        ctx.report(statistics[0].flip(1), statistics[1].flip(1))
    every = [grad if i != 2 or W_y is not None else None for i, grad in enumerate(grads)]
    return refuse_second_derivative(every, [grad_y, grad_h, x, raw, W_y, A, h0, y0])


def _pull_sweep(
    ctx: Any, grad_y: Tensor | None, grad_h: Tensor | None, *unused: None
) -> tuple[Tensor | None, ...]:
    return (*_pull(ctx, grad_y, grad_h), *[None] * len(ctx.options))


def _pull_known(
    ctx: Any, grad_y: Tensor | None, grad_h: Tensor | None, *unused: None
) -> tuple[Tensor | None, ...]:
    return (None, *_pull(ctx, grad_y, grad_h), *[None] * len(ctx.options))


_sweep.register_autograd(_pull_sweep, setup_context=_save_sweep)
_known.register_autograd(_pull_known, setup_context=_save_known)


def direct_sweep_triton(
    x: Tensor,  # (b, t, d)
    raw: Tensor,  # (b, t, r)
    W_y: Tensor | None,  # (r, d)
    A: Tensor,  # (d, n)
    h0: Tensor,  # (b, d, n)
    y0: Tensor,  # (b, d)
    options: SweepOptions,
    keep_every: int,
    y_star: Tensor | None,
    report: ReportBackward | None,
) -> Sweep:
    """`direct_sweep` where `choose_sweep` says "triton". torch.compile ignores `report`."""
    layout = options.layout
    if layout is None:
        raise ValueError("options.layout must be a RawLayout for the Triton kernels, got None")
    operands = (x, raw, W_y, A, h0, y0)
    fields = (layout.activation, layout.selective, layout.num_householder, layout.beta_max)
    scales = (options.input_scale, options.eigenvalues, options.feedback_norm_eps)
    if y_star is None:
        y, h, _, _, statistics = _sweep(*operands, *fields, *scales, keep_every)
        pivot = smallest_pivots(statistics[3])
    else:
        y, h, _, _, statistics = _known(y_star, *operands, *fields, *scales, keep_every)
        pivot = statistics.new_zeros(x.shape[:1])
    if report is not None and not torch.compiler.is_compiling() and y.grad_fn is not None:
        # an operation takes no functions: this one is handed to the node that `_pull` gets
        y.grad_fn.report = report
    defect, scale, magnitude = statistics[:3].unbind()
    return Sweep(y, h, defect, scale, magnitude, pivot)


def _layout(activation: str, selective: bool, num_householder: int, beta_max: float) -> RawLayout:
    return RawLayout(cast(Activation, activation), selective, num_householder, beta_max)


def _options(
    layout: RawLayout, input_scale: str, eigenvalues: str, norm_eps: float | None
) -> SweepOptions:
    scales = cast(InputScale, input_scale), cast(Eigenvalues, eigenvalues)
    return SweepOptions(_no_bind, *scales, norm_eps, layout)


def _no_bind(raw: Tensor) -> NoReturn:
    raise NotImplementedError("the kernels read raw values as the layout says")

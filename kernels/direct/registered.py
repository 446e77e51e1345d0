"""The sweep as operations of torch.library, so that torch.compile keeps whole graphs.

A solve, the same gradient for a y that is known, and the reverse sweep of both: with Triton, or
with `plain` in eager PyTorch, which torch.compile would write out token by token. The operations
import Triton when they run: registering them costs nothing where it is not chosen.

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

from typing import Any, cast

import torch
from torch import Tensor

from bedouin.kernels.backend import is_transformed
from bedouin.kernels.direct.fused import (
    count_kept,
    fused_memory,
    fused_reverse,
    fused_sweep,
    summarize,
)
from bedouin.kernels.direct.layout import bind_by_layout
from bedouin.kernels.direct.plain import (
    plain_memory,
    plain_reverse,
    plain_summary,
    plain_sweep,
)
from bedouin.kernels.direct.reference import Activation, RawLayout, Sweep, SweepOptions
from bedouin.kernels.direct.reverse import ReportBackward
from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.linear import padding
from bedouin.kernels.scan import Eigenvalues, InputScale

Known = tuple[Tensor, Tensor, Tensor]
"""y (b, t, d), last h (b, d, n), kept h (b, `_slots` n d). One axis, and the plain sweep's first
memory in it, because torch.compile asks whether an axis may be 0 or 1, and would compile sequences
of more than `keep_every` tokens anew."""

Solved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The same, the statistics (4, b, t), and residual and pivot (2, b) and converged (b,) of them."""

Pulled = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Gradients of x, raw, W_y, A, h0, y0, and the statistics (2, b, t) of the adjoint equation."""


@torch.library.custom_op("bedouin::direct_sweep", mutates_args=())
def _sweep(
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor | None,
    y0: Tensor | None,
    activation: str,
    selective: bool,
    num_householder: int,
    beta_max: float,
    input_scale: str,
    eigenvalues: str,
    norm_eps: float | None,
    plain: bool,
    keep_every: int,
) -> Solved:
    layout = _layout(activation, selective, num_householder, beta_max)
    options = _options(layout, A, input_scale, eigenvalues, norm_eps)
    run, summary = (plain_sweep, plain_summary) if plain else (fused_sweep, summarize)
    y, h, kept, statistics = run(x, raw, W_y, A, h0, y0, options, keep_every)
    return y, h, kept.flatten(1), statistics, *summary(statistics)


@_sweep.register_fake
def _sweep_fake(
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor | None,
    y0: Tensor | None,
    *options: Any,
) -> Solved:
    b, t, d = x.shape
    summary = A.new_empty(2, b), A.new_empty(b, dtype=torch.bool)
    return A.new_empty(b, t, d), *_memory_like(x, A, *options[-2:]), A.new_empty(4, b, t), *summary


@torch.library.custom_op("bedouin::direct_sweep_known", mutates_args=())
def _known(
    y_star: Tensor,
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor | None,
    y0: Tensor | None,
    activation: str,
    selective: bool,
    num_householder: int,
    beta_max: float,
    input_scale: str,
    eigenvalues: str,
    norm_eps: float | None,
    plain: bool,
    keep_every: int,
) -> Known:
    layout = _layout(activation, selective, num_householder, beta_max)
    options = _options(layout, A, input_scale, eigenvalues, norm_eps)
    run = plain_memory if plain else fused_memory
    h, kept = run(y_star, x, raw, W_y, A, h0, y0, options, keep_every)
    return y_star.clone(memory_format=torch.contiguous_format), h, kept.flatten(1)


@_known.register_fake
def _known_fake(
    y_star: Tensor,
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor | None,
    y0: Tensor | None,
    *options: Any,
) -> Known:
    return y_star.new_empty(y_star.shape), *_memory_like(x, A, *options[-2:])


def _memory_like(x: Tensor, A: Tensor, plain: bool, keep_every: int) -> tuple[Tensor, Tensor]:
    (b, t, d), n = x.shape, A.shape[1]
    return A.new_empty(b, n, d).mT, A.new_empty(b, _slots(t, plain, keep_every) * n * d)


def _slots(t: int, plain: bool, keep_every: int) -> int:
    """How many memories are kept: the plain sweep keeps the first, too."""
    return (t + keep_every - 1) // keep_every if plain else count_kept(t, keep_every)


@torch.library.custom_op("bedouin::direct_sweep_backward", mutates_args=())
def _sweep_backward(
    grad_y: Tensor,
    grad_h: Tensor | None,
    y: Tensor,
    kept: Tensor,
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor | None,
    y0: Tensor | None,
    wants_y0: bool,
    activation: str,
    selective: bool,
    num_householder: int,
    beta_max: float,
    input_scale: str,
    eigenvalues: str,
    norm_eps: float | None,
    plain: bool,
    keep_every: int,
) -> Pulled:
    layout = _layout(activation, selective, num_householder, beta_max)
    options = _options(layout, A, input_scale, eigenvalues, norm_eps)
    kept = kept.unflatten(1, (_slots(x.shape[1], plain, keep_every), *A.mT.shape))
    saved = (kept, keep_every, y, x, raw, W_y, A, h0, y0)
    run = plain_reverse if plain else fused_reverse
    with torch.autocast(x.device.type, enabled=False):
        return run(grad_y, grad_h, *saved, options, wants_y0=wants_y0)


@_sweep_backward.register_fake
def _sweep_backward_fake(
    grad_y: Tensor,
    grad_h: Tensor | None,
    y: Tensor,
    kept: Tensor,
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor | None,
    y0: Tensor | None,
    wants_y0: bool,
    *options: Any,
) -> Pulled:
    (b, t, d), n, r = x.shape, A.shape[1], raw.shape[2]
    rows = r + padding(r)
    grad_W_y = A.new_empty(0) if W_y is None else W_y.new_empty(W_y.shape)
    first = x.new_empty(x.shape), raw.new_empty(b, t, rows)[..., :r], grad_W_y
    then = A.new_empty(n, d).mT, A.new_empty(b, n, d).mT, A.new_empty(b if wants_y0 else 0, d)
    return *first, *then, A.new_empty(2, b, t)


def _save(
    ctx: Any,
    operands: tuple[Any, ...],
    options: tuple[Any, ...],
    output: Known | Solved,
    wants_y0: bool,
) -> None:
    y, _, *others = output
    ctx.mark_non_differentiable(*others)
    ctx.set_materialize_grads(False)  # those of the others would be written for nothing
    ctx.save_for_backward(y, others[0], *operands)
    # the gradient of the start is computed where somebody needs it
    ctx.wants_y0 = wants_y0
    ctx.options = options
    ctx.report = None


def _save_sweep(ctx: Any, inputs: tuple[Any, ...], output: Solved) -> None:
    _save(ctx, inputs[:6], inputs[6:], output, ctx.needs_input_grad[5])


def _save_known(ctx: Any, inputs: tuple[Any, ...], output: Known) -> None:
    _save(ctx, inputs[1:7], inputs[7:], output, ctx.needs_input_grad[6])


def _pull(ctx: Any, grad_y: Tensor | None, grad_h: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of x, raw, W_y, A, h0 and y0."""
    y, _, _, _, W_y, _, h0, _ = saved = ctx.saved_tensors
    grad_y = torch.zeros_like(y) if grad_y is None else grad_y
    with torch.no_grad():
        *grads, statistics = _sweep_backward(grad_y, grad_h, *saved, ctx.wants_y0, *ctx.options)
    if ctx.report is not None and y.shape[1] and not is_transformed():
        ctx.report(*statistics.unbind())
    wanted = (True, True, W_y is not None, True, h0 is not None, ctx.wants_y0)
    every = [grad if want else None for grad, want in zip(grads, wanted, strict=True)]
    return refuse_second_derivative(every, [grad_y, grad_h, *saved])


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


def direct_sweep_registered(
    x: Tensor,  # (b, t, d)
    raw: Tensor,  # (b, t, r)
    W_y: Tensor | None,  # (r, d)
    A: Tensor,  # (d, n)
    h0: Tensor | None,  # (b, d, n); None: zeros
    y0: Tensor | None,  # (b, d); None: zeros
    options: SweepOptions,
    keep_every: int,
    y_star: Tensor | None,
    report: ReportBackward | None,
    *,
    plain: bool,
) -> Sweep:
    """`direct_sweep` as one operation; needs `options.layout`. torch.compile ignores `report`."""
    layout = options.layout
    if layout is None:
        raise ValueError("options.layout must be a RawLayout for an operation, got None")
    operands = (x, raw, W_y, A, h0, y0)
    fields = (layout.activation, layout.selective, layout.num_householder, layout.beta_max)
    scales = (options.input_scale, options.eigenvalues, options.feedback_norm_eps)
    if y_star is None:
        found = _sweep(*operands, *fields, *scales, plain, keep_every)
        y, h, _, statistics, summary, converged = found
        residual, pivot = summary.unbind()
        defect, scale, magnitude, _ = statistics.unbind()
        reduced = (None, None) if plain else (residual, converged)
        sweep = Sweep(y, h, defect, scale, magnitude, pivot, *reduced)
    else:
        y, h, _ = _known(y_star, *operands, *fields, *scales, plain, keep_every)
        zeros = A.new_zeros(x.shape[:2])
        sweep = Sweep(y, h, zeros, zeros, zeros, A.new_zeros(x.shape[:1]))
    if report is not None and not torch.compiler.is_compiling() and y.grad_fn is not None:
        # an operation takes no functions: this one is handed to the node that `_pull` gets
        y.grad_fn.report = report
    return sweep


def _layout(activation: str, selective: bool, num_householder: int, beta_max: float) -> RawLayout:
    return RawLayout(cast(Activation, activation), selective, num_householder, beta_max)


def _options(
    layout: RawLayout, A: Tensor, input_scale: str, eigenvalues: str, norm_eps: float | None
) -> SweepOptions:
    scales = cast(InputScale, input_scale), cast(Eigenvalues, eigenvalues)
    return SweepOptions(bind_by_layout(layout, A), *scales, norm_eps, layout)

"""The sweep as operations of torch.library, so that torch.compile sees no graph breaks.

There are two: the solve, or for a given y the memory alone, and the reverse sweep of both. Each
runs eager PyTorch with `plain`, which torch.compile would otherwise unroll token by token, or else
Triton kernels.
`Operands` and `Parameterization` are flattened to tensors and scalars here and nowhere else. Triton
is imported when an operation runs, not when it is registered.

Letters: b batch, t time, d channels, n state per channel, r raw values, H heads
(kernels/heads.py).
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import is_transformed, without_autocast
from bedouin.kernels.direct.cpu import cpu_reverse, cpu_sweep
from bedouin.kernels.direct.layout import bind_by_layout, state_major
from bedouin.kernels.direct.limits import CHUNK, Gradients
from bedouin.kernels.direct.reference import memory_of
from bedouin.kernels.heads import padding
from bedouin.kernels.launch import ceil_div
from bedouin.kernels.operands import NUM_SCALARS, SCALARS, Operands, Parameterization
from bedouin.kernels.operation import operation, refuse_second_derivative

SweepResult = tuple[Tensor, Tensor, Tensor, Tensor]
"""y (b, t, d), last h (b, d, n), kept h (b, ceil(t / CHUNK) n d), and the statistics (4, b, t).

The kept h are flattened to one axis, because torch.compile specializes on axes of size 1 and would
recompile for sequences of more than CHUNK tokens."""


OPERANDS = "Tensor x, Tensor raw, Tensor? W_y, Tensor A, Tensor? h0, Tensor? y0"
OPTIONS = f"{SCALARS}, bool plain"


def _parse(*flat: Any) -> tuple[Operands, Parameterization, bool]:
    """The operands and the parameterization of an operation, and whether it is plain torch."""
    behind = 6 + NUM_SCALARS
    return Operands(*flat[:6]), Parameterization.from_scalars(*flat[6:behind]), flat[behind]


def _sweep_like(*flat: Any) -> SweepResult:
    operands = Operands(*flat[:6])
    A, (b, t, d), n = operands.A, operands.x.shape, operands.A.shape[-1]
    kept = A.new_empty(b, ceil_div(t, CHUNK) * n * d)
    return A.new_empty(b, t, d), A.new_empty(b, n, d).mT, kept, A.new_empty(4, b, t)


@operation(
    "direct_sweep",
    f"({OPERANDS}, Tensor? y_star, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _sweep_like,
)
def sweep_operation(*flat: Any) -> SweepResult:
    """With `y_star` (b, t, d) the memory of this y, which is not solved for: the statistics are 0,
    and the gradient is that of the solve."""
    (operands, options, plain), y_star = _parse(*flat[:6], *flat[7:]), flat[6]
    if y_star is not None:
        y = y_star.clone(memory_format=torch.contiguous_format)
        bind = bind_by_layout(options.known_layout(), operands.A)
        h, kept = memory_of(y, operands.wide(), options, bind, (), by_kernel=not plain)
        (b, t, _), h = y.shape, state_major(h)
        statistics = operands.A.new_zeros(4, b, t)
    elif plain or not operands.x.numel():
        y, h, kept, statistics = cpu_sweep(operands, options)
    else:
        from bedouin.kernels.direct.launch import launch_sweep

        y, h, kept, statistics = launch_sweep(operands, options)
    return y, h.mT, kept.flatten(1), statistics


def _like(
    operands: Operands,
    found: tuple[Tensor | None, ...] = (None,) * 7,  # as `Gradients`, with any strides
) -> Gradients:
    """Gradients with the dtypes and strides of the operation, with the values that are found."""
    x, raw, W_y, A, _, y0 = operands
    (b, t, d), r, heads = x.shape, raw.shape[2], A.shape[:-2]
    rows = r + padding(r)
    every: Gradients = (
        x.new_empty(x.shape),
        raw.new_empty(b, t, rows)[..., :r],
        A.new_empty(0) if W_y is None else W_y.new_empty(*heads, rows, d)[..., :r, :],
        A.new_empty(A.mT.shape).mT,
        A.new_empty(b, A.shape[-1], d).mT,
        A.new_empty(0 if y0 is None else b, d),
        A.new_empty(2, b, t),
    )
    for out, v in zip(every, found, strict=True):
        if v is not None and out.numel():
            out.copy_(v)
    return every


@operation(
    "direct_sweep_backward",
    f"(Tensor grad_y, Tensor? grad_h, Tensor y, Tensor kept, {OPERANDS}, {OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda *flat: _like(Operands(*flat[4:10])),
)
def _sweep_backward(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor | None,  # (b, d, n); None: zeros
    y: Tensor,  # (b, t, d)
    kept: Tensor,  # (b, ceil(t / CHUNK) n d)
    *flat: Any,
) -> Gradients:
    operands, options, plain = _parse(*flat)
    x, A = operands.x, operands.A
    with without_autocast(x.device):
        of_h = A.mT.shape[-2:]
        kept = kept.unflatten(1, (ceil_div(x.shape[1], CHUNK), *of_h))
        H = A.new_zeros(len(x), *of_h) if grad_h is None else state_major(grad_h)
        if plain or not y.numel():
            # with the dtypes and the strides of the operation
            return _like(operands, cpu_reverse(grad_y, H, y, kept, operands, options))
        from bedouin.kernels.direct.launch import launch_reverse

        return launch_reverse(grad_y, H, y, kept, operands, options)


def _save(ctx: Any, inputs: tuple[Any, ...], output: SweepResult) -> None:
    y, _, *others = output
    ctx.mark_non_differentiable(*others)
    ctx.set_materialize_grads(False)  # avoids zeros for the other outputs, which are never read
    ctx.save_for_backward(y, others[0], *inputs[:6])
    ctx.options = inputs[7:]
    ctx.report = None


def _vjp(
    ctx: Any,
    grad_y: Tensor | None,  # (b, t, d); None: zeros
    grad_h: Tensor | None,  # (b, d, n); None: zeros
    *unused: None,
) -> tuple[Tensor | None, ...]:
    y, _, _, _, W_y, _, h0, y0 = saved = ctx.saved_tensors
    grad_y = torch.zeros_like(y) if grad_y is None else grad_y
    with torch.no_grad():
        *grads, statistics = _sweep_backward(grad_y, grad_h, *saved, *ctx.options)
    if ctx.report is not None and y.shape[1] and not is_transformed():
        ctx.report(*statistics.unbind())
    given = (True, True, W_y is not None, True, h0 is not None, y0 is not None)
    every = [grad if there else None for grad, there in zip(grads, given, strict=True)]
    once = refuse_second_derivative(every, [grad_y, grad_h, *saved])
    return *once, *[None] * (1 + len(ctx.options))


sweep_operation.register_autograd(_vjp, setup_context=_save)

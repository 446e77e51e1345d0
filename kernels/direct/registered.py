"""The sweep as operations of torch.library, so that torch.compile sees no graph breaks.

There are three operations: the solve; the memory for a given y, which has the same gradient; and
the reverse sweep of both. Each runs eager PyTorch with `plain`, which torch.compile would otherwise
unroll token by token, or else Triton kernels.
`Operands` and `Parameterization` are flattened to tensors and scalars here and nowhere else. Triton
is imported when an operation runs, not when it is registered.

Letters: b batch, t time, d channels, n state per channel, r raw values, f those of them with
feedback, H heads (kernels/heads.py).
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import is_transformed, without_autocast
from bedouin.kernels.direct.cpu import cpu_reverse, cpu_sweep
from bedouin.kernels.direct.layout import choose_bind, state_major
from bedouin.kernels.direct.limits import count_kept
from bedouin.kernels.direct.reference import memory_of
from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.linear import padding
from bedouin.kernels.operands import NUM_SCALARS, SCALARS, Operands, Parameterization
from bedouin.kernels.operation import Operation, operation

MemoryResult = tuple[Tensor, Tensor, Tensor]
"""y (b, t, d), last h (b, d, n), kept h (b, `_slots` n d).

The kept h are flattened to one axis, and the plain sweep's begin with the first memory, because
torch.compile specializes on axes of size 0 and 1 and would recompile for sequences of more than
`keep_every` tokens."""

SweepResult = tuple[Tensor, Tensor, Tensor, Tensor]
"""The tensors of MemoryResult, and the statistics (4, b, t)."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Gradients of x, raw, W_y, A, h0, y0, and the statistics (2, b, t) of the adjoint equation."""


OPERANDS = "Tensor x, Tensor raw, Tensor? W_y, Tensor A, Tensor? h0, Tensor? y0"
OPTIONS = f"{SCALARS}, bool plain, SymInt keep_every"


def _parse(*flat: Any) -> tuple[Operands, Parameterization, *tuple[Any, ...]]:
    """The operands and the parameterization of an operation, and the arguments behind them."""
    behind = 6 + NUM_SCALARS
    return Operands(*flat[:6]), Parameterization.from_scalars(*flat[6:behind]), *flat[behind:]


@operation(
    "direct_sweep",
    f"({OPERANDS}, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def sweep_operation(*flat: Any) -> SweepResult:
    operands, options, plain, keep_every = _parse(*flat)
    if plain:
        y, h, kept, statistics = cpu_sweep(operands, options, keep_every)
        return y, h, kept.flatten(1), statistics
    from bedouin.kernels.direct.launch import launch_sweep

    y, h, kept, statistics = launch_sweep(operands.with_head_axis(), options, keep_every)
    return y, h.mT, kept.flatten(1), statistics


@sweep_operation.register_fake
def _sweep_fake(*flat: Any) -> SweepResult:
    operands, options, plain, keep_every = _parse(*flat)
    A, (b, t, _) = operands.A, operands.x.shape
    memory = _memory_like(operands, plain, keep_every)
    return A.new_empty(operands.x.shape), *memory, A.new_empty(4, b, t)


@operation(
    "direct_sweep_known", f"(Tensor y_star, {OPERANDS}, {OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
def memory_operation(
    y_star: Tensor,  # (b, t, d)
    *flat: Any,
) -> MemoryResult:
    operands, options, plain, keep_every = _parse(*flat)
    y = y_star.clone(memory_format=torch.contiguous_format)
    if plain:
        bind = choose_bind(None, options, operands.A)
        h, kept = memory_of(y, operands.wide(), options, bind, (), keep_every)
        return y, state_major(h).mT, kept.flatten(1)
    from bedouin.kernels.direct.launch import launch_memory

    h, kept = launch_memory(y, operands.with_head_axis(), options, keep_every)
    return y, h.mT, kept.flatten(1)


@memory_operation.register_fake
def _memory_fake(
    y_star: Tensor,  # (b, t, d)
    *flat: Any,
) -> MemoryResult:
    operands, options, plain, keep_every = _parse(*flat)
    memory = _memory_like(operands, plain, keep_every)
    return y_star.new_empty(y_star.shape), *memory


def _memory_like(operands: Operands, plain: bool, keep_every: int) -> tuple[Tensor, Tensor]:
    """Uninitialized tensors with the shapes and strides of an operation's last h and kept h."""
    A, (b, t, d), n = operands.A, operands.x.shape, operands.A.shape[-1]
    kept = _slots(t, plain, keep_every) * n * d
    return A.new_empty(b, n, d).mT, A.new_empty(b, kept)


def _slots(t: int, plain: bool, keep_every: int) -> int:
    """Number of kept memories; the plain sweep also keeps the first one."""
    return (t + keep_every - 1) // keep_every if plain else count_kept(t, keep_every)


@operation(
    "direct_sweep_backward",
    f"(Tensor grad_y, Tensor? grad_h, Tensor y, Tensor kept, {OPERANDS}, bool wants_y0, {OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _sweep_backward(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor | None,  # (b, d, n); None: zeros
    y: Tensor,  # (b, t, d)
    kept: Tensor,  # (b, `_slots` n d)
    *flat: Any,
) -> Gradients:
    operands, options, plain, keep_every = _parse(*flat[:6], *flat[7:])
    (x, _, W_y, A, *_), wants_y0 = operands, flat[6]
    with without_autocast(x.device):
        kept = kept.unflatten(1, (_slots(x.shape[1], plain, keep_every), *A.mT.shape[-2:]))
        if plain:
            found = cpu_reverse(grad_y, grad_h, y, kept, operands, options, keep_every)
            # with the dtypes and the strides of the operation, that of y0 only if it is wanted
            return _like(operands, wants_y0, found)
        from bedouin.kernels.direct.launch import launch_reverse

        given = (grad_y, grad_h), y, kept, operands.with_head_axis(), options, keep_every
        grads = launch_reverse(*given, wants_y0=wants_y0)
        if A.dim() == 3:
            return grads
        of_x, of_raw, of_W_y, of_A, of_h0, of_y0, statistics = grads
        of_W_y = of_W_y if W_y is None else of_W_y[0]
        return of_x, of_raw, of_W_y, of_A[0], of_h0, of_y0, statistics


@_sweep_backward.register_fake
def _sweep_backward_fake(*flat: Any) -> Gradients:
    return _like(Operands(*flat[4:10]), flat[10])


def _like(
    operands: Operands,
    wants_y0: bool,
    found: tuple[Tensor | None, ...] = (None,) * 7,  # as `Gradients`, with any strides
) -> Gradients:
    """Gradients with the dtypes and strides of the operation, with the values that are found."""
    x, raw, W_y, A, *_ = operands
    (b, t, d), n, r = x.shape, A.shape[-1], raw.shape[2]
    rows = r + padding(r)
    if W_y is None:
        grad_W_y = A.new_empty(0)
    else:
        *heads, f, columns = W_y.shape
        grad_W_y = W_y.new_empty(*heads, f + padding(f), columns)[..., :f, :]
    first = x.new_empty(x.shape), raw.new_empty(b, t, rows)[..., :r], grad_W_y
    then = A.new_empty(A.mT.shape).mT, A.new_empty(b, n, d).mT, A.new_empty(b if wants_y0 else 0, d)
    every: Gradients = (*first, *then, A.new_empty(2, b, t))
    for out, v in zip(every, found, strict=True):
        if v is not None and out.numel():
            out.copy_(v)
    return every


def _register_gradient(of: Operation, *, solved: bool) -> None:
    """That of `sweep_operation` (`solved`), or of `memory_operation`, which has y before x."""
    first = 0 if solved else 1
    end = first + len(Operands._fields)

    def save(ctx: Any, inputs: tuple[Any, ...], output: MemoryResult | SweepResult) -> None:
        y, _, *others = output
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)  # avoids zeros for the other outputs, which are never read
        ctx.save_for_backward(y, others[0], *inputs[first:end])
        # the gradient of y0 needs a matrix product that most calls can omit
        ctx.wants_y0 = ctx.needs_input_grad[end - 1]
        ctx.scalars = inputs[end : end + NUM_SCALARS + 2]
        ctx.behind = len(inputs) - end
        ctx.report = None

    def vjp(
        ctx: Any,
        grad_y: Tensor | None,  # (b, t, d); None: zeros
        grad_h: Tensor | None,  # (b, d, n); None: zeros
        *unused: None,
    ) -> tuple[Tensor | None, ...]:
        y, _, _, _, W_y, _, h0, _ = saved = ctx.saved_tensors
        grad_y = torch.zeros_like(y) if grad_y is None else grad_y
        with torch.no_grad():
            scalars = ctx.wants_y0, *ctx.scalars
            *grads, statistics = _sweep_backward(grad_y, grad_h, *saved, *scalars)
        if ctx.report is not None and y.shape[1] and not is_transformed():
            ctx.report(*statistics.unbind())
        wanted = (True, True, W_y is not None, True, h0 is not None, ctx.wants_y0)
        every = [grad if want else None for grad, want in zip(grads, wanted, strict=True)]
        once = refuse_second_derivative(every, [grad_y, grad_h, *saved])
        return *[None] * first, *once, *[None] * ctx.behind

    of.register_autograd(vjp, setup_context=save)


_register_gradient(sweep_operation, solved=True)
_register_gradient(memory_operation, solved=False)

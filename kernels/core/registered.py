"""The core of a layer as operations of torch.library.

Eager mode alone uses them: under torch.compile the parts of a layer are traced, and the compiler
fuses what lies between them. Triton is imported when an operation runs.

Letters as in `types.py`.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from bedouin.kernels.backend import is_batched, is_transformed, without_autocast
from bedouin.kernels.core.types import CoreOptions, CoreSaved, CoreTensors, DecayParameter
from bedouin.kernels.direct.buffers import count_kept
from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.guard import Launching
from bedouin.kernels.launch import accumulator
from bedouin.kernels.linear import padding
from bedouin.kernels.operands import NUM_SCALARS, SCALARS, Parameterization
from bedouin.kernels.operation import operation

if TYPE_CHECKING:
    from bedouin.kernels.plans import Launcher

TENSORS = (
    "Tensor projected, Tensor W_x, Tensor? W_y, Tensor decay, Tensor D, Tensor? weight, "
    "Tensor? h0, Tensor? y0"
)
SAVED = (
    "Tensor y, Tensor raw, Tensor gate, Tensor normed, Tensor kept, Tensor A, Tensor low_W_x, "
    "Tensor low_W_y"
)
OPTIONS = f"{SCALARS}, str decay_parameter, float sharpness, float eps, int keep_every"


INNER = slice(3, 10)
"""Of the outputs, those of `CoreSaved` but y."""


def flatten(options: CoreOptions) -> tuple[Any, ...]:
    """The arguments of the operation behind the tensors."""
    return (*options.parameterization.scalars(), *options[1:])


@lru_cache(maxsize=256, typed=True)
def _options(*flat: Any) -> CoreOptions:
    decay, *rest = flat[NUM_SCALARS:]
    parameterization = Parameterization.from_scalars(*flat[:NUM_SCALARS])
    return CoreOptions(parameterization, cast(DecayParameter, decay), *rest)


@operation(
    "core",
    f"({TENSORS}, Tensor dt_bias, Tensor? raw_bias, Tensor? real, {OPTIONS}) -> "
    f"({', '.join(['Tensor'] * 13)})",
)
def core_operation(*flat: Any) -> tuple[Tensor, ...]:
    """The gated output, the last h, the tensors of `CoreSaved`, and statistics (4, b', t), residual
    and pivot (2, b'), converged (b',). No size may be 0. `real` is that of `core_forward`."""
    from bedouin.kernels.core.forward import core_forward
    from bedouin.kernels.core.kinds import kind_of

    given = flat[:11]

    def compute(launcher: "Launcher") -> tuple[Tensor, ...]:
        tensors, biases, real = CoreTensors(*given[:8]), given[8:10], given[10]
        how = _options(*flat[11:]), real, launcher
        hidden, h, saved, statistics = core_forward(tensors, biases, *how)
        return hidden, h, *saved, *statistics

    return kind_of("forward", given, flat[11:]).run(given, compute)


@core_operation.register_fake
def _core_fake(*flat: Any) -> tuple[Tensor, ...]:
    tensors, keep_every = CoreTensors(*flat[:8]), flat[-1]
    low, sizes = tensors.projected, tensors.sizes()
    H, b, t, p, n, r, _ = sizes
    folded, like = sizes.folded, low.new_empty(0, dtype=accumulator(low.dtype))
    normed = low.new_empty(0) if tensors.W_y is None else low.new_empty(folded, t, p)
    saved = (
        like.new_empty(folded, t, p),
        low.new_empty(folded, t, r + padding(r)),
        low.new_empty(sizes.of_heads(b * t, p)),
        normed,
        like.new_empty(folded, count_kept(t, keep_every), n, p),
        like.new_empty(sizes.of_heads(n, p)),
        *(
            low.new_empty(0 if W is None or W.dtype == low.dtype else W.shape)
            for W in (tensors.W_x, tensors.W_y)
        ),
    )
    converged = low.new_empty(folded, dtype=torch.bool)
    statistics = like.new_empty(4, folded, t), like.new_empty(2, folded), converged
    return low.new_empty(b, t, H * p), like.new_empty(folded, n, p).mT, *saved, *statistics


@operation(
    "core_backward",
    "(Tensor? grad_hidden, Tensor? grad_y, Tensor? grad_h, "
    f"{TENSORS}, {SAVED}, {OPTIONS}, bool[] wanted) -> ({', '.join(['Tensor'] * 14)})",
)
def _core_backward(*flat: Any) -> tuple[Tensor, ...]:
    """The tensors of `CoreGradients`; `wanted` are the fields of `Wanted`."""
    return _run_backward(flat, overwrites=False)


def _run_backward(flat: tuple[Any, ...], *, overwrites: bool) -> tuple[Tensor, ...]:
    from bedouin.kernels.core.backward import CoreCotangents, Wanted, core_backward
    from bedouin.kernels.core.kinds import kind_of

    given, wanted = flat[:19], tuple(flat[-1])

    def compute(launcher: "Launcher") -> tuple[Tensor, ...]:
        cotangents, tensors = CoreCotangents(*given[:3]), CoreTensors(*given[3:11])
        others = CoreSaved(*given[11:]), _options(*flat[19:-1]), Wanted(*wanted), launcher
        return core_backward(cotangents, tensors, *others, overwrites=overwrites)

    others = flat[19:-1], wanted, overwrites
    return kind_of("backward", given, others).run(given, compute)


@_core_backward.register_fake
def _core_backward_fake(*flat: Any) -> tuple[Tensor, ...]:
    tensors, saved, wanted = CoreTensors(*flat[3:11]), CoreSaved(*flat[11:19]), flat[-1]
    projected, W_x, W_y, decay, D, weight, _, y0 = tensors
    sizes, like = tensors.sizes(), saved.A
    of_W_x = W_x.new_empty(W_x.shape if wanted[0] else 0)
    of_W_y = projected.new_empty(0) if W_y is None else W_y.new_empty(W_y.shape)
    if W_y is not None and not wanted[1]:
        of_W_y = W_y.new_empty(0)
    of_weight = D.new_empty(0 if weight is None else weight.shape)
    h0 = like.new_empty(sizes.folded, sizes.n, sizes.p).mT
    states = h0, like.new_empty(0 if y0 is None else y0.shape)
    of_bias = D if wanted[4] or not wanted[3] else like
    biases = (of_bias.new_empty(sizes.H * size if wanted[3] else 0) for size in (sizes.p, sizes.r))
    statistics, count = like.new_empty(2, sizes.folded, sizes.t), sizes.folded if wanted[5] else 0
    summary = tuple([like.new_empty(count, dtype=v) for v in (torch.int64, like.dtype, torch.bool)])
    grads = projected.new_empty(projected.shape), of_W_x, of_W_y, decay.new_empty(decay.shape)
    return *grads, D.new_empty(D.shape), of_weight, *states, *biases, statistics, *summary


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    y = output[2]
    ctx.mark_non_differentiable(*output[3:])
    ctx.set_materialize_grads(False)  # avoids zeros for the other outputs, which are never read
    ctx.save_for_backward(*inputs[:10], y, *output[INNER])
    ctx.scalars = inputs[11:]
    needs, of_bias = ctx.needs_input_grad, inputs[8:10]
    low = all([bias is None or bias.dtype == inputs[4].dtype for bias in of_bias])
    ctx.wanted = [needs[1], needs[2], needs[7], needs[8] or needs[9], low]
    ctx.report = None


def _gradients(
    ctx: Any,
    grad_hidden: Tensor | None,  # (b, t, d)
    grad_h: Tensor | None,  # (b', p, n)
    grad_y: Tensor | None,  # (b', t, p)
    *unused: None,
) -> tuple[Tensor | None, ...]:
    cotangents, saved = (grad_hidden, grad_y, grad_h), ctx.saved_tensors
    # FakeTensorMode is to see the operation, which has a rule for it
    is_last = not isinstance(saved[0], FakeTensor) and _is_last_use(*cotangents)
    report = ctx.report
    reports = report is not None and not is_transformed()
    with _without_gradients(), without_autocast(saved[0].device):
        wanted = [*ctx.wanted, reports and report.wants_summary(saved[0])]
        given = *cotangents, *saved[:8], *saved[10:], *ctx.scalars, wanted
        if is_last:
            with Launching(saved[0]):
                results = _run_backward(given, overwrites=True)
        else:
            results = _core_backward(*given)
        of_each = zip(results, ctx.needs_input_grad, saved[:10], strict=False)
        typed = [_like(grad, v) if need and v is not None else None for grad, need, v in of_each]
    if reports:
        report(*results[10:])
    # none for what is real and for the options
    last = [None] * (1 + len(ctx.scalars))
    return *refuse_second_derivative(typed, [*cotangents, *saved]), *last


def _without_gradients() -> AbstractContextManager[Any]:
    # most backward passes run without, and the context takes a while
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def _like(
    grad: Tensor,  # as v, in another shape perhaps
    v: Tensor,  # any shape
) -> Tensor:  # as v
    # conversions that change nothing take a while, too
    grad = grad if grad.dtype == v.dtype else grad.to(v.dtype)
    return grad if grad.shape == v.shape else grad.reshape(v.shape)


def _is_last_use(
    *cotangents: Tensor | None,  # any shapes
) -> bool:
    """Whether nothing reads what the forward pass has saved after this backward pass, so that it
    may take that memory, as the backward passes of torch.compile do with donated buffers."""
    if torch.compiler.is_compiling() or is_transformed() or is_batched(*cotangents):
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


core_operation.register_autograd(_gradients, setup_context=_save, inner=INNER)


class Report(Protocol):
    """What a backward pass tells about the adjoint equation."""

    def wants_summary(
        self,
        like: Tensor,  # any shape
    ) -> bool:
        """Whether the last three arguments of a call will be read at once; `like` is on their
        device."""

    def __call__(
        self,
        statistics: Tensor,  # (2, b', t): defect and scale
        steps: Tensor,  # (b',), or empty if there is no summary
        residual: Tensor,  # likewise
        converged: Tensor,  # likewise
    ) -> None: ...


class CoreRun(NamedTuple):
    """The results of a call that a layer reads."""

    hidden: Tensor  # (b, t, d), the gated output
    h: Tensor  # (b', p, n), the last memory
    y: Tensor  # (b', t, p), the fixed point
    statistics: Tensor  # (4, b', t): defect, scale, magnitude, pivot
    summary: Tensor  # (2, b'): residual, smallest pivot
    converged: Tensor  # (b',)

    @staticmethod
    def of(output: tuple[Tensor, ...], report: Report) -> "CoreRun":
        """The results of `core_operation`, whose backward pass is to call `report`."""
        # in eager mode with a gradient without `INNER`
        run = CoreRun(*output[:3], *output[-3:])
        if run.hidden.grad_fn is not None:
            # an operation takes no functions: the backward finds this one on its node
            run.hidden.grad_fn.report = report  # type: ignore[attr-defined]
        return run

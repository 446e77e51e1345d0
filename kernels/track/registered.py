"""The tracker's recurrence in Triton as an operation of torch.library, once differentiable.

Triton is imported when an operation runs. The operations take the fields of `TrackInputs` one by
one. Letters: b batch, t time, H heads, c channels and n states of a head.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.operation import operation
from bedouin.kernels.track.limits import Sizes
from bedouin.kernels.track.types import Gradients, Kept, TrackInputs

_INPUTS = (
    "Tensor x, Tensor B, Tensor C, Tensor delta, Tensor erase, Tensor gate, Tensor skip, "
    "Tensor dt_bias, Tensor erase_bias, Tensor A_log, Tensor D, Tensor weight, Tensor W_y, "
    "Tensor? h0, Tensor? y0, float feedback_eps, float eps"
)
_COUNT = len(TrackInputs._fields)


@operation("track", f"({_INPUTS}, bool keep) -> ({', '.join(['Tensor'] * 9)})")
def track_operation(*given: Any) -> tuple[Tensor, ...]:
    """hidden (b, t, H c), the last h (b, H c, n), y (b, t, H c), and what the backward reads, a
    part of it without `keep`. No size may be 0."""
    from bedouin.kernels.track.launch import launch_forward

    return launch_forward(TrackInputs(*given[:_COUNT]), *given[_COUNT:])


@track_operation.register_fake
def _fake(*given: Any) -> tuple[Tensor, ...]:
    inputs = TrackInputs(*given[:_COUNT])
    x, (b, t, H, c, n) = inputs.x, inputs.sizes
    kept = Kept.empty(x, Sizes.of(b, t, H, c, n, x.dtype), given[-1])
    h, y = (x.new_empty(size, dtype=torch.float32) for size in ((b, H * c, n), (b, t, H * c)))
    return x.new_empty(x.shape), h, y, *kept


@operation(
    "track_backward",
    "(Tensor grad, Tensor? grad_h, Tensor? grad_y, Tensor y, Tensor B_words, Tensor C_words, "
    "Tensor scalars, Tensor rows, Tensor fed, Tensor states, "
    f"{_INPUTS}) -> ({', '.join(['Tensor'] * 12)})",
)
def _backward(*given: Any) -> tuple[Tensor, ...]:
    """The fields of `Gradients`."""
    from bedouin.kernels.track.launch import launch_backward

    inputs, epsilons = TrackInputs(*given[10 : 10 + _COUNT]), given[10 + _COUNT :]
    return launch_backward(given[:3], given[3], Kept(*given[4:10]), inputs, *epsilons)


@_backward.register_fake
def _backward_fake(*given: Any) -> tuple[Tensor, ...]:
    return Gradients.empty(TrackInputs(*given[10 : 10 + _COUNT]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.feedback_eps, ctx.eps, keep = inputs
    if not keep:
        raise ValueError("keep must be True where gradients are recorded, got False")
    ctx.mark_non_differentiable(*output[3:])
    ctx.set_materialize_grads(False)  # zeros for what is kept would be written and not read
    ctx.save_for_backward(*output[2:], *tensors)


def _gradients(
    ctx: Any,
    grad: Tensor | None,  # (b, t, H c)
    grad_h: Tensor | None,  # (b, H c, n)
    grad_y: Tensor | None,  # (b, t, H c)
    *_: None,  # of what is kept
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    inputs = TrackInputs(*saved[7:])
    grad = torch.zeros_like(inputs.x) if grad is None else grad
    with torch.no_grad():
        *rows, sums, A_log, W_y, h0, y0 = _backward(
            grad, grad_h, grad_y, *saved, ctx.feedback_eps, ctx.eps
        )
        # unequal in what they belong to: D, the weight and dt_bias have (H c,), erase_bias (H,)
        of_D, of_weight, of_dt, of_erase = sums.unbind(1)
        found = [*rows, of_dt.reshape(-1), of_erase[:, 0], A_log, of_D.reshape(-1)]
        found += [of_weight.reshape(-1), W_y, h0, y0]
        pairs = zip(found, inputs, strict=True)
        grads = [None if v is None else of.to(v.dtype) for of, v in pairs]
    return *refuse_second_derivative(grads, [grad, grad_h, grad_y, *inputs]), *[None] * 3


track_operation.register_autograd(_gradients, setup_context=_save)

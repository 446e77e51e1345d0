"""The Triton kernel of the gated delta rule as a registered operation, which torch.compile does not
trace; Triton is imported when it runs.

Letters: b batch, t time, k Householder steps a token, h heads, p key channels and v value channels
of a head.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.operation import operation

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor beta, Tensor? log_decay, Tensor memory"


@operation("delta_rule", f"({_INPUTS}) -> (Tensor, Tensor, Tensor)")
def delta_rule_operation(
    *inputs: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v), (b, t, k, h, v)
    """The outputs and the last memory of `delta_rule`, computed in float32 from tensors in float32,
    bfloat16 or float16, and the errors value - S^T key, which have no gradient."""
    from bedouin.kernels.delta_rule.triton_tokens import launch_forward

    return launch_forward(inputs)


@delta_rule_operation.register_fake
def _fake(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, _, value, _, _, memory = inputs
    o = memory.new_empty(*query.shape[:3], value.shape[-1])
    error = value.new_empty(value.shape, dtype=torch.float32)
    return o, memory.new_empty(memory.shape), error


@operation(
    "delta_rule_backward",
    f"(Tensor grad_o, Tensor grad_last, Tensor error, {_INPUTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_operation(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, beta, log_decay (empty for None) and memory."""
    from bedouin.kernels.delta_rule.triton_tokens import launch_backward

    grad_o, grad_last, error, *inputs = given
    return launch_backward(grad_o, grad_last, error, tuple(inputs))


@_backward_operation.register_fake
def _backward_fake(
    grad_o: Tensor,  # (b, t, h, v)
    grad_last: Tensor,  # (b, h, p, v)
    error: Tensor,  # (b, t, k, h, v)
    *inputs: Tensor | None,  # any shapes
) -> tuple[Tensor, ...]:
    return tuple(grad_o.new_empty(0) if v is None else v.new_empty(v.shape) for v in inputs)


def _save(
    ctx: Any,
    inputs: tuple[Tensor | None, ...],  # any shapes
    output: tuple[Tensor, Tensor, Tensor],  # any shapes
) -> None:
    error = output[2]
    ctx.mark_non_differentiable(error)
    ctx.save_for_backward(error, *inputs)


def _gradients(
    ctx: Any,
    grad_o: Tensor,  # (b, t, h, v)
    grad_last: Tensor,  # (b, h, p, v)
    _: Tensor,  # of the errors, not read
) -> tuple[Tensor | None, ...]:
    known = ctx.saved_tensors
    with torch.no_grad():
        found = _backward_operation(grad_o, grad_last, *known)
    grads = [None if v is None else grad for v, grad in zip(known[1:], found, strict=True)]
    return refuse_second_derivative(grads, [grad_o, grad_last, *known])


delta_rule_operation.register_autograd(_gradients, setup_context=_save)

"""The strength beta of the writes and the log decay of the memories, from raw values.

Letters: b batch, t time, h heads, k Householder steps a token, p key channels of a head.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.backend import Backend, choose_backend
from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.launch import accumulator
from bedouin.kernels.operation import operation

MAX_CHANNELS = 1024
"""Most key channels, which a program of the Triton kernel holds of several tokens."""


def delta_rates(
    b: Tensor,  # (b, t, k h)
    key: Tensor,  # (b, t, k, h, p), of length 1 up to rounding
    decay: tuple[Tensor, Tensor, Tensor] | None,  # a (b, t, h), A_log (h,) and dt_bias (h,)
    scale: float,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None]:  # (b, t, k, h), (b, t, h)
    """beta = scale * sigmoid(b) / max(1, |key|^2) and g = -exp(A_log) softplus(a + dt_bias), both
    in at least float32.

    A key that rounding has made longer than 1 would, with beta = 2, let the memory grow at every
    token that repeats it; the division prevents that, and the key gets no gradient from it.
    """
    *_, h, p = key.shape
    unfit = f"{p} key channels (at most {MAX_CHANNELS})" if p > MAX_CHANNELS else None
    if decay is not None and key.numel():
        if choose_backend(backend, b.device, accumulator(b.dtype, key.dtype), unfit) == "triton":
            beta, g = delta_rates_operation(b, key, *decay, scale)
            return beta, g
    return delta_rates_reference(b, key, decay, scale)


def delta_rates_reference(
    b: Tensor,  # (b, t, k h)
    key: Tensor,  # (b, t, k, h, p)
    decay: tuple[Tensor, Tensor, Tensor] | None,  # (b, t, h), (h,) and (h,)
    scale: float,
) -> tuple[Tensor, Tensor | None]:  # (b, t, k, h), (b, t, h)
    """`delta_rates` in plain torch: the specification."""
    dtype = accumulator(b.dtype)
    beta = scale * torch.sigmoid(b.to(dtype).unflatten(-1, key.shape[2:4]))
    if key.dtype in (torch.bfloat16, torch.float16):
        with torch.no_grad():
            excess = key.to(dtype).square().sum(-1).clamp(min=1)
        beta = beta / excess
    if decay is None:
        return beta, None
    a, A_log, dt_bias = (v.to(dtype) for v in decay)
    return beta, -torch.exp(A_log) * F.softplus(a + dt_bias)


_OPERANDS = "Tensor b, Tensor key, Tensor a, Tensor A_log, Tensor dt_bias, float scale"


@operation("delta_rates", f"({_OPERANDS}) -> (Tensor, Tensor)")
def delta_rates_operation(*given: Any) -> tuple[Tensor, Tensor]:
    """`delta_rates` with a decay, in Triton, which is imported when the operation runs."""
    from bedouin.kernels.delta_rule.launch_rates import launch_forward

    return launch_forward(*given)


@delta_rates_operation.register_fake
def _fake(*given: Any) -> tuple[Tensor, Tensor]:
    _, key, a = given[:3]
    return key.new_empty(key.shape[:4], dtype=torch.float32), a.new_empty(
        a.shape, dtype=torch.float32
    )


@operation(
    "delta_rates_backward",
    f"(Tensor grad_beta, Tensor grad_decay, {_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(*given: Any) -> tuple[Tensor, ...]:
    """The cotangents of b, a, A_log and dt_bias."""
    from bedouin.kernels.delta_rule.launch_rates import launch_backward

    return launch_backward(*given)


@_backward.register_fake
def _backward_fake(*given: Any) -> tuple[Tensor, ...]:
    _, _, b, _, a, A_log, dt_bias, _ = given
    return tuple(v.new_empty(v.shape) for v in (b, a, A_log, dt_bias))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *operands, ctx.scale = inputs
    ctx.save_for_backward(*operands)


def _gradients(
    ctx: Any,
    grad_beta: Tensor,  # (b, t, k, h)
    grad_decay: Tensor,  # (b, t, h)
) -> tuple[Tensor | None, ...]:
    operands = ctx.saved_tensors
    with torch.no_grad():
        grads = _backward(grad_beta, grad_decay, *operands, ctx.scale)
    found = refuse_second_derivative(grads, [grad_beta, grad_decay, *operands])
    return found[0], None, *found[1:], None


delta_rates_operation.register_autograd(_gradients, setup_context=_save)

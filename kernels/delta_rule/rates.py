"""The strength beta of the writes and the log decay of the memories, from raw values.

Letters: b batch, t time, h heads, k Householder steps a token, p key channels of a head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.backend import Backend, choose_backend
from bedouin.kernels.launch import accumulator, ceil_div, evenly_spaced, next_power_of_two
from bedouin.kernels.operation import empty_like, operation

MAX_CHANNELS = 1024
"""Most key channels, which a program of the Triton kernel holds of several tokens."""

TILE = 4096
"""Most numbers of keys of a program: 32 for each of 128 threads."""


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


class RateInputs(NamedTuple):
    """The tensors of the operation."""

    b: Tensor  # (b, t, k h)
    key: Tensor  # (b, t, k, h, p)
    a: Tensor  # (b, t, h)
    A_log: Tensor  # (h,)
    dt_bias: Tensor  # (h,)


def _launch_arguments(
    given: tuple[Any, ...],  # the arguments of the operation
) -> tuple[RateInputs, tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """The tensors as the kernels read them, and the distances of the rows of the first three; the
    numbers r = b t, c = k h and h; the constants."""
    b, key, a, A_log, dt_bias, _ = given
    (*_, h, p), c = key.shape, b.shape[-1]
    b, key, a = rows = [evenly_spaced(v) for v in (b, key.flatten(2), a)]
    r, block = b.numel() // c, next_power_of_two(p)
    tokens = min(next_power_of_two(r), max(1, TILE // block))
    constants = {"P": p, "TOKENS": tokens, "BLOCK": block, "enable_fp_fusion": True}
    read = RateInputs(b, key, a, A_log.contiguous(), dt_bias.contiguous())
    return read, tuple(v.stride(1) for v in rows), (r, c, h), constants


def _like(*given: Any) -> tuple[Tensor, Tensor]:
    _, key, a = given[:3]
    beta = key.new_empty(key.shape[:4], dtype=torch.float32)
    return beta, a.new_empty(a.shape, dtype=torch.float32)


@operation(
    "delta_rates",
    "(Tensor b, Tensor key, Tensor a, Tensor A_log, Tensor dt_bias, float scale)"
    " -> (Tensor, Tensor)",
    _like,
)
def delta_rates_operation(*given: Any) -> tuple[Tensor, Tensor]:
    """`delta_rates` with a decay, in Triton, which is imported when the operation runs."""
    from bedouin.kernels.delta_rule.triton_rates import rates_kernel

    *read, (r, c, h), constants = _launch_arguments(given)
    rates, tiles = _like(*given), ceil_div(r, constants["TOKENS"])
    rates_kernel[(tiles * c,)](*read, *rates, r, c, h, given[5], **constants)
    return rates


@delta_rates_operation.register_vjp(constant=(1,))
def _backward(
    grad_beta: Tensor,  # (b, t, k, h)
    grad_decay: Tensor,  # (b, t, h)
    *given: Any,
) -> tuple[Tensor, ...]:
    """The cotangents of b, key (empty), a, A_log and dt_bias."""
    from bedouin.kernels.delta_rule.triton_rates import rates_backward_kernel

    *read, (r, c, h), constants = _launch_arguments(given)
    (b, _, a, A_log, dt_bias, scale), tiles = given, ceil_div(r, constants["TOKENS"])
    grad_b, grad_key, grad_a = empty_like(b, None, a)
    sums = b.new_empty(tiles, 2, h, dtype=torch.float32)
    rates_backward_kernel[(tiles * c,)](
        *(*read, grad_beta.contiguous(), grad_decay.contiguous(), grad_b, grad_a, sums),
        *(r, c, h, scale),
        **constants,
    )
    # two sums, because an operation must not return two views of one tensor
    of_A, of_bias = sums[:, 0].sum(0), sums[:, 1].sum(0)
    return grad_b, grad_key, grad_a, of_A.to(A_log.dtype), of_bias.to(dt_bias.dtype)

"""The gated delta rule token by token in Triton, as an operation of torch.library.

Triton is imported when an operation runs.
Letters: b batch, t time, k Householder steps a token, h heads, p key channels and v value channels
of a head.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.launch import ceil_div, next_power_of_two
from bedouin.kernels.operation import empty_like, operation

INPUTS = "Tensor query, Tensor key, Tensor value, Tensor beta, Tensor? log_decay, Tensor memory"

CELLS = 2048
"""Numbers of a block of S whose key channels are padded to a power of two."""

FORWARD_PART, BACKWARD_PART = 8, 16
"""Key channels of a part of S, of which the last is padded. A part of a key has fewer numbers than
a warp has threads: it is loaded as it is used, and the threads exchange none of it."""

REGISTERS = 128
"""Of a thread, at most: 16 warps, each a program, fit on a multiprocessor of sm_90."""

LAUNCH = {"enable_fp_fusion": True, "num_warps": 1, "maxnreg": REGISTERS}


def _launch_arguments(
    query: Tensor,  # (b, t, h, p)
    key: Tensor,  # (b, t, k, h, p)
    value: Tensor,  # (b, t, k, h, v)
    beta: Tensor,  # (b, t, k, h)
    log_decay: Tensor | None,  # (b, t, h)
    memory: Tensor,  # (b, h, p, v)
) -> tuple[list[Tensor], tuple[int, int], tuple[int, ...]]:
    """The inputs as the kernels read them, with the memory transposed, which without a decay is in
    its place, unread; the grid; t, h and the compile-time constants of both kernels."""
    (b, t, k, h, p), v = key.shape, memory.shape[-1]
    memory = memory.mT.contiguous()
    inputs = query, key, value, beta, log_decay, memory
    read = [memory if tensor is None else tensor.contiguous() for tensor in inputs]
    block = min(next_power_of_two(v), max(1, CELLS // next_power_of_two(p)))
    return read, (b * h, ceil_div(v, block)), (t, h, log_decay is not None, k, p, v, block)


@operation("delta_rule", f"({INPUTS}) -> (Tensor, Tensor, Tensor)")
def delta_rule_operation(*inputs: Any) -> tuple[Tensor, ...]:
    """The outputs (b, t, h, v) and the last memory (b, h, p, v) of `delta_rule`, in the dtype of
    the memory, computed in float32 from tensors in float32, bfloat16 or float16; and the errors
    value - S^T key (b, t, k, h, v) in float32, for the backward."""
    from bedouin.kernels.delta_rule.triton_tokens import forward_kernel

    read, grid, constants = _launch_arguments(*inputs)
    o, _, error = _fake(*inputs)
    last = torch.empty_like(read[-1])
    forward_kernel[grid](*read, o, error, last, *constants, FORWARD_PART, **LAUNCH)
    return o, last.mT.contiguous(), error


@delta_rule_operation.register_fake
def _fake(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, _, value, _, _, memory = inputs
    o = memory.new_empty(*query.shape[:3], value.shape[-1])
    error = value.new_empty(value.shape, dtype=torch.float32)
    return o, memory.new_empty(memory.shape), error


@operation(
    "delta_rule_backward",
    f"(Tensor grad_o, Tensor grad_last, Tensor error, {INPUTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad_o: Tensor,  # (b, t, h, v)
    grad_last: Tensor,  # (b, h, p, v)
    error: Tensor,  # (b, t, k, h, v)
    *inputs: Any,
) -> tuple[Tensor, ...]:
    """The gradients of the inputs, in their dtypes; that of log_decay is empty without a decay."""
    from bedouin.kernels.delta_rule.triton_tokens import backward_kernel

    query, key, value, beta, log_decay, _ = inputs
    read, grid, constants = _launch_arguments(*inputs)
    n = grid[1]
    # the parts that blocks of value channels give
    grad_q, grad_k, grad_beta = (error.new_empty(n, *v.shape) for v in (query, key, beta))
    grad_decay = error.new_empty((n, 0) if log_decay is None else (n, *log_decay.shape))
    grad_v, grad_memory = torch.empty_like(error), torch.empty_like(read[-1])
    backward_kernel[grid](
        *(*read, error, grad_o.contiguous(), grad_last.mT.contiguous()),
        *(grad_q, grad_k, grad_v, grad_beta, grad_decay, grad_memory),
        *(*constants, BACKWARD_PART),
        **LAUNCH,
    )
    parts = (grad_q, query), (grad_k, key), (grad_beta, beta), (grad_decay, read[4])
    of_query, of_key, of_beta, of_decay = (
        (grad.sum(0) if n > 1 else grad[0]).to(v.dtype) for grad, v in parts
    )
    others = of_beta, of_decay, grad_memory.mT.contiguous()
    return of_query, of_key, grad_v.to(value.dtype), *others


_backward.register_fake(lambda grad_o, grad_last, error, *inputs: empty_like(*inputs))
delta_rule_operation.register_vjp(_backward, kept=1)

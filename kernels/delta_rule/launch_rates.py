"""Launches of `delta_rates`.

Letters: b batch, t time, h heads, k Householder steps a token, p key channels of a head; r = b t
tokens, c = k h columns of beta.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.delta_rule.triton_rates import rates_backward_kernel, rates_kernel
from bedouin.kernels.launch import ceil_div, evenly_spaced, next_power_of_two

TILE = 4096
"""Most numbers of keys of a program: 32 for each of 128 threads."""


def launch_forward(
    b: Tensor,  # (b, t, k h)
    key: Tensor,  # (b, t, k, h, p)
    a: Tensor,  # (b, t, h)
    A_log: Tensor,  # (h,)
    dt_bias: Tensor,  # (h,)
    scale: float,
) -> tuple[Tensor, Tensor]:  # (b, t, k, h), (b, t, h)
    operands, numbers, tiles, constants = _prepared(b, key, a, A_log, dt_bias)
    beta = b.new_empty(key.shape[:4], dtype=torch.float32)
    decay = b.new_empty(a.shape, dtype=torch.float32)
    rates_kernel[(tiles * numbers[1],)](*operands, beta, decay, *numbers, scale, **constants)
    return beta, decay


def launch_backward(
    grad_beta: Tensor,  # (b, t, k, h)
    grad_decay: Tensor,  # (b, t, h)
    b: Tensor,  # (b, t, k h)
    key: Tensor,  # (b, t, k, h, p)
    a: Tensor,  # (b, t, h)
    A_log: Tensor,  # (h,)
    dt_bias: Tensor,  # (h,)
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The cotangents of b, a, A_log and dt_bias."""
    operands, numbers, tiles, constants = _prepared(b, key, a, A_log, dt_bias)
    grad_b, grad_a = b.new_empty(b.shape), a.new_empty(a.shape)
    sums = b.new_empty(tiles, 2, a.shape[-1], dtype=torch.float32)
    rates_backward_kernel[(tiles * numbers[1],)](
        *(grad_beta.contiguous(), grad_decay.contiguous(), *operands),
        *(grad_b, grad_a, sums, *numbers, scale),
        **constants,
    )
    # two sums, because an operation must not return two views of one tensor
    of_A, of_bias = sums[:, 0].sum(0), sums[:, 1].sum(0)
    return grad_b, grad_a, of_A.to(A_log.dtype), of_bias.to(dt_bias.dtype)


def _prepared(
    b: Tensor,  # (b, t, k h)
    key: Tensor,  # (b, t, k, h, p)
    a: Tensor,  # (b, t, h)
    A_log: Tensor,  # (h,)
    dt_bias: Tensor,  # (h,)
) -> tuple[tuple[Tensor, ...], tuple[int, ...], int, dict[str, Any]]:
    """The operands with evenly spaced rows, the numbers r, c, h and the distances of rows, the
    number of tiles of tokens, and the constants."""
    (*_, h, p), c = key.shape, b.shape[-1]
    b, a = evenly_spaced(b), evenly_spaced(a)
    key = evenly_spaced(key.flatten(2))
    r, block = b.numel() // c, next_power_of_two(p)
    tokens = min(next_power_of_two(r), max(1, TILE // block))
    numbers = r, c, h, b.stride(1), key.stride(1), a.stride(1)
    constants = {"P": p, "TOKENS": tokens, "BLOCK": block, "enable_fp_fusion": True}
    operands = b, key, a, A_log.contiguous(), dt_bias.contiguous()
    return operands, numbers, ceil_div(r, tokens), constants

"""Launches of the short convolution.

Letters: b batch, t time, c channels, w width, a channels to which something is added.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.convolution.triton_kernels import (
    convolution_kernel,
    cotangent_kernel,
    input_kernel,
)
from bedouin.kernels.launch import ceil_div, evenly_spaced, next_power_of_two

TILE = 4096
"""Numbers of a program's tile: 32 for each of 128 threads."""

CHANNELS = 64
"""Channels of a program's block where none belong to a group: rows of 128 bytes in bfloat16."""


def launch_forward(
    x: Tensor,  # (b, t, c)
    weight: Tensor,  # (c, w)
    window: Tensor,  # (b, w - 1, c)
    added: Tensor | None,  # (b, t, a)
    count: int,
    size: int,
    eps: float,
) -> tuple[Tensor, Tensor]:  # (b, t, c + a), and (b, w - 1, c) after the last token
    x, added, sizes = _prepared(x, added)
    b, (t, c, a) = len(x), sizes
    out, after = x.new_empty(b, t, c + a), window.new_empty(window.shape)
    grid, numbers, constants = _tiles(x, weight, count, size)
    convolution_kernel[grid](
        *(x, weight.contiguous(), window.contiguous(), x if added is None else added, out, after),
        *(*sizes, *numbers, count),
        *(x.stride(1), 0 if added is None else added.stride(1)),
        **constants,
        EPS=eps,
        ADDS=added is not None,
        NORMS=count > 0,
    )
    return out, after


def launch_backward(
    grad: Tensor,  # (b, t, c + a)
    x: Tensor,  # (b, t, c)
    weight: Tensor,  # (c, w)
    window: Tensor,  # (b, w - 1, c)
    added: Tensor | None,  # (b, t, a)
    count: int,
    size: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of x, weight, window and added, which is empty where there is none."""
    x, added, sizes = _prepared(x, added)
    grad, weight = evenly_spaced(grad), weight.contiguous()
    grid, numbers, constants = _tiles(x, weight, count, size)
    (b, _, c), w = x.shape, weight.shape[1]
    cotangent, grad_x = x.new_empty(x.shape), x.new_empty(x.shape)
    grad_added = x.new_empty(0) if added is None else added.new_empty(added.shape)
    window, grad_window = window.contiguous(), window.new_empty(window.shape)
    sums = x.new_empty(b * numbers[0], w, c, dtype=torch.float32)
    cotangent_kernel[grid](
        *(grad, x, weight, window, x if added is None else added, cotangent, grad_added),
        *(*sizes, *numbers, count),
        *(grad.stride(1), x.stride(1), 0 if added is None else added.stride(1)),
        **constants,
        EPS=eps,
        ADDS=added is not None,
        NORMS=count > 0,
    )
    input_kernel[grid](
        *(cotangent, x, weight, window, grad_x, grad_window, sums),
        *(*sizes[:2], *numbers, x.stride(1)),
        **constants,
    )
    grad_weight = sums.sum(0).T.contiguous().to(weight.dtype)
    return grad_x, grad_weight, grad_window, grad_added


def _prepared(
    x: Tensor,  # (b, t, c)
    added: Tensor | None,  # (b, t, a)
) -> tuple[Tensor, Tensor | None, tuple[int, int, int]]:
    """Both with evenly spaced rows, and t, c, a."""
    _, t, c = x.shape
    added = None if added is None else evenly_spaced(added)
    return evenly_spaced(x), added, (t, c, 0 if added is None else added.shape[-1])


def _tiles(
    x: Tensor,  # (b, t, c)
    weight: Tensor,  # (c, w)
    count: int,
    size: int,
) -> tuple[tuple[int], tuple[int, int], dict[str, Any]]:
    """The grid, the numbers of tiles of tokens and of blocks of channels, and the constants."""
    b, t, c = x.shape
    if not count:
        size = min(CHANNELS, c)
    block = next_power_of_two(size)
    tokens = min(next_power_of_two(t), max(1, TILE // block))
    numbers = ceil_div(t, tokens), ceil_div(c, size)
    constants = {"WIDTH": weight.shape[1], "TOKENS": tokens, "SIZE": size, "BLOCK": block}
    return (b * numbers[0] * numbers[1],), numbers, {**constants, "enable_fp_fusion": True}

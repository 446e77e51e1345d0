"""Launches of the core's own kernels.

Letters as in `types.py`.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.core.triton_kernels import clear_kernel, finish_kernel, start_kernel
from bedouin.kernels.core.types import CoreOptions, CoreTensors
from bedouin.kernels.launch import ceil_div, next_power_of_two, triton_dtype
from bedouin.kernels.linear import ALIGNMENT
from bedouin.kernels.plans import KEPT_CONSTANTS, Constants, PlannedKernel

BLOCK = 1024
"""Elements that a program writes."""

START, CLEAR = PlannedKernel(start_kernel), PlannedKernel(clear_kernel)
FINISH = PlannedKernel(finish_kernel)


def launch_start(
    tensors: CoreTensors,
    biases: tuple[Tensor, Tensor | None],  # (d,), (H r,)
    options: CoreOptions,
    A: Tensor,  # (n, p) or (H, n, p)
    bias: Tensor,  # (r + padding(r) + p,) or (H, r + padding(r) + p)
    h: Tensor,  # (b', n, p)
    normed: Tensor,  # (b', t, p)
    counters: Tensor,  # (3,)
    W_x: Tensor,  # as that of `tensors`, in any dtype
    W_y: Tensor | None,
) -> None:
    """Write A, the bias of W^x, W_x and W_y; zero the counters and what no state is given for.

    A weight is not written if it is that of `tensors` itself.
    """
    (b, n, p), (dt_bias, raw_bias) = h.shape, biases
    wide = bias.shape[-1] - p
    zeroed = h.numel() if tensors.h0 is None else 0
    first = tensors.W_y is not None and tensors.y0 is None
    of_W_x, of_W_y = _conversion(tensors.W_x, W_x), _conversion(tensors.W_y, W_y)
    # a pointer that is not used
    nothing = counters, counters
    largest = max(zeroed, A.numel(), bias.numel(), b * p, _size(of_W_x), _size(of_W_y))
    START.launch(
        (ceil_div(largest, BLOCK),),
        (
            tensors.decay.contiguous(),
            dt_bias,
            dt_bias if raw_bias is None else raw_bias,
            A,
            bias,
            h,
            normed,
            counters,
            *(of_W_x or nothing),
            *(of_W_y or nothing),
        ),
        (
            zeroed,
            b,
            normed.stride(0),
            A.numel(),
            _size(of_W_x),
            _size(of_W_y),
            W_x.shape[-2] - p,
            wide,
            p,
            n,
        ),
        _start_constants(options.decay, options.sharpness, raw_bias is not None, first, A.dtype),
    )


def _conversion(
    source: Tensor | None,  # any shape
    target: Tensor | None,  # as source
) -> tuple[Tensor, Tensor] | None:
    """Source and target as a kernel copies them, element by element; None: there is nothing to do.
    The target is contiguous."""
    if source is None or target is None or source is target:
        return None
    return source.contiguous(), target


def _size(conversion: tuple[Tensor, Tensor] | None) -> int:
    return 0 if conversion is None else conversion[0].numel()


@lru_cache(maxsize=KEPT_CONSTANTS)
def _start_constants(
    decay: str, sharpness: float, bias: bool, normed: bool, dtype: torch.dtype
) -> Constants:
    return Constants(
        DECAY=decay,
        SHARPNESS=sharpness,
        BIAS=bias,
        NORMED=normed,
        ACC=triton_dtype(dtype),
        BLOCK=BLOCK,
    )


def launch_clear(
    flat: Tensor,  # any size
    padded: Tensor,  # (b', t, r + padding), contiguous
    r: int,
) -> None:
    """Zero `flat`, and the columns of `padded` from r on."""
    wide = padded.shape[-1]
    rows = padded.numel() // wide
    constants = _clear_constants(min(ALIGNMENT, next_power_of_two(max(wide - r, 1))))
    at_a_time = BLOCK // constants["PADDING"]
    programs = max(ceil_div(flat.numel(), BLOCK), ceil_div(rows, at_a_time))
    CLEAR.launch((programs,), (flat, padded), (flat.numel(), rows, r, wide), constants)


@lru_cache
def _clear_constants(padding: int) -> Constants:
    return Constants(PADDING=padding, BLOCK=BLOCK)


class Finished(NamedTuple):
    """Gradients as the parameters have them; empty where they are not wanted."""

    W_x: Tensor  # (r + p, p) or (H, r + p, p)
    W_y: Tensor  # as W_x
    decay: Tensor  # (d, n)
    dt_bias: Tensor  # (p,) or (H, p)
    raw_bias: Tensor  # (r,) or (H, r)


def launch_finish(
    tensors: CoreTensors,
    options: CoreOptions,
    grad_A: Tensor,  # (n, p) or (H, n, p)
    bias: Tensor,  # (r + p,) or (H, r + p), of the bias of W^x, or empty
    W_x: Tensor,  # (r + p, p) or (H, r + p, p), or empty
    W_y: Tensor,  # as W_x
) -> Finished:
    """Convert gradients, split that of the bias, and take that of A on to its parameter."""
    decay, (*heads, n, p) = tensors.decay.contiguous(), grad_A.shape
    r = tensors.W_x.shape[-2] - p
    parts = [bias.new_empty((*heads, size) if bias.numel() else 0) for size in (p, r)]
    grad = torch.empty_like(decay)
    targets = [_as_weight(W_x, tensors.W_x), _as_weight(W_y, tensors.W_y)]
    pairs = [_conversion(v, target) for v, target in zip((W_x, W_y), targets, strict=True)]
    sizes = decay.numel(), bias.numel(), *map(_size, pairs)
    nothing = grad, grad
    FINISH.launch(
        (ceil_div(max(sizes), BLOCK),),
        (grad_A, decay, grad, bias, *parts, *(pairs[0] or nothing), *(pairs[1] or nothing)),
        (*sizes, r, p, n),
        _finish_constants(options.decay, options.sharpness, grad_A.dtype),
    )
    return Finished(targets[0], targets[1], grad, parts[0], parts[1])


def _as_weight(
    grad: Tensor,  # that of the weight, or empty
    weight: Tensor | None,  # any shape
) -> Tensor:  # as grad
    """grad itself if it has the dtype of the weight, else new memory of that dtype."""
    if weight is None or grad.dtype == weight.dtype:
        return grad
    return torch.empty(grad.shape, dtype=weight.dtype, device=grad.device)


@lru_cache(maxsize=KEPT_CONSTANTS)
def _finish_constants(decay: str, sharpness: float, dtype: torch.dtype) -> Constants:
    return Constants(DECAY=decay, SHARPNESS=sharpness, ACC=triton_dtype(dtype), BLOCK=BLOCK)

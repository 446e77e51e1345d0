"""Launches of the core's own kernels.

Letters as in `types.py`.
"""

from functools import lru_cache

import torch
from torch import Tensor

from bedouin.kernels.core.triton_kernels import clear_kernel, decay_gradient_kernel, start_kernel
from bedouin.kernels.core.types import CoreOptions, CoreTensors
from bedouin.kernels.launch import ceil_div, next_power_of_two, triton_dtype
from bedouin.kernels.linear import ALIGNMENT
from bedouin.kernels.plans import KEPT_CONSTANTS, Constants, PlannedKernel

BLOCK = 1024
"""Elements that a program writes."""

START, CLEAR = PlannedKernel(start_kernel), PlannedKernel(clear_kernel)
DECAY_GRADIENT = PlannedKernel(decay_gradient_kernel)


def launch_start(
    tensors: CoreTensors,
    biases: tuple[Tensor, Tensor | None],  # (d,), (H r,)
    options: CoreOptions,
    A: Tensor,  # (n, p) or (H, n, p)
    bias: Tensor,  # (r + padding(r) + p,) or (H, r + padding(r) + p)
    h: Tensor,  # (b', n, p)
    normed: Tensor,  # (b', t, p)
    counters: Tensor,  # (3,)
) -> None:
    """Write A and the bias of W^x; zero the counters and what no state is given for."""
    (b, n, p), (dt_bias, raw_bias) = h.shape, biases
    wide = bias.shape[-1] - p
    zeroed = h.numel() if tensors.h0 is None else 0
    first = tensors.W_y is not None and tensors.y0 is None
    largest = max(zeroed, A.numel(), bias.numel(), b * p)
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
        ),
        (zeroed, b, normed.stride(0), A.numel(), tensors.W_x.shape[-2] - p, wide, p, n),
        _start_constants(options.decay, options.sharpness, raw_bias is not None, first, A.dtype),
    )


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


def decay_gradient(
    grad_A: Tensor,  # (n, p) or (H, n, p)
    decay: Tensor,  # (d, n)
    options: CoreOptions,
) -> Tensor:  # (d, n)
    """The cotangent of the parameter behind A, from that of A."""
    (n, p), decay = grad_A.shape[-2:], decay.contiguous()
    size, grad = decay.numel(), torch.empty_like(decay)
    constants = _gradient_constants(options.decay, options.sharpness, grad_A.dtype)
    DECAY_GRADIENT.launch((ceil_div(size, BLOCK),), (grad_A, decay, grad), (size, p, n), constants)
    return grad


@lru_cache(maxsize=KEPT_CONSTANTS)
def _gradient_constants(decay: str, sharpness: float, dtype: torch.dtype) -> Constants:
    return Constants(DECAY=decay, SHARPNESS=sharpness, ACC=triton_dtype(dtype), BLOCK=BLOCK)

"""Launches of the core's own kernels.

Letters as in `types.py`.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.core.triton_kernels import (
    clear_kernel,
    finish_kernel,
    start_kernel,
    sum_kernel,
)
from bedouin.kernels.core.types import CoreOptions, CoreTensors
from bedouin.kernels.launch import ceil_div, next_power_of_two, triton_dtype
from bedouin.kernels.linear import ALIGNMENT
from bedouin.kernels.plans import KEPT_CONSTANTS, Constants, How, Launcher, PlannedKernel

BLOCK = 1024
"""Elements that a program writes."""

START, CLEAR = PlannedKernel(start_kernel), PlannedKernel(clear_kernel)
SUM, FINISH = PlannedKernel(sum_kernel), PlannedKernel(finish_kernel)

SUM_ROWS, SUM_COLUMNS = 16, 256
"""Rows and columns that a program adds at a time: 32 values in each of its threads."""

ROWS_OF_PART, MOST_PARTS = 64, 16
"""Fewest rows of one part of a sum, and most parts: enough programs for all of a GPU, and few
enough sums to add again."""

FINISH_BLOCK = 256
"""Elements of which a program adds all parts: at most 32 values in each of its threads."""


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
    launcher: Launcher,
) -> None:
    """Write A, the bias of W^x, W_x and W_y; zero the counters and what no state is given for.

    A weight is not written if it is that of `tensors` itself.
    """
    dt_bias, raw_bias = biases
    of_W_x, of_W_y = _conversion(tensors.W_x, W_x), _conversion(tensors.W_y, W_y)

    def how() -> How:
        b, n, p = h.shape
        wide = bias.shape[-1] - p
        zeroed = h.numel() if tensors.h0 is None else 0
        first = tensors.W_y is not None and tensors.y0 is None
        sizes = A.numel(), _size(of_W_x), _size(of_W_y)
        largest = max(zeroed, *sizes, bias.numel(), b * p)
        integers = zeroed, b, normed.stride(0), *sizes, W_x.shape[-2] - p, wide, p, n
        kept = options.decay, options.sharpness, raw_bias is not None, first, A.dtype
        return (ceil_div(largest, BLOCK),), integers, _start_constants(*kept)

    # a pointer that is not used
    nothing = counters, counters
    pointers = (
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
    )
    launcher.launch(START, None, pointers, how)


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
    launcher: Launcher,
) -> None:
    """Zero `flat`, and the columns of `padded` from r on."""

    def how() -> How:
        wide = padded.shape[-1]
        rows = padded.numel() // wide
        constants = _clear_constants(min(ALIGNMENT, next_power_of_two(max(wide - r, 1))))
        at_a_time = BLOCK // constants["PADDING"]
        programs = max(ceil_div(flat.numel(), BLOCK), ceil_div(rows, at_a_time))
        return (programs,), (flat.numel(), rows, r, wide), constants

    launcher.launch(CLEAR, None, (flat, padded), how)


@lru_cache
def _clear_constants(padding: int) -> Constants:
    return Constants(PADDING=padding, BLOCK=BLOCK)


class Finished(NamedTuple):
    """Gradients as the parameters have them; empty where they are not wanted."""

    W_x: Tensor  # (r + p, p) or (H, r + p, p)
    W_y: Tensor  # (f + p, p) or (H, f + p, p)
    decay: Tensor  # (d, n)
    D: Tensor  # (d,)
    weight: Tensor  # (d,), empty without weight
    dt_bias: Tensor  # (d,)
    raw_bias: Tensor  # (H r,)


def launch_finish(
    tensors: CoreTensors,
    options: CoreOptions,
    grad_A: Tensor,  # (b', n, p)
    grad_raw: Tensor,  # (i, r + padding) or (H, i, r + padding), contiguous
    grad_gate: Tensor,  # (i, p) or (H, i, p)
    of_channels: Tensor,  # (any, 2, d) or (any, 1, d): parts of the gradients of D and weight
    W_x: Tensor,  # (r + p, p) or (H, r + p, p), or empty
    W_y: Tensor,  # (f + p, p) or (H, f + p, p), or empty
    of_biases: torch.dtype | None,  # None: the gradients of the biases are not wanted
    launcher: Launcher,
) -> Finished:
    """Add up the gradients of parameters that tokens share, and convert all as the parameters
    have them; that of A is taken on to its parameter."""
    sizes = tensors.sizes()
    H, b, t, p, n, r, _ = sizes
    decay, D, weight = tensors.decay.contiguous(), tensors.D, tensors.weight
    parts, wants_bias = of_channels.shape[1], of_biases is not None
    count = of_channels.shape[0]
    shares = max(1, min(MOST_PARTS, ceil_div(max(b * t, count), ROWS_OF_PART)))
    sums = grad_A.new_empty(shares, H, n * p + r + p + parts * p)

    def how_to_sum() -> How:
        widths = [n * p, parts * p, *([p, r] if wants_bias else [])]
        blocks = sum([ceil_div(width, SUM_COLUMNS) for width in widths])
        rows = grad_gate.stride(0) if H > 1 else 0, grad_gate.stride(-2)
        integers = b * t, b, count, r, grad_raw.shape[-1], *rows, p, n
        return (shares, blocks, H), integers, _sum_constants(parts, wants_bias, grad_A.dtype)

    launcher.launch(SUM, None, (grad_A, grad_raw, grad_gate, of_channels, sums), how_to_sum)
    of_bias = D.dtype if of_biases is None else of_biases
    of_delta = D.new_empty(H * p if wants_bias else 0, dtype=of_bias)
    of_others = D.new_empty(H * r if wants_bias else 0, dtype=of_bias)
    grad, grad_D = torch.empty_like(decay), torch.empty_like(D)
    grad_weight = D.new_empty(0) if weight is None else torch.empty_like(weight)
    targets = _as_weight(W_x, tensors.W_x), _as_weight(W_y, tensors.W_y)
    first, second = _conversion(W_x, targets[0]), _conversion(W_y, targets[1])

    def how() -> How:
        sizes = _size(first), _size(second)
        largest = max(decay.numel(), H * (r + p) if wants_bias else 0, *sizes)
        kept = parts, wants_bias, options.decay, options.sharpness, grad_A.dtype, shares
        integers = shares, H, *sizes, r, p, n
        return (ceil_div(largest, FINISH_BLOCK),), integers, _finish_constants(*kept)

    nothing, grads = (grad, grad), (grad_D, grad_weight, of_delta, of_others)
    pointers = sums, decay, grad, *grads, *(first or nothing), *(second or nothing)
    launcher.launch(FINISH, None, pointers, how)
    return Finished(*targets, grad, *grads)


def _as_weight(
    grad: Tensor,  # that of the weight, or empty
    weight: Tensor | None,  # any shape
) -> Tensor:  # as grad
    """grad itself if it has the dtype of the weight, else new memory of that dtype."""
    if weight is None or grad.dtype == weight.dtype:
        return grad
    return torch.empty(grad.shape, dtype=weight.dtype, device=grad.device)


@lru_cache(maxsize=KEPT_CONSTANTS)
def _sum_constants(parts: int, bias: bool, dtype: torch.dtype) -> Constants:
    acc = triton_dtype(dtype)
    return Constants(PARTS=parts, BIAS=bias, ACC=acc, ROWS=SUM_ROWS, BLOCK=SUM_COLUMNS)


@lru_cache(maxsize=KEPT_CONSTANTS)
def _finish_constants(
    parts: int, bias: bool, decay: str, sharpness: float, dtype: torch.dtype, shares: int
) -> Constants:
    return Constants(
        PARTS=parts,
        BIAS=bias,
        DECAY=decay,
        SHARPNESS=sharpness,
        ACC=triton_dtype(dtype),
        SHARES=next_power_of_two(shares),
        BLOCK=FINISH_BLOCK,
    )

"""Launches of the split of the projected input.

Letters: b batch, t time, p channels of a head, r raw values of a head, q those with a bias,
c convolved channels, w width of the convolution, H heads; b' = H b folded samples
(kernels/heads.py).
"""

from functools import lru_cache

import torch
from torch import Tensor

from bedouin.kernels.launch import ceil_div, last_axis_contiguous, next_power_of_two
from bedouin.kernels.plans import KEPT_CONSTANTS, Constants, PlannedKernel
from bedouin.kernels.projection.parts import Parts
from bedouin.kernels.projection.triton_kernels import split_backward_kernel, split_kernel

TILE = 1024
"""Values of a program's tile, for parts of at most so many values."""

ROW_TILE = 256
"""Values of a program's tile in the backward, of which it holds w inputs, cotangents and sums."""

LEAST_TOKENS = 16
"""Fewest tokens of a program's tile."""

LENGTH = 32
"""Fewest tokens of a row of such a tile, which also reads 2 (w - 1) of its neighbours."""

MOST_SPLITS = 16
"""Most programs of the backward for a sample, a part and a head: as many partial sums."""

PROGRAMS = 2048
"""Programs of the backward of a part that fill a GPU; more of them only leave more partial sums."""

# for the time of their compilation (coalescing.py)
SPLIT = PlannedKernel(split_kernel, coalesces=False)
SPLIT_BACKWARD = PlannedKernel(split_backward_kernel, coalesces=False)


def launch_split(
    projected: Tensor,  # (b, t, columns)
    bias: Tensor,  # (H, q)
    weight: Tensor | None,  # (c, w)
    window: Tensor | None,  # (b, w - 1, c)
    flat: tuple[int, ...],
    results: tuple[Tensor, Tensor, Tensor],  # x, raw and gate, contiguous, written
) -> None:
    """x, the raw values and the gate of each head."""
    (b, t, _), H = projected.shape, len(bias)
    projected, bias, parts = last_axis_contiguous(projected), bias.contiguous(), Parts.of(flat, H)
    given = projected, bias, _read(weight, bias), _read(window, bias), *results
    # as many programs of each part as the widest one has
    grid = ceil_div(t, _tokens(parts.widest)) * len(parts.placed), H, b
    constants = _constants(SPLIT, parts, _width(weight), window is not None)
    SPLIT.launch(grid, given, (t, *projected.stride()[:2], bias.stride(0)), constants)


def launch_split_backward(
    grads: tuple[Tensor, Tensor, Tensor],  # of x, raw and gate
    projected: Tensor,  # (b, t, columns)
    weight: Tensor | None,  # (c, w)
    window: Tensor | None,  # (b, w - 1, c)
    flat: tuple[int, ...],
    H: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the projected input, of the bias (H, q) and the weight (c, w) one after the
    other (H q + c w), and of the window, empty where there is none; the last two in float32."""
    (b, t, columns), parts, w = projected.shape, Parts.of(flat, H), _width(weight)
    projected = last_axis_contiguous(projected)
    x, raw, gate = map(last_axis_contiguous, grads)
    grad_projected = projected.new_empty(b, t, columns)
    splits = min(MOST_SPLITS, ceil_div(PROGRAMS, max(1, b * H)))
    sums = projected.new_zeros(b * splits, H * parts.q + parts.c * w, dtype=torch.float32)
    grad_window = sums.new_empty(0 if window is None else window.shape)
    given = projected, _read(weight, projected), _read(window, projected), x, raw, gate
    strides = [v.stride()[:2] for v in (projected, x, raw, gate, grad_projected)]
    grid = splits * len(parts.placed), H, b
    constants = _constants(SPLIT_BACKWARD, parts, w, window is not None)
    tensors = *given, grad_projected, grad_window, sums
    SPLIT_BACKWARD.launch(grid, tensors, (t, splits, *sum(strides, ())), constants)
    return grad_projected, sums.sum(0), grad_window


def _width(
    weight: Tensor | None,  # (c, w)
) -> int:
    """w, 0 without a convolution."""
    return 0 if weight is None else weight.shape[1]


def _read(
    tensor: Tensor | None,  # any shape
    other: Tensor,  # any shape, stands for what is not read
) -> Tensor:
    """`tensor` as the kernels read it."""
    return other if tensor is None else tensor.contiguous()


def _tokens(size: int) -> int:
    """Tokens of a program of the forward, for a part of this size."""
    return max(LEAST_TOKENS, TILE // next_power_of_two(size))


def _rows(size: int) -> int:
    """Rows of a program of the backward, for a part of this size."""
    return max(1, ROW_TILE // next_power_of_two(size))


@lru_cache(maxsize=KEPT_CONSTANTS)
def _constants(
    kernel: PlannedKernel,
    parts: Parts,
    width: int,  # 0: no convolution
    windowed: bool,
) -> Constants:
    rows = _tokens if kernel is SPLIT else _rows
    fields: list[int] = []
    for (size, place, convolved, biased), column, channel, bias in parts.placed:
        fields += size, next_power_of_two(size), place, int(convolved), column, channel, rows(size)
        fields += size - biased, bias
    every = {
        "PARTS": tuple(fields),
        "SIZES": (parts.p, parts.r, parts.c, parts.q, width),
        "WINDOWED": windowed,
        "LENGTH": LENGTH,
        "num_warps": 4,
        "num_stages": 1,
    }
    return Constants.of(kernel, every)

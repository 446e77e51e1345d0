"""Launches of the split of the projected input.

Letters: b batch, t time, p channels of a head, r raw values of a head, c convolved channels,
w width of the convolution, H heads; b' = H b folded samples (kernels/heads.py).
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.launch import ceil_div, last_axis_contiguous, next_power_of_two
from bedouin.kernels.plans import KEPT_CONSTANTS, Constants, PlannedKernel
from bedouin.kernels.projection.parts import GATE, Part, Parts, X
from bedouin.kernels.projection.triton_kernels import split_backward_kernel, split_kernel

TILE = 1024
"""Values of a program's tile, for parts of at most so many values."""

ROW_TILE = 256
"""Values of a program's tile in the backward, of which it holds w inputs, cotangents and sums."""

LENGTH = 32
"""Fewest tokens of a row of such a tile, which also reads 2 (w - 1) of its neighbours."""

MOST_SPLITS = 16
"""Most programs of the backward for a sample, a part and a head: as many partial sums."""

PROGRAMS = 2048
"""Programs of the backward of a part that fill a GPU; more of them only leave more partial sums."""

SPLIT, SPLIT_BACKWARD = PlannedKernel(split_kernel), PlannedKernel(split_backward_kernel)


def launch_split(
    projected: Tensor,  # (b, t, columns)
    bias: Tensor,  # (H, r)
    weight: Tensor | None,  # (c, w)
    window: Tensor | None,  # (b, w - 1, c)
    flat: tuple[int, ...],
    results: tuple[Tensor, Tensor, Tensor],  # x, raw and gate, written
) -> None:
    """x, the raw values and the gate of each head."""
    (b, t, _), H = projected.shape, len(bias)
    projected, parts = last_axis_contiguous(projected), Parts.of(flat, H)
    weight, window = (None if v is None else v.contiguous() for v in (weight, window))
    bias = bias.contiguous()
    for part, column, channel in parts.placed:
        source, to = projected[..., column:], _of_part(results, part)
        constants = _constants(part, 0 if weight is None else weight.shape[1])
        given = bias[:, max(part.place, 0) :], *_of_channels(weight, window, part, channel, bias)

        strides = *source.stride()[:2], bias.stride(0), *to.stride()[:2]
        grid = ceil_div(t, constants["TOKENS"]), H, b
        SPLIT.launch(grid, (source, *given, to), (t, H, part.size, parts.c, *strides), constants)


def launch_split_backward(
    grads: tuple[Tensor, Tensor, Tensor],  # of x, raw and gate
    projected: Tensor,  # (b, t, columns)
    weight: Tensor | None,  # (c, w)
    window: Tensor | None,  # (b, w - 1, c)
    flat: tuple[int, ...],
    H: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the projected input, the bias (H, r), the weight (c, w) and the window;
    float32 but for the first, empty where there is none."""
    (b, t, columns), parts = projected.shape, Parts.of(flat, H)
    w = 1 if weight is None else weight.shape[1]
    projected = last_axis_contiguous(projected)
    weight, window = (None if v is None else v.contiguous() for v in (weight, window))
    grads = tuple(last_axis_contiguous(v) for v in grads)  # type: ignore[assignment]
    grad_projected = projected.new_empty(b, t, columns)
    wide = projected.new_empty(0, dtype=torch.float32)
    splits = min(MOST_SPLITS, ceil_div(PROGRAMS, max(1, b * H)))
    grad_bias = wide.new_zeros(b * splits, H, parts.r)
    grad_weight = wide.new_zeros(b * splits if weight is not None else 0, w, parts.c)
    grad_window = wide.new_empty(b, w - 1, parts.c)
    for part, column, channel in parts.placed:
        source, grad = projected[..., column:], _of_part(grads, part)
        constants = _backward_constants(part, 0 if weight is None else w)
        rows = constants["ROWS"]
        length = max(LENGTH if constants["WEIGHTED"] else 1, ceil_div(t, rows * splits))
        sums = grad_bias[..., max(part.place, 0) :], grad_weight[..., channel:]
        written = grad_projected[..., column:], grad_window[..., channel:], *sums
        given = source, *_of_channels(weight, window, part, channel, source), grad, *written

        strides = *source.stride()[:2], *grad.stride()[:2], *grad_projected.stride()[:2]
        numbers = t, H, length, part.size, parts.c, *strides, H * parts.r, parts.r
        grid = ceil_div(t, length * rows), H, b
        SPLIT_BACKWARD.launch(grid, given, numbers, constants)
    if weight is None:
        return grad_projected, grad_bias.sum(0), wide.new_empty(0, parts.c), grad_window[:0]
    return grad_projected, grad_bias.sum(0), grad_weight.sum(0).mT.contiguous(), grad_window


def _of_part(
    results: tuple[Tensor, Tensor, Tensor],  # x, raw and gate, or their gradients
    part: Part,
) -> Tensor:  # (b', t, at least the part's size)
    """Where a part is."""
    x, raw, gate = results
    return {X: x, GATE: gate}[part.place] if part.place < 0 else raw[..., part.place :]


def _of_channels(
    weight: Tensor | None,  # (c, w)
    window: Tensor | None,  # (b, w - 1, c)
    part: Part,
    channel: int,
    other: Tensor,  # stands for what is not read
) -> tuple[Tensor, Tensor]:
    """Weight and window from the part's first channel on."""
    if weight is None or window is None or not part.convolved:
        return other, other
    return weight[channel:], window[..., channel:]


@lru_cache(maxsize=KEPT_CONSTANTS)
def _constants(
    part: Part,
    width: int,  # 0: no convolution
) -> Constants:
    block = next_power_of_two(part.size)
    tokens = max(16, TILE // block)
    return Constants(TOKENS=tokens, num_warps=4, **_common_constants(part, width))


@lru_cache(maxsize=KEPT_CONSTANTS)
def _backward_constants(part: Part, width: int) -> Constants:
    rows = max(1, ROW_TILE // next_power_of_two(part.size))
    return Constants(ROWS=rows, num_warps=2, **_common_constants(part, width))


def _common_constants(part: Part, width: int) -> dict[str, Any]:
    weighted = part.convolved and width > 0
    return {
        "WIDTH": width if weighted else 1,
        "WEIGHTED": weighted,
        "ACTIVATED": part.convolved,
        "BIASED": part.place >= 0,
        "BLOCK": next_power_of_two(part.size),
        "num_stages": 1,
        "enable_fp_fusion": True,
    }

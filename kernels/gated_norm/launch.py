"""Launches of the gated norm.

Letters: b batch, t time, h heads, v value channels of a head, r = b t h rows.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.gated_norm.triton_kernels import (
    gated_norm_backward_kernel,
    gated_norm_kernel,
)
from bedouin.kernels.launch import ceil_div, evenly_spaced, next_power_of_two

TILE = 2048
"""Numbers of a program's tile: 16 for each of 128 threads."""

PROGRAMS = 1024
"""Most programs of the backward: eight on each multiprocessor of an H100, and few parts of a sum.
The same on every device, so that the sums are."""


def launch_forward(
    o: Tensor,  # (b, t, h, v)
    gate: Tensor,  # (b, t, h v)
    weight: Tensor,  # (v,)
    eps: float,
) -> Tensor:  # (b, t, h v)
    gate, out = evenly_spaced(gate), gate.new_empty(gate.shape)
    r, tiles, constants = _tiles(o, eps)
    numbers = r, o.shape[2], gate.stride(1)
    operands = o.contiguous(), gate, weight.contiguous(), out
    gated_norm_kernel[(tiles,)](*operands, *numbers, **constants)
    return out


def launch_backward(
    grad: Tensor,  # (b, t, h v)
    o: Tensor,  # (b, t, h, v)
    gate: Tensor,  # (b, t, h v)
    weight: Tensor,  # (v,)
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of o, gate and weight."""
    gate = evenly_spaced(gate)
    grad_o, grad_gate = o.new_empty(o.shape), gate.new_empty(gate.shape)
    r, tiles, constants = _tiles(o, eps)
    programs = min(tiles, PROGRAMS)
    sums = o.new_empty(programs, o.shape[-1], dtype=torch.float32)
    gated_norm_backward_kernel[(programs,)](
        *(grad.contiguous(), o.contiguous(), gate, weight.contiguous()),
        *(grad_o, grad_gate, sums, r, o.shape[2], gate.stride(1), tiles),
        **constants,
    )
    return grad_o, grad_gate, sums.sum(0).to(weight.dtype)


def _tiles(
    o: Tensor,  # (b, t, h, v)
    eps: float,
) -> tuple[int, int, dict[str, Any]]:
    """The rows, the tiles of rows, and the constants of a kernel."""
    v = o.shape[-1]
    r, block = o.numel() // v, next_power_of_two(v)
    rows = max(1, min(TILE // block, next_power_of_two(r)))
    constants = {"EPS": eps, "V": v, "ROWS": rows, "BLOCK": block}
    return r, ceil_div(r, rows), {**constants, "enable_fp_fusion": True}

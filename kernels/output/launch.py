"""Launches of the output stage.

Letters: b batch, t time, d channels, H heads (kernels/heads.py).
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.launch import (
    ceil_div,
    evenly_spaced,
    last_axis_contiguous,
    next_power_of_two,
)
from bedouin.kernels.output.triton_kernels import (
    output_backward_kernel,
    output_kernel,
    shifted_norm_backward_kernel,
    shifted_norm_kernel,
)
from bedouin.kernels.output.types import OutputOperands

TILE = 1024
"""Fewest elements of a program's tile where there are as many: four warps, 8 elements a thread."""
MAX_WARPS = 16
PROGRAMS = 1024
"""Most programs of the backward, up to a rounding to whole heads: eight on each multiprocessor of
an H100, and few enough that their parts of the sums are small. The same on every device, so that
the sums are."""


def output_forward(
    operands: OutputOperands,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:  # (b / H, t, H d)
    """The gated output in `dtype`. No size may be 0."""
    y, x, D, gate, fed, z, weight = operands
    d, heads = y.shape[-1], operands.heads
    out = torch.empty(operands.joined_shape, dtype=dtype, device=y.device)
    rows = _as_rows(y, x, gate, fed, z)
    tokens, parts = y.shape[:2].numel() // heads, (fed is not None, weight is not None)
    constants = _output_constants(heads > 1, *parts, eps, tokens, d)
    norm_weight = D if weight is None else weight.contiguous()
    output_kernel[(ceil_div(tokens, constants["TOKENS"]), heads)](
        *(rows[0], rows[1], D.contiguous(), *rows[2:], norm_weight, out),
        *(tokens, d, *_strides(out, rows, heads)),
        **constants,
    )
    return out


def output_backward(
    grad: Tensor,  # (b / H, t, H d)
    operands: OutputOperands,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of y, x and gate, which is also that of fed and z, and of D and weight.

    The last is (2, d) or (2, H, d); without weight that of D alone, (1, d) or (1, H, d). No size
    may be 0.
    """
    y, x, D, gate, fed, z, weight = operands
    grads = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in (y, x, gate)]
    d, heads = y.shape[-1], operands.heads
    grad = evenly_spaced(grad)
    rows = _as_rows(y, x, gate, fed, z)
    tokens, parts = y.shape[:2].numel() // heads, (fed is not None, weight is not None)
    constants = _output_constants(heads > 1, *parts, eps, tokens, d)
    programs = min(ceil_div(PROGRAMS, heads), ceil_div(tokens, constants["TOKENS"]))
    sums = y.new_empty(programs, 2 if weight is not None else 1, *D.shape)
    norm_weight = D if weight is None else weight.contiguous()
    output_backward_kernel[(programs, heads)](
        *(grad, *rows[:2], D.contiguous(), *rows[2:], norm_weight, *grads, sums),
        *(tokens, d, *_strides(grad, rows, heads)),
        **constants,
    )
    return grads[0], grads[1], grads[2], sums.sum(0)


def shifted_norm_forward(
    y: Tensor,  # (b, t, d)
    y0: Tensor | None,  # (b, d); None: zeros
    eps: float | None,
    dtype: torch.dtype,
) -> Tensor:  # (b, t, d)
    """RMSNorm of y_{t-1} in `dtype`. No size may be 0."""
    out = torch.empty(y.shape, dtype=dtype, device=y.device)
    y = last_axis_contiguous(y)
    first = y if y0 is None else last_axis_contiguous(y0)
    b, t_end, d = y.shape
    constants = _norm_constants(y0 is not None, eps, b * t_end, d)
    shifted_norm_kernel[(ceil_div(b * t_end, constants["TOKENS"]),)](
        *(y, first, out),
        *(b * t_end, t_end, d, *y.stride()[:2], first.stride(0)),
        **constants,
    )
    return out


def shifted_norm_backward(
    grad: Tensor,  # (b, t, d)
    y: Tensor,  # (b, t, d)
    y0: Tensor | None,  # (b, d); None: zeros
    eps: float | None,
) -> tuple[Tensor, Tensor]:
    """Cotangents of y and y0, the second empty for None."""
    grad_y = y.new_empty(y.shape)
    grad_y0 = y.new_empty(0) if y0 is None else y0.new_empty(y0.shape)
    grad, y = last_axis_contiguous(grad), last_axis_contiguous(y)
    first = y if y0 is None else last_axis_contiguous(y0)
    b, t_end, d = y.shape
    rows = b * (t_end + 1)
    constants = _norm_constants(y0 is not None, eps, b * t_end, d)
    shifted_norm_backward_kernel[(ceil_div(rows, constants["TOKENS"]),)](
        *(grad, y, first, grad_y, grad_y0),
        *(rows, t_end, d, *grad.stride()[:2], *y.stride()[:2], first.stride(0)),
        **constants,
    )
    return grad_y, grad_y0


def _output_constants(
    heads: bool, fed: bool, norm: bool, eps: float, tokens: int, d: int
) -> dict[str, Any]:
    return {"HEADS": heads, "FED": fed, "NORM": norm, "EPS": eps, **_blocks(tokens, d)}


def _norm_constants(start: bool, eps: float | None, tokens: int, d: int) -> dict[str, Any]:
    norm = {"START": start, "NORM": eps is not None, "EPS": eps or 0.0}
    return {**norm, **_blocks(tokens, d)}


def _as_rows(first: Tensor, *others: Tensor | None) -> list[Tensor]:
    """The operands (b, t, d), copied unless their tokens are rows at one distance.

    None, which a kernel does not read, is replaced by the first.
    """
    rows = evenly_spaced(first)
    return [rows, *[rows if v is None else evenly_spaced(v) for v in others]]


def _strides(
    joined: Tensor,  # (b / H, t, H d), the output or its cotangent
    rows: list[Tensor],  # (b, t, d) each
    heads: int,
) -> list[int]:
    """The distances of rows, then those of heads: zeros for one head, since they depend on the
    number of tokens, and each would need a kernel of its own."""
    # the stride of an axis of size 1 says nothing
    strides = [v.stride(1) if v.shape[1] > 1 else v.stride(0) for v in (joined, *rows)]
    if heads == 1:
        return [*strides, *[0 for _ in strides]]
    b, t, width = joined.shape
    return [*strides, width // heads, *[b * t * stride for stride in strides[1:]]]


def _blocks(tokens: int, d: int) -> dict[str, Any]:
    """How many tokens one program takes at a time, with all their channels, and launch options."""
    block_d = next_power_of_two(d)
    taken = max(1, min(next_power_of_two(tokens), TILE // block_d))
    warps = max(1, min(MAX_WARPS, taken * block_d // 256))
    return {"TOKENS": taken, "BLOCK_D": block_d, "num_warps": warps, "enable_fp_fusion": True}

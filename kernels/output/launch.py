"""Launches of the output stage.

Letters: b batch, t time, d channels, H heads (kernels/heads.py).
"""

from functools import lru_cache

import torch
from torch import Tensor

from bedouin.kernels.launch import (
    accumulator,
    ceil_div,
    last_axis_contiguous,
    next_power_of_two,
    triton_dtype,
)
from bedouin.kernels.output.triton_kernels import (
    output_backward_kernel,
    output_kernel,
    shifted_norm_backward_kernel,
    shifted_norm_kernel,
)
from bedouin.kernels.output.types import OutputOperands
from bedouin.kernels.plans import (
    AFRESH,
    KEPT_CONSTANTS,
    Constants,
    How,
    Launcher,
    PlannedKernel,
)

TILE = 1024
"""Fewest elements of a program's tile where there are as many: four warps, 8 elements a thread."""
MAX_WARPS = 16
PROGRAMS = 1024
"""Most programs of the backward, up to a rounding to whole heads: eight on each multiprocessor of
an H100, and few enough that their parts of the sums are small. The same on every device, so that
the sums are."""


OUTPUT, OUTPUT_BACKWARD = PlannedKernel(output_kernel), PlannedKernel(output_backward_kernel)
SHIFTED_NORM = PlannedKernel(shifted_norm_kernel)
SHIFTED_NORM_BACKWARD = PlannedKernel(shifted_norm_backward_kernel)


def output_forward(
    operands: OutputOperands,
    eps: float,
    dtype: torch.dtype,
    *,
    into: Tensor | None = None,  # (b, t, d), or as the operands
    launcher: Launcher = AFRESH,
) -> Tensor:  # as y
    """The gated output in `dtype`, written to `into`, by default to new memory. No size may be 0.

    Operands and `into` may also be rows, (b t, d) or of several heads (H, T, d).
    """
    y, _, D, *_, weight = operands
    out = torch.empty(y.shape, dtype=dtype, device=y.device) if into is None else into
    d, heads = y.shape[-1], D.numel() // y.shape[-1]
    rows = _head_rows(heads, y, operands.x, operands.gate, operands.fed, operands.z)

    def how() -> How:
        tokens, every = rows[0].shape[-2], rows + _head_rows(heads, out)
        blocks, parts = _blocks(tokens, d), (operands.fed is not None, weight is not None)
        constants = _output_constants(heads > 1, *parts, eps, y.dtype, tokens, d)
        integers = tokens, d, *_row_strides(every), *_head_strides(every)
        return (ceil_div(tokens, blocks["TOKENS"]), heads), integers, constants

    norm_weight = D if weight is None else weight.contiguous()
    tensors = rows[0], rows[1], D.contiguous(), *rows[2:], norm_weight, out
    launcher.launch(OUTPUT, None, tensors, how)
    return out


def output_backward(
    grad: Tensor,  # (b, t, d)
    operands: OutputOperands,
    eps: float,
    *,
    into: tuple[Tensor, Tensor] | None = None,  # (b, t, d) each, evenly spaced rows
    most_programs: int = PROGRAMS,
    adds: bool = True,
    launcher: Launcher = AFRESH,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of y, x and gate, which is also that of fed and z, and of D and weight.

    The last is (2, d) or (2, H, d); without weight that of D alone, (1, d) or (1, H, d). Those of x
    and gate are written to `into`, by default to new memory. No size may be 0. Operands may also be
    rows, as those of `output_forward`. Without `adds` the last has one axis more in front, over
    which the caller adds.
    """
    y, x, D, gate, fed, z, weight = operands
    given = into or [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in (x, gate)]
    grad_y = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    d, heads = y.shape[-1], D.numel() // y.shape[-1]
    read = [*_head_rows(heads, grad), *_head_rows(heads, y, x, gate, fed, z)]
    tokens = read[0].shape[-2]
    blocks = _blocks(tokens, d)
    programs = min(ceil_div(most_programs, heads), ceil_div(tokens, blocks["TOKENS"]))
    sums = y.new_empty(programs, 2 if weight is not None else 1, *D.shape)

    def how() -> How:
        every, parts = read + _head_rows(heads, *given), (fed is not None, weight is not None)
        constants = _output_constants(heads > 1, *parts, eps, y.dtype, tokens, d)
        integers = tokens, d, *_row_strides(every), *_head_strides(every)
        return (programs, heads), integers, constants

    norm_weight = D if weight is None else weight.contiguous()
    first = *read[:3], D.contiguous(), *read[3:], norm_weight
    launcher.launch(OUTPUT_BACKWARD, None, (*first, grad_y, *given, sums), how)
    return grad_y, given[0], given[1], sums.sum(0) if adds else sums


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
    blocks = _blocks(b * t_end, d)
    SHIFTED_NORM.launch(
        (ceil_div(b * t_end, blocks["TOKENS"]),),
        (y, first, out),
        (b * t_end, t_end, d, *y.stride()[:2], first.stride(0)),
        _norm_constants(y0 is not None, eps, y.dtype, b * t_end, d),
    )
    return out


def shifted_norm_backward(
    grad: Tensor,  # (b, t, d)
    y: Tensor,  # (b, t, d)
    y0: Tensor | None,  # (b, d); None: zeros
    eps: float | None,
    add_to: Tensor | None = None,  # (b, t, d), contiguous
    launcher: Launcher = AFRESH,
) -> tuple[Tensor, Tensor]:
    """Cotangents of y and y0, the second empty for None; that of y is added to `add_to` in place,
    if given."""
    grad_y = y.new_empty(y.shape) if add_to is None else add_to
    grads = [grad_y, y.new_empty(0) if y0 is None else y0.new_empty(y0.shape)]
    grad, y = last_axis_contiguous(grad), last_axis_contiguous(y)
    first = y if y0 is None else last_axis_contiguous(y0)

    def how() -> How:
        b, t_end, d = y.shape
        rows, blocks = b * (t_end + 1), _blocks(b * t_end, d)
        integers = rows, t_end, d, *grad.stride()[:2], *y.stride()[:2], first.stride(0)
        constants = _norm_constants(y0 is not None, eps, y.dtype, b * t_end, d, add_to is not None)
        return (ceil_div(rows, blocks["TOKENS"]),), integers, constants

    launcher.launch(SHIFTED_NORM_BACKWARD, None, (grad, y, first, *grads), how)
    return grads[0], grads[1]


@lru_cache(maxsize=KEPT_CONSTANTS)
def _output_constants(
    heads: bool, fed: bool, norm: bool, eps: float, dtype: torch.dtype, tokens: int, d: int
) -> Constants:
    acc = triton_dtype(accumulator(dtype))
    return Constants(HEADS=heads, FED=fed, NORM=norm, EPS=eps, ACC=acc, **_blocks(tokens, d))


@lru_cache(maxsize=KEPT_CONSTANTS)
def _norm_constants(
    start: bool,
    eps: float | None,
    dtype: torch.dtype,
    tokens: int,
    d: int,
    add: bool | None = None,  # None: for the forward kernel
) -> Constants:
    acc = triton_dtype(accumulator(dtype))
    norm = {"START": start, "NORM": eps is not None, "EPS": eps or 0.0, "ACC": acc}
    added = {} if add is None else {"ADD": add}
    return Constants(**norm, **added, **_blocks(tokens, d))


def _head_rows(heads: int, first: Tensor, *others: Tensor | None) -> list[Tensor]:
    """The operands (b, t, d), (b t, d) or (H, T, d) as (H, T, d), or for one head as they are if
    they are (b t, d): views where the tokens of a head are rows at one distance.

    None, which a kernel does not read, is replaced by the first.
    """
    rows = _as_rows(heads, first)
    return [rows, *[rows if v is None else _as_rows(heads, v) for v in others]]


def _as_rows(
    heads: int,
    v: Tensor,  # (b, t, d), (b t, d) or (H, T, d)
) -> Tensor:  # (H, T, d), or (T, d) for one head
    # a view of the same shape costs the host as much as some launches
    if v.dim() == 2 if heads == 1 else v.dim() == 3 and v.shape[0] == heads:
        return last_axis_contiguous(v)
    return last_axis_contiguous(v.reshape(heads, -1, v.shape[-1]))


def _row_strides(rows: list[Tensor]) -> list[int]:
    return [v.stride(-2) for v in rows]


def _head_strides(rows: list[Tensor]) -> list[int]:
    """Zeros for one head, since the axis's stride then depends on the number of tokens, and each
    would need a kernel of its own."""
    return [v.stride(0) if v.dim() == 3 and len(v) > 1 else 0 for v in rows]


def _blocks(tokens: int, d: int) -> dict[str, int]:
    """How many tokens one program takes at a time, with all their channels, and its warps."""
    block_d = next_power_of_two(d)
    taken = max(1, min(next_power_of_two(tokens), TILE // block_d))
    warps = max(1, min(MAX_WARPS, taken * block_d // 256))
    return {"TOKENS": taken, "BLOCK_D": block_d, "num_warps": warps}

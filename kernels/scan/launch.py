"""Launches of the scan: how it is spread over programs, and both directions.

Letters: b batch, t time, d channels, n state per channel, H heads of b/H samples each
(kernels/heads.py).
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.heads import count_heads
from bedouin.kernels.launch import (
    ceil_div,
    last_axis_contiguous,
    next_power_of_two,
)
from bedouin.kernels.scan.triton_backward import backward_kernel
from bedouin.kernels.scan.triton_forward import forward_kernel
from bedouin.kernels.scan.types import SCAN_CHUNK, ScanOperands, ScanOptions

MOST_WARPS = 8
BACKWARD_CHANNELS = 16
"""Fewest channels of a backward program, as far as MOST_WARPS hold their states: each block of
channels has its own part of the gradients of B and C, (b, t, n) each."""

LANES = 32
"""Most channels of a forward program, one warp: with up to 16 states a thread holds all states of
one channel, and neither a sum over states nor a row of x crosses threads."""

FORWARD_PROGRAMS = 512
"""Programs wanted in a forward launch, one for each scheduler of an H100; with fewer the blocks are
halved once."""

BACKWARD_PROGRAMS = 1024
"""The backward takes blocks of two warps where these make that many programs, else of one."""

WARP = 512
"""Elements (channels times states) of one warp, 16 in each thread."""


def choose_block(
    x: Tensor,  # (b, t, d)
    n: int,
    *,
    reverse: bool,
) -> int:
    """Channels of a program of the forward kernel or, with `reverse`, of the backward kernel."""
    b, _, d = x.shape
    warp, most = max(1, WARP // next_power_of_two(n)), next_power_of_two(d)
    if not reverse:
        block = min(warp, LANES, most)
        return block if b * ceil_div(d, block) >= FORWARD_PROGRAMS else max(1, block // 2)
    least = min(BACKWARD_CHANNELS, MOST_WARPS * warp)
    block = min(max(2 * warp, least), most)
    return block if b * ceil_div(d, block) >= BACKWARD_PROGRAMS else min(max(warp, least), most)


def scan_forward(
    operands: ScanOperands, options: ScanOptions, *, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y (b, t, d), the last h (b, d, n), and h before each chunk (b, ceil(t / SCAN_CHUNK), d, n),
    which `scan_backward` needs; without `keep` of no chunk. No size may be 0."""
    A, h0, D = operands.A, operands.h0, operands.D
    x, delta, B, C = map(last_axis_contiguous, (operands.x, operands.delta, operands.B, operands.C))
    by_state, skip = A.mT.contiguous(), A if D is None else D.contiguous()
    (b, t, d), n, heads = x.shape, A.shape[-1], count_heads(A)
    block = choose_block(x, n, reverse=False)
    chunks = ceil_div(t, SCAN_CHUNK) if keep else 0
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = torch.empty(h0.shape, dtype=h0.dtype, device=h0.device)
    kept = x.new_empty(b, chunks, d, n, dtype=torch.float32)
    forward_kernel[(b * ceil_div(d, block),)](
        *(x, delta, by_state, B, C, h0.mT.contiguous(), skip, y, h, kept),
        *(t, d, n, 0),
        *_strides(x, delta, B, C),
        b // heads,
        **_flags(options),
        EXCLUSIVE=options.exclusive,
        HEADS=heads > 1,
        HAS_D=D is not None,
        KEEP=keep,
        CHUNK=SCAN_CHUNK,
        **_blocks(block, n),
    )
    return y, h, kept


def scan_backward(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor,  # (b, d, n)
    kept: Tensor,  # (b, ceil(t / SCAN_CHUNK), d, n), as `scan_forward` returns it
    operands: ScanOperands,
    options: ScanOptions,
) -> tuple[Tensor, ...]:
    """The cotangents of the operands, each in the shape and dtype of its operand, that of D empty
    without D: the adjoint of the scan, from the last token to the first. No size may be 0."""
    h0, D = operands.h0, operands.D
    grad_y, x, delta, B, C = map(
        last_axis_contiguous, (grad_y, operands.x, operands.delta, operands.B, operands.C)
    )
    A, grad_h = operands.A.contiguous(), grad_h.contiguous()
    skip = A if D is None else D.contiguous()
    (b, t, d), n, heads = x.shape, A.shape[-1], count_heads(A)
    block = choose_block(x, n, reverse=True)
    blocks = ceil_div(d, block)
    cells = block * next_power_of_two(n)
    work = x.new_empty(b * blocks, SCAN_CHUNK, cells, dtype=torch.float32)
    grad_x, grad_delta = (x.new_empty(x.shape, dtype=v.dtype) for v in (x, delta))
    grad_A = A.new_empty(b, d, n, dtype=torch.float32)
    grad_BC = x.new_empty(2, b, t, blocks, n, dtype=torch.float32)
    grad_h0 = torch.empty(h0.shape, dtype=h0.dtype, device=h0.device)
    grad_D = A.new_empty(b, d if D is not None else 0, dtype=torch.float32)
    backward_kernel[(b * blocks,)](
        *(grad_y, grad_h, x, delta, A, B, C, skip, kept, work),
        *(grad_x, grad_delta, grad_A, *grad_BC, grad_h0, grad_D),
        *(t, d, n),
        *_strides(grad_y, x, delta, B, C),
        b // heads,
        **_flags(options),
        EXCLUSIVE=options.exclusive,
        HEADS=heads > 1,
        HAS_D=D is not None,
        CHUNK=SCAN_CHUNK,
        **_blocks(block, n),
    )
    summed_A = _sum_samples(grad_A, A)
    # One reduction for both. They are copied even without a cast, or they would share its memory.
    summed_B, summed_C = grad_BC.sum(3)
    summed_B, summed_C = summed_B.to(B.dtype, copy=True), summed_C.to(C.dtype, copy=True)
    summed_D = A.new_empty(0) if D is None else _sum_samples(grad_D, D)
    return grad_x, grad_delta, summed_A, summed_B, summed_C, grad_h0, summed_D


def _sum_samples(
    parts: Tensor,  # (b, ...)
    operand: Tensor,  # (...) or (H, ...)
) -> Tensor:  # as the operand
    """A gradient from its parts of samples, of each head by itself."""
    if operand.dim() < parts.dim():
        summed = parts.sum(0)
    else:
        summed = parts.unflatten(0, (len(operand), -1)).sum(1)
    return summed.to(operand.dtype)


def _blocks(block_d: int, n: int) -> dict[str, int]:
    """The sizes of a program's block and its warps."""
    block_n = next_power_of_two(n)
    warps = max(1, min(MOST_WARPS, block_d * block_n // WARP))
    return {"BLOCK_D": block_d, "BLOCK_N": block_n, "num_warps": warps}


def _strides(*operands: Tensor) -> tuple[int, ...]:
    """Strides of the batch and time axes of each operand (b, t, ...)."""
    return tuple(v.stride(axis) for v in operands for axis in (0, 1))


def _flags(options: ScanOptions) -> dict[str, Any]:
    """The options of a scan as keyword arguments of a kernel."""
    return {
        "INPUT_SCALE": options.input_scale,
        "FULL": options.eigenvalues == "full",
        "FAST": not interpreter_is_on(),
    }

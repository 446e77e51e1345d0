"""The scan as operations of torch.library, so that torch.compile keeps whole graphs.

`triton_scan` launches the kernels, `plain_scan` calls the reference. The operations take the
operands and options of a scan one by one, in the order of `ScanOperands` and `ScanOptions`. Triton
is imported when an operation runs.
Letters: b batch, t time, d channels, n state per channel, H heads of b/H samples each
(kernels/heads.py).
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.heads import count_heads, sum_samples
from bedouin.kernels.launch import ceil_div, last_axis_contiguous, next_power_of_two
from bedouin.kernels.operation import empty_like, operation, plain_operation
from bedouin.kernels.scan.reference import selective_scan_reference
from bedouin.kernels.scan.types import SCAN_CHUNK, ScanOperands, ScanOptions

TENSORS = "Tensor x, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor h0"
OPTIONS = "str input_scale, str eigenvalues, bool exclusive"

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


def _constants(options: ScanOptions, n: int, block: int) -> dict[str, Any]:
    """What a program with a block of channels has at compile time, and its launch options."""
    block_n = next_power_of_two(n)
    return {
        "INPUT_SCALE": options.input_scale,
        "FULL": options.eigenvalues == "full",
        "EXCLUSIVE": options.exclusive,
        "FAST": not interpreter_is_on(),
        "CHUNK": SCAN_CHUNK,
        "BLOCK_D": block,
        "BLOCK_N": block_n,
        "num_warps": max(1, min(MOST_WARPS, block * block_n // WARP)),
    }


def _strides(*rows: Tensor) -> list[int]:
    """Those of the batch and time axes of tensors (b, t, ...), whose last axes are contiguous."""
    return [v.stride(axis) for v in rows for axis in (0, 1)]


def launch_forward(
    rows: tuple[Tensor, Tensor, Tensor, Tensor],  # x, delta (b, t, d), B, C (b, t, n), rows whole
    A: Tensor,  # (H, n, d) or (n, d), contiguous
    h0: Tensor,  # (b, n, d), contiguous
    D: Tensor | None,  # (H, d) or (d,), contiguous
    outputs: tuple[Tensor, Tensor, Tensor | None],  # y (b, t, d), the last h (b, d, n), kept
    options: ScanOptions,
) -> None:
    """Launch the forward kernel, which writes the outputs: as those of `triton_scan`."""
    from bedouin.kernels.scan.triton_forward import forward_kernel

    x, (b, t, d), (n, heads) = rows[0], rows[0].shape, (A.shape[-2], count_heads(A))
    y, last, kept = outputs
    block = choose_block(x, n, reverse=False)
    forward_kernel[(b * ceil_div(d, block),)](
        *(x, rows[1], A, *rows[2:], h0, A if D is None else D),
        *(y, last, last if kept is None else kept, t, d, n, 0, *_strides(*rows), b // heads),
        HAS_D=D is not None,
        KEEP=kept is not None,
        **_constants(options, n, block),
    )


@operation(
    "selective_scan", f"({TENSORS}, Tensor? D, {OPTIONS}, bool keep) -> (Tensor, Tensor, Tensor)"
)
def triton_scan(*flat: Any) -> tuple[Tensor, ...]:
    """y (b, t, d) with D * x, the last h (b, d, n), and h before each chunk
    (b, ceil(t / SCAN_CHUNK), d, n); without `keep` of no chunk. No size may be 0."""
    operands, (y, last, kept) = ScanOperands(*flat[:7]), _scan_fake(*flat)
    x, delta, B, C = map(last_axis_contiguous, operands.rows)
    D = None if operands.D is None else operands.D.contiguous()
    states = operands.A.mT.contiguous(), operands.h0.mT.contiguous()
    written = y, last, kept if flat[10] else None
    launch_forward((x, delta, B, C), *states, D, written, ScanOptions(*flat[7:10]))
    return y, last, kept


@triton_scan.register_fake
def _scan_fake(*flat: Any) -> tuple[Tensor, ...]:
    x, _, A, _, _, h0, _ = ScanOperands(*flat[:7])
    chunks = ceil_div(x.shape[1], SCAN_CHUNK) if flat[10] else 0
    kept = x.new_empty(x.shape[0], chunks, *A.shape[-2:], dtype=torch.float32)
    return *empty_like(x, h0), kept


@operation(
    "selective_scan_backward",
    f"(Tensor grad_y, Tensor grad_h, Tensor kept, {TENSORS}, Tensor? D, {OPTIONS}) "
    f"-> ({', '.join(['Tensor'] * 7)})",
)
def _scan_backward(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor,  # (b, d, n)
    kept: Tensor,  # (b, ceil(t / SCAN_CHUNK), d, n), as `triton_scan` returns it
    *flat: Any,
) -> tuple[Tensor, ...]:
    """The cotangents of the operands, each in the shape and dtype of its operand, that of D empty
    without D: the adjoint of the scan, from the last token to the first. No size may be 0."""
    from bedouin.kernels.scan.triton_backward import backward_kernel

    operands = ScanOperands(*flat[:7])
    D, A, grad_h = operands.D, operands.A.contiguous(), grad_h.contiguous()
    rows = tuple(map(last_axis_contiguous, (grad_y, *operands.rows)))
    grad_y, x, delta, B, C = rows
    (b, t, d), n, heads = x.shape, A.shape[-1], count_heads(A)
    block = choose_block(x, n, reverse=True)
    blocks = ceil_div(d, block)
    cells = block * next_power_of_two(n)
    work = x.new_empty(b * blocks, SCAN_CHUNK, cells, dtype=torch.float32)
    grad_x, grad_delta, grad_h0 = empty_like(x, delta, operands.h0)
    grad_A = A.new_empty(b, d, n, dtype=torch.float32)
    grad_BC = x.new_empty(2, b, t, blocks, n, dtype=torch.float32)
    grad_D = A.new_empty(b, 0 if D is None else d, dtype=torch.float32)
    backward_kernel[(b * blocks,)](
        *(grad_y, grad_h, x, delta, A, B, C, A if D is None else D.contiguous(), kept, work),
        *(grad_x, grad_delta, grad_A, *grad_BC, grad_h0, grad_D),
        *(t, d, n, *_strides(*rows), b // heads),
        HAS_D=D is not None,
        **_constants(ScanOptions(*flat[7:]), n, block),
    )
    of_A = sum_samples(grad_A, heads).view(A.shape).to(A.dtype)
    # One reduction for both. They are copied even without a cast, or they would share its memory.
    of_B, of_C = grad_BC.sum(3)
    of_B, of_C = of_B.to(B.dtype, copy=True), of_C.to(C.dtype, copy=True)
    of_D = A.new_empty(0)
    if D is not None:
        of_D = sum_samples(grad_D, heads).view(D.shape).to(D.dtype)
    return grad_x, grad_delta, of_A, of_B, of_C, grad_h0, of_D


_scan_backward.register_fake(lambda grad_y, grad_h, kept, *flat: empty_like(*flat[:7]))
triton_scan.register_vjp(_scan_backward, kept=1)


def _plain(*flat: Any) -> tuple[Tensor, Tensor]:
    """y (b, t, d) without D * x, and the last h (b, d, n). No size may be 0."""
    return selective_scan_reference(*flat[:6], **ScanOptions(*flat[6:])._asdict())


plain_scan = plain_operation(
    "plain_scan", TENSORS, OPTIONS, _plain, lambda *flat: empty_like(flat[0], flat[5])
)

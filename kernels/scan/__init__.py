"""Diagonal selective scan: the public operation, and its operations of torch.library, with which
torch.compile keeps whole graphs.

`triton_scan` launches the kernels, `plain_scan` calls the reference. They take the tensors of
`selective_scan` and the fields of `ScanOptions` one by one. Triton is imported when an operation
runs.
Letters: b batch, t time, d channels, n state per channel, H heads of b/H samples each
(kernels/heads.py).
"""

from typing import Any, get_args

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, choose_backend
from bedouin.kernels.checks import check_sequence, check_shapes, one_of
from bedouin.kernels.heads import check_heads, count_heads, per_sample, sum_samples
from bedouin.kernels.launch import (
    accumulator,
    as_constants,
    ceil_div,
    last_axis_contiguous,
    next_power_of_two,
)
from bedouin.kernels.operation import empty_like, is_recorded, operation, plain_operation
from bedouin.kernels.scan.reference import (
    SCAN_CHUNK,
    Eigenvalues,
    InputScale,
    ScanOptions,
    contract,
    discretize,
    selective_scan_reference,
)

__all__ = [
    "Eigenvalues",
    "InputScale",
    "contract",
    "discretize",
    "selective_scan",
    "selective_scan_reference",
]


def selective_scan(
    x: Tensor,  # (b, t, d)
    delta: Tensor,  # (b, t, d)
    A: Tensor,  # (d, n) or (H, d, n)
    B: Tensor,  # (b, t, n)
    C: Tensor,  # (b, t, n)
    h0: Tensor | None = None,  # (b, d, n)
    D: Tensor | None = None,  # (d,) or (H, d), as A
    *,
    input_scale: InputScale = "delta",
    eigenvalues: Eigenvalues = "positive",
    exclusive: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:  # (b, t, d), (b, d, n)
    """The scan h_t = lambda_t * h_{t-1} + (s_t * x_t) B_t^T, y_t = h_t C_t + D * x_t.

    lambda_t = exp(A delta_t) and s_t are computed inside (`discretize`). Returns y and the last h,
    both differentiable. With `exclusive`, y_t reads memory before token t is written.
    Source: Mamba (arXiv 2312.00752), section 3; Fixed-Point RNNs (arXiv 2503.10799), section 5.
    With A (H, d, n) the batch is H groups of b/H samples, one group for each head: sample i uses
    A[i // (b/H)], and D in the same way.
    Computes in at least float32; y has the dtype of x, the last h that of h0 (without h0 at least
    float32). The Triton version is once differentiable, and so is every one under torch.compile,
    where the scan is one operation for every length.

    Raises ValueError for shapes that do not fit, a batch that is not H groups of one size, unknown
    option names, or a backend that cannot run on the device.
    """
    check_sequence("x", x)
    b, t, d = x.shape
    if A.dim() not in (2, 3) or A.shape[-2] != d:
        raise ValueError(f"A must have shape (d, n) = ({d}, n) or (H, d, n), got {tuple(A.shape)}")
    check_heads(count_heads(A), b, "A")
    n = A.shape[-1]
    check_shapes((b, t, d), delta=delta)
    check_shapes((b, t, n), B=B, C=C)
    check_shapes((b, d, n), h0=h0)
    check_shapes(A.shape[:-1], D=D)
    one_of("input_scale", input_scale, get_args(InputScale))
    one_of("eigenvalues", eigenvalues, get_args(Eigenvalues))
    implementation = choose_backend(backend, x.device, x.dtype)
    if h0 is None:
        h0 = x.new_zeros(b, d, n, dtype=accumulator(x.dtype))
    operands = x, delta, A, B, C, h0, D
    options = ScanOptions(input_scale, eigenvalues, exclusive)
    is_empty = not (x.numel() and A.numel())
    if implementation == "triton" and not is_empty:
        y, h, _ = triton_scan(*operands, *options, is_recorded(*operands))
        return y, h
    if torch.compiler.is_compiling() and not is_empty:
        y, h = plain_scan(*operands[:6], *options)
    else:
        y, h = selective_scan_reference(*operands[:6], **options._asdict())
    if D is None:
        return y, h
    skipped = (D if D.dim() == 1 else per_sample(D, b).unsqueeze(1)) * x
    return (y + skipped).to(x.dtype), h


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
        "how": as_constants(options),
        "CHUNK": SCAN_CHUNK,
        "BLOCK_D": block,
        "BLOCK_N": block_n,
        "num_warps": max(1, min(MOST_WARPS, block * block_n // WARP)),
    }


def launch_forward(
    rows: tuple[Tensor, ...],  # x, delta (b, t, d), B, C (b, t, n), rows whole
    A: Tensor,  # (H, n, d) or (n, d), contiguous
    h0: Tensor,  # (b, n, d), contiguous
    D: Tensor | None,  # (H, d) or (d,), contiguous
    outputs: tuple[Tensor, Tensor, Tensor | None],  # y (b, t, d), the last h (b, d, n), kept
    options: ScanOptions,
) -> None:
    """Launch the forward kernel, which writes the outputs: as those of `triton_scan`."""
    from bedouin.kernels.scan.triton_kernels import forward_kernel

    (b, t, d), n, strides = rows[0].shape, A.shape[-2], tuple(v.stride()[:2] for v in rows)
    block = choose_block(rows[0], n, reverse=False)
    forward_kernel[(b * ceil_div(d, block),)](
        *(rows, A, h0, D, *outputs, t, d, n, 0, strides, b // count_heads(A)),
        **_constants(options, n, block),
    )


def _like(*flat: Any) -> tuple[Tensor, ...]:
    x, _, A, _, _, h0 = flat[:6]
    chunks = ceil_div(x.shape[1], SCAN_CHUNK) if flat[10] else 0
    kept = x.new_empty(x.shape[0], chunks, *A.shape[-2:], dtype=torch.float32)
    return *empty_like(x, h0), kept


@operation(
    "selective_scan",
    f"({TENSORS}, Tensor? D, {OPTIONS}, bool keep) -> (Tensor, Tensor, Tensor)",
    _like,
)
def triton_scan(*flat: Any) -> tuple[Tensor, ...]:
    """y (b, t, d) with D * x, the last h (b, d, n), and h before each chunk
    (b, ceil(t / SCAN_CHUNK), d, n); without `keep` of no chunk. No size may be 0."""
    (x, delta, A, B, C, h0, D), (y, last, kept) = flat[:7], _like(*flat)
    rows = tuple(map(last_axis_contiguous, (x, delta, B, C)))
    D = None if D is None else D.contiguous()
    states = A.mT.contiguous(), h0.mT.contiguous()
    written = y, last, kept if flat[10] else None
    launch_forward(rows, *states, D, written, ScanOptions(*flat[7:10]))
    return y, last, kept


@triton_scan.register_vjp(kept=1)
def _backward(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor,  # (b, d, n)
    kept: Tensor,  # (b, ceil(t / SCAN_CHUNK), d, n), as `triton_scan` returns it
    *flat: Any,
) -> tuple[Tensor, ...]:
    """The cotangents of the operands, each in the shape and dtype of its operand, that of D empty
    without D: the adjoint of the scan, from the last token to the first. No size may be 0."""
    from bedouin.kernels.scan.triton_kernels import backward_kernel

    x, delta, A, B, C, h0, D = flat[:7]
    A, D = A.contiguous(), None if D is None else D.contiguous()
    rows = tuple(map(last_axis_contiguous, (x, delta, B, C, grad_y)))
    (b, t, d), n, heads = x.shape, A.shape[-1], count_heads(A)
    block = choose_block(x, n, reverse=True)
    blocks = ceil_div(d, block)
    cells = block * next_power_of_two(n)
    work = x.new_empty(b * blocks, SCAN_CHUNK, cells, dtype=torch.float32)
    grad_x, grad_delta, grad_h0 = empty_like(x, delta, h0)
    grad_A = A.new_empty(b, d, n, dtype=torch.float32)
    grad_BC = x.new_empty(2, b, t, blocks, n, dtype=torch.float32)
    grad_D = A.new_empty(b, 0 if D is None else d, dtype=torch.float32)
    backward_kernel[(b * blocks,)](
        *(rows, grad_h.contiguous(), A, D, kept, work),
        *(grad_x, grad_delta, grad_A, *grad_BC, grad_h0, grad_D),
        *(t, d, n, tuple(v.stride()[:2] for v in rows), b // heads),
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


def _plain(*flat: Any) -> tuple[Tensor, Tensor]:
    """y (b, t, d) without D * x, and the last h (b, d, n). No size may be 0."""
    return selective_scan_reference(*flat[:6], **ScanOptions(*flat[6:])._asdict())


plain_scan = plain_operation(
    "plain_scan",
    f"({TENSORS}, {OPTIONS}) -> (Tensor, Tensor)",
    _plain,
    lambda *flat: empty_like(flat[0], flat[5]),
)

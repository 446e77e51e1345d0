"""Launches of the direct sweep's Triton kernels.

With feedback a token is two launches, of which one is the product with W^y: calls of many tokens
are meant for CUDA graphs. Without feedback a launch has all tokens, or in the backward a chunk.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bedouin.kernels.direct.buffers import GradBuffers, SolvedBuffers, SweepBuffers
from bedouin.kernels.direct.limits import MAX_HEAD
from bedouin.kernels.direct.triton_bundles import local_width
from bedouin.kernels.direct.triton_constants import (
    REPLAY_CHANNELS,
    Shape,
    input_strides,
    kernel_constants,
    memory_constants,
    num_warps,
    overlapping,
    per_head,
    product_constants,
    token_strides,
    uses_tf32,
)
from bedouin.kernels.direct.triton_forward import sweep_kernel
from bedouin.kernels.direct.triton_prepare import prepare_kernel
from bedouin.kernels.direct.triton_product import product_kernel
from bedouin.kernels.direct.triton_replay import replay_kernel
from bedouin.kernels.direct.triton_reverse import reverse_kernel
from bedouin.kernels.launch import Device, ceil_div, next_power_of_two
from bedouin.kernels.linear import padding
from bedouin.kernels.operands import Parameterization
from bedouin.kernels.plans import KEPT_CONSTANTS, Constants, LaunchSeries, PlannedKernel

SWEEP, PREPARE = PlannedKernel(sweep_kernel), PlannedKernel(prepare_kernel)
REPLAY, REVERSE = PlannedKernel(replay_kernel), PlannedKernel(reverse_kernel)
PRODUCT = PlannedKernel(product_kernel)

OUT, MOST_SAMPLES = 64, 64
"""Rows of W^y of a program of the product, and its samples at most."""

COLUMNS = {2: (128, 4), 4: (32, 8)}
"""Its columns, READ at once and PARTS times, by the bytes of an entry: products of float32 that are
not rounded to TF32 hold their factors in registers."""


def launch_sweep(
    buffers: SweepBuffers,
    options: Parameterization,
    keep_every: int,
) -> None:
    """The whole forward sweep, in place."""
    x, raw, W_y, A, h, kept, y, normed, statistics = buffers
    (b, t_end, d), n = x.shape, A.shape[0]
    # some more columns, so that the product is aligned
    r = 0 if W_y is None else W_y.shape[0] + padding(W_y.shape[0])
    product, fed = (None, None) if W_y is None else _product(W_y, normed, r)
    strides = *raw.stride()[:2], r
    own = {"KEEP": keep_every, **_token_constants(A, options, fed, always=False)}
    constants = kernel_constants(SWEEP, A.shape, options, strides, **own)
    # read only where the states are in several blocks
    BC = A.new_empty(b, 2 * n) if constants["BLOCKS"] > 1 else A
    tensors = x, raw, A if fed is None else fed, A, h, kept, BC, y, normed, statistics
    sizes = b, t_end, d, n, *x.stride()[:2], *strides
    series = LaunchSeries(SWEEP, (b,), tensors, sizes, constants)
    if product is None:
        series.launch(0)
        return
    for t in range(t_end):
        product(t)
        series.launch(t)


def _token_constants(
    A: Tensor,  # (n, d)
    options: Parameterization,
    fed: Tensor | None,  # (splits, ...), the parts of a token's product; None: no feedback
    *,
    always: bool,
) -> dict[str, int]:
    """Of a kernel of tokens. Without a product between them launches do not overlap: a token reads
    the memory of the one before at once (`await_launch`)."""
    memory = memory_constants(
        A.shape, fed is not None and Device.of(A.device).overlaps, always=always
    )
    has_norm = fed is not None and options.feedback_norm_eps is not None
    return {**memory, "SPLITS": 0 if fed is None else len(fed), "NORM": has_norm}


def launch_memory(
    known: SolvedBuffers,
    h: Tensor,  # (b, n, d): before the first token, replaced by that after the last
    options: Parameterization,
    keep_every: int,
) -> None:
    """The memory of tokens whose y is known: fills `known.kept` and h."""
    t_end = known.x.shape[1]
    buffers = chunk_buffers(known, keep_every, options)
    slots = known.kept.shape[1]
    for slot in range(slots + 1):
        chunk = range(slot * keep_every, min((slot + 1) * keep_every, t_end))
        prepare(known, buffers, chunk, options)
        last = h if slot == slots else known.kept[:, slot]
        _replay(known, buffers, last, chunk, slot, options, keeps_all=False)


def launch_reverse(
    known: SolvedBuffers,
    grads: GradBuffers,
    W: Tensor | None,  # (r, d), W^y
    options: Parameterization,
    keep_every: int,
) -> Tensor | None:
    """The whole reverse sweep, in place; the cotangent of norm(y0) (b, d), None without W^y."""
    x, y, raw, fed, A, h0, kept = known
    given = raw if fed is None else fed
    (b, t_end, d), n, width = x.shape, A.shape[0], grads.raw.shape[2]
    slots, count = kept.shape[1], min(keep_every, t_end)
    buffers = chunk_buffers(known, keep_every, options)
    replayed = A.new_empty(b, count - 1, n, d)

    def chunk_of(slot: int) -> range:
        return range(slot * keep_every, min((slot + 1) * keep_every, t_end))

    def enter(slot: int) -> None:
        """Prepare the tokens of a chunk."""
        prepare(known, buffers, chunk_of(slot), options)
        _replay(known, buffers, replayed, chunk_of(slot), slot, options, keeps_all=True)

    enter(slots)
    # The reverse kernel reads results of `enter` before the preceding launch has ended
    # (`await_launch`). That launch is therefore never one of `enter`: it is the product, or for the
    # last token the one that fills the zeros of the product.
    product, parts = (None, None) if W is None else _product(W.mT, grads.raw, d)
    strides = *raw.stride()[:2], *given.stride()[:2]
    how = _token_constants(A, options, parts, always=True)
    rows = *strides, *grads.raw.stride()[:2]
    constants = kernel_constants(REVERSE, A.shape, options, rows, **how)
    read = x, raw, given, grads.y, y, A if parts is None else parts, A, *buffers, h0, kept, replayed
    tensors = *read, grads.H, grads.x, grads.raw, grads.A, grads.statistics
    inner = *x.stride()[:2], *strides, *grads.y.stride()[:2]
    sizes = slots, b, t_end, width, d, n, *inner, h0.stride(0)
    for slot in reversed(range(slots + 1)):
        chunk = chunk_of(slot)
        integers = chunk.start, len(chunk), slot, *sizes
        series = LaunchSeries(REVERSE, (b,), tensors, integers, constants)
        for i in (0,) if product is None else reversed(range(len(chunk))):
            series.launch(i)
            if i == 0 and slot:
                enter(slot - 1)
            if product is not None:
                product(chunk.start + i)
    return None if parts is None else parts.sum(0).to(A.dtype)


def _product(
    W: Tensor,  # (rows, columns)
    v: Tensor,  # (b, t, columns or more), whose last axis is contiguous
    width: int,  # of the results, at least `rows`
) -> tuple[Callable[[int], object], Tensor]:
    """A function that launches the product of W with the vectors of token t, and the tensor
    (splits, b, width) whose sum over the splits is this product, zeros beyond the rows of W.

    With more than MOST_SAMPLES samples it is torch's: forward and backward of 128 samples of 16
    tokens of 1024 channels took 1.30 ms with it and 1.59 ms with the kernel, on an H100.
    """
    (rows, columns), b = W.shape, len(v)
    if b > MOST_SAMPLES:
        # of whole rows, for which cuBLAS is fast
        whole, vectors = pad(W, (0, v.shape[2] - columns, 0, width - rows)).mT, v.unbind(1)
        parts = W.new_zeros(1, b, width)
        return lambda t: torch.mm(vectors[t].to(W.dtype), whole, out=parts[0]), parts
    W = W.contiguous()
    device = Device.of(W.device)
    splits, grid, constants = product_launch(W.shape, W.dtype, b, uses_tf32(), device.overlaps)
    # The kernel may read W before the preceding launch has ended (`await_launch`), so that this one
    # must not write W. For the first token it is the launch that fills these zeros.
    parts = W.new_zeros(splits, b, width, dtype=torch.float32)
    numbers = b, rows, columns, width, *v.stride()[:2]
    return LaunchSeries(PRODUCT, grid, (v, W, parts), numbers, constants).launch, parts


@lru_cache(maxsize=KEPT_CONSTANTS)
def product_launch(
    W: Shape, dtype: torch.dtype, b: int, tf32: bool, overlaps: bool
) -> tuple[int, tuple[int, int], Constants]:
    """The splits, grid and constants of `product_kernel` for a batch."""
    (rows, columns), (read, parts) = W, COLUMNS[dtype.itemsize]
    splits = ceil_div(columns, read * parts)
    sizes = {"SAMPLES": max(16, next_power_of_two(b)), "OUT": OUT, "READ": read, "PARTS": parts}
    how = {"num_warps": 8, "num_stages": 1}
    constants = Constants(sizes, **how, **product_constants(dtype, tf32), **overlapping(overlaps))
    return splits, (ceil_div(rows, OUT), splits), constants


class ChunkBuffers(NamedTuple):
    """Intermediate results of the tokens of a chunk."""

    mixed: Tensor  # (b, count, d): x~
    local: Tensor  # (b, count, WIDTH): see triton_prepare.py


def chunk_buffers(known: SolvedBuffers, keep_every: int, options: Parameterization) -> ChunkBuffers:
    """Uninitialized."""
    b, t_end, d = known.y.shape
    count = min(keep_every, t_end)
    width = local_width(options.known_layout().num_householder, known.A.shape[-2])
    return ChunkBuffers(known.A.new_empty(b, count, d), known.A.new_empty(b, count, width))


def prepare(
    known: SolvedBuffers,
    buffers: ChunkBuffers,
    chunk: range,
    options: Parameterization,
) -> None:
    """x~ and the scalars of the local systems of a chunk, for one head or several."""
    x, y, raw, fed, A, _, _ = known
    given = raw if fed is None else fed
    b, t_end, d = y.shape
    strides = *raw.stride()[:2], *given.stride()[:2]
    sizes = chunk.start, len(chunk), t_end, per_head(A, b), d, A.shape[-2]
    integers = *sizes, *input_strides(x, A), *strides[:2], *token_strides(fed)
    how = {"FEEDBACK": fed is not None, "num_warps": _warps(d, A.dim() == 3)}
    constants = kernel_constants(PREPARE, A.shape, options, strides, **how)
    tensors = x, y, raw, given, A, buffers.mixed, buffers.local
    PREPARE.launch((b * len(chunk),), tensors, integers, constants)


@lru_cache(maxsize=KEPT_CONSTANTS)
def _warps(d: int, has_heads: bool) -> int:
    """Of `prepare_kernel`: half as many as for a sweep, since every warp repeats the k x k algebra;
    one for a head, whose channels are then summed within it."""
    return 1 if has_heads and d <= MAX_HEAD else max(4, num_warps(d, 1) // 2)


def _replay(
    known: SolvedBuffers,
    buffers: ChunkBuffers,
    out: Tensor,  # (b, count - 1, n, d) or (b, n, d), written
    chunk: range,
    slot: int,
    options: Parameterization,
    *,
    keeps_all: bool,
) -> None:
    """h before the tokens of a chunk but the first (`keeps_all`), or after the chunk."""
    _, y, raw, fed, A, h0, kept = known
    given = raw if fed is None else fed
    (b, _, d), n = y.shape, A.shape[-2]
    strides = *raw.stride()[:2], *given.stride()[:2]
    block_d = REPLAY_CHANNELS if d > REPLAY_CHANNELS else next_power_of_two(d)
    how = {"KEEP_ALL": keeps_all, "FEEDBACK": fed is not None, "BLOCK_D": block_d, "num_warps": 4}
    constants = kernel_constants(REPLAY, A.shape, options, strides, **how)
    # a chunk may be shorter than others
    out_stride = (len(chunk) - 1) * n * d if keeps_all else out.stride(0)
    sizes = chunk.start, len(chunk), slot, kept.shape[1], per_head(A, b), d, n
    integers = *sizes, *strides[:2], *token_strides(fed), h0.stride(0), out_stride
    tensors = buffers.mixed, buffers.local, raw, given, A, h0, kept, out
    REPLAY.launch((ceil_div(d, block_d) * b,), tensors, integers, constants)

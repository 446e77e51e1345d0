"""Launches of the direct sweep's kernels for heads that a program holds, with feedback or without.

Letters: b folded samples, t time, d channels of a head, n state per channel, k reflections, r raw
values, H heads.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.direct.buffers import (
    WORKSPACE,
    GradBuffers,
    SolvedBuffers,
    SweepBuffers,
)
from bedouin.kernels.direct.heads.blocks import head_blocks
from bedouin.kernels.direct.heads.triton_edges import head_edges_kernel
from bedouin.kernels.direct.heads.triton_forward import head_sweep_kernel
from bedouin.kernels.direct.heads.triton_reverse import reverse_head_kernel
from bedouin.kernels.direct.triton_constants import (
    DTYPES,
    Shape,
    input_strides,
    map_constants,
    product_constants,
    uses_tf32,
)
from bedouin.kernels.direct.triton_launch import chunk_buffers, prepare
from bedouin.kernels.direct.triton_rows import local_width
from bedouin.kernels.launch import Device, arguments_of, ceil_div, next_power_of_two
from bedouin.kernels.linear import apply_weight
from bedouin.kernels.operands import Parameterization

COLUMNS = 8
"""Fewest columns of a product on tensor cores."""

WARPS = 8
"""Most warps of a program, each with a sample or a part of one: so many have MAX_REGISTERS each."""

LANES = 32
"""Threads of a warp, and the fewest channels of a part of a sample."""

MEMORIES = 16384
"""Most values of h of all samples of a program; of more, most would be spilled in every token."""

BLOCK_STATES = 16
"""Most states that a sweep takes at once: the values of more would not fit registers."""

MOST_HELD = 1024
"""Most values of A, and of h of the next token, that a warp of the reverse sweep holds."""

MAX_REGISTERS = 255
"""Of a thread; without this bound the compiler takes 32 where even 255 do not suffice."""


def launch_head_sweep(
    buffers: SweepBuffers,
    options: Parameterization,
    keep_every: int,
) -> None:
    """The whole forward sweep, in place."""
    x, raw, W_y, A, h, kept, y, first, statistics = buffers
    b, t_end, d = y.shape
    samples, parts = choose_rows(b, A, W_y)
    programs, W = _programs(b, A, samples), _whole_rows(A if W_y is None else W_y)
    how = uses_tf32(), keep_every, Device.of(A.device).shared_memory
    given = A.shape, _dtype_of(W_y), options, samples, parts, *how
    constants = _constants(head_sweep_kernel, *given, 0)
    found = statistics if W_y is not None else statistics.new_empty(parts, *statistics.shape)
    # B, C and alpha of a token, two places for each sample
    scratch = A.new_empty(programs, samples, 2, constants["BLOCK_S"] + constants["ALPHA"])
    tensors = x, raw, W, A, h, kept, first, scratch, y, found
    integers = b // A.shape[0], t_end, d, A.shape[1], *input_strides(x, A), *raw.stride()[:2]
    head_sweep_kernel[(programs,)](*tensors, *integers, W.stride(0), **constants)
    if W_y is None:
        torch.amax(found, 0, out=statistics)


def launch_head_reverse(
    known: SolvedBuffers,
    grads: GradBuffers,
    W_y: Tensor | None,  # (H, r, d)
    options: Parameterization,
    keep_every: int,
    *,
    wants_y0: bool = True,
) -> Tensor | None:
    """The whole reverse sweep, in place; the cotangent of norm(y0) (b, d) if wanted, None without
    feedback."""
    x, y, raw, fed, A, h0, kept = known
    fed = raw if fed is None else fed
    (b, t_end, d), n = y.shape, A.shape[1]
    size = _tokens_at_once(y, n, keep_every, options)
    samples, parts = choose_rows(b, A, W_y)
    buffers = chunk_buffers(known, size, options)
    programs, W = _programs(b, A, samples), _whole_rows(A if W_y is None else W_y)
    how = uses_tf32(), keep_every, Device.of(A.device).shared_memory
    given = A.shape, _dtype_of(W_y), options, samples, parts, *how
    constants = _constants(reverse_head_kernel, *given, buffers.local.shape[2])
    segments, each = 1, size
    if W_y is None and size >= t_end:
        segments, each = _choose_segments(programs * parts, b * n * d, t_end, keep_every, A)
    H, grad_A = grads.H, grads.A
    if segments > 1:
        H, grad_A = A.new_empty(segments, b, n, d), A.new_zeros(segments, b, n, d)
        H[-1] = grads.H
    replayed = A.new_empty(segments, b, max(1, keep_every - 1), n, d)
    scratch = A.new_empty(segments, programs, samples, 2, constants["BLOCK_L"])
    read = grads.y, x, y, raw, fed, W, A, *buffers, h0, kept, replayed
    statistics = grads.statistics
    found = statistics if W_y is not None else statistics.new_empty(parts, *statistics.shape)
    tensors = *read, H, grads.x, grads.raw, grad_A, found, scratch
    inner = *grads.y.stride()[:2], *input_strides(x, A), *raw.stride()[:2]
    strides = *inner, *fed.stride()[:2], W.stride(0), h0.stride(0)
    sizes = t_end, kept.shape[1], b // A.shape[0], d, n, grads.raw.shape[-1]
    for start in reversed(range(0, t_end, size)):
        chunk = range(start, min(start + size, t_end))
        prepare(known, buffers, chunk, options)
        if segments > 1:
            edges = each, t_end, segments, *sizes[2:5], *grads.y.stride()[:2], *raw.stride()[:2]
            of_edges = _constants(head_edges_kernel, *given, 0)
            head_edges_kernel[(programs,)](*(grads.y, raw, buffers.local, A, H), *edges, **of_edges)
        tokens = start, len(chunk), min(each, len(chunk))
        reverse_head_kernel[(programs, segments)](*tensors, *tokens, *sizes, *strides, **constants)
    if W_y is None:
        torch.amax(found, 0, out=statistics)
    if segments > 1:
        grads.H.copy_(H[0])
        torch.sum(grad_A, 0, out=grads.A)
    if W_y is None or not wants_y0:
        return None
    first = grads.raw[:, 0, : W.shape[1]].to(W.dtype)
    return apply_weight(first, W.mT).to(A.dtype)


def _choose_segments(
    warps: int,  # of all samples
    size: int,  # of h of all samples
    t_end: int,
    keep_every: int,
    A: Tensor,  # (H, n, d)
) -> tuple[int, int]:
    """Segments of tokens, and tokens of each, a multiple of `keep_every`: as many as fit all
    multiprocessors at once, of whose registers WARPS take all, and h of a chunk of each WORKSPACE.
    """
    chunks = ceil_div(t_end, keep_every)
    most = WARPS * (Device.of(A.device).programs or 4) // warps
    most = min(chunks, most, WORKSPACE // (size * keep_every))
    each = ceil_div(chunks, max(1, most)) * keep_every
    return ceil_div(t_end, each), each


def _tokens_at_once(
    y: Tensor,  # (b, t, d)
    n: int,
    keep_every: int,
    options: Parameterization,
) -> int:
    """The number of tokens of a launch, a multiple of `keep_every`: as many as possible such that h
    of one chunk and, of all these tokens, x~ and the scalars fit WORKSPACE, or the memory that a
    single chunk takes if that is more."""
    b, t_end, d = y.shape
    width: int = local_width(options.known_layout().num_householder, n)
    prepared = b * (d + width)
    most = max(WORKSPACE, keep_every * (b * n * d + prepared))
    tokens = (most - (keep_every - 1) * b * n * d) // prepared
    return min(tokens, t_end + keep_every - 1) // keep_every * keep_every


@lru_cache(maxsize=1024)
def _constants(
    kernel: Any,  # of Triton
    A: Shape,  # (H, n, d)
    dtype: torch.dtype | None,  # of W^y, to which factors and results of its products are rounded
    options: Parameterization,
    samples: int,
    parts: int,
    tf32: bool,
    keep_every: int,
    shared_memory: int,  # bytes of a program
    scalars: int,  # of a token, in the reverse sweep
) -> dict[str, Any]:
    """The constants of a kernel. Not to be changed."""
    layout = options.known_layout()
    blocks = head_blocks(A[2], A[1], layout.num_householder, layout.selective)
    streamed = dtype is not None and blocks.streams(dtype.itemsize, shared_memory)
    every = {
        **map_constants(A, options),
        **product_constants(dtype or torch.float32, tf32),
        "ROUND": DTYPES[dtype or torch.float32],
        "FEEDBACK": dtype is not None,
        "KEEP": keep_every,
        "S": samples,
        "PARTS": parts,
        "COLUMNS": max(COLUMNS, samples),
        "BLOCK_D": blocks.channels,
        "BLOCK_S": blocks.small,
        "ALPHA": blocks.alpha,
        # a few more than the scalars, whose groups begin at multiples of 4
        "BLOCK_L": next_power_of_two(scalars + 16),
        "N": min(BLOCK_STATES, blocks.states),
        "HOLD": blocks.channels // parts * blocks.states <= MOST_HELD,
        "STREAMED": streamed,
        # one product for all reflections, whose rows are then interleaved
        "JOINED": dtype is not None and not streamed and layout.num_householder in (2, 4),
        "num_warps": samples * parts,
        "num_stages": 1,
        "maxnreg": MAX_REGISTERS,
    }
    every["NORM"] &= dtype is not None
    return arguments_of(kernel, every)


def _dtype_of(W_y: Tensor | None) -> torch.dtype | None:
    return None if W_y is None else W_y.dtype


def _whole_rows(
    W: Tensor,  # (H, r, d)
) -> Tensor:  # as W
    """W, copied unless the matrices of the heads are contiguous, at any distance."""
    return W if W.stride()[1:] == (W.shape[2], 1) else W.contiguous()


def _programs(
    b: int,
    A: Tensor,  # (H, n, d)
    samples: int,  # of a program
) -> int:
    return A.shape[0] * ceil_div(b // A.shape[0], samples)


def choose_rows(
    b: int,
    A: Tensor,  # (H, n, d)
    W_y: Tensor | None,  # (H, r, d)
) -> tuple[int, int]:
    """Samples of a program and parts of each, a warp for every part. Without W^y samples share
    nothing, and fewer warps wait for each other in a program of one."""
    samples = 1 if W_y is None else choose_samples(b, A)
    return samples, choose_parts(max(16, next_power_of_two(A.shape[2])), samples)


def choose_samples(
    b: int,
    A: Tensor,  # (H, n, d)
) -> int:
    """Samples of a program: as many as leave a program for every second multiprocessor, at least 2
    and at most WARPS, half of these for more than 64 channels, and no more than MEMORIES allow.

    A token takes a program about as long for one sample as for several, up to that.
    """
    heads, n, d = A.shape
    most = WARPS if d <= 64 else WARPS // 2
    most = min(most, MEMORIES // (next_power_of_two(n) * next_power_of_two(d)))
    units = Device.of(A.device).programs or 4
    samples = 2
    while samples < most and heads * ceil_div(b // heads, 2 * samples) >= units // 2:
        samples *= 2
    return min(samples, most, next_power_of_two(b // heads))


def choose_parts(channels: int, samples: int) -> int:
    """Parts of a sample, a warp each, for so many channels of a block and samples of a program: as
    many as WARPS and LANES allow.

    A token takes a program as long as one of its warps, whose instructions are fewer for fewer
    channels; more than 64 channels with 16 states do not fit the registers of one.
    """
    return max(1, min(WARPS // samples, channels // LANES))

"""Launches of the kernels that compute what y alone determines, for chunks of tokens.

Letters: b folded samples, t time, d channels of a head, n state per channel, k reflections, r raw
values, H heads.
"""

from typing import NamedTuple

from torch import Tensor

from bedouin.kernels.direct.buffers import SolvedBuffers
from bedouin.kernels.direct.triton_constants import input_strides, kernel_constants, token_strides
from bedouin.kernels.direct.triton_prepare import prepare_kernel
from bedouin.kernels.direct.triton_replay import replay_kernel
from bedouin.kernels.direct.triton_rows import local_width
from bedouin.kernels.operands import Parameterization


class ChunkBuffers(NamedTuple):
    """Intermediate results of the tokens of a chunk."""

    mixed: Tensor  # (b, count, d): x~
    local: Tensor  # (b, count, WIDTH): see triton_prepare.py


def chunk_buffers(known: SolvedBuffers, keep_every: int, options: Parameterization) -> ChunkBuffers:
    """Uninitialized."""
    b, t_end, d = known.y.shape
    count = min(keep_every, t_end)
    width = local_width(options.known_layout().num_householder, known.A.shape[1])
    return ChunkBuffers(known.A.new_empty(b, count, d), known.A.new_empty(b, count, width))


def prepare(
    known: SolvedBuffers,
    buffers: ChunkBuffers,
    chunk: range,
    options: Parameterization,
) -> None:
    """x~ and the scalars of the local systems of a chunk."""
    x, y, raw, fed, A, _, _ = known
    given = raw if fed is None else fed
    b, t_end, d = y.shape
    strides = *raw.stride()[:2], *given.stride()[:2]
    sizes = chunk.start, len(chunk), t_end, b // len(A), d, A.shape[1]
    integers = *sizes, *input_strides(x, A), *strides[:2], *token_strides(fed)
    # one warp, within which channels are summed
    how = {"FEEDBACK": fed is not None, "num_warps": 1}
    constants = kernel_constants(prepare_kernel, A.shape, options, strides, **how)
    tensors = x, y, raw, given, A, buffers.mixed, buffers.local
    prepare_kernel[(b * len(chunk),)](*tensors, *integers, **constants)


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
        _replay(known, buffers, h if slot == slots else known.kept[:, slot], chunk, slot, options)


def _replay(
    known: SolvedBuffers,
    buffers: ChunkBuffers,
    out: Tensor,  # (b, n, d), written
    chunk: range,
    slot: int,
    options: Parameterization,
) -> None:
    """h after a chunk."""
    _, y, raw, fed, A, h0, kept = known
    given = raw if fed is None else fed
    (b, _, d), n = y.shape, A.shape[1]
    strides = *raw.stride()[:2], *given.stride()[:2]
    how = {"FEEDBACK": fed is not None, "num_warps": 4}
    constants = kernel_constants(replay_kernel, A.shape, options, strides, **how)
    sizes = chunk.start, len(chunk), slot, kept.shape[1], b // len(A), d, n
    integers = *sizes, *strides[:2], *token_strides(fed), h0.stride(0), out.stride(0)
    tensors = buffers.mixed, buffers.local, raw, given, A, h0, kept, out
    replay_kernel[(b,)](*tensors, *integers, **constants)

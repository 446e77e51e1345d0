"""Launches of the direct sweep's Triton kernels.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.direct.buffers import GradBuffers, SolvedBuffers, SweepBuffers
from bedouin.kernels.direct.open_loop.launch import launch_open_reverse, launch_open_sweep
from bedouin.kernels.direct.triton_bundles import local_width
from bedouin.kernels.direct.triton_constants import (
    Like,
    adds_later,
    alignment,
    blocked_constants,
    counters,
    grad_A_constants,
    holds_blocks,
    input_strides,
    is_crowded,
    launch_options,
    layout_of,
    mixer_constants,
    norm_constants,
    per_head,
    prepare_constants,
    replay_constants,
    reverse_constants,
    sweep_constants,
    token_strides,
    uses_tf32,
)
from bedouin.kernels.direct.triton_forward import sweep_kernel
from bedouin.kernels.direct.triton_grad_A import grad_A_kernel
from bedouin.kernels.direct.triton_plan import LIMITS, Limits, Plan, plan_product
from bedouin.kernels.direct.triton_prepare import prepare_kernel
from bedouin.kernels.direct.triton_replay import replay_kernel
from bedouin.kernels.direct.triton_reverse import reverse_kernel, step_kernel
from bedouin.kernels.feedback import padded_rows
from bedouin.kernels.launch import ceil_div
from bedouin.kernels.linear import padding
from bedouin.kernels.operands import Parameterization
from bedouin.kernels.plans import PlannedKernel

SWEEP, PREPARE = PlannedKernel(sweep_kernel), PlannedKernel(prepare_kernel)
REPLAY, REVERSE = PlannedKernel(replay_kernel), PlannedKernel(reverse_kernel)
GRAD_A = PlannedKernel(grad_A_kernel)

HELPERS = 2
"""Programs of a sample that work ahead of the one that walks back."""


def launch_sweep(
    buffers: SweepBuffers,
    options: Parameterization,
    keep_every: int,
    limits: Limits = LIMITS,
) -> None:
    """The whole forward sweep, in place."""
    W_y = buffers.W_y
    if W_y is None:
        launch_open_sweep(buffers, options, keep_every)
        return
    b, t_end, d = buffers.x.shape
    counts, r = counters(buffers.x), W_y.shape[0]
    plan = plan_product(r, d, W_y, b, limits=limits)
    parts = _splits(plan)
    fed = (W_y if parts == 1 else buffers.A).new_empty(parts, b, r + padding(r))
    if plan is not None:
        tokens = range(t_end)
        _sweep(buffers, options, keep_every, tokens, fed, plan, plan.programs, counts)
        return
    rows = padded_rows(W_y, r + padding(r)).mT
    for t in range(t_end):
        torch.mm(buffers.normed[:, t], rows, out=fed[0])
        # the programs of these launches do not wait for each other, and count nothing
        one = range(t, t + 1)
        _sweep(buffers, options, keep_every, one, fed, None, b, counts)


def _sweep(
    buffers: SweepBuffers,
    options: Parameterization,
    keep_every: int,
    tokens: range,
    fed: Tensor,  # (splits, b, r or more)
    plan: Plan | None,
    programs: int,
    counts: Tensor,  # (3,)
) -> None:
    x, raw, W_y, A, h, kept, y, normed, statistics = buffers
    assert W_y is not None
    b, t_end, d = x.shape
    strides = raw.stride(0), raw.stride(1), fed.stride(0), fed.stride(1)
    looks = Like.of(A), Like.of(W_y), options, keep_every, plan, programs, b, strides
    sizes = tokens.start, tokens.stop, b, t_end, raw.shape[-1], d, A.shape[0]
    integers = *sizes, *x.stride()[:2], *strides[:2], fed.shape[-1]
    # read only where the states are in several blocks
    BC = A.new_empty(b, 2 * A.shape[0]) if holds_blocks(d, A) else A
    read = x, raw, W_y.contiguous(), A
    tensors = *read, h, kept, fed, BC, y, normed, statistics, counts
    SWEEP.launch((programs,), tensors, integers, sweep_constants(*looks, uses_tf32()))


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
        _replay(known, buffers, last, chunk, slot, options)


def launch_reverse(
    known: SolvedBuffers,
    grads: GradBuffers,
    W: Tensor | None,  # (r, d), W^y
    options: Parameterization,
    keep_every: int,
    limits: Limits = LIMITS,
) -> Tensor | None:
    """The whole reverse sweep, in place; the cotangent of norm(y0) in parts (splits, b, d)."""
    if W is None:
        launch_open_reverse(known, grads, options, keep_every)
        return None
    b, t_end, d = known.x.shape
    columns = grads.raw.shape[-1]
    plan = plan_product(d, columns, W, b, limits=limits, helpers=HELPERS)
    n, slots = known.A.shape[0], range(known.kept.shape[1] + 1)
    ahead = _can_prepare_ahead(known, plan)
    at_a_time = 2 if ahead and len(slots) > 1 else 1
    buffers = chunk_buffers(known, keep_every, options, at_a_time)
    parts = known.A.new_zeros(_splits(plan), b, d)
    tokens = min(keep_every, t_end) - (0 if is_crowded(d, known.A) else 1)
    replayed = known.A.new_empty(at_a_time * b, tokens, n, d)
    buffers = buffers._replace(replayed=replayed, grad_normed=parts)
    later = adds_later(d, known.A, ahead=ahead)
    if later:
        vectors = known.A.new_empty(at_a_time * b, min(keep_every, t_end), 2, d)
        top = known.A.new_empty(at_a_time * b, n, d)
        buffers = buffers._replace(vectors=vectors, top=top)
    if plan is not None and ahead:
        _reverse(known, grads, W, buffers, slots, plan, options, keep_every, ahead=True)
        return parts
    r = W.shape[0]
    rows = padded_rows(W, r + padding(r)) if plan is None else W
    for slot in reversed(slots):
        chunk = range(slot * keep_every, min((slot + 1) * keep_every, t_end))
        prepare(known, buffers, chunk, options)
        end = _end_of(known, buffers, chunk)
        _replay(known, buffers, end, chunk, slot, options)
        if plan is not None:
            one = range(slot, slot + 1)
            _reverse(known, grads, W, buffers, one, plan, options, keep_every, ahead=False)
        else:
            _reverse_by_token(known, grads, rows, buffers, chunk, slot, options)
        if later:
            _add_grad_A(known, grads, buffers, chunk, slot, options)
    return parts


def _can_prepare_ahead(known: SolvedBuffers, plan: Plan | None) -> bool:
    """Whether so many programs have neither a tile nor a sample that they prepare a chunk, and add
    the cotangent of A of another, while the others walk one."""
    b, _, d = known.x.shape
    if plan is None or not plan.separate or is_crowded(d, known.A):
        return False
    tiles = ceil_div(d, plan.block_m) * plan.splits
    return (1 + HELPERS) * b + tiles <= plan.programs


def _splits(plan: Plan | None) -> int:
    return 1 if plan is None else plan.splits


def _end_of(known: SolvedBuffers, buffers: "ChunkBuffers", chunk: range) -> Tensor | None:
    """The part (b, n, d) of `buffers.replayed` that is h after the chunk, if there is one."""
    b, _, d = known.x.shape
    if not is_crowded(d, known.A):
        return None
    assert buffers.replayed is not None
    n, count = known.A.shape[0], len(chunk)
    return buffers.replayed.view(-1)[: b * count * n * d].view(b, count, n, d)[:, -1]


class ChunkBuffers(NamedTuple):
    """Intermediate results of the tokens of a chunk."""

    mixed: Tensor  # (b, count, d), or 2 b for two chunks at a time: x~
    local: Tensor  # (b, count, WIDTH), or 2 b: see triton_prepare.py
    replayed: Tensor | None = None  # (b, count - 1, n, d), or 2 b: h before all tokens but the
    # first; if `is_crowded` (b, count, n, d), the last one h after the chunk
    grad_normed: Tensor | None = None  # (splits, b, d): parts of the cotangent of norm(y_t)
    vectors: Tensor | None = None  # (b, count, 2, d), or 2 b: w and Delta, if `adds_later`
    top: Tensor | None = None  # (b, n, d), or 2 b: the cotangent of h after the chunk, likewise


def chunk_buffers(
    known: SolvedBuffers, keep_every: int, options: Parameterization, at_a_time: int = 1
) -> ChunkBuffers:
    """Uninitialized, for so many chunks at a time."""
    b, t_end, d = known.y.shape
    count = min(keep_every, t_end)
    width = local_width(layout_of(options).num_householder, known.A.shape[-2])
    local = known.A.new_empty(at_a_time * b, count, width)
    return ChunkBuffers(known.A.new_empty(at_a_time * b, count, d), local)


def prepare(
    known: SolvedBuffers,
    buffers: ChunkBuffers,
    chunk: range,
    options: Parameterization,
) -> None:
    x, y, raw, fed, A, _, _ = known
    given = raw if fed is None else fed
    b, t_end, d = y.shape
    strides = *raw.stride()[:2], *given.stride()[:2]
    sizes = chunk.start, len(chunk), t_end, per_head(A, b), d, A.shape[-2]
    integers = *sizes, *input_strides(x, A), *strides[:2], *token_strides(fed)
    constants = prepare_constants(Like.of(A), options, fed is not None, strides)
    tensors = x, y, raw, given, A, buffers.mixed, buffers.local
    PREPARE.launch((b * len(chunk),), tensors, integers, constants)


def _replay(
    known: SolvedBuffers,
    buffers: ChunkBuffers,
    last: Tensor | None,  # (b, n, d), written: h after the chunk
    chunk: range,
    slot: int,
    options: Parameterization,
) -> None:
    x, _, raw, fed, A, h0, kept = known
    given, replayed = raw if fed is None else fed, buffers.replayed
    b, _, d = x.shape
    strides = *raw.stride()[:2], *given.stride()[:2]
    keeps = replayed is not None, last is not None
    constants = replay_constants(Like.of(A), options, fed is not None, *keeps, strides)
    sizes = chunk.start, len(chunk), slot, kept.shape[1], per_head(A, b), d, A.shape[-2]
    inner = *strides[:2], *token_strides(fed), h0.stride(0)
    integers = *sizes, *inner, 0 if last is None else last.stride(0)
    read = buffers.mixed, buffers.local, raw, given, A, h0, kept
    written = kept if replayed is None else replayed, kept if last is None else last
    programs = ceil_div(d, constants["BLOCK_D"]) * b
    REPLAY.launch((programs,), (*read, *written), integers, constants)


def _reverse(
    known: SolvedBuffers,
    grads: GradBuffers,
    W: Tensor,  # (r, d)
    buffers: ChunkBuffers,
    slots: range,  # chunks of one launch
    plan: Plan,
    options: Parameterization,
    keep_every: int,
    *,
    ahead: bool,  # whether the launch also prepares chunks, each while the one after it is walked
) -> None:
    x, y, raw, fed, A, h0, kept = known
    assert fed is not None and buffers.replayed is not None and buffers.grad_normed is not None
    b, t_end, d = x.shape
    strides = *raw.stride()[:2], *fed.stride()[:2], *grads.raw.stride()[:2]
    looks = Like.of(A), Like.of(W), options, keep_every, plan, b, strides
    sizes = slots.stop - 1, b, t_end, grads.raw.shape[-1], d, A.shape[0]
    inner = *grads.y.stride()[:2], *x.stride()[:2], *strides[:2], *token_strides(fed)
    constants = reverse_constants(*looks, uses_tf32(), ahead)
    factors = grads.y, buffers.grad_normed, x, y, raw, fed, W.contiguous()
    tensors = *factors, *_behind_factors(known, grads, buffers), counters(x)
    REVERSE.launch((plan.programs,), tensors, (*sizes, *inner, h0.stride(0)), constants)


def _behind_factors(
    known: SolvedBuffers, grads: GradBuffers, buffers: ChunkBuffers
) -> tuple[Tensor, ...]:
    """The tensors that both reverse kernels take behind the factors of the product."""
    assert buffers.replayed is not None
    read = known.A, buffers.mixed, buffers.local, known.h0, known.kept, buffers.replayed
    # any tensors where none are written
    vectors = grads.A if buffers.vectors is None else buffers.vectors
    top = grads.A if buffers.top is None else buffers.top
    written = grads.H, grads.x, grads.raw, vectors, top
    return *read, *written, grads.A, grads.statistics


def _add_grad_A(
    known: SolvedBuffers,
    grads: GradBuffers,
    buffers: ChunkBuffers,
    chunk: range,
    slot: int,
    options: Parameterization,
) -> None:
    """Add the cotangent of A of a chunk that has been walked back."""
    A, h0, kept = known.A, known.h0, known.kept
    assert buffers.replayed is not None
    assert buffers.vectors is not None and buffers.top is not None
    n, d = A.shape
    constants = grad_A_constants(Like.of(A), options)
    blocks = ceil_div(d, constants["BLOCK_D"]) * ceil_div(n, constants["BLOCK_N"])
    sizes = chunk.start, len(chunk), slot, kept.shape[1], d, n, h0.stride(0)
    read = A, buffers.mixed, buffers.local, h0, kept, buffers.replayed
    tensors = *read, buffers.vectors, buffers.top, grads.A
    GRAD_A.launch((len(h0) * blocks,), tensors, sizes, constants)


def _reverse_by_token(
    known: SolvedBuffers,
    grads: GradBuffers,
    rows: Tensor,  # (r or more, d), W^y, as many rows as grads.raw has columns
    buffers: ChunkBuffers,
    chunk: range,
    slot: int,
    options: Parameterization,
) -> None:
    """A launch and a product for every token of a chunk, the last first."""
    assert buffers.grad_normed is not None
    for t in reversed(chunk):
        _step(known, grads, buffers, t, chunk, slot, options)
        buffers.grad_normed[0] = grads.raw[:, t].to(rows.dtype) @ rows


def _step(
    known: SolvedBuffers,
    grads: GradBuffers,
    buffers: ChunkBuffers,
    t: int,
    chunk: range,
    slot: int,
    options: Parameterization,
) -> None:
    x, y, raw, fed, A, h0, kept = known
    assert fed is not None
    b, t_end, d = x.shape
    step_kernel[(b,)](
        grads.y,
        buffers.grad_normed,
        x,
        y,
        raw,
        fed,
        *_behind_factors(known, grads, buffers),
        t - chunk.start,
        chunk.start,
        len(chunk),
        slot,
        kept.shape[1],
        b,
        t_end,
        grads.raw.shape[-1],
        d,
        A.shape[0],
        *grads.y.stride()[:2],
        *x.stride()[:2],
        *raw.stride()[:2],
        *token_strides(fed),
        h0.stride(0),
        LATER_A=adds_later(d, A, ahead=False),
        **blocked_constants(d, A, options),
        **norm_constants(options),
        **mixer_constants(options),
        **alignment(*(v for rows in (raw, fed, grads.raw) for v in rows.stride()[:-1])),
        **launch_options(d, A),
    )

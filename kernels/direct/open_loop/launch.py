"""Launches of the sweep without feedback and of its reverse, of all heads at once.

Letters: b folded samples (kernels/heads.py), t time, d channels of a head, n state per channel,
k reflections, r raw values.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.direct.buffers import GradBuffers, SolvedBuffers, SweepBuffers
from bedouin.kernels.direct.open_loop.triton_prepare import prepare_kernel
from bedouin.kernels.direct.open_loop.triton_tokens import gradients_kernel, statistics_kernel
from bedouin.kernels.direct.open_loop.triton_walk import walk_kernel
from bedouin.kernels.direct.triton_constants import (
    Like,
    alignment,
    layout_of,
    per_head,
    scan_constants,
)
from bedouin.kernels.launch import ceil_div, next_power_of_two
from bedouin.kernels.operands import Parameterization
from bedouin.kernels.plans import KEPT_CONSTANTS, Constants, PlannedKernel
from bedouin.kernels.scan.launch import (
    LIMITS,
    Limits,
    SweepScan,
    plan_scan,
    sweep_scan_backward,
)
from bedouin.kernels.scan.types import ScanOptions

PREPARE, WALK = PlannedKernel(prepare_kernel), PlannedKernel(walk_kernel)
STATISTICS, GRADIENTS = PlannedKernel(statistics_kernel), PlannedKernel(gradients_kernel)

LINE = 32
"""float32 of a line of cache."""

CHANNELS_OF_WARP = 256
"""Channels of a warp of a kernel of one token a program: 8 in each thread."""

LANES = 32
"""Threads of a warp."""

MOST_WARPS = 16
"""Most warps of a walk."""

NEIGHBOURS = 4
"""Channels of a thread that are neighbours: 16 bytes of float32."""

STATES_OF_THREAD = 64
"""Elements of h in a thread: with as many of A, and what a token needs, 255 registers."""

REGISTERS, MAX_REGISTERS = 65536, 255
"""Of a multiprocessor, and the most of a thread."""

RESIDENT_STATES = 16384
"""Most elements of h of a sample beside which A fits the registers of a multiprocessor."""


def launch_open_sweep(buffers: SweepBuffers, options: Parameterization, keep_every: int) -> None:
    """The whole forward sweep, in place."""
    x, raw, _, A, h, kept, y, _, statistics = buffers
    b, t_end, d = y.shape
    n, k = A.shape[-2], layout_of(options).num_householder
    delta, solver = A.new_empty(b, t_end, d), A.new_empty(b, t_end, _solver_width(k, n))
    e = A.new_empty(b, t_end, k)
    strides = *_input_strides(x, A), *raw.stride()[:2]
    PREPARE.launch(
        (b * t_end,),
        (x, y, x, raw, A, delta, solver, statistics[3], y, solver),
        (t_end, per_head(A, b), d, n, *strides[:3], *y.stride()[:2], *raw.stride()[:2]),
        _prepare_constants(Like.of(A), options, raw.stride()[:2], reverse=False),
    )
    constants = _walk_constants(Like.of(A), options, raw.stride()[:2], reverse=False)
    WALK.launch(
        (b,),
        (x, raw, delta, solver, A, h, y, e, kept),
        (t_end, keep_every, kept.shape[1], per_head(A, b), d, n, *strides),
        constants,
    )
    STATISTICS.launch(
        (b * t_end,),
        (x, y, raw, A, delta, solver, e, statistics),
        (t_end, per_head(A, b), d, n, *strides),
        _statistics_constants(Like.of(A), options, raw.stride()[:2]),
    )


def launch_open_reverse(
    known: SolvedBuffers,
    grads: GradBuffers,
    options: Parameterization,
    keep_every: int,
    limits: Limits = LIMITS,
) -> None:
    """The whole reverse sweep, in place; `limits` are those of the scan's backward."""
    x, y, raw, _, A, h0, kept = known
    b, t_end, d = y.shape
    n, k = A.shape[-2], layout_of(options).num_householder
    size, pairs = _solver_size(k), k * (k + 1) // 2
    delta, mixed, v = A.new_empty(3, b, t_end, d)
    solver = A.new_empty(b, t_end, _solver_width(k, n))
    factor = A.new_empty(b, t_end, pairs + 4 * k + 2)
    of_x, of_g, of_raw = _input_strides(x, A), grads.y.stride()[:2], raw.stride()[:2]
    PREPARE.launch(
        (b * t_end,),
        (x, y, grads.y, raw, A, delta, solver, v, mixed, factor),
        (t_end, per_head(A, b), d, n, *of_x, *of_g, *of_raw),
        _prepare_constants(Like.of(A), options, of_raw, reverse=True),
    )
    heads = 1 if A.dim() == 2 else len(A)
    plan = plan_scan(y, n, reverse=True, heads=heads, chunk=keep_every, limits=limits)
    ends = A.new_empty(b, plan.segments, n, d)
    WALK.launch(
        (b,),
        (grads.y, raw, delta, solver, A, grads.H, v, v, ends),
        (
            t_end,
            plan.segment_chunks * keep_every,
            plan.segments,
            per_head(A, b),
            d,
            n,
            *_input_strides(grads.y, A),
            *of_raw,
        ),
        _walk_constants(Like.of(A), options, of_raw, reverse=True),
    )
    B, C = solver[..., size : size + n], solver[..., size + n : size + 2 * n]
    scan = SweepScan(v, ends, mixed, delta, A, B, C, h0, kept)
    scales = ScanOptions(options.input_scale, options.eigenvalues, exclusive=False)
    in_parts = plan.segments > 1
    grad_A = A.new_empty(ends.shape) if in_parts else grads.A.unsqueeze(1)
    grad_B, grad_C = sweep_scan_backward(scan, grad_A, scales, plan, keep_every)
    if in_parts:
        torch.sum(grad_A, 1, out=grads.A)
    of_grad = grads.raw.stride()[:2]
    GRADIENTS.launch(
        (b * t_end,),
        (
            x,
            y,
            grads.y,
            raw,
            v,
            solver,
            factor,
            mixed,
            delta,
            grad_B,
            grad_C,
            grads.x,
            grads.raw,
            grads.statistics,
        ),
        (t_end, plan.channel_blocks, per_head(A, b), d, n, *of_x, *of_g, *of_raw, *of_grad),
        _gradients_constants(Like.of(A), options, plan.channel_blocks, (*of_raw, *of_grad)),
    )


def _input_strides(
    v: Tensor,  # (b, t, d) or (H, b / H, t, d)
    A: Tensor,  # (n, d) or (H, n, d)
) -> tuple[int | None, ...]:
    """Strides of the axes of heads, of which there is none for one head, batch and time."""
    if A.dim() == 2:
        return None, *v.stride()[:2]
    return (v if v.dim() == 4 else v.unflatten(0, (len(A), -1))).stride()[:3]


def _solver_size(k: int) -> int:
    """Scalars of a token: see triton_prepare.py."""
    return k * k + k * (k + 1) + k + 1


def _solver_width(k: int, n: int) -> int:
    """Entries of a token's row of scalars, B and C: whole lines of cache of 32 float32."""
    return ceil_div(_solver_size(k) + 2 * n, LINE) * LINE


def _solver_constants(A: Like, options: Parameterization) -> dict[str, int]:
    k = layout_of(options).num_householder
    return {"K": k, "WIDTH": _solver_width(k, A.shape[-2])}


def token_warps(d: int) -> int:
    """Warps of a kernel of one token a program; every warp repeats the k x k algebra."""
    return max(1, min(MOST_WARPS, next_power_of_two(d) // CHANNELS_OF_WARP))


class Form(NamedTuple):
    """How the channels of a walk are spread over threads."""

    warps: int
    whole: bool  # a thread has all states of its channels


def walk_form(d: int, n: int) -> Form:
    """The form for d channels with n states: the compiler gives a thread NEIGHBOURS channels, and
    as many of these to a warp as it can."""
    channels = next_power_of_two(d)
    states = channels * next_power_of_two(n) // LANES
    warps = max(1, min(MOST_WARPS, states // STATES_OF_THREAD))
    return Form(warps, whole=channels >= NEIGHBOURS * LANES * warps)


@lru_cache(maxsize=KEPT_CONSTANTS)
def _prepare_constants(
    A: Like, options: Parameterization, strides: tuple[int, ...], *, reverse: bool
) -> Constants:
    d = A.shape[-1]
    return Constants(
        REVERSE=reverse,
        **scan_constants(d, A, options),
        **_solver_constants(A, options),
        BETA_MAX=layout_of(options).beta_max,
        **alignment(*strides),
        num_warps=token_warps(d),
    )


@lru_cache(maxsize=KEPT_CONSTANTS)
def _walk_constants(
    A: Like,
    options: Parameterization,
    strides: tuple[int, ...],
    form: Form | None = None,
    *,
    reverse: bool,
) -> Constants:
    n, d = A.shape[-2:]
    constants = scan_constants(d, A, options)
    del constants["ACTIVATION"], constants["EPS"]
    form = walk_form(d, n) if form is None else form
    return Constants(
        REVERSE=reverse,
        **_solver_constants(A, options),
        RESIDENT=constants["BLOCK_D"] * constants["BLOCK_N"] <= RESIDENT_STATES,
        WHOLE=form.whole,
        **constants,
        **alignment(*strides),
        num_warps=form.warps,
        num_stages=1,
        # without a bound the compiler takes 32 where even the most do not suffice
        maxnreg=min(MAX_REGISTERS, REGISTERS // (LANES * form.warps)),
    )


@lru_cache(maxsize=KEPT_CONSTANTS)
def _statistics_constants(
    A: Like, options: Parameterization, strides: tuple[int, ...]
) -> Constants:
    d = A.shape[-1]
    constants = scan_constants(d, A, options)
    del constants["ACTIVATION"], constants["EPS"]
    return Constants(
        **_solver_constants(A, options),
        **constants,
        **alignment(*strides),
        num_warps=token_warps(d),
    )


@lru_cache(maxsize=KEPT_CONSTANTS)
def _gradients_constants(
    A: Like, options: Parameterization, blocks: int, strides: tuple[int, ...]
) -> Constants:
    d = A.shape[-1]
    constants = scan_constants(d, A, options)
    for name in ("INPUT_SCALE", "FULL", "EPS", "FAST"):
        del constants[name]
    return Constants(
        **_solver_constants(A, options),
        BLOCKS=next_power_of_two(blocks),
        **constants,
        **alignment(*strides),
        num_warps=token_warps(d),
    )

"""Launches of the sweep without feedback and of its reverse, of all heads at once.

Letters: b folded samples (kernels/heads.py), t time, d channels of a head, n state per channel,
k reflections, r raw values.
"""

import torch

from bedouin.kernels.direct.buffers import GradBuffers, SolvedBuffers, SweepBuffers
from bedouin.kernels.direct.open_loop.triton_prepare import prepare_open_loop_kernel
from bedouin.kernels.direct.open_loop.triton_tokens import gradients_kernel, token_statistics_kernel
from bedouin.kernels.direct.open_loop.walks import launch_walk
from bedouin.kernels.direct.triton_constants import (
    MOST_WARPS,
    Like,
    input_strides,
    kernel_constants,
    layout_of,
    per_head,
    solver_size,
    solver_width,
)
from bedouin.kernels.launch import next_power_of_two
from bedouin.kernels.operands import Parameterization
from bedouin.kernels.plans import PlannedKernel
from bedouin.kernels.scan.launch import (
    LIMITS,
    ScanLimits,
    SweepScan,
    plan_scan,
    sweep_scan_backward,
)
from bedouin.kernels.scan.types import ScanOptions

PREPARE = PlannedKernel(prepare_open_loop_kernel)
STATISTICS, GRADIENTS = PlannedKernel(token_statistics_kernel), PlannedKernel(gradients_kernel)

CHANNELS_OF_WARP = 256
"""Channels of a warp of a kernel of one token a program: 8 in each thread."""


def launch_open_sweep(buffers: SweepBuffers, options: Parameterization, keep_every: int) -> None:
    """The whole forward sweep, in place."""
    x, raw, _, A, h, kept, y, _, statistics = buffers
    b, t_end, d = y.shape
    n, k = A.shape[-2], layout_of(options).num_householder
    delta, solver = A.new_empty(b, t_end, d), A.new_empty(b, t_end, solver_width(k, n))
    e = A.new_empty(b, t_end, k)
    strides, warps = (*input_strides(x, A), *raw.stride()[:2]), token_warps(d)
    PREPARE.launch(
        (b * t_end,),
        (x, y, x, raw, A, delta, solver, statistics[3], y, solver),
        (t_end, per_head(A, b), d, n, *strides[:3], *y.stride()[:2], *raw.stride()[:2]),
        kernel_constants(PREPARE, Like.of(A), options, raw.stride()[:2], REVERSE=False, **warps),
    )
    launch_walk(x, raw, delta, solver, A, h, y, e, kept, keep_every, options)
    STATISTICS.launch(
        (b * t_end,),
        (x, y, raw, A, delta, solver, e, statistics),
        (t_end, per_head(A, b), d, n, *strides),
        kernel_constants(STATISTICS, Like.of(A), options, raw.stride()[:2], **warps),
    )


def launch_open_reverse(
    known: SolvedBuffers,
    grads: GradBuffers,
    options: Parameterization,
    keep_every: int,
    limits: ScanLimits = LIMITS,
) -> None:
    """The whole reverse sweep, in place; `limits` are those of the scan's backward."""
    x, y, raw, _, A, h0, kept = known
    b, t_end, d = y.shape
    n, k = A.shape[-2], layout_of(options).num_householder
    pairs, B_at = k * (k + 1) // 2, solver_size(k)
    delta, mixed, v = A.new_empty(3, b, t_end, d)
    solver = A.new_empty(b, t_end, solver_width(k, n))
    factor, warps = A.new_empty(b, t_end, pairs + 4 * k + 2), token_warps(d)
    x_strides, grad_y_strides, raw_strides = (
        input_strides(x, A),
        grads.y.stride()[:2],
        raw.stride()[:2],
    )
    PREPARE.launch(
        (b * t_end,),
        (x, y, grads.y, raw, A, delta, solver, v, mixed, factor),
        (t_end, per_head(A, b), d, n, *x_strides, *grad_y_strides, *raw_strides),
        kernel_constants(PREPARE, Like.of(A), options, raw_strides, REVERSE=True, **warps),
    )
    heads = 1 if A.dim() == 2 else len(A)
    plan = plan_scan(y, n, reverse=True, heads=heads, chunk=keep_every, limits=limits)
    ends = A.new_empty(b, plan.segments, n, d)
    every = plan.segment_chunks * keep_every
    launch_walk(grads.y, raw, delta, solver, A, grads.H, v, None, ends, every, options)
    B, C = solver[..., B_at : B_at + n], solver[..., B_at + n : B_at + 2 * n]
    scan = SweepScan(v, ends, mixed, delta, A, B, C, h0, kept)
    scales = ScanOptions(options.input_scale, options.eigenvalues, exclusive=False)
    in_parts = plan.segments > 1
    grad_A = A.new_empty(ends.shape) if in_parts else grads.A.unsqueeze(1)
    grad_B, grad_C = sweep_scan_backward(scan, grad_A, scales, plan, keep_every)
    if in_parts:
        torch.sum(grad_A, 1, out=grads.A)
    grad_raw_strides = grads.raw.stride()[:2]
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
        (
            t_end,
            plan.channel_blocks,
            per_head(A, b),
            d,
            n,
            *x_strides,
            *grad_y_strides,
            *raw_strides,
            *grad_raw_strides,
        ),
        kernel_constants(
            GRADIENTS,
            Like.of(A),
            options,
            (*raw_strides, *grad_raw_strides),
            BLOCKS=next_power_of_two(plan.channel_blocks),
            **warps,
        ),
    )


def token_warps(d: int) -> dict[str, int]:
    """The warps of a kernel of one token a program; every warp repeats the k x k algebra."""
    return {"num_warps": max(1, min(MOST_WARPS, next_power_of_two(d) // CHANNELS_OF_WARP))}

"""Launches of the walk through the tokens, in either direction, with one program a sample or, for
few samples, in chunks of tokens with several.

Letters: b folded samples (kernels/heads.py), t time, d channels of a head, n state per channel,
k reflections, r raw values.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct.open_loop.triton_chunks import chunks_kernel, couplings_kernel
from bedouin.kernels.direct.open_loop.triton_walk import walk_kernel
from bedouin.kernels.direct.triton_constants import (
    LANES,
    MOST_WARPS,
    Like,
    cooperative,
    input_strides,
    kernel_constants,
    layout_of,
    per_head,
    solver_width,
)
from bedouin.kernels.launch import Device, ceil_div, next_power_of_two
from bedouin.kernels.operands import Parameterization
from bedouin.kernels.plans import PlannedKernel

WALK = PlannedKernel(walk_kernel)
COUPLINGS, CHUNKS = PlannedKernel(couplings_kernel), PlannedKernel(chunks_kernel)

SECTOR = 8
"""float32 of a line that are loaded together."""

NEIGHBOURS = 4
"""Channels of a thread that are neighbours: 16 bytes of float32."""

STATES_OF_THREAD = 64
"""Elements of h in a thread: with as many of A, and what a token needs, 255 registers."""

REGISTERS, MAX_REGISTERS = 65536, 255
"""Of a multiprocessor, and the most of a thread."""

RESIDENT_STATES = 16384
"""Most elements of h of a sample beside which A fits the registers of a multiprocessor."""

CHANNELS_AT_A_TIME = 128
"""Of a program that computes the couplings of a chunk, one in each thread."""


@dataclass(frozen=True)
class ChunkLimits:
    """When a walk takes chunks of tokens, and how it is spread; tests give other values.

    tokens: of a chunk, a power of two, at least 2; 0: the walk never takes chunks. With k = 4 a
        thread cannot hold what 8 tokens need.
    couplings: most coefficients between the tokens of a chunk, which a thread sums at the same
        time; where there would be more, the chunks are shorter.
    shortest: fewest tokens of a sequence.
    states: fewest elements of h of a sample: with fewer the other walk has little to compute.
    channels, most_channels: fewest and most channels of a program.
    bytes: most of the states of a channel, which a thread holds twice, with as many of A.
    programs: that run at the same time; None: one for each multiprocessor, and in Triton's
        interpreter, which runs them one after the other, no chunks.
    """

    tokens: int = 4
    couplings: int = 128
    shortest: int = 32
    states: int = 4096
    channels: int = 64
    most_channels: int = 256
    bytes: int = 128
    programs: int | None = None


CHUNK_LIMITS = ChunkLimits()


class ChunkPlan(NamedTuple):
    """How a walk in chunks is spread over programs."""

    tokens: int  # of a chunk
    block_d: int  # channels of a program
    parts: int  # programs of a sample


def plan_chunks(
    b: int,
    t_end: int,
    A: Like,  # (n, d) or (H, n, d)
    k: int,
    every: int,  # tokens between two kept h
    programs: int | None,  # that run at the same time; None: unknown
    limits: ChunkLimits = CHUNK_LIMITS,
) -> ChunkPlan | None:
    """The plan with the fewest channels in a program for which all programs run at the same time;
    None if there is none, or if a walk with one program a sample is preferred."""
    (n, d), tokens = A.shape[-2:], limits.tokens
    programs = limits.programs if limits.programs is not None else programs
    while tokens > 2 and tokens * (tokens - 1) // 2 * k * k > limits.couplings:
        tokens //= 2
    if programs is None or tokens == 0 or every % tokens:
        return None
    if t_end < limits.shortest or n * d < limits.states:
        return None
    if next_power_of_two(n) * A.dtype.itemsize > limits.bytes:
        return None
    block_d = limits.channels
    while b * ceil_div(d, block_d) > programs:
        block_d *= 2
        if block_d > limits.most_channels:
            return None
    return ChunkPlan(tokens, block_d, ceil_div(d, block_d))


def launch_walk(
    given: Tensor,  # (b, t, d), x or the cotangent of y
    raw: Tensor,  # (b, t, r)
    delta: Tensor,  # (b, t, d)
    solver: Tensor,  # (b, t, WIDTH)
    A: Tensor,  # (n, d) or (H, n, d), log2(e) A
    h: Tensor,  # (b, n, d), overwritten
    out: Tensor,  # (b, t, d), written
    e: Tensor | None,  # (b, t, k), written; None: in reverse
    kept: Tensor,  # (b, slots, n, d), written
    every: int,
    options: Parameterization,
) -> None:
    """The walk of `walk_kernel`, or if `e` is None its reverse, in place."""
    b, t_end, d = out.shape
    reverse, n = e is None, A.shape[-2]
    written = h, out, out if e is None else e, kept
    given_strides, raw_strides = input_strides(given, A), raw.stride()[:2]
    like, sizes = Like(tuple(A.shape), A.dtype), (per_head(A, b), d, n)
    k, programs = layout_of(options).num_householder, Device.of(A.device).programs
    common = like, options, raw_strides
    plan = plan_chunks(b, t_end, like, k, every, programs, CHUNK_LIMITS)
    if plan is None:
        WALK.launch(
            (b,),
            (given, raw, delta, solver, A, *written),
            (t_end, every, kept.shape[1], *sizes, *given_strides, *raw_strides),
            kernel_constants(WALK, *common, REVERSE=reverse, **_walk_options(n, d)),
        )
        return
    tokens, chunks = plan.tokens, ceil_div(t_end, plan.tokens)
    block_d = min(CHANNELS_AT_A_TIME, next_power_of_two(d))
    launch = _launch_options(max(1, block_d // LANES))
    couplings = A.new_empty(b, chunks, tokens * (tokens - 1) // 2, k, k)
    COUPLINGS.launch(
        (b * chunks,),
        (raw, delta, solver, A, couplings),
        (t_end, chunks, *sizes, *raw_strides),
        kernel_constants(COUPLINGS, *common, TOKENS=tokens, BLOCK_D=block_d, **launch),
    )
    words = next_power_of_two(tokens * k) * A.dtype.itemsize // 4
    sums = torch.zeros(2, b, plan.parts, words, dtype=torch.int64, device=A.device)
    # programs that do not run at the same time cannot exchange anything within a launch
    together = not interpreter_is_on() or plan.parts == 1
    at_once = chunks if together else 1
    for first in range(0, chunks, at_once):
        for gather, spread in ((True, True),) if together else ((True, False), (False, True)):
            CHUNKS.launch(
                (b * plan.parts,),
                (given, raw, delta, solver, couplings, A, *written, sums),
                (
                    t_end,
                    chunks,
                    first,
                    first + at_once,
                    every,
                    kept.shape[1],
                    *sizes,
                    *given_strides,
                    *raw_strides,
                ),
                kernel_constants(
                    CHUNKS,
                    *common,
                    REVERSE=reverse,
                    GATHER=gather,
                    SPREAD=spread,
                    **_chunk_options(plan, n, k),
                ),
            )


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


def _walk_options(n: int, d: int) -> dict[str, Any]:
    """Constants of `walk_kernel` beside those of options and sizes."""
    form, states = walk_form(d, n), next_power_of_two(d) * next_power_of_two(n)
    own = {"RESIDENT": states <= RESIDENT_STATES, "WHOLE": form.whole}
    return own | _launch_options(form.warps)


def _chunk_options(plan: ChunkPlan, n: int, k: int) -> dict[str, Any]:
    """Those of `chunks_kernel`."""
    tokens = plan.tokens
    sums, pairs = next_power_of_two(tokens * k), tokens * (tokens - 1) // 2 * k * k
    return {
        "TOKENS": tokens,
        "PARTS": plan.parts,
        "ROWS": next_power_of_two(plan.parts),
        "LEVELS": sums.bit_length() - 1,
        "SECTORS": next_power_of_two(solver_width(k, n) // SECTOR),
        "PAIR_SECTORS": next_power_of_two(ceil_div(pairs, SECTOR)),
        "BLOCK_D": plan.block_d,
        **_launch_options(max(1, plan.block_d // LANES)),
        **(cooperative() if plan.parts > 1 else {}),
    }


def _launch_options(warps: int) -> dict[str, int]:
    # without a bound the compiler takes 32 registers where even the most do not suffice
    most = min(MAX_REGISTERS, REGISTERS // (LANES * warps))
    return {"num_warps": warps, "num_stages": 1, "maxnreg": most}

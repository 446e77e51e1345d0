"""Launches of the direct sweep's Triton kernels, and the plan that chooses between their forms."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct.buffers import (
    GradBuffers,
    SolvedBuffers,
    SweepBuffers,
)
from bedouin.kernels.direct.triton_forward import sweep_kernel
from bedouin.kernels.direct.triton_prepare import prepare_kernel, replay_kernel
from bedouin.kernels.direct.triton_reverse import reverse_kernel, step_kernel
from bedouin.kernels.householder.reference import UNIT_EPS
from bedouin.kernels.launch import ceil_div, next_power_of_two
from bedouin.kernels.linear import pad_rows, padding
from bedouin.kernels.operands import Parameterization

PERSISTENT = True
"""Whether the persistent kernels may be used."""

SHARED_MEMORY = ((128, 32), (64, 32), (32, 16))
"""Kilobytes for a program's tile of W^y and for the vectors it is multiplied with, the largest
first: the first of these fits an H100 (227 KB a multiprocessor) and an A100 (163)."""

MAX_COLUMNS = 1024
"""Most columns of a tile of W^y for up to 16 samples; half as many for more."""

MAX_ROWS = 128
"""Most rows of a tile of W^y: as many as two warpgroups multiply at a time."""

REDUCTIONS = 2048
"""Bytes of shared memory for sums over channels."""

STATES_AT_A_TIME = 8
"""States of a block in the reverse kernel: more at a time do not stay in registers."""

TOGETHER = 32
"""Largest batch for which the reverse sweep is one launch: what a chunk needs is then made by the
persistent programs in one round; for more samples, launches of their own fill the chip better."""

REPLAY_CHANNELS = 128
"""Channels of a block whose memory is replayed."""


@dataclass(frozen=True)
class Plan:
    """How a product with W^y is spread over persistent programs."""

    programs: int
    block_m: int
    block_k: int  # columns of a chunk
    chunks: int  # of a tile
    block_b: int  # samples at a time
    splits: int  # parts of the sum over columns
    one_tile: bool
    apart: bool  # no program has a tile and samples


def plan_product(m: int, v: int, W: Tensor, b: int) -> Plan | None:
    """The plan for a matrix (m, v) and b vectors, None if it does not fit: then products are made
    outside.

    Every program keeps one tile in shared memory from token to token. A matrix that would need
    more tiles than the chip has multiprocessors would be read again for every token: a library
    product does that better.
    """
    if not PERSISTENT or W.dtype == torch.float64 and not interpreter_is_on():
        return None
    shared = _shared_memory(W.device)
    if shared is None:
        return None
    tile_bytes, vector_bytes = shared
    size = W.element_size()
    # in float32 the product is made of scalar operations, unrolled over samples and columns
    block_b = 16 if size > 2 else min(128, max(16, next_power_of_two(b)))
    # wide tiles make few parts of sums; for many vectors tiles of 128 rows, or both warpgroups of a
    # program would multiply the same 64 where there are several chunks
    most = MAX_COLUMNS if block_b <= 16 else MAX_COLUMNS // 2
    columns = max(16, min(most, next_power_of_two(v)))
    # a chunk is in shared memory while the next one comes
    room = vector_bytes // (block_b * size)
    block_k = columns if columns <= room else room // 2
    block_m = max(16, min(MAX_ROWS, tile_bytes // (columns * size)))
    splits = ceil_div(v, columns)
    tiles = ceil_div(m, block_m) * splits
    sizes = (block_m, block_k, columns // block_k, block_b, splits)
    if interpreter_is_on():
        # programs run one after the other: two that wait for each other would never end
        return Plan(1, *sizes, one_tile=tiles == 1, apart=False)
    programs = _multiprocessors(W.device)
    if tiles > programs or (size > 2 and columns > 256):
        return None
    return Plan(programs, *sizes, one_tile=True, apart=tiles + b <= programs)


def _shared_memory(device: torch.device) -> tuple[int, int] | None:
    """Bytes for a tile and for vectors, None on a device with less than the smallest choice."""
    available = 232448
    if not interpreter_is_on():
        properties = torch.cuda.get_device_properties(device)
        available = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    # reductions take some more
    fitting = (v for v in SHARED_MEMORY if sum(v) * 1024 + REDUCTIONS <= available)
    chosen = next(fitting, None)
    return None if chosen is None else (chosen[0] * 1024, chosen[1] * 1024)


def _multiprocessors(device: torch.device) -> int:
    """Programs that run at the same time when each takes a whole multiprocessor."""
    if interpreter_is_on():
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch_sweep(buffers: SweepBuffers, options: Parameterization, keep_every: int) -> None:
    """The whole forward sweep, in place."""
    b, t_end, d = buffers.x.shape
    W_y = buffers.W_y
    if W_y is None:
        _sweep(buffers, options, keep_every, range(t_end), buffers.x, None, b)
        return
    r = W_y.shape[0]
    plan = plan_product(r, d, W_y, b)
    parts = 1 if plan is None else plan.splits
    fed = (W_y if parts == 1 else buffers.A).new_empty(parts, b, r + padding(r))
    if plan is not None:
        _sweep(buffers, options, keep_every, range(t_end), fed, plan, plan.programs)
        return
    rows = pad_rows(W_y).mT
    for t in range(t_end):
        torch.mm(buffers.normed[:, t], rows, out=fed[0])
        _sweep(buffers, options, keep_every, range(t, t + 1), fed, None, b)


def _sweep(
    buffers: SweepBuffers,
    options: Parameterization,
    keep_every: int,
    tokens: range,
    fed: Tensor,
    plan: Plan | None,
    programs: int,
) -> None:
    x, raw, W_y, A, h, kept, y, normed, statistics = buffers
    b, t_end, d = x.shape
    sweep_kernel[(programs,)](
        x,
        raw,
        fed if W_y is None else W_y.contiguous(),
        A,
        h,
        kept,
        fed,
        y,
        normed,
        statistics,
        _counters(x),
        tokens.start,
        tokens.stop,
        b,
        t_end,
        raw.shape[-1],
        d,
        A.shape[0],
        *x.stride()[:2],
        *raw.stride()[:2],
        fed.shape[-1],
        KEEP=keep_every,
        FEEDBACK=W_y is not None,
        **_matrix_constants(plan, W_y, b, programs),
        **_scan_constants(d, A, options),
        **_norm_constants(options),
        **_mixer_constants(options),
        **_alignment(raw, fed),
        **_launch_options(d, A),
        **({} if plan is None else _cooperative()),
    )


def launch_memory(
    known: SolvedBuffers, h: Tensor, options: Parameterization, keep_every: int
) -> None:
    """Fill `kept`, and h (b, n, d), given before the first token, with that after the last."""
    b, t_end, d = known.x.shape
    mixed, small = _chunk_buffers(known, keep_every, options)
    slots = known.kept.shape[1]
    for slot in range(slots + 1):
        chunk = range(slot * keep_every, min((slot + 1) * keep_every, t_end))
        _prepare(known, mixed, small, chunk, options)
        last = h if slot == slots else known.kept[:, slot]
        _replay(known, mixed, small, None, last, chunk, slot, options)


def launch_reverse(
    known: SolvedBuffers,
    grads: GradBuffers,
    W: Tensor | None,  # (r, d), W^y
    options: Parameterization,
    keep_every: int,
) -> Tensor | None:
    """The whole reverse sweep, in place; the cotangent of norm(y0) in parts (splits, b, d)."""
    b, t_end, d = known.x.shape
    n, slots = known.A.shape[0], range(known.kept.shape[1] + 1)
    mixed, small = _chunk_buffers(known, keep_every, options)
    buffers = (mixed, small, known.A.new_empty(b, min(keep_every, t_end) - 1, n, d))
    plan = None if W is None else plan_product(d, grads.raw.shape[-1], W, b)
    pulled = None
    if W is not None:
        pulled = known.A.new_zeros(1 if plan is None else plan.splits, b, d)
    rows = None if W is None or plan is not None else pad_rows(W)
    together = b <= TOGETHER
    if together and (W is None or plan is not None):
        _reverse(known, grads, W, pulled, buffers, slots, plan, options, keep_every)
        return pulled
    for slot in reversed(slots):
        chunk = range(slot * keep_every, min((slot + 1) * keep_every, t_end))
        _prepare(known, mixed, small, chunk, options)
        _replay(known, mixed, small, buffers[2], None, chunk, slot, options)
        if rows is None:
            one = range(slot, slot + 1)
            _reverse(known, grads, W, pulled, buffers, one, plan, options, keep_every)
            continue
        assert W is not None and pulled is not None
        for t in reversed(chunk):
            _step(known, grads, pulled, buffers, t, chunk, slot, options)
            pulled[0] = grads.raw[:, t].to(W.dtype) @ rows
    return pulled


def _chunk_buffers(
    known: SolvedBuffers, keep_every: int, options: Parameterization
) -> tuple[Tensor, Tensor]:
    b, t_end, d = known.x.shape
    k = _layout(options).num_householder
    count = min(keep_every, t_end)
    scalars = 3 * (k * (k + 1) // 2) + k * k + 5 * k + 4
    mixed = known.A.new_empty(b, count, d)
    return mixed, known.A.new_empty(b, count, scalars + 2 * known.A.shape[0])


def _prepare(
    known: SolvedBuffers, mixed: Tensor, small: Tensor, chunk: range, options: Parameterization
) -> None:
    x, y, raw, fed, A, _, _ = known
    b, t_end, d = x.shape
    prepare_kernel[(b * len(chunk),)](
        x,
        y,
        raw,
        raw if fed is None else fed,
        A,
        mixed,
        small,
        0,
        chunk.start,
        len(chunk),
        t_end,
        d,
        A.shape[0],
        *x.stride()[:2],
        *raw.stride()[:2],
        *_token_strides(fed),
        FEEDBACK=fed is not None,
        NORM_EPS=options.feedback_norm_eps or 0.0,
        **_scan_constants(d, A, options),
        **_mixer_constants(options),
        **_alignment(raw, raw if fed is None else fed),
        # half as many as a sweep takes: every warp repeats the k x k algebra
        num_warps=max(4, _num_warps(d, 1) // 2),
    )


def _replay(
    known: SolvedBuffers,
    mixed: Tensor,
    small: Tensor,
    before: Tensor | None,
    last: Tensor | None,
    chunk: range,
    slot: int,
    options: Parameterization,
) -> None:
    x, _, raw, fed, A, h0, kept = known
    b, _, d = x.shape
    constants = _scan_constants(d, A, options)
    del constants["EPS"], constants["SELECTIVE"]
    constants["BLOCK_D"] = min(REPLAY_CHANNELS, constants["BLOCK_D"])
    replay_kernel[(ceil_div(d, constants["BLOCK_D"]) * b,)](
        mixed,
        small,
        raw,
        raw if fed is None else fed,
        A,
        h0,
        kept,
        kept if before is None else before,
        kept if last is None else last,
        0,
        chunk.start,
        len(chunk),
        slot,
        kept.shape[1],
        d,
        A.shape[0],
        *raw.stride()[:2],
        *_token_strides(fed),
        h0.stride(0),
        0 if last is None else last.stride(0),
        K=_layout(options).num_householder,
        KEEP_ALL=before is not None,
        KEEP_LAST=last is not None,
        FEEDBACK=fed is not None,
        **constants,
        **_alignment(raw, raw if fed is None else fed),
        num_warps=4,
    )


def _reverse(
    known: SolvedBuffers,
    grads: GradBuffers,
    W: Tensor | None,
    pulled: Tensor | None,
    buffers: tuple[Tensor, Tensor, Tensor],
    slots: range,
    plan: Plan | None,
    options: Parameterization,
    keep_every: int,
) -> None:
    x, y, raw, fed, A, h0, kept = known
    b, t_end, d = x.shape
    together = b <= TOGETHER
    programs = b if plan is None else plan.programs
    if together:
        programs = _multiprocessors(x.device)
    constants = _blocked_constants(d, A, options)
    reverse_kernel[(programs,)](
        grads.y,
        grads.H if pulled is None else pulled,
        x,
        y,
        raw,
        raw if fed is None else fed,
        raw if W is None else W.contiguous(),
        A,
        *buffers[:2],
        h0,
        kept,
        buffers[2],
        grads.H,
        grads.x,
        grads.raw,
        grads.A,
        grads.statistics,
        _counters(x),
        slots.start,
        slots.stop - 1,
        b,
        t_end,
        grads.raw.shape[-1],
        d,
        A.shape[0],
        *grads.y.stride()[:2],
        *x.stride()[:2],
        *raw.stride()[:2],
        *_token_strides(fed),
        h0.stride(0),
        KEEP=keep_every,
        PREPARE=together,
        REPLAY_D=min(REPLAY_CHANNELS, constants["BLOCK_D"]),
        FEEDBACK=fed is not None,
        **_matrix_constants(plan, W, b, programs),
        **constants,
        **_norm_constants(options),
        **_mixer_constants(options),
        **_alignment(raw, raw if fed is None else fed, grads.raw),
        **_launch_options(d, A),
        **(_cooperative() if together or plan is not None else {}),
    )


def _step(
    known: SolvedBuffers,
    grads: GradBuffers,
    pulled: Tensor,
    buffers: tuple[Tensor, Tensor, Tensor],
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
        pulled,
        x,
        y,
        raw,
        fed,
        A,
        *buffers[:2],
        h0,
        kept,
        buffers[2],
        grads.H,
        grads.x,
        grads.raw,
        grads.A,
        grads.statistics,
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
        *_token_strides(fed),
        h0.stride(0),
        **_blocked_constants(d, A, options),
        **_norm_constants(options),
        **_mixer_constants(options),
        **_alignment(raw, fed, grads.raw),
        **_launch_options(d, A),
    )


def _blocked_constants(d: int, A: Tensor, options: Parameterization) -> dict[str, Any]:
    constants = _scan_constants(d, A, options)
    constants["BLOCKS"] = ceil_div(constants["BLOCK_N"], STATES_AT_A_TIME)
    constants["BLOCK_N"] //= constants["BLOCKS"]
    return constants


def _counters(like: Tensor) -> Tensor:
    return torch.zeros(3, dtype=torch.int32, device=like.device)


def _token_strides(fed: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if fed is None else fed.stride()[:2]


def _matrix_constants(plan: Plan | None, W: Tensor | None, b: int, programs: int) -> dict[str, Any]:
    tf32 = torch.backends.cuda.matmul.allow_tf32 and not interpreter_is_on()
    return {
        "PERSISTENT": plan is not None,
        "COMPILED": not interpreter_is_on(),
        "ONE_TILE": plan is not None and plan.one_tile,
        "APART": plan is not None and plan.apart,
        "RESIDENT": b <= programs,
        "BLOCK_M": 16 if plan is None else plan.block_m,
        "BLOCK_K": 16 if plan is None else plan.block_k,
        "CHUNKS": 1 if plan is None else plan.chunks,
        "BLOCK_B": 16 if plan is None else plan.block_b,
        "SPLITS": 1 if plan is None else plan.splits,
        "PRECISION": "tf32" if tf32 else "ieee",
        "DOT": _dot_dtype(W),
    }


def _dot_dtype(W: Tensor | None) -> tl.dtype:
    """The dtype of the factors; the interpreter multiplies bfloat16 and float16 wrongly."""
    if W is None or W.dtype == torch.float32:
        return tl.float32
    if W.dtype == torch.float64:
        return tl.float64
    if interpreter_is_on():
        return tl.float32
    return tl.bfloat16 if W.dtype == torch.bfloat16 else tl.float16


def _layout(options: Parameterization) -> Any:
    if options.layout is None:
        raise ValueError("options.layout must be a RawLayout for the Triton kernels, got None")
    return options.layout


def _scan_constants(d: int, A: Tensor, options: Parameterization) -> dict[str, Any]:
    layout = _layout(options)
    return {
        "BLOCK_D": next_power_of_two(d),
        "BLOCK_N": next_power_of_two(A.shape[0]),
        "ACTIVATION": layout.activation,
        "SELECTIVE": layout.selective,
        "INPUT_SCALE": options.input_scale,
        "FULL": options.eigenvalues == "full",
        "EPS": UNIT_EPS,
        "FAST": A.dtype == torch.float32 and not interpreter_is_on(),
        "ACC": tl.float64 if A.dtype == torch.float64 else tl.float32,
    }


def _norm_constants(options: Parameterization) -> dict[str, Any]:
    eps = options.feedback_norm_eps
    return {"NORM": eps is not None, "NORM_EPS": 0.0 if eps is None else eps}


def _mixer_constants(options: Parameterization) -> dict[str, Any]:
    layout = _layout(options)
    return {"K": layout.num_householder, "BETA_MAX": layout.beta_max}


def _alignment(*rows: Tensor) -> dict[str, int]:
    """A power of two, at most 8, that divides every stride between rows of raw values."""
    common = 8
    for tensor in rows:
        for stride in tensor.stride()[:-1]:
            common = math.gcd(common, stride)
    return {"ALIGNED": common}


def _num_warps(d: int, rows: int) -> int:
    """64 registers a thread for a tile (rows, d) of memory, 4 for a row."""
    elements = next_power_of_two(d) * next_power_of_two(rows)
    return int(min(16, max(4, elements // 2048, next_power_of_two(d) // 128)))


def _launch_options(d: int, A: Tensor) -> dict[str, Any]:
    # one stage: prefetching of operands is written out in the kernels
    return {"num_warps": _num_warps(d, A.shape[0]), "num_stages": 1}


def _cooperative() -> dict[str, bool]:
    """All programs run at the same time: they wait for each other."""
    return {} if interpreter_is_on() else {"launch_cooperative_grid": True}

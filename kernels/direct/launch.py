"""Launches of the direct sweep's kernels, with feedback or without.

Letters: b folded samples, t time, d channels of a head, n state per channel, k reflections, r raw
values, f those of them with feedback, H heads (kernels/heads.py). The kernels read r rows of W^y,
the last r - f zero.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct.layout import state_major
from bedouin.kernels.direct.limits import WORKSPACE, count_kept, head_blocks
from bedouin.kernels.direct.triton_forward import sweep_kernel
from bedouin.kernels.direct.triton_prepare import local_width, memory_kernel, prepare_kernel
from bedouin.kernels.direct.triton_reverse import reverse_kernel
from bedouin.kernels.feedback import normalize_feedback_vjp, padded_rows
from bedouin.kernels.heads import sum_samples
from bedouin.kernels.householder import UNIT_EPS
from bedouin.kernels.launch import (
    Device,
    arguments_of,
    ceil_div,
    dtype_of_factors,
    last_axis_contiguous,
    next_power_of_two,
)
from bedouin.kernels.linear import apply_weight, padding, weight_gradient
from bedouin.kernels.operands import Operands, Parameterization
from bedouin.kernels.output.registered import shifted_norm_operation

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

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Gradients of x, raw, W_y, A, h0, y0, and the statistics (2, b, t) of the adjoint equation."""


class Known(NamedTuple):
    """What the kernels read of tokens whose y is known."""

    x: Tensor  # (b, t, d)
    y: Tensor  # (b, t, d), contiguous
    raw: Tensor  # (b, t, r)
    fed: Tensor  # (b, t, r or more), W^y norm(y_{t-1}); `raw` without feedback
    A: Tensor  # (H, n, d), log2(e) A
    feedback: bool


class Prepared(NamedTuple):
    """Results of `prepare_kernel` for some tokens."""

    mixed: Tensor  # (b, count, d): x~
    local: Tensor  # (b, count, WIDTH): see triton_prepare.py


def launch_sweep(
    operands: Operands,  # with the axis of heads
    options: Parameterization,
    keep_every: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (b, t, d), the last h (b, n, d), kept h (b, `count_kept`, n, d), and the statistics
    (4, b, t): defect, scale, magnitude, pivot."""
    x, raw, W_y, A, h0, y0 = operands
    (b, t_end, d), n, exponents = x.shape, A.shape[-1], _exponents(A)
    y, kept = A.new_empty(b, t_end, d), A.new_empty(b, count_kept(t_end, keep_every), n, d)
    h, statistics = _first_memory(h0, b, A), A.new_empty(4, b, t_end)
    if not y.numel():
        return y, h, kept, statistics
    x, raw, W, first, found = last_axis_contiguous(x), last_axis_contiguous(raw), exponents, y, None
    samples, parts = choose_rows(b, exponents, W_y)
    constants = _of_heads(sweep_kernel, exponents, W_y, options, (samples, parts), keep_every)
    if W_y is None:
        # of each part of a sample, the maximum of which is taken below
        found = statistics.new_empty(parts, *statistics.shape)
    else:
        W = _whole_rows(padded_rows(W_y, raw.shape[2]))
        first = W_y.new_zeros(b, 1, d)
        if y0 is not None:
            first = _normed_past(y0.unsqueeze(1), operands, W_y, options)
    programs = _programs(b, A, samples)
    # B, C and alpha of a token, two places for each sample
    scratch = A.new_empty(programs, samples, 2, constants["BLOCK_S"] + constants["ALPHA"])
    tensors = x, raw, W, exponents, h, kept, first, scratch, y
    integers = b // len(A), t_end, d, n, *_input_strides(x, A), *raw.stride()[:2], W.stride(0)
    results = statistics if found is None else found
    sweep_kernel[(programs,)](*tensors, results, *integers, **constants)
    if found is not None:
        torch.amax(found, 0, out=statistics)
    return y, h, kept, statistics


def launch_memory(
    y: Tensor,  # (b, t, d), a fixed point found elsewhere
    operands: Operands,  # with the axis of heads
    options: Parameterization,
    keep_every: int,
) -> tuple[Tensor, Tensor]:
    """The last h (b, n, d), and kept h (b, `count_kept`, n, d), of tokens whose y is known."""
    (b, t_end, d), n = y.shape, operands.A.shape[-1]
    kept = operands.A.new_empty(b, count_kept(t_end, keep_every), n, d)
    h = _first_memory(operands.h0, b, operands.A)
    if not y.numel():
        return h, kept
    known = _known(y, operands, options)
    size = _tokens_at_once(y, n, keep_every, options)
    prepared = _allocate_prepared(known, size, options)
    strides, how = _token_strides(known), {"FEEDBACK": known.feedback, "KEEP": keep_every}
    given = known.A.shape, options, strides
    constants = token_constants(memory_kernel, *given, **how, num_warps=4)
    for start in range(0, t_end, size):
        chunk = range(start, min(start + size, t_end))
        _prepare(known, prepared, chunk, options)
        integers = start, len(chunk), t_end, b // len(known.A), d, n, *strides
        tensors = *prepared, known.raw, known.fed, known.A, h, kept
        memory_kernel[(b,)](*tensors, *integers, **constants)
    return h, kept


def launch_reverse(
    cotangents: tuple[Tensor, Tensor | None],  # of y (b, t, d) and h (b, d, n); None: zeros
    y: Tensor,  # (b, t, d)
    kept: Tensor,  # (b, `count_kept`, n, d)
    operands: Operands,  # with the axis of heads
    options: Parameterization,
    keep_every: int,
    *,
    wants_y0: bool,
) -> Gradients:
    """The gradients: of W_y empty without feedback, of y0 if not wanted."""
    grad_y, grad_h = last_axis_contiguous(cotangents[0]), cotangents[1]
    x, raw, W_y, A, h0, y0 = operands
    (b, t_end, d), n, r = x.shape, A.shape[-1], raw.shape[2]
    if grad_h is None:
        H, grad_A = A.new_zeros(2, b, n, d).unbind()
    else:
        H, grad_A = state_major(grad_h), A.new_zeros(b, n, d)
    known = _known(y, operands, options)
    if W_y is None:
        # padded, so that rows are aligned for cuBLAS and for vectorized stores
        grad_raw = raw.new_empty(b, t_end, r + padding(r))
    elif known.fed.dtype == raw.dtype:
        # a token's feedback is read before its cotangent is written, so both share memory
        grad_raw = known.fed
    else:
        grad_raw = torch.zeros_like(known.fed, dtype=raw.dtype)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    statistics = A.new_empty(2, b, t_end)
    grad_y0, grad_W_y = A.new_empty(0, d), A.new_empty(0)
    if wants_y0 and y0 is not None:
        grad_y0 = torch.zeros_like(y0)
    if y.numel():
        # all samples share one memory of zeros
        first = A.new_zeros(n, d).expand(b, n, d) if h0 is None else h0.mT.contiguous()
        written = H, grad_x, grad_raw, grad_A, statistics
        W = known.A if W_y is None else _whole_rows(padded_rows(W_y, r))
        _reverse(known, W, (grad_y, first, kept), written, options, keep_every)
        if W_y is not None and y0 is not None and wants_y0:
            normed = apply_weight(grad_raw[:, 0, : W.shape[1]].to(W.dtype), W.mT).to(A.dtype)
            grad_y0 = normalize_feedback_vjp(normed, y0, options.feedback_norm_eps)
    if W_y is not None:
        past, f = _normed_past(y, operands, W_y, options), W_y.shape[-2]
        # some more columns, so that the product is aligned
        rows = grad_raw[..., : f + padding(f)].to(W_y.dtype)
        grad_W_y = weight_gradient(rows, past, W_y)[..., :f, :]
    grad_A = sum_samples(grad_A, len(A)).mT
    return grad_x, grad_raw[..., :r], grad_W_y, grad_A, H.mT, grad_y0, statistics


def _reverse(
    known: Known,
    W: Tensor,  # (H, r, d), W^y; without feedback any tensor with three axes
    read: tuple[Tensor, Tensor, Tensor],  # grad_y (b, t, d), h0 (b, n, d) and the kept h
    written: tuple[Tensor, ...],  # H, grad_x, grad_raw, grad_A, statistics
    options: Parameterization,
    keep_every: int,
) -> None:
    """The kernels of the reverse sweep."""
    (x, y, raw, fed, A, feedback), (grad_y, h0, kept) = known, read
    *results, statistics = written
    (b, t_end, d), n = y.shape, A.shape[1]
    size, W_y = _tokens_at_once(y, n, keep_every, options), W if feedback else None
    samples, parts = choose_rows(b, A, W_y)
    prepared, programs = _allocate_prepared(known, size, options), _programs(b, A, samples)
    constants = _of_heads(reverse_kernel, A, W_y, options, (samples, parts), keep_every)
    replayed = A.new_empty(b, max(1, keep_every - 1), n, d)
    scratch = A.new_empty(programs, samples, 2, constants["BLOCK_L"])
    found = statistics if feedback else statistics.new_empty(parts, *statistics.shape)
    tensors = grad_y, x, y, raw, fed, W, A, *prepared, h0, kept, replayed, *results, found, scratch
    strides = *grad_y.stride()[:2], *_input_strides(x, A), *_token_strides(known)
    sizes = t_end, kept.shape[1], b // len(A), d, n, results[2].shape[-1]
    integers = *sizes, *strides, W.stride(0), h0.stride(0)
    for start in reversed(range(0, t_end, size)):
        chunk = range(start, min(start + size, t_end))
        _prepare(known, prepared, chunk, options)
        reverse_kernel[(programs,)](*tensors, start, len(chunk), *integers, **constants)
    if not feedback:
        torch.amax(found, 0, out=statistics)


def _known(
    y: Tensor,  # (b, t, d)
    operands: Operands,
    options: Parameterization,
) -> Known:
    """The feedback is computed again."""
    raw = fed = last_axis_contiguous(operands.raw)
    W_y, r, y = operands.W_y, raw.shape[2], y.contiguous()
    if W_y is not None:
        past = _normed_past(y, operands, W_y, options)
        # zeros from the first column without feedback on
        fed = apply_weight(past, padded_rows(W_y, r + padding(r)))
    x, A = last_axis_contiguous(operands.x), _exponents(operands.A)
    return Known(x, y, raw, fed, A, W_y is not None)


def _allocate_prepared(known: Known, count: int, options: Parameterization) -> Prepared:
    b, t_end, d = known.y.shape
    width = local_width(options.known_layout().num_householder, known.A.shape[1])
    new, count = known.A.new_empty, min(count, t_end)
    return Prepared(new(b, count, d), new(b, count, width))


def _prepare(known: Known, prepared: Prepared, chunk: range, options: Parameterization) -> None:
    """x~ and the scalars of the local systems of a chunk."""
    x, y, raw, fed, A, _ = known
    b, t_end, d = y.shape
    sizes = chunk.start, len(chunk), t_end, b // len(A), d, A.shape[1]
    strides = _token_strides(known)
    integers = *sizes, *_input_strides(x, A), *strides
    # one warp, within which channels are summed
    how = {"FEEDBACK": known.feedback, "num_warps": 1}
    constants = token_constants(prepare_kernel, A.shape, options, strides, **how)
    prepare_kernel[(b * len(chunk),)](x, y, raw, fed, A, *prepared, *integers, **constants)


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
def token_constants(
    kernel: Any,  # of Triton
    A: tuple[int, ...],  # (H, n, d)
    options: Parameterization,
    strides: tuple[int, ...],  # between rows of raw values
    **own: Any,
) -> dict[str, Any]:
    """The constants and launch options of a kernel of known tokens. Not to be changed."""
    # a power of two, at most 8, that divides all strides
    own["ALIGNED"] = math.gcd(8, *strides)
    return arguments_of(kernel, _map_constants(A, options) | own)


@lru_cache(maxsize=1024)
def head_constants(
    kernel: Any,  # of Triton
    A: tuple[int, ...],  # (H, n, d)
    dtype: torch.dtype | None,  # of W^y, to which factors and results of its products are rounded
    options: Parameterization,
    rows: tuple[int, int],  # samples of a program, parts of each
    tf32: bool,
    keep_every: int,
    shared_memory: int,  # bytes of a program
) -> dict[str, Any]:
    """The constants and launch options of the sweep and the reverse sweep. Not to be changed."""
    (samples, parts), layout = rows, options.known_layout()
    k, blocks = layout.num_householder, head_blocks(A[2], A[1], layout)
    streamed = dtype is not None and blocks.streams(dtype.itemsize, shared_memory)
    kind, every = dtype or torch.float32, _map_constants(A, options)
    every |= {
        "ROUND": getattr(tl, str(kind).removeprefix("torch.")),
        "DOT": dtype_of_factors(kind),
        "PRECISION": "tf32" if tf32 else "ieee",
        "FEEDBACK": dtype is not None,
        "NORM": dtype is not None and options.feedback_norm_eps is not None,
        "KEEP": keep_every,
        "S": samples,
        "PARTS": parts,
        "COLUMNS": max(COLUMNS, samples),
        "BLOCK_D": blocks.channels,
        "BLOCK_S": blocks.small,
        "ALPHA": blocks.alpha,
        # a few more than the scalars, whose groups begin at multiples of 4
        "BLOCK_L": next_power_of_two(local_width(k, A[1]) + 16),
        "N": min(BLOCK_STATES, blocks.states),
        "HOLD": blocks.channels // parts * blocks.states <= MOST_HELD,
        "STREAMED": streamed,
        # one product for all reflections, whose rows are then interleaved
        "JOINED": dtype is not None and not streamed and k in (2, 4),
        "num_warps": samples * parts,
        "num_stages": 1,
        "maxnreg": MAX_REGISTERS,
    }
    return arguments_of(kernel, every)


def _map_constants(
    A: tuple[int, ...],  # (H, n, d)
    options: Parameterization,
) -> dict[str, Any]:
    """Those that sizes and options determine."""
    layout, eps = options.known_layout(), options.feedback_norm_eps
    return {
        "BLOCK_D": next_power_of_two(A[2]),
        "BLOCK_N": next_power_of_two(A[1]),
        "ACTIVATION": layout.activation,
        "SELECTIVE": layout.selective,
        "INPUT_SCALE": options.input_scale,
        "EPS": UNIT_EPS,
        "FAST": not interpreter_is_on(),
        "NORM_EPS": 0.0 if eps is None else eps,
        "K": layout.num_householder,
        "BETA_MAX": layout.beta_max,
    }


def _of_heads(
    kernel: Any,  # of Triton
    A: Tensor,  # (H, n, d)
    W_y: Tensor | None,  # (H, ., d)
    options: Parameterization,
    rows: tuple[int, int],
    keep_every: int,
) -> dict[str, Any]:
    dtype, shared_memory = W_y if W_y is None else W_y.dtype, Device.of(A.device).shared_memory
    given = A.shape, dtype, options, rows, uses_tf32(), keep_every, shared_memory
    return head_constants(kernel, *given)


def uses_tf32() -> bool:
    """Whether products of float32 are rounded to TF32, as torch's setting says."""
    # the newer of two names: reading the older one, allow_tf32, raises if the newer one was set
    return torch.backends.cuda.matmul.fp32_precision == "tf32" and not interpreter_is_on()


def choose_rows(
    b: int,
    A: Tensor,  # (H, n, d)
    W_y: Tensor | None,  # (H, ., d)
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


def _programs(
    b: int,
    A: Tensor,  # (H, ., .)
    samples: int,  # of a program
) -> int:
    return len(A) * ceil_div(b // len(A), samples)


def _input_strides(
    x: Tensor,  # (b, t, d)
    A: Tensor,  # (H, ., .)
) -> tuple[int, ...]:
    """Strides of the axes of heads, batch and time."""
    of_heads: Tensor = x.unflatten(0, (len(A), -1))
    return of_heads.stride()[:3]


def _token_strides(known: Known) -> tuple[int, ...]:
    """Strides of the batch and time axes of raw values and of their feedback."""
    return *known.raw.stride()[:2], *known.fed.stride()[:2]


def _whole_rows(
    W: Tensor,  # (H, r, d)
) -> Tensor:  # as W
    """W, copied unless the matrices of the heads are contiguous, at any distance."""
    return W if W.stride()[1:] == (W.shape[2], 1) else W.contiguous()


def _first_memory(
    h0: Tensor | None,  # (b, d, n); None: zeros
    b: int,
    A: Tensor,  # (H, d, n)
) -> Tensor:  # (b, n, d), in new memory
    return A.new_zeros(b, *A.mT.shape[-2:]) if h0 is None else state_major(h0)


def _normed_past(
    y: Tensor,  # (b, t, d)
    operands: Operands,
    W_y: Tensor,  # (H, f, d)
    options: Parameterization,
) -> Tensor:  # (b, t, d)
    """norm(y_{t-1}) in the dtype of W^y."""
    if not y.numel():
        return y.to(W_y.dtype)
    given = y, operands.y0, options.feedback_norm_eps, W_y.dtype
    normed: Tensor = shifted_norm_operation.function(*given)
    return normed


def _exponents(
    A: Tensor,  # (H, d, n)
) -> Tensor:  # (H, n, d)
    """log2(e) A, with which the decay is 2^(log2(e) A Delta)."""
    transposed = A.mT
    exponents = A.new_empty(transposed.shape)
    return torch.mul(transposed, math.log2(math.e), out=exponents)

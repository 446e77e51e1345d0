"""Launches of the direct sweep's kernels, with feedback or without.

Letters: b folded samples, t time, d channels of a head, n state per channel, k reflections, r raw
values, H heads (kernels/heads.py).

Where W^y does not fit a program, each token is a launch (`SINGLE`), and cuBLAS computes the
products with W^y between launches, in the order of the stream: nothing synchronizes.
"""

import math
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct.layout import state_major
from bedouin.kernels.direct.limits import (
    CHUNK,
    MAX_MEMORY,
    MAX_SIDE,
    Gradients,
    head_blocks,
)
from bedouin.kernels.direct.triton_forward import sweep_kernel
from bedouin.kernels.direct.triton_prepare import local_width, prepare_kernel
from bedouin.kernels.direct.triton_reverse import reverse_kernel
from bedouin.kernels.feedback import aligned_rows, normalize_feedback_vjp
from bedouin.kernels.heads import apply_weight, padding, sum_samples, weight_gradient
from bedouin.kernels.householder import UNIT_EPS
from bedouin.kernels.launch import (
    Constants,
    Device,
    ceil_div,
    last_axis_contiguous,
    next_power_of_two,
)
from bedouin.kernels.operands import Operands, Parameterization
from bedouin.kernels.output import shifted_norm_operation

COLUMNS = 8
"""Fewest columns of a product on tensor cores."""

WARPS = 8
"""Most warps of a program, each with a sample or a part of one: so many have MAX_REGISTERS each."""

LANES = 32
"""Threads of a warp, and the fewest channels of a part of a sample."""

AT_ONCE = 16
"""States that the reverse sweep takes at once; of more, neither sweep holds A in registers. With 64
at once most values of a thread would be spilled, which doubles the time of a token."""

MAX_REGISTERS = 255
"""Of a thread; without this bound the compiler takes 32 where even 255 do not suffice."""


def launch_sweep(
    operands: Operands, options: Parameterization
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (b, t, d), not empty, the last h (b, n, d), h before every CHUNK-th token, and the
    statistics (4, b, t): defect, scale, magnitude, pivot."""
    operands = operands.with_head_axis()
    _, _, W_y, A, h0, y0 = operands
    (b, t_end, d), n = operands.x.shape, A.shape[-1]
    x, raw, exponents, strides, programs, (head, constants) = _shared(operands, options)
    y, kept = A.new_empty(b, t_end, d), A.new_empty(b, ceil_div(t_end, CHUNK), n, d)
    h = A.new_zeros(b, n, d) if h0 is None else state_major(h0)
    statistics = A.new_empty(head["PARTS"], 4, b, t_end)
    W, first = exponents, y
    if W_y is not None:
        W = _whole_rows(aligned_rows(W_y) if head["SINGLE"] else W_y)
        if y0 is None:
            first = W_y.new_zeros(b, 1, d)
        else:
            eps = options.feedback_norm_eps
            first = shifted_norm_operation.function(y0.unsqueeze(1), y0, eps, W_y.dtype)
    # B, C and alpha of a token, two places for each sample
    scratch = A.new_empty(programs, head["S"], 2, head["BLOCK_S"])
    for token in range(t_end if head["SINGLE"] else 1):
        given = apply_weight(first, W) if head["SINGLE"] else W
        tensors = x, raw, given, exponents, h, kept, first, scratch, y, statistics
        numbers = b // len(A), t_end, token, *strides, given.stride(0)
        sweep_kernel[(programs,)](*tensors, *numbers, **constants)
    return y, h, kept, statistics.amax(0)


def launch_reverse(
    grad_y: Tensor,  # (b, t, d)
    H: Tensor,  # (b, n, d), the cotangent of the last h, overwritten
    y: Tensor,  # (b, t, d)
    kept: Tensor,  # (b, ceil(t / CHUNK), n, d)
    given: Operands,
    options: Parameterization,
) -> Gradients:
    """The gradients: of W_y empty without feedback, of y0 without a y0."""
    operands = given.with_head_axis()
    _, _, W_y, A, _, y0 = operands
    grad_y, y = last_axis_contiguous(grad_y), y.contiguous()
    (b, t_end, d), n, r = y.shape, A.shape[-1], operands.raw.shape[2]
    x, raw, exponents, strides, programs, (head, constants) = _shared(operands, options)
    grad_x, grad_A = x.new_empty(x.shape), torch.zeros_like(H)
    W, fed, grad_W_y = exponents, raw, A.new_empty(0)
    grad_y0 = A.new_empty(0, d) if y0 is None else torch.zeros_like(y0)
    if W_y is None:
        # padded, so that rows are aligned for cuBLAS and for vectorized stores
        grad_raw = raw.new_empty(b, t_end, r + padding(r))
    else:
        W = _whole_rows(aligned_rows(W_y))
        past = shifted_norm_operation.function(y, y0, options.feedback_norm_eps, W_y.dtype)
        # the feedback again; that of a token is read before its cotangent is written, so both share
        # memory if they have one dtype
        fed = apply_weight(past, W)
        grad_raw = fed if fed.dtype == raw.dtype else torch.zeros_like(fed, dtype=raw.dtype)
    statistics = A.new_empty(head["PARTS"], 2, b, t_end)

    def of_past(token: int) -> Tensor:  # (b, d)
        """The cotangent of the normed output before a token."""
        return apply_weight(grad_raw[:, token].to(W.dtype), W.mT)

    strides = *strides, fed.stride()[:2]
    mixed, local = A.new_empty(b, t_end, d), A.new_empty(b, t_end, local_width(head["K"], n))
    tokens, per_head = (x, y, raw, fed, exponents, mixed, local), b // len(A)
    # one warp, within which channels are summed
    of_one_warp = {**constants, "num_warps": 1}
    prepare_kernel[(b * t_end,)](*tokens, t_end, per_head, *strides, **of_one_warp)
    replayed = A.new_empty(b, CHUNK - 1, n, d)
    scratch = A.new_empty(programs, head["S"], 2, head["BLOCK_L"])
    for token in reversed(range(t_end if head["SINGLE"] else 1)):
        fed_back = W
        if head["SINGLE"]:
            fed_back = W.new_zeros(b, d) if token == t_end - 1 else of_past(token + 1)
        read = grad_y, x, y, raw, fed, fed_back, exponents, mixed, local, kept, replayed
        reverse_kernel[(programs,)](
            *(*read, H, grad_x, grad_raw, grad_A, statistics, scratch, t_end, token, per_head),
            *(grad_raw.shape[-1], grad_y.stride()[:2], *strides, fed_back.stride(0)),
            **constants,
        )
    if W_y is not None:
        if y0 is not None:
            grad_y0 = normalize_feedback_vjp(of_past(0).to(A.dtype), y0, options.feedback_norm_eps)
        grad_W_y = weight_gradient(grad_raw.to(W_y.dtype), past, W_y)[..., :r, :]
        grad_W_y = grad_W_y.view(*given.A.shape[:-2], r, d)
    grad_A = sum_samples(grad_A, len(A)).mT.view(given.A.shape)
    return grad_x, grad_raw[..., :r], grad_W_y, grad_A, H.mT, grad_y0, statistics.amax(0)


def _shared(
    operands: Operands, options: Parameterization
) -> tuple[Tensor, Tensor, Tensor, tuple[tuple[int, ...], ...], int, tuple[dict[str, Any], ...]]:
    """x and raw with contiguous rows, log2(e) A (H, n, d), with which the decay is
    2^(log2(e) A Delta), the strides of x (H, b / H, t) and raw (b, t), the number of programs, and
    the result of `head_constants`."""
    x, raw, W_y, A, *_ = operands
    x, raw, transposed = last_axis_contiguous(x), last_axis_contiguous(raw), A.mT
    exponents = A.new_empty(transposed.shape)
    torch.mul(transposed, math.log2(math.e), out=exponents)
    of_heads: Tensor = x.unflatten(0, (len(A), -1))
    rows = choose_rows(len(x), exponents, W_y)
    programs = len(A) * ceil_div(len(x) // len(A), rows[0])
    dtype, shared_memory = W_y if W_y is None else W_y.dtype, Device.of(A.device).shared_memory
    how = exponents.shape, dtype, options, rows, uses_tf32(), CHUNK, shared_memory
    strides = of_heads.stride()[:3], raw.stride()[:2]
    return x, raw, exponents, strides, programs, head_constants(*how)


@lru_cache(maxsize=1024)
def head_constants(
    A: tuple[int, ...],  # (H, n, d)
    dtype: torch.dtype | None,  # of W^y
    options: Parameterization,
    rows: tuple[int, int],  # samples of a program, parts of each
    tf32: bool,
    keep_every: int,
    shared_memory: int,  # bytes of a program
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The constants of the kernels, and what their launches take by name: one object `how` of these
    constants, and options. Not to be changed."""
    (_, n, d), (samples, parts) = A, rows
    layout, eps = options.known_layout(), options.feedback_norm_eps
    k, blocks, is_fed = layout.num_householder, head_blocks(d, n, layout), dtype is not None
    kind, states = dtype or torch.float32, 2 * n if layout.selective else 0
    memory = kind.itemsize, shared_memory
    single = is_fed and blocks.is_single(*memory)
    streamed = is_fed and not single and blocks.streams(*memory)
    # the dtype to which factors and results of products with W^y are rounded
    rounded = getattr(tl, str(kind).removeprefix("torch."))
    joined = is_fed and not streamed and k in (2, 4)
    head: dict[str, Any] = {
        "d": d,
        "n": n,
        "K": k,
        "ACTIVATION": layout.activation,
        "SELECTIVE": layout.selective,
        "BETA_MAX": layout.beta_max,
        "INPUT_SCALE": options.input_scale,
        "EPS": UNIT_EPS,
        "FEEDBACK": is_fed,
        "NORM": is_fed and eps is not None,
        "NORM_EPS": 0.0 if eps is None else eps,
        "ROUND": rounded,
        # in the interpreter products of 16 bits are wrong
        "DOT": tl.float32 if interpreter_is_on() else rounded,
        "PRECISION": "tf32" if tf32 else "ieee",
        "KEEP": keep_every,
        "S": samples,
        "PARTS": parts,
        "ROWS": samples * parts,
        "STATES": states,  # raw values of B and C
        "U_AT": d + states,  # where those of u begin
        "N": blocks.states,
        "BLOCKS": max(1, blocks.states // AT_ONCE),  # of states, in the reverse sweep
        "BLOCK_D": blocks.channels,
        "D": blocks.channels // parts,
        "BLOCK_S": blocks.small,  # B, C and alpha
        "BLOCK_L": next_power_of_two(local_width(k, n)),
        "COLUMNS": max(COLUMNS, samples),
        # one product for all reflections, whose rows are then interleaved
        "JOINED": joined,
        "SMALL": 2 if joined else k + 1,  # the number of the tile of B, C and alpha
        "STREAMED": streamed,  # W^y is read anew for each token
        "SINGLE": single,  # a launch has one token, whose product with W^y is given
    }
    how = {"num_warps": samples * parts, "num_stages": 1, "maxnreg": MAX_REGISTERS}
    return head, {"how": Constants(head), **how, "enable_fp_fusion": True}


def uses_tf32() -> bool:
    """Whether products of float32 are rounded to TF32, as torch's setting says."""
    # the newer of two names: reading the older one, allow_tf32, raises if the newer one was set
    return torch.backends.cuda.matmul.fp32_precision == "tf32" and not interpreter_is_on()


def choose_rows(
    b: int,
    A: Tensor,  # (H, n, d)
    W_y: Tensor | None,  # (H, ., d)
) -> tuple[int, int]:
    """Samples of a program and parts of each, a warp for every part.

    With W^y as many samples as leave a program for every second multiprocessor, at least 2 and at
    most WARPS, half of these for more than 64 channels, and no more than MAX_MEMORY allows: a token
    takes a program about as long for one sample as for several, up to that. Without W^y samples
    share nothing, and fewer warps wait for each other in a program of one.
    """
    heads, n, d = A.shape
    channels, samples = next_power_of_two(d), 1
    if W_y is not None and d <= MAX_SIDE:
        most = WARPS if d <= 64 else WARPS // 2
        most = min(most, MAX_MEMORY // (next_power_of_two(n) * channels))
        units, samples = Device.of(A.device).programs or 4, 2
        while samples < most and heads * ceil_div(b // heads, 2 * samples) >= units // 2:
            samples *= 2
        samples = min(samples, most, next_power_of_two(b // heads))
    return samples, choose_parts(max(16, channels), samples)


def choose_parts(channels: int, samples: int) -> int:
    """Parts of a sample, a warp each, for so many channels of a block and samples of a program: as
    many as WARPS and LANES allow.

    A token takes a program as long as one of its warps, whose instructions are fewer for fewer
    channels; more than 64 channels with 16 states do not fit the registers of one.
    """
    return max(1, min(WARPS // samples, channels // LANES))


def _whole_rows(
    W: Tensor,  # (H, r, d)
) -> Tensor:  # as W
    """W, copied unless the matrices of the heads are contiguous, at any distance."""
    return W if W.stride()[1:] == (W.shape[2], 1) else W.contiguous()

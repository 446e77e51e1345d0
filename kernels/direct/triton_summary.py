"""The statistics of a sweep's tokens, reduced to one residual and one verdict a sample.

One launch replaces thirty of torch's reductions.

Letters: b batch, t time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bedouin.kernels.device.norms import larger_or_nan
from bedouin.kernels.direct.reference import MAX_RESIDUAL, ROUNDING
from bedouin.kernels.launch import arguments_of, next_power_of_two

MAX_TOKENS = 1024
"""Most tokens that a program reads at a time."""


@triton.jit
def summary_kernel(
    statistics_ptr,  # (4, b, t): defect, scale, magnitude, pivot
    summary_ptr,  # (2, b): residual, pivot
    converged_ptr,  # (b,)
    lengths_ptr,  # (b,), tokens before the padding of a sample, with PADDED
    batch,
    t_end,
    PADDED: tl.constexpr,
    TOLERANCE: tl.constexpr,
    MAX_RESIDUAL: tl.constexpr,
    LARGEST: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """residual = max over t of defect_t / (max over s <= t of scale_s), and the smallest pivot.

    A sample has converged if for all t defect_t <= TOLERANCE times the largest scale or magnitude
    up to t, and defect_t <= MAX_RESIDUAL times the largest scale up to t. All but the pivot, which
    is at most 1 and is 1 in padding, is that of the tokens before the padding.
    """
    sample = tl.program_id(0)
    if PADDED:
        length = tl.load(lengths_ptr + sample)
    else:
        length = t_end
    row = statistics_ptr + tl.cast(sample, tl.int64) * t_end
    plane = tl.cast(batch, tl.int64) * t_end
    infinity = tl.full((), float("inf"), tl.float32)
    scale_so_far = tl.full((), 0.0, tl.float32)
    terms_so_far = tl.full((), 0.0, tl.float32)
    residual = tl.full((), 0.0, tl.float32)
    pivot = infinity
    nonfinite = tl.full((), 0, tl.int32)
    unexplained = tl.full((), 0, tl.int32)
    for start in range(0, t_end, TOKENS):
        t = start + tl.arange(0, TOKENS)
        mask = t < t_end
        real = t < length
        defect = tl.load(row + t, mask=real, other=0.0)
        scale = tl.load(row + plane + t, mask=real, other=0.0)
        magnitude = tl.load(row + 2 * plane + t, mask=real, other=0.0)
        pivots = tl.load(row + 3 * plane + t, mask=mask, other=float("inf"))
        # tokens after the last real one load zeros, which change no maximum
        scale = larger_or_nan(tl.associative_scan(scale, 0, larger_or_nan), scale_so_far)
        terms = larger_or_nan(scale, tl.associative_scan(magnitude, 0, larger_or_nan))
        terms = larger_or_nan(terms, terms_so_far)
        divisible = (defect < infinity) & (scale > 0)
        # rounded as in torch: a compiled division is off by an ulp or two
        ratio = tl.div_rn(tl.where(divisible, defect, 0.0), tl.where(divisible, scale, 1.0))
        finite = divisible & (ratio < infinity)
        unbounded = ((scale < infinity) == 0) | ((defect != 0) & (finite == 0))
        nonfinite += tl.sum(tl.where(real & unbounded, 1, 0))
        residual = tl.maximum(residual, tl.max(tl.where(finite, ratio, 0.0)))
        explained = (tl.abs(terms) < infinity) & (defect <= TOLERANCE * terms)
        explained &= defect <= MAX_RESIDUAL * scale
        unexplained += tl.sum(tl.where(real & (explained == 0), 1, 0))
        # NaN after a singular token must not hide its pivot; infinity becomes LARGEST, as in torch
        pivots = tl.where(pivots != pivots, infinity, tl.where(pivots > LARGEST, LARGEST, pivots))
        pivot = tl.minimum(pivot, tl.min(tl.where(mask, pivots, infinity)))
        at_end = tl.arange(0, TOKENS) == TOKENS - 1
        scale_so_far = tl.sum(tl.where(at_end, scale, 0.0))
        terms_so_far = tl.sum(tl.where(at_end, terms, 0.0))
    tl.store(summary_ptr + sample, tl.where(nonfinite > 0, float("nan"), residual))
    tl.store(summary_ptr + batch + sample, pivot)
    tl.store(converged_ptr + sample, unexplained == 0)


@triton.jit
def adjoint_summary_kernel(
    statistics_ptr,  # (2, b, t): defect, scale
    steps_ptr,  # (b,)
    residual_ptr,  # (b,)
    converged_ptr,  # (b,)
    batch,
    t_end,
    TOLERANCE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One step, residual = max over t of defect_t / (max over s >= t of scale_s), and whether that
    is below TOLERANCE: the reverse sweep begins with the last token."""
    sample = tl.program_id(0)
    last = statistics_ptr + tl.cast(sample, tl.int64) * t_end + t_end - 1
    plane = tl.cast(batch, tl.int64) * t_end
    infinity = tl.full((), float("inf"), tl.float32)
    scale_so_far = tl.full((), 0.0, tl.float32)
    residual = tl.full((), 0.0, tl.float32)
    nonfinite = tl.full((), 0, tl.int32)
    for start in range(0, t_end, TOKENS):
        back = start + tl.arange(0, TOKENS)
        mask = back < t_end
        defect = tl.load(last - back, mask=mask, other=0.0)
        scale = tl.load(last + plane - back, mask=mask, other=0.0)
        scale = larger_or_nan(tl.associative_scan(scale, 0, larger_or_nan), scale_so_far)
        divisible = (defect < infinity) & (scale > 0)
        ratio = tl.div_rn(tl.where(divisible, defect, 0.0), tl.where(divisible, scale, 1.0))
        finite = divisible & (ratio < infinity)
        unbounded = ((scale < infinity) == 0) | ((defect != 0) & (finite == 0))
        nonfinite += tl.sum(tl.where(mask & unbounded, 1, 0))
        residual = tl.maximum(residual, tl.max(tl.where(finite, ratio, 0.0)))
        scale_so_far = tl.sum(tl.where(tl.arange(0, TOKENS) == TOKENS - 1, scale, 0.0))
    tl.store(steps_ptr + sample, tl.full((), 1, tl.int64))
    tl.store(residual_ptr + sample, tl.where(nonfinite > 0, float("nan"), residual))
    tl.store(converged_ptr + sample, (nonfinite == 0) & (residual < TOLERANCE))


def launch_summary(
    statistics: Tensor,  # (4, b, t)
    summary: Tensor,  # (2, b)
    converged: Tensor,  # (b,)
    lengths: Tensor | None = None,  # (b,); None: there is no padding
) -> None:
    """Fill `summary` and `converged`; no size may be 0."""
    _, b, t_end = statistics.shape
    constants = _constants(summary_kernel, t_end, lengths is not None)
    last = statistics if lengths is None else lengths.contiguous()
    summary_kernel[(b,)](statistics, summary, converged, last, b, t_end, **constants)


def _constants(
    kernel: Any,  # of Triton
    t_end: int,
    padded: bool,
) -> dict[str, Any]:
    every = {
        "PADDED": padded,
        "TOLERANCE": ROUNDING * torch.finfo(torch.float32).eps,
        "MAX_RESIDUAL": MAX_RESIDUAL,
        "LARGEST": torch.finfo(torch.float32).max,
        "TOKENS": min(MAX_TOKENS, next_power_of_two(t_end)),
        "num_warps": 4 if t_end > 256 else 1,
    }
    return arguments_of(kernel, every)


def summarize_adjoint(
    statistics: Tensor,  # (2, b, t): defect, scale
) -> tuple[Tensor, Tensor, Tensor]:  # (b,) each
    """Steps, residual and convergence of a reverse sweep; no size may be 0."""
    _, b, t_end = statistics.shape
    steps = torch.empty(b, dtype=torch.int64, device=statistics.device)
    residual, converged = statistics.new_empty(b), torch.empty_like(steps, dtype=torch.bool)
    constants = _constants(adjoint_summary_kernel, t_end, False)
    tensors = statistics.contiguous(), steps, residual, converged
    adjoint_summary_kernel[(b,)](*tensors, b, t_end, **constants)
    return steps, residual, converged

"""The plain sweep with the interface of fused.py: what its operations run without Triton.

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.direct.forward import forward_sweep, remember
from bedouin.kernels.direct.reference import SweepOptions, full_raw, start_tensors
from bedouin.kernels.direct.reverse import reverse_sweep, saved_inputs
from bedouin.kernels.linear import padding


def plain_sweep(
    x: Tensor,  # (b, t, d)
    raw: Tensor,  # (b, t, r)
    W_y: Tensor | None,  # (r, d)
    A: Tensor,  # (d, n)
    h0: Tensor | None,  # (b, d, n); None: zeros
    y0: Tensor | None,  # (b, d); None: zeros
    options: SweepOptions,
    keep_every: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `fused_sweep`, but `kept` has h before the first token, too, and the pivot of every token
    is the smallest of its sample."""
    h0, y0 = start_tensors(h0, y0, x, A)
    wide = x.to(A.dtype), raw.to(A.dtype)
    sweep, kept = forward_sweep(*wide, W_y, A, h0, y0, (), options, keep_every)
    pivot = sweep.pivot.unsqueeze(1).expand(x.shape[:2])
    statistics = torch.stack([sweep.defect, sweep.scale, sweep.magnitude, pivot])
    return sweep.y.contiguous(), _own(sweep.h), _joined(kept, A, len(x)), statistics


def plain_summary(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """As `summarize`, but for the pivot (2nd row) alone: the others follow from the statistics."""
    _, b, t_end = statistics.shape
    unknown = statistics.new_full((b,), math.nan)
    pivot = statistics[3].amin(1) if t_end else statistics.new_full((b,), math.inf)
    return torch.stack([unknown, pivot]), unknown > 0


def plain_memory(
    y: Tensor,  # (b, t, d), a fixed point found elsewhere
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor | None,
    y0: Tensor | None,
    options: SweepOptions,
    keep_every: int,
) -> tuple[Tensor, Tensor]:
    """As `fused_memory`."""
    h0, y0 = start_tensors(h0, y0, x, A)
    coefficients = options.bind(full_raw(y, raw.to(A.dtype), W_y, y0, options))
    h, kept = remember(y, x.to(A.dtype), coefficients, A, h0, options, keep_every)
    return _own(h), _joined(kept, A, len(x))


def plain_reverse(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor | None,  # (b, d, n); None: zeros
    kept: Tensor,  # (b, ceil(t / keep_every), n, d)
    keep_every: int,
    y: Tensor,  # (b, t, d)
    x: Tensor,  # (b, t, d)
    raw: Tensor,  # (b, t, r)
    W_y: Tensor | None,
    A: Tensor,  # (d, n)
    h0: Tensor | None,  # (b, d, n); None: zeros
    y0: Tensor | None,  # (b, d); None: zeros
    options: SweepOptions,
    *,
    wants_y0: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `fused_reverse`."""
    h0, y0 = start_tensors(h0, y0, x, A)
    wide = x.to(A.dtype), raw.to(A.dtype)
    inputs = saved_inputs(y, *wide, W_y, A, y0, (), options)
    statistics = A.new_zeros(2, *x.shape[:2])

    def report(defect: Tensor, scale: Tensor) -> None:
        statistics[0], statistics[1] = defect, scale

    grad_h = torch.zeros_like(h0) if grad_h is None else grad_h
    grad_x, grad_raw, grad_W_y, grad_A, grad_h0, grad_y0 = reverse_sweep(
        grad_y, grad_h, kept, keep_every, inputs, options, report
    )
    assert grad_x is not None and grad_raw is not None and grad_A is not None
    assert grad_h0 is not None and grad_y0 is not None
    # in the memory that the operation promises
    r = raw.shape[2]
    rows = F.pad(grad_raw.to(raw.dtype), (0, padding(r)))[..., :r]
    first = grad_x.to(x.dtype), rows, A.new_empty(0) if grad_W_y is None else grad_W_y
    return *first, _own(grad_A), _own(grad_h0), grad_y0[: None if wants_y0 else 0], statistics


def _own(h: Tensor) -> Tensor:
    """(..., d, n) in new memory, (..., n, d) there."""
    return h.mT.clone(memory_format=torch.contiguous_format).mT


def _joined(kept: list[Tensor], A: Tensor, b: int) -> Tensor:
    """(b, slots, n, d)."""
    return torch.stack(kept, 1) if kept else A.new_empty(b, 0, *A.mT.shape)

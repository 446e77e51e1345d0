"""The direct sweep for speed in eager PyTorch: what `direct_sweep_reference` does, laid out for it.

Memory is kept as h (b, n, d), so that sums over the n states run along contiguous channels: a
contraction is then one batched row-vector product, 4 to 8 times faster on a CPU than over
(b, d, n). The public layout stays (b, d, n). What is as large as h is computed in place: on a CPU,
touching new memory costs more than the arithmetic.

Letters: b batch, t time, d channels, n state per channel.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bedouin.kernels.direct.local import factor_local, smallest_pivot, solve_local
from bedouin.kernels.direct.reference import (
    Coefficients,
    Sweep,
    SweepOptions,
    project_feedback,
)
from bedouin.kernels.direct.scratch import Scratch
from bedouin.kernels.householder import apply_complement, combine_rows
from bedouin.kernels.scan import Eigenvalues, InputScale


def decay_rows(
    scratch: Scratch, name: str, delta: Tensor, A: Tensor, eigenvalues: Eigenvalues
) -> Tensor:
    """lambda (..., n, d) from delta (..., d) and A (n, d), in the buffer `name`."""
    decay = scratch.product(name, delta.unsqueeze(-2), A).exp_()
    return decay.mul_(2).sub_(1) if eigenvalues == "full" else decay


def scale_rows(
    delta: Tensor,  # (..., d)
    decay: Tensor,  # (..., n, d)
    input_scale: InputScale,
) -> Tensor:
    """s, (..., n, d) for "one_minus_decay", else (..., 1, d); see `discretize`."""
    if input_scale == "one_minus_decay":
        return decay.abs().neg_().add_(1)
    delta = delta.unsqueeze(-2)
    return delta / (1 + delta) if input_scale == "bounded_delta" else delta


def gain_rows(s: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """sigma (..., d): sum over n of s B C, for s (..., 1, d) or (..., n, d)."""
    if s.shape[-2] > 1:
        return combine_rows(B * C, s)
    return s.squeeze(-2) * (B * C).sum(-1, keepdim=True)


def write_rows_(scratch: Scratch, decayed: Tensor, s: Tensor, mixed: Tensor, B: Tensor) -> Tensor:
    """h_t (..., n, d) = decayed + B (s * x~), in the memory of `decayed`."""
    # not addcmul_, which vmap has no rule for
    written = scratch.product("outer", s * mixed.unsqueeze(-2), B.unsqueeze(-1))
    return scratch.add_(decayed, written)


def term_size(s: Tensor, x: Tensor, mixed: Tensor) -> Tensor:
    """max of |s| (|x| + |x~|) (b,), with 1, its bound, for an s that has a state axis."""
    terms = x.abs() + mixed.abs()
    return (terms if s.shape[-2] > 1 else s.squeeze(-2).abs() * terms).amax(-1)


def forward_sweep(
    x: Tensor,  # (b, t, d)
    raw: Tensor,  # (b, t, r)
    W_y: Tensor | None,  # (r, d)
    A: Tensor,  # (d, n)
    h0: Tensor,  # (b, d, n)
    y0: Tensor,  # (b, d)
    bind_parameters: Sequence[Tensor],
    options: SweepOptions,
    keep_every: int,
) -> tuple[Sweep, list[Tensor]]:
    """`direct_sweep_reference`, and h (b, n, d) before tokens 0, keep_every, 2 keep_every, ..."""
    h, y, kept = h0.mT.contiguous(), y0, []
    A_rows, scratch = A.mT.contiguous(), Scratch(x)
    ys, defects, scales, sizes, pivots = [], [], [], [], []
    for t in range(x.shape[1]):
        if t % keep_every == 0:
            kept.append(scratch.keep(h))
        x_t, raw_t = x[:, t], raw[:, t]
        if W_y is not None:
            raw_t = raw_t + project_feedback(y, W_y, options.feedback_norm_eps)
        delta, B, C, e, U, M = options.bind(raw_t, *bind_parameters)
        decay = decay_rows(scratch, f"h{t % 2}", delta, A_rows, options.eigenvalues)
        s = scale_rows(delta, decay, options.input_scale)
        sigma = gain_rows(s, B, C)
        decayed = scratch.mul_(decay, h)
        factors = factor_local(sigma, e, U, M)
        rhs = combine_rows(C, decayed) + sigma * (x_t - apply_complement(x_t, e, U, M))
        y = solve_local(rhs, factors)
        mixed = x_t + apply_complement(y - x_t, e, U, M)
        h = write_rows_(scratch, decayed, s, mixed, B)
        F_t = combine_rows(C, h)
        ys.append(y)
        defects.append((F_t - y).abs().amax(-1))
        scales.append(F_t.abs().amax(-1))
        sizes.append(term_size(s, x_t, mixed))
        pivots.append(smallest_pivot(factors))
    return _collect(x, h.mT, ys, (defects, scales, sizes), pivots), kept


def _collect(
    x: Tensor,
    h: Tensor,
    ys: list[Tensor],
    norms: tuple[list[Tensor], ...],
    pivots: list[Tensor],
) -> Sweep:
    if not ys:
        empty, no_pivot = x.new_zeros(x.shape[:2]), x.new_full(x.shape[:1], torch.inf)
        return Sweep(torch.zeros_like(x), h, empty, empty, empty, no_pivot)
    defect, scale, size = (torch.stack(values, 1) for values in norms)
    # NaN after a singular token must not hide its pivot
    pivot = torch.stack(pivots, 1).nan_to_num(nan=torch.inf).amin(1)
    return Sweep(torch.stack(ys, 1), h, defect, scale, size, pivot)


def remember(
    y: Tensor,  # (b, t, d), a fixed point found elsewhere
    x: Tensor,
    coefficients: Coefficients,  # (b, t, ...)
    A: Tensor,
    h0: Tensor,
    options: SweepOptions,
    keep_every: int,
) -> tuple[Tensor, list[Tensor]]:
    """The last h (b, d, n), and those that `forward_sweep` keeps, for a known y."""
    h, kept, A_rows = h0.mT.contiguous(), [], A.mT.contiguous()
    scratch = Scratch(x)
    delta, B, _, e, U, M = coefficients
    mixed = x + apply_complement(y - x, e, U, M)
    for t in range(x.shape[1]):
        if t % keep_every == 0:
            kept.append(scratch.keep(h))
        decay = decay_rows(scratch, f"h{t % 2}", delta[:, t], A_rows, options.eigenvalues)
        s = scale_rows(delta[:, t], decay, options.input_scale)
        h = write_rows_(scratch, scratch.mul_(decay, h), s, mixed[:, t], B[:, t])
    return h.mT, kept

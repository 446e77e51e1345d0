"""The convergence rule: which tokens have converged, and the residual that is reported.

defect_t = |F(y)_t - y_t| and scale_t = |F(y)_t| in the max norm. Token t has converged when
defect_s < atol + rtol max_{r <= s} scale_r for all s <= t, so later tokens have no influence on it.
Letters: b batch, t tokens of a sample.
"""

import torch
from torch import Tensor

ATOL = 1e-30
"""The default atol, in units of y. The tolerance is relative by default because the scale of y is
unknown: cotangents, and layers with small inputs, can be far below any fixed number. This atol, a
normal number in float32, lets a sample of exact zeros converge, as no relative tolerance does."""

ROUNDING = 1e4
"""An exact solve has converged at token t if defect_t is at most ROUNDING eps times the largest
term in the sums F(y)_s, s <= t. The Woodbury formula with a pivoted k x k system is backward
stable; the factor allows for the sums over d channels and the growth factor of the elimination."""

MAX_RESIDUAL = 0.1
"""The largest defect_t of an exact solve that has converged, relative to the largest scale_s, s <=
t. If the terms cancel, as for Q x near 0 in a head with no more channels than reflections, rounding
errors may be as large as y."""


def holds_so_far(condition: Tensor) -> Tensor:
    """(b, t): whether `condition` (b, t) holds at every token s <= t."""
    return (~condition).cumsum(1) == 0


def largest_so_far(size: Tensor) -> Tensor:
    """(b, t): max_{s <= t} size_s of `size` (b, t); NaN from its first NaN on."""
    return torch.cummax(size, dim=1).values


def within_tolerance(defect: Tensor, largest: Tensor, rtol: float, atol: float) -> Tensor:
    """Whether each defect (b, t) is small for `largest`, the scale that it is judged against."""
    return defect < atol + rtol * largest


def within_rounding(
    defect: Tensor,  # (b, t)
    scale: Tensor,  # (b, t), |F(y)_t|
    magnitude: Tensor,  # (b, t), the largest term in the sums of F(y)_t
) -> Tensor:  # (b,)
    """Whether all values are finite and every defect is within the rounding error of F(y), and
    small relative to the largest F(y) so far."""
    largest = largest_so_far(scale)
    terms = torch.maximum(largest, largest_so_far(magnitude))
    explained = defect <= ROUNDING * torch.finfo(terms.dtype).eps * terms
    return (torch.isfinite(terms) & explained & (defect <= MAX_RESIDUAL * largest)).all(1)


def front(frozen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:  # (b, t) x 2 -> (b,) x 2
    """How many tokens are frozen before the first one that is not, and v at that, or at the last
    token. With v the defect, a contraction makes this smaller in every step."""
    count = frozen.sum(1)
    first = count.clamp(max=frozen.shape[1] - 1).unsqueeze(1)
    return count, v.gather(1, first).squeeze(1)


def relative_residual(defect: Tensor, scale: Tensor) -> Tensor:  # (b, t), (b, t) -> (b,)
    """max_t defect_t / max_{s <= t} scale_s, with 0 / 0 = 0; infinite where the scale of a finite
    defect is 0. NaN always means a value that is not finite, also where the defect is 0: the
    explicit equation of a mixer without reflections has no other."""
    largest = largest_so_far(scale)
    ratio = torch.where((defect == 0) & (largest == 0), 0.0, defect / largest)
    ratio = torch.where(torch.isfinite(largest) & torch.isfinite(defect), ratio, torch.nan)
    return ratio.amax(1) if ratio.shape[1] else ratio.new_zeros(ratio.shape[0])

"""The convergence rule: which tokens have converged, and the residual that is reported.

defect_t = |F(y)_t - y_t| and scale_t = |F(y)_t| in the max norm. Token t has converged when
defect_s < atol + rtol max_{r <= s} scale_r for all s <= t, so later tokens have no influence on it.
Where a token has several parts, such as the heads of a layer that converge together, this must hold
for each of them: otherwise a small head would count as converged as soon as a large one has.
Letters: b batch, t tokens of a sample, c the values of a token, p its parts.
"""

import torch
from torch import Tensor

from bedouin.kernels.direct import is_rounding

ATOL = 1e-30
"""The default atol, in units of y. The tolerance is relative by default because the scale of y is
unknown: cotangents, and layers with small inputs, can be far below any fixed number. This atol only
lets a sample converge that is exactly zero, which no relative tolerance does. It is a normal number
in float32."""


def sizes_of_parts(
    v: Tensor,  # (b, t, c)
    parts: int,
) -> Tensor:  # (b p, t)
    """The max norm of each part of every token. All parts have c / p values, and the rows of a
    sample's parts are adjacent."""
    if parts == 1:
        return v.abs().amax(-1)
    sizes: Tensor = v.abs().unflatten(-1, (parts, -1)).amax(-1)
    return sizes.mT.flatten(0, 1)


def in_all_parts(
    condition: Tensor,  # (b p, ...), bool
    parts: int,
) -> Tensor:  # (b, ...)
    """Where the condition holds in every part."""
    return condition if parts == 1 else condition.unflatten(0, (-1, parts)).all(1)


def largest_of_parts(
    v: Tensor,  # (b p, ...)
    parts: int,
) -> Tensor:  # (b, ...)
    """The largest value of the parts; NaN where one is NaN."""
    return v if parts == 1 else v.unflatten(0, (-1, parts)).amax(1)


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
    """Whether all values are finite and every defect is within the rounding error of F(y), and less
    than a tenth of the largest F(y) so far."""
    return is_rounding(defect, largest_so_far(scale), largest_so_far(magnitude)).all(1)


def first_open_token_is_nonfinite(frozen: Tensor, scale: Tensor) -> Tensor:  # (b, t) x 2 -> (b,)
    """Whether the first token that is not frozen is NaN or Inf, so that the sample has failed.

    Tokens after it may be non-finite during the iteration and still converge later.
    """
    last = frozen.shape[1] - 1
    first_open = frozen.sum(1, keepdim=True).clamp(max=last)
    return ~torch.isfinite(scale).gather(1, first_open).squeeze(1) & ~frozen.all(1)


def relative_residual(defect: Tensor, scale: Tensor) -> Tensor:  # (b, t), (b, t) -> (b,)
    """max_t defect_t / max_{s <= t} scale_s, with 0 / 0 = 0; NaN where this ratio or one of its
    terms is not finite."""
    ratio = _ratio(defect, scale)
    return _largest(torch.where(torch.isfinite(ratio), ratio, torch.nan))


def reported_residual(defect: Tensor, scale: Tensor) -> Tensor:  # (b, t), (b, t) -> (b,)
    """`relative_residual`, but infinite where the scale of a finite defect is 0, so that NaN always
    means a value that is not finite."""
    return _largest(torch.where(torch.isfinite(defect), _ratio(defect, scale), torch.nan))


def _ratio(defect: Tensor, scale: Tensor) -> Tensor:  # (b, t), (b, t) -> (b, t)
    """defect_t / max_{s <= t} scale_s, with 0 / 0 = 0. NaN where that maximum is not finite, which
    a defect of 0 must not hide: an explicit equation, as that of a mixer without reflections, has
    no other."""
    largest = largest_so_far(scale)
    ratio = torch.where((defect == 0) & (largest == 0), 0.0, defect / largest)
    return torch.where(torch.isfinite(largest), ratio, torch.nan)


def _largest(ratio: Tensor) -> Tensor:  # (b, t) -> (b,)
    return ratio.amax(1) if ratio.shape[1] else ratio.new_zeros(ratio.shape[0])

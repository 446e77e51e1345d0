"""Picard: damped fixed-point iteration."""

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from bedouin.kernels.checks import check_count, check_number, frozen_options, one_of
from bedouin.kernels.iteration import IterationRule
from bedouin.solvers.convergence import holds_so_far, within_tolerance
from bedouin.solvers.iterate import IterativeSolver

StopRule = Literal["prefix", "paper"]


class _Damping(NamedTuple):
    """The state of adaptive damping of each sample."""

    factor: Tensor  # (b,), the current damping factor
    lowest: Tensor  # (b,), the lowest defect so far
    stalled: Tensor  # (b,), steps since the lowest defect or the last reduction of the factor


@frozen_options
class Picard(IterativeSolver):
    """y <- (1 - damping) y + damping f(y).

    Converges linearly if f is a contraction. On long sequences with feedback it needs at least
    about as many steps as there are tokens, and may diverge if |sigma| |I - Q| > 1 (sigma is the
    factor by which x~_t enters y_t). Prefer Direct or Jacobi, which need no contraction, if the map
    has their structure.

    rtol, atol: token t has converged when |f(y)_s - y_s| < atol + rtol max_{r<=s} |f(y)_r| for all
        s <= t. The tolerance bounds the defect, not the error: iterates that grow without bound by
        constant steps, such as those of y + 1, satisfy it once they are 1 / rtol times as large as
        a step. The default atol is for exact zeros only; if the fixed point itself is zero, pass an
        atol in units of y.
    damping: in (0, 1]; 1 is the undamped iteration.
    patience: if an int, the damping factor of a sample is multiplied by `shrink`, in (0, 1],
        whenever its largest defect has not reached a new minimum for this many steps (adaptive
        damping, arXiv 2503.10799, section 4). That depends on the whole sequence, so the output is
        then causal only to tolerance.
    stop_rule: "prefix" is the rule above: exactly causal; returns the y whose defect was measured.
        "paper" (arXiv 2503.10799, section 5.3) stops a sample when |f(y) - y| < atol + rtol |f(y)|
        in the max norm over its whole sequence, so that later tokens determine the number of steps
        of earlier ones. It returns the sample's last evaluation f(y), undamped, also when max_steps
        ends the iteration; stats.residual belongs to the step that made it, and adjoints use it as
        y*.

    Raises ValueError for values out of range.
    """

    damping: float = 1.0
    patience: int | None = None
    shrink: float = 0.9
    stop_rule: StopRule = "prefix"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("damping", self.damping, 0, 1, open_low=True)
        check_number("shrink", self.shrink, 0, 1, open_low=True)
        check_count("patience", self.patience, optional=True)
        one_of("stop_rule", self.stop_rule, get_args(StopRule))

    def rule(self) -> IterationRule:
        paper, adaptive = self.stop_rule == "paper", self.patience is not None
        return IterationRule(self.rtol, self.atol, self.damping, paper, adaptive)

    @property
    def returns_evaluation(self) -> bool:
        return self.stop_rule == "paper"

    def update(self, y: Tensor, f_y: Tensor, memory: Any) -> tuple[Tensor, _Damping | None]:
        if self.patience is None:
            return (f_y if self.damping == 1 else torch.lerp(y, f_y, self.damping)), None
        if memory is None:
            factor = torch.full_like(y[:, 0, 0], self.damping)
            memory = _Damping(factor, torch.full_like(factor, torch.inf), torch.zeros_like(factor))
        defect = (f_y - y).detach().abs().amax((1, 2))
        improved = defect < memory.lowest
        stalled = torch.where(improved, 0.0, memory.stalled + 1)
        shrinks = stalled >= self.patience
        memory = _Damping(
            torch.where(shrinks, memory.factor * self.shrink, memory.factor),
            torch.where(improved, defect, memory.lowest),
            torch.where(shrinks, 0.0, stalled),
        )
        return torch.lerp(y, f_y, memory.factor[:, None, None]), memory

    def within_tolerance(self, defect: Tensor, scale: Tensor) -> Tensor:
        if self.stop_rule == "prefix":
            return super().within_tolerance(defect, scale)
        # tokens from the first non-finite one on must not prevent the earlier ones from stopping
        finite = holds_so_far(torch.isfinite(scale))
        worst = torch.where(finite, defect, 0.0).amax(1, keepdim=True)
        largest = torch.where(finite, scale, 0.0).amax(1, keepdim=True)
        return finite & within_tolerance(worst, largest, self.rtol, self.atol)

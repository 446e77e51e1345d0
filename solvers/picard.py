"""Picard: damped fixed-point iteration."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from bedouin.kernels.iteration import IterationRule
from bedouin.solvers.base import Map, check_number, strict_options
from bedouin.solvers.convergence import ATOL, holds_so_far, within_tolerance
from bedouin.solvers.iterate import IterativeSolver, Measurement

StopRule = Literal["prefix", "paper"]


class _Damping(NamedTuple):
    """Per sample, (b,): the present factor, the lowest defect, the steps since it was reached."""

    factor: Tensor
    lowest: Tensor
    waited: Tensor


@strict_options
@dataclass(frozen=True)
class Picard(IterativeSolver):
    """y <- (1 - damping) y + damping f(y).

    Converges linearly where f contracts. On long sequences with feedback it needs at least about as
    many steps as tokens, and may diverge where |sigma| |I - Q| > 1: prefer Direct or Jacobi, which
    need no contraction, where the map has their structure.

    rtol, atol: token t has converged when |f(y)_s - y_s| < atol + rtol max_{r<=s} |f(y)_r| for all
        s <= t. The tolerance bounds the defect, not the error: iterates that grow without bound by
        constant steps, as of f(y) = y + 1, satisfy it once they are 1 / rtol times as large as a
        step (after 10 steps with rtol = 0.1, after 10,000 with the default). By default it is
        relative alone, but for exact zeros; where the fixed point itself is zero, give an atol in
        units of y.
    damping: in (0, 1]; 1 is the plain iteration.
    patience: with an int, a sample whose largest defect has not reached a new low for this many
        steps multiplies its damping factor by `shrink` (adaptive damping, arXiv 2503.10799,
        section 4). It looks at the whole sequence, so the output is then causal only to tolerance.
    stop_rule: "prefix" as above, causal bit for bit, returns the y whose defect was measured.
        "paper" (arXiv 2503.10799, section 5.3) stops a sample when |f(y) - y| < atol + rtol |f(y)|
        in the max norm over its whole sequence: not causal, since later tokens decide how far
        earlier ones are iterated. It returns the sample's last evaluation f(y), undamped, also when
        max_steps cuts it. stats.residual is then that of the last step, not of the returned value,
        and adjoints take the returned value for y*.
    Raises ValueError for values out of range.
    """

    rtol: float = 1e-4
    atol: float = ATOL
    damping: float = 1.0
    patience: int | None = None
    shrink: float = 0.9
    stop_rule: StopRule = "prefix"

    def __post_init__(self) -> None:
        check_number("rtol", self.rtol, 0, 1e6, open_low=False)
        check_number("atol", self.atol, 0, 1e6, open_low=False)
        check_number("damping", self.damping, 0, 1, open_low=True)
        check_number("shrink", self.shrink, 0, 1, open_low=True)
        if self.patience is not None and (type(self.patience) is not int or self.patience < 1):
            raise ValueError(f"patience must be None or an int >= 1, got {self.patience!r}")
        if self.stop_rule not in get_args(StopRule):
            raise ValueError(
                f"stop_rule must be one of {get_args(StopRule)}, got {self.stop_rule!r}"
            )

    def rule(self) -> IterationRule:
        paper, adaptive = self.stop_rule == "paper", self.patience is not None
        return IterationRule("picard", self.rtol, self.atol, self.damping, paper, adaptive)

    @property
    def returns_evaluation(self) -> bool:
        return self.stop_rule == "paper"

    def start(self, y0: Tensor) -> _Damping | None:
        if self.patience is None:
            return None
        factor = torch.full_like(y0[:, 0, 0], self.damping)
        return _Damping(factor, torch.full_like(factor, torch.inf), torch.zeros_like(factor))

    def evaluate(self, f: Map, y: Tensor) -> Measurement:
        return Measurement(f(y), None)

    def update(
        self, y: Tensor, f_y: Tensor, memory: _Damping | None
    ) -> tuple[Tensor, _Damping | None]:
        if memory is None:
            return (f_y if self.damping == 1 else torch.lerp(y, f_y, self.damping)), None
        memory = self._adapt(memory, (f_y - y).detach().abs().amax((1, 2)))
        return torch.lerp(y, f_y, memory.factor[:, None, None]), memory

    def _adapt(self, memory: _Damping, defect: Tensor) -> _Damping:
        improved = defect < memory.lowest
        waited = torch.where(improved, 0.0, memory.waited + 1)
        shrinks = waited >= (self.patience or 0)
        return _Damping(
            torch.where(shrinks, memory.factor * self.shrink, memory.factor),
            torch.where(improved, defect, memory.lowest),
            torch.where(shrinks, 0.0, waited),
        )

    def within_tolerance(self, defect: Tensor, scale: Tensor) -> Tensor:
        if self.stop_rule == "prefix":
            return super().within_tolerance(defect, scale)
        # a token that is not finite, and all after it, must not keep the ones before it going
        finite = holds_so_far(torch.isfinite(scale))
        worst = torch.where(finite, defect, 0.0).amax(1, keepdim=True)
        largest = torch.where(finite, scale, 0.0).amax(1, keepdim=True)
        return finite & within_tolerance(worst, largest, self.rtol, self.atol)

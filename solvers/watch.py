"""What a caller of `solve` sees of its steps: a callback, and the residuals of all steps.

Letters: b batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bedouin.solvers.solution import Solution

Watch = Callable[[Tensor, Tensor], None]
"""Called by a solver with each y that it evaluates the map at, (b, ...) or as tokens (b, t, c), and
its residual (b,)."""


@dataclass(frozen=True)
class SolveStep:
    """One evaluation of the map, as a callback receives it; tensors are detached.

    index: 0 for the first. residual: (b,), as `SolveStats.residual` but at `value`; a sample that
    has converged keeps both. value: y, with the structure and the shapes of y0.
    """

    index: int
    residual: Tensor  # (b,)
    value: Any


class StepRecorder:
    """A `Watch` that calls `callback`, with the value that `split` makes of y, and with `keeps`
    records the residuals."""

    def __init__(
        self,
        callback: Callable[[SolveStep], object] | None = None,
        keeps: bool = True,
        split: Callable[[Tensor], Any] = Tensor.detach,
    ) -> None:
        self.callback, self.keeps, self.split = callback, keeps, split
        self.count = 0
        self.residuals: list[Tensor] = []

    def __call__(
        self,
        y: Tensor,  # (b, ...) or (b, t, c)
        residual: Tensor,  # (b,)
    ) -> None:
        if self.keeps:
            self.residuals.append(residual.detach())
        if self.callback is not None:
            self.callback(SolveStep(self.count, residual.detach(), self.split(y.detach())))
        self.count += 1

    def into(self, solution: Solution) -> Solution:
        """`solution` with the recorded history in its statistics."""
        if not self.keeps:
            return solution
        none = solution.stats.residual.new_empty(0, *solution.stats.residual.shape)
        history = torch.stack(self.residuals) if self.residuals else none
        return replace(solution, stats=replace(solution.stats.plain, history=history))

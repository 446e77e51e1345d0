"""Reports of solves that did not converge: nothing, a warning or an error."""

from dataclasses import dataclass
from typing import Literal

from bedouin.solvers.deferred import DeferredWarning
from bedouin.solvers.recompute import is_recomputation
from bedouin.solvers.solution import (
    BackwardStats,
    ConvergenceError,
    Result,
    Solution,
    SolveStats,
    accepted,
    can_read_device,
    describe,
)

OnUnconverged = Literal["warn", "raise", "ignore"]


@dataclass(frozen=True)
class Reporting:
    """Reports the forward solve and the adjoint solve of one call according to `policy`.

    policy: "warn", "raise" or "ignore".
    subject: the name of what is solved, for messages.
    warnings: counts the warnings of the layer, and delays those from a GPU.
    cut_at: the cap of this call if it was drawn and is below its limit, else None. Finite samples
        that it stops are recorded in the statistics but not reported.
    """

    policy: OnUnconverged
    subject: str
    warnings: DeferredWarning
    cut_at: int | None

    def forward(self, solution: Solution, *, capped: bool) -> None:
        """Report a forward solve. capped: whether the cap of this call limited its steps."""
        if solution.result is Result.converged or self.policy == "ignore":
            return
        # a call recomputed by activation checkpointing was reported the first time, and would have
        # raised then
        if self.policy == "raise" or not is_recomputation():
            cut_at = self.cut_at if capped else None
            self._report(solution.stats, solution.result, self.subject, cut_at)

    def adjoint(self, stats: SolveStats, result: Result) -> None:
        """Report an iterative adjoint solve, which has the same cap as the forward solve."""
        if result is not Result.converged:
            self._report(stats, result, self._adjoint_subject, self.cut_at)

    def sweep(self, cell: BackwardStats) -> None:
        """Report an exact adjoint, whose statistics `cell` computes when they are first read."""
        if self.policy == "ignore" or self.warnings.is_pending(self._adjoint_subject):
            return
        stats = cell.stats
        assert stats is not None
        self._report(stats, Result.unknown, self._adjoint_subject, None)

    @property
    def _adjoint_subject(self) -> str:
        return f"{self.subject}, adjoint solve"

    def _report(self, stats: SolveStats, result: Result, subject: str, cut_at: int | None) -> None:
        if self.policy == "ignore" or not can_read_device(stats.verdict):
            return
        if self.policy == "warn" and result is Result.unknown and stats.verdict.is_cuda:
            self.warnings.schedule(stats, subject, cut_at)
            return
        if bool((stats.verdict if cut_at is None else accepted(stats, cut_at)).all()):
            return
        message = describe(stats, subject, cut_at)
        if self.policy == "raise":
            error = ConvergenceError(message)
            error.stats = stats
            raise error
        self.warnings.warn(message, subject)

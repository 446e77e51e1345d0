"""Reports of solves that did not converge: nothing, a warning or an error.

Warnings of one layer are rate-limited, and on a GPU they come without synchronization.
Letters: b batch, q parts of a sample.
"""

import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from types import FrameType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bedouin.solvers.draws import is_recomputation
from bedouin.solvers.solution import (
    BackwardStats,
    ConvergenceError,
    ConvergenceWarning,
    Result,
    Solution,
    SolveStats,
    accepted,
    can_read_device,
    unconverged_message,
)

OnUnconverged = Literal["warn", "raise", "ignore"]

SKIPPED_PACKAGES = ("bedouin", "torch")
"""A warning points at the innermost caller outside these packages. torch is one of them because its
Module.__call__ and backward lie between the user's line and this package."""


class _Pending(NamedTuple):
    """An outcome that is being copied to the host."""

    accepted: Tensor  # (b,) or (q b,) on the host, valid once the event has completed
    event: torch.cuda.Event | None  # None: the copy is complete, because it came from a CPU
    stats: SolveStats
    cut_at: int | None
    exact: bool


class DeferredWarning:
    """Warns about solves of a layer that did not converge: the 1st, 10th, 100th, ... of each
    subject, which is the name of what was solved, or every one if `every`.

    `schedule` starts an asynchronous copy of an outcome to the host, and `flush` warns once the
    copy is complete. A copy of the layer starts with counts of zero and without pending outcomes.
    """

    def __init__(self, every: bool = False) -> None:
        self._every = every
        self._pending: dict[str, _Pending] = {}
        self._counts: Counter[str] = Counter()
        self._told: set[str] = set()

    def __reduce__(self) -> tuple[type["DeferredWarning"], tuple[bool]]:
        return DeferredWarning, (self._every,)  # for copies and pickles

    def is_pending(self, subject: str) -> bool:
        """Whether an outcome is being copied; until `flush` reads it no other one is scheduled."""
        return subject in self._pending

    def schedule(
        self, stats: SolveStats, subject: str, cut_at: int | None = None, *, exact: bool = False
    ) -> None:
        """Start to copy an outcome to the host; for `cut_at` and `exact` see
        `unconverged_message`."""
        if self.is_pending(subject):
            return
        outcome = stats.verdict if cut_at is None else accepted(stats, cut_at)
        copy, event = outcome.to("cpu", non_blocking=True), None
        if outcome.is_cuda:
            event = torch.cuda.Event()
            # the stream of the copy, whose device need not be the current one
            event.record(torch.cuda.current_stream(outcome.device))
        # without the cell of the adjoint's statistics, which may refer to the owner of this object
        self._pending[subject] = _Pending(copy, event, stats.without_cell(), cut_at, exact)

    def flush(self) -> None:
        """Warn about scheduled outcomes whose copy is complete; under torch.compile do nothing."""
        if torch.compiler.is_compiling():
            return  # a graph that depends on pending outcomes would be recompiled when they change
        for subject, pending in list(self._pending.items()):
            # a graph capture fails if it queries an event recorded outside it
            if not can_read_device(pending.stats.verdict):
                continue
            if pending.event is not None and not pending.event.query():
                continue
            del self._pending[subject]
            if not bool(pending.accepted.all()):
                named = f"{subject} (an earlier call)"
                known = pending.stats, named, pending.cut_at
                self.warn(unconverged_message(*known, exact=pending.exact), subject)

    def warn(self, message: str, subject: str) -> None:
        """Warn about this call for `subject`, with its number, if it is one of those above."""
        if not self._every:
            self._counts[subject] += 1
            count = self._counts[subject]
            if str(count).strip("0") != "1":
                return  # not a power of ten
            message += f" (unconverged call {count} of this layer; next warning at {10 * count})"
        warnings.warn(message, ConvergenceWarning, stacklevel=stacklevel(sys._getframe()))

    def tell(self, message: str) -> None:
        """Issue a UserWarning, the first time, or every time if `every`."""
        if self._every or message not in self._told:
            self._told.add(message)
            warnings.warn(message, UserWarning, stacklevel=stacklevel(sys._getframe()))


def stacklevel(frame: FrameType) -> int:
    """The stacklevel, for a warning from `frame`, of the innermost caller outside
    `SKIPPED_PACKAGES`."""
    level, outer = 1, frame.f_back
    while outer is not None:
        level += 1
        package = str(outer.f_globals.get("__name__", "")).partition(".")[0]
        if package not in SKIPPED_PACKAGES:
            return level
        outer = outer.f_back
    return level


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
            known = solution.stats, solution.result, self.subject, cut_at
            self._report(*known, exact=not capped)

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
        self._report(stats, Result.unknown, self._adjoint_subject, None, exact=True)

    @property
    def _adjoint_subject(self) -> str:
        return f"{self.subject}, adjoint solve"

    def _report(
        self,
        stats: SolveStats,
        result: Result,
        subject: str,
        cut_at: int | None,
        *,
        exact: bool = False,
    ) -> None:
        if self.policy == "ignore" or not can_read_device(stats.verdict):
            return
        if self.policy == "warn" and result is Result.unknown and stats.verdict.is_cuda:
            self.warnings.schedule(stats, subject, cut_at, exact=exact)
            return
        if bool((stats.verdict if cut_at is None else accepted(stats, cut_at)).all()):
            return
        message = unconverged_message(stats, subject, cut_at, exact=exact)
        if self.policy == "raise":
            error = ConvergenceError(message)
            error.stats = stats
            raise error
        self.warnings.warn(message, subject)

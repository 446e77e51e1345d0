"""Convergence warnings of one layer: rate-limited, and on a GPU without synchronization.

Letters: b batch, q parts of a sample.
"""

import sys
import warnings
from collections import Counter
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bedouin.solvers.solution import (
    ConvergenceWarning,
    DeferredStats,
    SolveStats,
    accepted,
    can_read_device,
    describe,
)

SKIPPED_PACKAGES = ("bedouin", "torch")
"""A warning points at the innermost caller outside these packages. torch is one of them because its
Module.__call__ and backward lie between the user's line and this package."""


class _Pending(NamedTuple):
    """An outcome that is being copied to the host."""

    accepted: Tensor  # (b,) or (q b,) on the host, valid once the event has completed
    event: torch.cuda.Event | None  # None: the copy is complete, because it came from a CPU
    stats: SolveStats
    cut_at: int | None


class DeferredWarning:
    """Warns about solves that did not converge: the 1st, 10th, 100th, ... of each subject, or every
    one if `every`. A subject is the name of what was solved, as messages show it.

    `schedule` starts an asynchronous copy of an outcome to the host, and `flush` warns once the
    copy is complete. Belongs to one layer; a copy of the layer starts with counts of zero and
    without pending outcomes.
    """

    def __init__(self, every: bool = False) -> None:
        self._every = every
        self._pending: dict[str, _Pending] = {}
        self._counts: Counter[str] = Counter()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeferredWarning":
        return DeferredWarning(self._every)

    def __reduce__(self) -> tuple[type["DeferredWarning"], tuple[bool]]:
        return DeferredWarning, (self._every,)

    def is_pending(self, subject: str) -> bool:
        """Whether an outcome is being copied; until `flush` reads it no other one is scheduled."""
        return subject in self._pending

    def schedule(self, stats: SolveStats, subject: str, cut_at: int | None = None) -> None:
        """Start to copy an outcome to the host; for `cut_at` see `accepted`."""
        if self.is_pending(subject):
            return
        outcome = stats.verdict if cut_at is None else accepted(stats, cut_at)
        copy, event = outcome.to("cpu", non_blocking=True), None
        if outcome.is_cuda:
            event = torch.cuda.Event()
            # the stream of the copy, whose device need not be the current one
            event.record(torch.cuda.current_stream(outcome.device))
        # without the cell of the adjoint's statistics, which may refer to the owner of this object
        if isinstance(stats, DeferredStats):
            stats = stats.without_cell()
        else:
            stats = SolveStats(stats.num_steps, stats.residual, stats.converged)
        self._pending[subject] = _Pending(copy, event, stats, cut_at)

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
                self.warn(describe(pending.stats, named, pending.cut_at), subject)

    def warn(self, message: str, subject: str) -> None:
        """Warn about the 1st, 10th, 100th, ... call for `subject`, with its number, or every call.

        The warning points at the innermost caller outside `SKIPPED_PACKAGES`.
        """
        if not self._every:
            self._counts[subject] += 1
            count = self._counts[subject]
            if not _is_power_of_ten(count):
                return
            message += f" (unconverged call {count} of this layer; next warning at {10 * count})"
        warnings.warn(message, ConvergenceWarning, stacklevel=_stacklevel(sys._getframe()))


def _is_power_of_ten(count: int) -> bool:
    while count % 10 == 0:
        count //= 10
    return count == 1


def _stacklevel(frame: FrameType) -> int:
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

"""The warnings of one layer: not at every call, and on a GPU without waiting for the outcome."""

import sys
import warnings
from collections import Counter
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bedouin.solvers.solution import (
    ConvergenceWarning,
    SolveStats,
    accepted,
    can_read_device,
    describe,
)

NOT_THE_USER = ("bedouin", "torch")
"""Packages whose lines a warning does not point at; torch's Module.__call__ and backward are in
between."""


class _Pending(NamedTuple):
    accepted: Tensor  # (b,), on the host when the event has passed
    event: torch.cuda.Event
    stats: SolveStats
    cut_at: int | None


class DeferredWarning:
    """Warns about solves that did not converge: at the 1st, 10th, 100th, ... of each subject, or at
    `every` one.

    `schedule` keeps an asynchronous copy of an outcome, and `flush` warns once it has arrived.
    Belongs to one layer. A copy of the layer starts without pending outcomes and counts anew.
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
        """Whether an outcome is on its way; another one is not scheduled until it has been seen."""
        return subject in self._pending

    def schedule(self, stats: SolveStats, subject: str, cut_at: int | None = None) -> None:
        """Start to copy the outcome (on a CUDA device) to the host; `cut_at`: see `accepted`."""
        if self.is_pending(subject):
            return
        copy = accepted(stats, cut_at).to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        # not the cell of the adjoint's statistics, which may know the owner of this object
        stats = SolveStats(stats.num_steps, stats.residual, stats.converged)
        self._pending[subject] = _Pending(copy, event, stats, cut_at)

    def flush(self) -> None:
        """Warn about scheduled outcomes that have arrived; under torch.compile do nothing."""
        if torch.compiler.is_compiling():
            return  # a graph that asks would be compiled anew with every change of the answer
        for subject, pending in list(self._pending.items()):
            # a capture fails if it asks for an event from outside it
            if not can_read_device(pending.stats.converged) or not pending.event.query():
                continue
            del self._pending[subject]
            if not bool(pending.accepted.all()):
                named = f"{subject} (an earlier call)"
                self.warn(describe(pending.stats, named, pending.cut_at), subject)

    def warn(self, message: str, subject: str) -> None:
        """Warn about an outcome of `subject` if it is the 1st, 10th, 100th, ..., with that number.

        The warning points at the innermost line outside this package and torch.
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
    """Of the innermost caller's line outside this package and torch, for a warning from `frame`."""
    level, outer = 1, frame.f_back
    while outer is not None:
        level += 1
        package = str(outer.f_globals.get("__name__", "")).partition(".")[0]
        if package not in NOT_THE_USER:
            return level
        outer = outer.f_back
    return level

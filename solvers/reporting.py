"""What is said of solves that did not converge: nothing, a warning or an error.

Warnings of one layer are rate-limited, and on a GPU they come without synchronization.
Letters: q samples of a map, t tokens of a sample.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Literal

import torch
from torch import Tensor

from bedouin.kernels.backend import can_read_device
from bedouin.solvers.draws import is_recomputation
from bedouin.solvers.solution import (
    ConvergenceError,
    ConvergenceWarning,
    Measured,
    Outcome,
    failure_message,
)

OnUnconverged = Literal["warn", "raise", "ignore"]

SKIPPED_PACKAGES = ("bedouin", "torch")
"""A warning points at the innermost caller outside these packages. torch is one of them because its
Module.__call__ and backward lie between the user's line and this package."""


class DeferredWarning:
    """Warns about solves of a layer that did not converge: the 1st, 10th, 100th, ... of each
    subject, which is the name of what was solved, or every one if `every`.

    `schedule` starts an asynchronous copy of an outcome to the host, and `flush` warns once the
    copy is complete. A copy of the layer starts with counts of zero and without pending outcomes.
    """

    def __init__(self, every: bool = False) -> None:
        self._every = every
        # an outcome, its copy on the host, whose event is None if it came from a CPU, the message
        self._pending: dict[
            str, tuple[Tensor, Tensor, torch.cuda.Event | None, Callable[[], str]]
        ] = {}
        self._counts: Counter[str] = Counter()
        self._told: set[str] = set()

    def __reduce__(self) -> tuple[type["DeferredWarning"], tuple[bool]]:
        return DeferredWarning, (self._every,)  # for copies and pickles

    def is_pending(self, subject: str) -> bool:
        """Whether an outcome is being copied; until `flush` reads it no other one is scheduled."""
        return subject in self._pending

    def schedule(self, outcome: Tensor, subject: str, message: Callable[[], str]) -> None:
        """Start to copy an outcome, bool, to the host; `message` tells what is not true."""
        if self.is_pending(subject):
            return
        copy, event = outcome.to("cpu", non_blocking=True), None
        if outcome.is_cuda:
            event = torch.cuda.Event()
            # the stream of the copy, whose device need not be the current one
            event.record(torch.cuda.current_stream(outcome.device))
        self._pending[subject] = outcome, copy, event, message

    def flush(self) -> None:
        """Warn about scheduled outcomes whose copy is complete; under torch.compile do nothing."""
        if torch.compiler.is_compiling():
            return  # a graph that depends on pending outcomes would be recompiled when they change
        for subject, (outcome, copy, event, message) in list(self._pending.items()):
            # a graph capture fails if it queries an event recorded outside it
            if can_read_device(outcome) and (event is None or event.query()):
                del self._pending[subject]
                if not bool(copy.all()):
                    self.warn(message(), subject)

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
class Caller:
    """Who runs a solve: the name used in messages, and what all calls of one caller share.

    deferred: counts and delays the caller's warnings. draw: the number of the training call; None
    in evaluation. record: receives the outcome before a failure is reported. num_parts: how many of
    the map's samples are one of the caller's. record_history: as in `solve`.
    """

    subject: str
    deferred: DeferredWarning
    draw: int | None = None
    record: Callable[[Outcome], None] | None = None
    num_parts: int = 1
    record_history: bool = False


class Report:
    """The outcomes of the forward solve and the adjoint solve of one call, and what is said of them
    by the policy. cut_at: the cap of this call if it was drawn and is below its limit, else None.
    Finite samples that it stops are recorded in the statistics but not reported."""

    def __init__(self, caller: Caller, policy: OnUnconverged, cut_at: int | None) -> None:
        self.subject, self.warnings, self.policy = caller.subject, caller.deferred, policy
        self.cut_at, self.adjoint = cut_at, Outcome(caller.num_parts)
        self.forward = Outcome(caller.num_parts, self.adjoint)

    def check_forward(self) -> None:
        """Report the forward solve, but not again for a call that activation checkpointing
        recomputes, which would have raised the first time."""
        if self.policy == "raise" or not is_recomputation():
            self._check(self.forward, self.subject)

    def take_adjoint(self, measured: Measured) -> None:
        """Keep and report an adjoint solve."""
        self.adjoint.take(measured)
        self._check(self.adjoint, f"{self.subject}, adjoint solve")

    def take_reverse_sweep(self, defect: Tensor, scale: Tensor) -> None:  # (q, t), (q, t)
        """Keep and report an exact adjoint, by the norms of its equation."""
        if can_read_device(defect):
            self.take_adjoint(Measured(defect, scale, backward=True))

    def _check(self, outcome: Outcome, subject: str) -> None:
        measured = outcome.measured
        if self.policy == "ignore" or measured is None or not can_read_device(measured.defect):
            return
        cut_at = None if measured.is_exact else self.cut_at
        message = partial(failure_message, measured, outcome.num_parts, cut_at)
        if self.policy == "warn" and measured.defect.is_cuda and not measured.waited:
            if not self.warnings.is_pending(subject):
                later = partial(message, f"{subject} (an earlier call)")
                self.warnings.schedule(measured.accepted(cut_at), subject, later)
            return
        stats = outcome.stats
        assert stats is not None
        if bool(stats.accepted(cut_at).all()):
            return
        if self.policy == "raise":
            error = ConvergenceError(message(subject))
            error.stats = stats
            raise error
        self.warnings.warn(message(subject), subject)

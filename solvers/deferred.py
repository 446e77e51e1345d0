"""A warning that does not wait for the GPU: it is given one call late."""

import warnings
from typing import Any

import torch
from torch import Tensor

from bedouin.solvers.solution import (
    ConvergenceWarning,
    SolveStats,
    can_read_device,
    describe,
    read_result,
)


class DeferredWarning:
    """Keeps an asynchronous copy of a solve's outcome and warns once it has arrived.

    Belongs to one layer. A copy of the layer starts without pending outcomes.
    """

    def __init__(self) -> None:
        self._pending: tuple[Tensor, torch.cuda.Event, SolveStats, str] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeferredWarning":
        return DeferredWarning()

    def __reduce__(self) -> tuple[type["DeferredWarning"], tuple[()]]:
        return DeferredWarning, ()

    @property
    def is_pending(self) -> bool:
        """Whether an outcome is on its way; another one is not scheduled until it has been seen."""
        return self._pending is not None

    def schedule(self, stats: SolveStats, subject: str) -> None:
        """Start to copy the outcome (on a CUDA device) to the host."""
        if self._pending is not None:
            return
        converged = stats.converged.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending = converged, event, stats, subject

    def flush(self) -> None:
        """Warn about the scheduled outcome if it has arrived; under torch.compile do nothing."""
        if torch.compiler.is_compiling():
            return  # a graph that asks would be compiled anew with every change of the answer
        if self._pending is None:
            return
        converged, event, stats, subject = self._pending
        # a capture fails if it asks for an event from outside it
        if not can_read_device(stats.converged) or not event.query():
            return
        self._pending = None
        if not bool(converged.all()):
            message = describe(stats, read_result(stats), f"{subject} (an earlier call)")
            warnings.warn(message, ConvergenceWarning, stacklevel=4)

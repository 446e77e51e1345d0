"""Ctrl-C and SIGTERM end a run between two steps, when its state is consistent."""

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Self

import torch
from accelerate import Accelerator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTICE = b"\nfinishing the step, then saving; a second signal stops at once and saves nothing\n"


class StopRequest:
    """A context in which the first signal is only recorded; a second one has its usual effect.

    Signals that the process ignores (nohup, a background job) stay ignored. Python delivers signals
    to the main thread only, so the context has no effect in other threads.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.signum: int | None = None
        self._accelerator = accelerator
        self._agreed = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                    self._before[signum] = signal.signal(signum, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def agreed(self, *, meeting: bool) -> bool:
        """Whether to stop before the next step.

        Signals reach several processes at different times, but all must stop before the same step.
        They therefore exchange their signals, which synchronizes with the devices, in calls with
        `meeting`. A single process stops at once without synchronization.
        """
        if self._agreed:
            return True
        asked = self.signum is not None
        if self._accelerator.num_processes == 1:
            self._agreed = asked
        elif meeting:
            mine = torch.tensor(float(asked), device=self._accelerator.device)
            self._agreed = bool(self._accelerator.reduce(mine, reduction="sum") > 0)
        return self._agreed

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self._restore()
        if self._accelerator.is_main_process:
            with suppress(OSError):  # print is not reentrant, and the signal may interrupt one
                os.write(2, _NOTICE)

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())  # type: ignore[arg-type]

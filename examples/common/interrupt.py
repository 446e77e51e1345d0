"""Ctrl-C and SIGTERM end a run between two steps, when its state is consistent."""

import os
import signal
import threading
from contextlib import suppress
from types import FrameType

import torch
from accelerate import Accelerator

_NOTICE = b"\nfinishing the step, then saving; a second signal stops at once and saves nothing\n"


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run, after it saved a checkpoint."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum


class StopRequest:
    """Records the first signal; a second one has its usual effect, as has one after `restore`.

    Signals that the process ignores (nohup, a background job) stay ignored. Python delivers signals
    to the main thread only, so this has no effect in other threads.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.signum: int | None = None
        self._accelerator = accelerator
        self._before: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                    self._before[signum] = signal.signal(signum, self._remember)

    def agreed(self, *, meeting: bool) -> bool:
        """Whether to stop before the next step. Signals reach several processes at different times,
        but all must stop before the same step: they therefore exchange them in calls with
        `meeting`, and stop in no others."""
        asked = self.signum is not None
        if self._accelerator.num_processes == 1 or not meeting:
            return asked and self._accelerator.num_processes == 1
        mine = torch.tensor(float(asked), device=self._accelerator.device)
        return bool(self._accelerator.reduce(mine, reduction="sum") > 0)

    def restore(self) -> None:
        """Give the signals their earlier effects."""
        while self._before:
            signal.signal(*self._before.popitem())  # type: ignore[arg-type]

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self.restore()
        if self._accelerator.is_main_process:
            with suppress(OSError):  # print is not reentrant, and the signal may interrupt one
                os.write(2, _NOTICE)

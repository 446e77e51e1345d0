"""How a training script ends: signals, the exit status, messages instead of tracebacks."""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import torch
from accelerate import Accelerator
from torch import distributed

from common.options import ConfigT
from flags import UsageError

_NOTICE = b"\nfinishing the step, then saving; a second signal stops at once and saves nothing\n"


class Interrupted(KeyboardInterrupt):
    """A signal, the second argument, stopped the run, after it saved a checkpoint."""


class StopRequest:
    """Records the first signal; a second one has its usual effect, as has one after `restore`. What
    the process ignores stays ignored; only the main thread may handle signals."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.signum: int | None = None
        self._accelerator = accelerator
        self._before: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                    self._before[signum] = signal.signal(signum, self._remember)

    def agreed(self, *, meeting: bool) -> bool:
        """Whether to stop before the next step, which must be the same one for several processes:
        they therefore exchange their signals in calls with `meeting`, and stop in no others."""
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


def run_script(main: Callable[[ConfigT], object], config: ConfigT) -> None:
    """Train. Exit status: 1 for errors that the user can correct (checkpoint, folder, disk, loss);
    130 and 143 after Ctrl-C and SIGTERM, with the command that continues the run. Other errors are
    bugs and keep their traceback."""
    try:
        main(config)
    except KeyboardInterrupt as stop:
        lost = "stopped at once: what came after the last checkpoint, if there is one, is lost"
        message, signum = stop.args if isinstance(stop, Interrupted) else (lost, signal.SIGINT)
        if os.environ.get("RANK", "0") == "0":
            print(f"\n{message}; continue with\n    {resume_command()}", file=sys.stderr)
        sys.exit(128 + signum)
    except (UsageError, OSError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
    leave_process_group()


def leave_process_group() -> None:
    """Leave the group of processes, whose threads can abort a process that ends with it."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def resume_command() -> str:
    """The command line of this process with --resume; with several processes the options of
    `accelerate launch` are unknown and left out as "..."."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    words = ["accelerate", "launch", "...", *sys.argv] if several else sys.orig_argv
    kept = [word for word in words if word not in ("--resume", "--no-resume")]
    return shlex.join([*kept, "--resume"])

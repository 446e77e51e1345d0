"""The exit status of a training script, and messages instead of tracebacks for user errors."""

import os
import shlex
import sys
from collections.abc import Callable

from torch import distributed

from common.interrupt import Interrupted
from common.options import ConfigT
from flags import UsageError


def run_script(main: Callable[[ConfigT], object], config: ConfigT) -> None:
    """Train.

    Exit status: 2 for invalid flags; 1 for errors that the user can correct (checkpoint, folder,
    disk, loss); 130 and 143 after Ctrl-C and SIGTERM, with the command that continues the run.
    Other errors are bugs and keep their traceback.
    """
    try:
        main(config)
    except KeyboardInterrupt as stop:
        if not isinstance(stop, Interrupted):
            lost = "stopped at once: what came after the last checkpoint, if there is one, is lost"
            stop = Interrupted(lost, 2)
        if os.environ.get("RANK", "0") == "0":
            print(f"\n{stop}; continue with\n    {resume_command()}", file=sys.stderr)
        sys.exit(128 + stop.signum)
    except (UsageError, OSError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
    leave_process_group()


def leave_process_group() -> None:
    """Leave the group of processes, if there is one. A thread of a group that is left to the end of
    the process can abort it, with an exit status that is not 0."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def resume_command() -> str:
    """The command line of this process with --resume.

    With several processes the options of `accelerate launch` are unknown and left out as "...".
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    words = ["accelerate", "launch", "...", *sys.argv] if several else sys.orig_argv
    kept = [word for word in words if word not in ("--resume", "--no-resume")]
    return shlex.join([*kept, "--resume"])

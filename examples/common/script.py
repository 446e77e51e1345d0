"""The exit status of a training script, and messages instead of tracebacks for user errors."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

from torch import distributed

from common.errors import Interrupted, UsageError
from common.options import ConfigT, parse_config


def run_script(main: Callable[[ConfigT], None], presets: Mapping[str, ConfigT]) -> None:
    """Read the command line and train.

    Exit status: 2 for invalid flags; 1 for errors that the user can correct (checkpoint, folder,
    disk, loss); 130 and 143 after Ctrl-C and SIGTERM, with the command that continues the run.
    Other errors are bugs and keep their traceback.
    """
    config = parse_config(presets)
    try:
        main(config)
    except Interrupted as stop:
        _leave(f"{stop}; continue with\n    {resume_command()}", 128 + stop.signum)
    except KeyboardInterrupt:
        lost = "stopped at once: what came after the last checkpoint, if there is one, is lost"
        _leave(f"{lost}; continue with\n    {resume_command()}", 130)
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


def _leave(message: str, status: int) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        print(f"\n{message}", file=sys.stderr)
    raise SystemExit(status)

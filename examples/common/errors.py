"""Errors that end a script with a message instead of a traceback."""


class UsageError(ValueError):
    """An error that the user of the script can correct: an option, a file, a folder."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run, after it saved a checkpoint."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum

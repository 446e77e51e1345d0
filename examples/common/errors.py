"""What ends a script with a message instead of a traceback."""


class UsageError(ValueError):
    """Something that whoever started the script can mend: an option, a file, a folder."""


class Interrupted(KeyboardInterrupt):
    """A run that was asked to stop, and has saved a checkpoint."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum

"""Checks of arguments that several modules share."""


def positive_int(name: str, value: int) -> int:
    """`value`; TypeError or ValueError that names it unless it is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int >= 1, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value

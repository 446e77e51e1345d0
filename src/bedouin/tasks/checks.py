"""Checks of the tasks' arguments."""

from numbers import Integral


def whole_number(name: str, value: int, low: int, high: int | None = None) -> int:
    """`value`, an integer of Python or NumPy in [low, high), as an int.

    Raises TypeError for anything else and for a bool, ValueError outside of the range.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < low or (high is not None and value >= high):
        wanted = f"at least {low}" if high is None else f"in [{low}, {high})"
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return int(value)


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")

"""Checks of arguments that the public operations share."""

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

OptionT = TypeVar("OptionT", bound=str)


def one_of(argument: str, value: OptionT, valid: Sequence[str]) -> OptionT:
    """Return `value`. Raises ValueError unless it is one of `valid`."""
    if value not in valid:
        raise ValueError(f"{argument} must be one of {tuple(valid)}, got {value!r}")
    return value


def check_shape(
    argument: str,
    tensor: Tensor | None,  # None: not given, and not checked
    expected: Sequence[int],
    letters: str = "",
) -> None:
    """Raise ValueError unless `tensor` has the shape `expected`; `letters` names its axes."""
    if tensor is not None and tensor.shape != tuple(expected):
        named = f"{letters} = " if letters else ""
        raise ValueError(
            f"{argument} must have shape {named}{tuple(expected)}, got {tuple(tensor.shape)}"
        )


def check_sequence(argument: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` has three axes, (b, t, d)."""
    if tensor.dim() != 3:
        raise ValueError(f"{argument} must have shape (b, t, d), got {tuple(tensor.shape)}")

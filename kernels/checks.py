"""Checks of arguments and options, which all of the library shares."""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, dataclass_transform

from torch import Tensor

OptionT = TypeVar("OptionT", bound=str)
ClassT = TypeVar("ClassT", bound=type)
InitT = TypeVar("InitT", bound=Callable[..., None])


def one_of(argument: str, value: OptionT, valid: Sequence[str]) -> OptionT:
    """Return `value`. Raises ValueError unless it is one of `valid`."""
    if value not in valid:
        raise ValueError(f"{argument} must be one of {tuple(valid)}, got {value!r}")
    return value


def check_shapes(
    expected: Sequence[int],
    letters: str = "",
    **tensors: Tensor | None,  # by argument; None: not given, and not checked
) -> None:
    """Raise ValueError unless `tensors` have the shape `expected`; `letters` names its axes."""
    named = f"{letters} = " if letters else ""
    for argument, tensor in tensors.items():
        if tensor is not None and tensor.shape != tuple(expected):
            raise ValueError(
                f"{argument} must have shape {named}{tuple(expected)}, got {tuple(tensor.shape)}"
            )


def check_sequence(argument: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` has three axes, (b, t, d)."""
    if tensor.dim() != 3:
        raise ValueError(f"{argument} must have shape (b, t, d), got {tuple(tensor.shape)}")


@dataclass_transform(frozen_default=True)
def frozen_options(cls: ClassT) -> ClassT:
    """Class decorator: a frozen dataclass, of which an unknown option raises a TypeError that lists
    the valid names."""
    frozen: ClassT = dataclass(frozen=True)(cls)  # type: ignore[assignment]
    frozen.__init__ = known_options(frozen.__init__)  # type: ignore[misc]
    return frozen


def known_options(init: InitT) -> InitT:
    """Decorator of a constructor: an unknown option raises a TypeError that lists the valid ones,
    or gives the reason that the class has in `absent_options`. The signature stays what it is for
    type checkers and help(). A class with `settable_options` finds all options in `_options` when
    it is made, and may then refuse that others are set."""
    valid = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: object, *args: Any, **options: Any) -> None:
        owner = type(self).__name__
        for name in options:
            if name not in valid:
                reason = getattr(type(self), "absent_options", {}).get(name)
                if reason is not None:
                    raise TypeError(f"{owner} has no option {name}: {reason}")
                raise TypeError(unknown_option(owner, name, valid))
        if len(args) > len(valid):
            raise TypeError(f"{owner} takes {len(valid)} options {valid}, got {len(args)}")
        init(self, *args, **options)
        if hasattr(self, "settable_options"):
            self.__dict__["_options"] = tuple(valid)

    return cast(InitT, checked)


def unknown_option(owner: str, name: str, valid: list[str]) -> str:
    """The error message for an option that `owner` does not have."""
    near = difflib.get_close_matches(name, valid, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else "."
    options = ", ".join(valid) if valid else "no options at all"
    return f"{owner} has no option {name!r}{guess} Valid: {options}"


def check_number(name: str, value: float, low: float, high: float, *, open_low: bool) -> None:
    """Raise ValueError unless low <= value <= high, or low < value <= high with `open_low`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must lie in {bracket}{low}, {high}], got {value!r}")


def check_count(name: str, value: object, least: int = 1, *, optional: bool = False) -> None:
    """Raise ValueError unless `value` is an int of at least `least`, or with `optional` None."""
    if (optional and value is None) or (type(value) is int and value >= least):
        return
    none = "None or " if optional else ""
    raise ValueError(f"{name} must be {none}an int >= {least}, got {value!r}")


def positive_int(name: str, value: Any, otherwise: str = "") -> int:
    """Return `value`. Raises TypeError unless it is an int, ValueError if it is below 1.
    otherwise: for the message, what else it may be."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int >= 1{otherwise}, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value

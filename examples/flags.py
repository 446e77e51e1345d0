"""Command lines of all scripts: checks of options, with messages that name the flag.

The type of an option may carry its range, as in `lr: Positive` or `seed: Annotated[int, whole(0)]`;
`check_types` finds it inside tuples and optional types as well.
"""

import math
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_type_hints

import torch

Device = Literal["auto", "cpu", "cuda"]


class UsageError(ValueError):
    """An error that the user of a script can correct: an option, a file, a folder. It ends the
    script with a message instead of a traceback."""


@dataclass(frozen=True)
class Range:
    """The interval from `low` to `high`; a round bracket excludes its end."""

    low: float
    high: float = math.inf
    brackets: str = "[)"
    whole: bool = False

    def holds(self, value: object) -> bool:
        """Whether the value is in the interval; False for NaN and bools."""
        kinds = int if self.whole else int | float
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        above = value >= self.low if self.brackets[0] == "[" else value > self.low
        return above and (value <= self.high if self.brackets[1] == "]" else value < self.high)

    def __str__(self) -> str:
        kind = "an int" if self.whole else "a number"
        return f"{kind} in {self.brackets[0]}{self.low:g}, {self.high:g}{self.brackets[1]}"


def whole(low: int, high: float = math.inf) -> Range:
    """The integers in [low, high)."""
    return Range(low, high, whole=True)


Count = Annotated[int, whole(1)]
Natural = Annotated[int, whole(0)]
Positive = Annotated[float, Range(0, brackets="()")]
Share = Annotated[float, Range(0, 1, "[]")]


def flag(name: str) -> str:
    """The flag of a field: num_layers -> --num-layers."""
    return f"--{name.replace('_', '-')}"


def check_types(options: object) -> None:
    """Raise ValueError with the flag's name unless all numbers are in the ranges of their types."""
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        wanted = _range_in(hint)
        if wanted is None:
            continue
        value, optional = getattr(options, name), type(None) in get_args(hint)
        for number in value if isinstance(value, tuple) else (value,):
            if not (wanted.holds(number) or (number is None and optional)):
                raise ValueError(f"{flag(name)} must be {wanted}, got {number!r}")


def _range_in(hint: Any) -> Range | None:
    """The first range in a type, at any depth."""
    if isinstance(hint, Range):
        return hint
    return next((found for part in get_args(hint) if (found := _range_in(part))), None)


def check_heads(num_heads: int | None, d_inner: int) -> None:
    """Raise ValueError unless the heads divide the inner channels; None always does."""
    if num_heads is not None and d_inner % num_heads:
        raise ValueError(
            f"--num-heads must divide the {d_inner} inner channels, d_model times expand, got "
            f"{num_heads}"
        )


@contextmanager
def naming_flags(names: Collection[str]) -> Iterator[None]:
    """Re-raise ValueErrors of the library with flags instead of argument names."""
    try:
        yield
    except ValueError as error:
        words = rf"\b({'|'.join(names)})\b"
        raise ValueError(re.sub(words, lambda word: flag(word[0]), str(error))) from error


def choose_device(name: Device, remedy: str = "--device cpu") -> torch.device:
    """The device of this name; auto: the GPU if there is one. Raises UsageError without a GPU for
    cuda, whose message says to use `remedy`."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device cuda needs a GPU, and torch sees none: use {remedy}")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)

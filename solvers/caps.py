"""Caps: how many steps one solve may take."""

import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass


class Cap(ABC):
    """A limit on the steps of a solve, possibly drawn anew for each training call."""

    @property
    @abstractmethod
    def limit(self) -> int:
        """The most steps that any call may take; what holds in evaluation."""

    @property
    @abstractmethod
    def is_random(self) -> bool:
        """Whether draws may fall short of `limit`."""

    @abstractmethod
    def draw(self, index: int) -> int:
        """The cap of training call number `index`: a function of the cap's fields and `index`."""


@dataclass(frozen=True)
class FixedCap(Cap):
    """At most `steps` steps, in training and in evaluation. Raises ValueError for steps < 1."""

    steps: int = 100

    def __post_init__(self) -> None:
        _check_count("steps", self.steps)

    @property
    def limit(self) -> int:
        return self.steps

    @property
    def is_random(self) -> bool:
        return False

    def draw(self, index: int) -> int:
        return self.steps


@dataclass(frozen=True)
class GammaCap(Cap):
    """ceil(Gamma(shape, scale)) steps in training, between 1 and `limit`; `limit` in evaluation.

    Draw i depends on (seed, i) alone, so all ranks of a data-parallel run draw the same cap, and a
    resumed run draws what the uninterrupted one would have. Gamma(4, 1) is the paper's choice
    (arXiv 2503.10799, figure 1). Raises TypeError for values of the wrong type, ValueError for
    values that are not positive.

    A layer's training call with a random cap draws one number from torch's default CPU generator.
    It does not influence the cap; activation checkpointing restores that generator, so a call that
    runs again in the backward pass is recognized and gets its own cap. With
    preserve_rng_state=False that holds for one call of a layer in each region of
    torch.utils.checkpoint; what cannot be recognized is a RuntimeError in the backward pass.
    """

    shape: float = 4.0
    scale: float = 1.0
    limit: int = 100  # a field implements the abstract property
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("shape", self.shape), ("scale", self.scale)):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a positive number, got {value!r}")
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        _check_count("limit", self.limit)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an int, got {self.seed!r}")

    @property
    def is_random(self) -> bool:
        return True

    def draw(self, index: int) -> int:
        generator = random.Random(f"bedouin.GammaCap/{self.seed}/{index}")
        # a large scale may overflow to infinity, which has no ceiling
        steps = min(generator.gammavariate(self.shape, self.scale), self.limit)
        return max(math.ceil(steps), 1)


def as_cap(max_steps: int | Cap) -> Cap:
    """`max_steps` as a Cap; TypeError or ValueError where it is neither a Cap nor an int >= 1."""
    if isinstance(max_steps, Cap):
        return max_steps
    _check_count("max_steps", max_steps)
    return FixedCap(max_steps)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int >= 1 or a Cap, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")

"""Caps: how many steps one solve may take."""

import math
import random
from abc import ABC, abstractmethod

from bedouin.kernels.checks import check_number, frozen_options, positive_int


class Cap(ABC):
    """A limit on the steps of a solve, which may be drawn at random for each training call."""

    @property
    def is_random(self) -> bool:
        """Whether a draw may be smaller than `limit`."""
        return False

    @property
    @abstractmethod
    def limit(self) -> int:
        """The most steps that any call may take; the cap of every call in evaluation."""

    def draw(self, index: int) -> int:
        """The cap of training call number `index` >= 0; depends on the fields and `index` alone."""
        return self.limit


@frozen_options
class FixedCap(Cap):
    """At most `steps` steps, in training and in evaluation. Raises ValueError for steps < 1."""

    steps: int = 100

    def __post_init__(self) -> None:
        positive_int("steps", self.steps, " or a Cap")

    @property
    def limit(self) -> int:
        return self.steps


@frozen_options
class GammaCap(Cap):
    """ceil(Gamma(shape, scale)) steps in training, between 1 and `limit`; `limit` in evaluation.

    Draw i depends only on (seed, i), so all ranks of a data-parallel run draw the same cap, and a
    resumed run draws the same caps as an uninterrupted one. Gamma(4, 1) is the paper's choice
    (arXiv 2503.10799, figure 1). `Draws` says which number a layer's call has, also where
    activation checkpointing recomputes it. Raises TypeError for a limit or seed that is no int,
    ValueError for other values that do not fit.
    """

    shape: float = 4.0
    scale: float = 1.0
    limit: int = 100  # a field implements the abstract property
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("shape", self.shape), ("scale", self.scale)):
            check_number(name, value, 0, math.inf, open_low=True)
        positive_int("limit", self.limit, " or a Cap")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an int, got {self.seed!r}")

    @property
    def is_random(self) -> bool:
        return True

    def draw(self, index: int) -> int:
        generator = random.Random(f"bedouin.GammaCap/{self.seed}/{index}")
        # take the minimum first: a large scale may overflow to infinity, which math.ceil rejects
        steps = min(generator.gammavariate(self.shape, self.scale), self.limit)
        return max(math.ceil(steps), 1)


def as_cap(max_steps: int | Cap) -> Cap:
    """`max_steps` as a Cap. Raises TypeError or ValueError unless it is a Cap or an int >= 1."""
    if isinstance(max_steps, Cap):
        return max_steps
    return FixedCap(positive_int("max_steps", max_steps, " or a Cap"))

"""Training lengths that grow during training."""

from dataclasses import dataclass
from typing import Literal

from flags import Count, Share, check_types

Kind = Literal["none", "uniform", "double", "quadruple"]
FACTORS = {"double": 2, "quadruple": 4}
"""By what a length that is learned is multiplied."""


@dataclass(frozen=True, kw_only=True)
class CurriculumOptions:
    """Options of the lengths that a model is trained on."""

    curriculum: Kind = "none"
    """none: the task's own lengths; uniform: in the first steps lengths from --curriculum-from to
    the longest; double, quadruple: --curriculum-from at first, two or four times as long after
    every log entry whose training accuracy reaches --curriculum-threshold."""
    curriculum_from: Count = 2
    """Shortest length of a curriculum."""
    curriculum_share: Share = 1 / 3
    """Share of the steps in which "uniform" draws lengths."""
    curriculum_threshold: Share = 0.95
    """Training accuracy at which "double" and "quadruple" multiply the length."""

    def __post_init__(self) -> None:
        check_types(self)


def first_length(options: CurriculumOptions, longest: int) -> int:
    """The longest length at the first step. Raises ValueError if the curriculum starts above
    `longest`."""
    if options.curriculum != "none" and options.curriculum_from > longest:
        raise ValueError(
            f"--curriculum-from must be at most the training length {longest}, got "
            f"{options.curriculum_from}"
        )
    return options.curriculum_from if options.curriculum in FACTORS else longest


def next_length(options: CurriculumOptions, reached: int, longest: int, accuracy: float) -> int:
    """The longest length after an accuracy at training lengths up to `reached`."""
    passed = accuracy >= options.curriculum_threshold
    return min(FACTORS.get(options.curriculum, 1) * reached, longest) if passed else reached


def draws_lengths(options: CurriculumOptions, step: int, steps: int) -> bool:
    """Whether the lengths of this step are drawn."""
    return options.curriculum == "uniform" and step < options.curriculum_share * steps

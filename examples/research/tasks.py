"""The variants of a word problem as options, and tasks with shorter training rows."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from bedouin.tasks import (
    MQAR,
    BoundPermutations,
    Copying,
    ModularArithmetic,
    Parity,
    WordProblem,
)

Task = WordProblem | Copying | Parity | ModularArithmetic | BoundPermutations | MQAR


@dataclass(frozen=True, kw_only=True)
class WordOptions:
    """Options of the variants of a word problem."""

    elements: Literal["all", "swaps", "3-permutations"] = "all"
    """Elements that a word problem draws."""
    include_identity: bool = False
    """Whether swaps and 3-permutations include the identity, as published."""
    generators: int | None = None
    """Draw from a fixed random set of so many generators of the group."""
    generator_seed: int = 0
    """Which of these sets."""
    tokens_per_transition: int = 1
    """Tokens for each element of a word problem, all but the first being fillers."""
    label_at: Literal["transition", "every", "last"] = "transition"
    """Where a word problem has labels."""


def word_options(options: WordOptions) -> dict[str, Any]:
    """The variant as arguments of `WordProblem`."""
    return {name: getattr(options, name) for name in WordOptions.__dataclass_fields__}


def limited(task: Task, longest: int) -> Task:
    """The task with training rows up to a length."""
    if isinstance(task, Copying):
        return replace(task, min_length=min(task.min_length, longest), max_length=longest)
    if isinstance(task, BoundPermutations):
        least = min(task.min_operations, longest)
        return replace(task, min_operations=least, max_operations=longest)
    if isinstance(task, WordProblem | MQAR):
        return replace(task, length=longest)
    least = longest if task.min_length is None else min(task.min_length, longest)
    return replace(task, length=longest, min_length=least)

"""The tasks of `ensemble.py`, with every variant, and their training and test rows.

Letters: s seeds, b batch, t time, v classes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from bedouin.tasks import (
    IGNORE,
    MQAR,
    Batch,
    BoundPermutations,
    Copying,
    Group,
    ModularArithmetic,
    Parity,
    Stream,
    WordProblem,
    last_position_accuracy,
    scaled_accuracy,
    sequence_accuracy,
    stream,
    token_accuracy,
)
from flags import Count, Share, check_types, flag
from research.games import Chess

Task = WordProblem | Copying | Parity | ModularArithmetic | BoundPermutations | MQAR | Chess
Kind = Literal["none", "double", "quadruple"]
FACTORS = {"double": 2, "quadruple": 4}
"""By what a length that is learned is multiplied."""
Metric = Callable[[Tensor, Tensor, Tensor], Tensor]
Point = int | tuple[int, int]
"""What test rows have in common: their length, or numbers of definitions and of operations."""

DRAWN_AHEAD = 50
"""Number of batches drawn at once, because a draw takes dozens of launches."""


@dataclass(frozen=True, kw_only=True)
class CurriculumOptions:
    """Options of the lengths that a model is trained on."""

    curriculum: Kind = "none"
    """none: the task's own lengths; double, quadruple: --curriculum-from at first, two or four
    times as long after every log entry whose training accuracy reaches --curriculum-threshold."""
    curriculum_from: Count = 2  # Shortest length of a curriculum.
    curriculum_threshold: Share = 0.95
    """Training accuracy at which "double" and "quadruple" multiply the length."""

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class WordOptions:
    """Options of the variants of a word problem."""

    elements: Literal["all", "swaps", "3-permutations"] = "all"
    """Elements that a word problem draws."""
    include_identity: bool = False
    """Whether swaps and 3-permutations include the identity, as published."""
    generators: int | None = None
    """Draw from a fixed random set of so many generators of the group."""
    generator_seed: int = 0  # Which of these sets.
    tokens_per_transition: int = 1
    """Tokens for each element of a word problem, all but the first being fillers."""
    label_at: Literal["transition", "every", "last"] = "transition"
    """Where a word problem has labels."""


@dataclass(frozen=True, kw_only=True)
class TaskOptions(CurriculumOptions, WordOptions):
    """Options of the task, of which each task takes its own and refuses the others."""

    task: Literal["word", "copy", "parity", "arithmetic", "brackets", "bound", "mqar", "chess"] = (
        "word"
    )
    """A word problem, copying, parity, arithmetic modulo 5 without or with brackets, bound
    permutations, multi-query associative recall, or the boards of chess, whose --length is one of
    moves."""
    group: str = "A5"  # Group of the word problem and of bound permutations.
    length: int = 16  # Training length; the longest one of parity and arithmetic.
    curriculum_until: Share = 1.0
    """Share of the steps after which the longest length holds, learned or not."""
    min_length: int = 3  # Shortest training row of parity and arithmetic.
    eval_from: int | None = None
    """Shortest test row of parity and arithmetic, 40 as published; None: the length alone."""
    multiplication: bool = True  # Whether arithmetic draws products, with and without brackets.
    min_string: int = 4  # Shortest string to copy.
    max_string: int = 8  # Longest string to copy.
    context: int = 32  # Context of the copying task.
    min_definitions: int = 4  # Fewest bound names of bound permutations.
    max_definitions: int = 16  # Most bound names of bound permutations.
    max_operations: int = 32
    """Most operations of bound permutations, of which --curriculum-from is the smallest number."""
    eval_definitions: tuple[int, ...] = (16,)
    """Bound names of the test rows of bound permutations, one number for each --eval-lengths, which
    are numbers of operations; a single one is that of all."""
    vocabulary: int = 8192  # Tokens of associative recall.
    pairs: int = 32
    """Pairs of associative recall at --length; test rows have as many for each of their tokens."""
    games: Path = Path("runs/chess/games.npz")  # Games of chess, written by games.py.

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in sorted(set().union(*TAKEN.values()) - TAKEN[self.task]):
            default = getattr(TaskOptions, name)
            if getattr(self, name) != default:
                raise ValueError(
                    f"--task {self.task} takes no {flag(name)}: leave it at {default!r}, got "
                    f"{getattr(self, name)!r}"
                )


_LENGTHS = {"length", "min_length", "eval_from"}
TAKEN = {
    "word": {"group", "length", *WordOptions.__dataclass_fields__},
    "copy": {"min_string", "max_string", "context"},
    "parity": _LENGTHS,
    "arithmetic": _LENGTHS | {"multiplication"},
    "brackets": _LENGTHS | {"multiplication"},
    "bound": {
        *("group", "min_definitions", "max_definitions", "max_operations", "eval_definitions"),
    },
    "mqar": {"length", "vocabulary", "pairs"},
    "chess": {"length", "games"},
}
"""The options that each task takes."""


def make_task(options: TaskOptions) -> Task:
    """The task that the flags describe. Raises ValueError for flags that it does not take."""
    least = min(options.min_length, options.length)
    match options.task:
        case "word":
            group = Group.from_name(options.group)
            return WordProblem(group, options.length, **word_options(options))
        case "copy":
            return Copying(
                min_length=options.min_string,
                max_length=options.max_string,
                context_len=options.context,
            )
        case "parity":
            return Parity(options.length, least)
        case "arithmetic" | "brackets":
            return ModularArithmetic(
                brackets=options.task == "brackets",
                length=options.length,
                min_length=least,
                multiplication=options.multiplication,
            )
        case "bound":
            return BoundPermutations(
                Group.from_name(options.group),
                options.min_definitions,
                options.max_definitions,
                min(options.curriculum_from, options.max_operations),
                options.max_operations,
            )
        case "mqar":
            return MQAR(options.vocabulary, options.length, options.pairs)
        case "chess":
            return Chess(Path(options.games), options.length)


def metrics(task: Task) -> dict[str, Metric]:
    """The accuracies of a task by name, functions of logits (b, t, v), labels and tokens (b, t): of
    the labels and of whole rows; of word problems that of the last label; of bound permutations
    both are those of products, and "recall" is that of answers; of chess those of squares and of
    whole boards, and "last" is that of the last board; of parity and arithmetic that of
    the label on the scale of guessing, as the literature gives it."""
    if isinstance(task, BoundPermutations):
        return {
            "token": _of(token_accuracy, task.products),
            "sequence": _of(sequence_accuracy, task.products),
            "recall": _of(token_accuracy, task.answers),
        }
    if isinstance(task, Copying):
        return {"token": _of(task.character_accuracy), "sequence": _of(task.string_accuracy)}
    both = {"token": _of(token_accuracy), "sequence": _of(sequence_accuracy)}
    if isinstance(task, WordProblem):
        return {**both, "last": _of(last_position_accuracy)}
    if isinstance(task, Chess):
        return {**both, "last": _of(sequence_accuracy, _last_board)}
    if isinstance(task, MQAR):
        return both
    return {**both, "scaled": _of(partial(scaled_accuracy, chance=task.chance))}


def _of(
    accuracy: Callable[[Tensor, Tensor], Tensor],
    chosen: Callable[[Tensor, Tensor], Tensor] = lambda labels, tokens: labels,
) -> Metric:
    """The accuracy of the labels that `chosen` leaves."""
    return lambda logits, labels, tokens: accuracy(logits, chosen(labels, tokens))


def _last_board(labels: Tensor, tokens: Tensor) -> Tensor:  # (b, t, 64) -> (b, t, 64)
    return pad(labels[:, -1:], (0, 0, labels.shape[1] - 1, 0), value=IGNORE)


def predictions(task: Task, logits: Tensor) -> Tensor:  # (b, t, v) -> (..., classes)
    """The logits of each label: those of a token, or of chess of every square after a move."""
    return task.by_square(logits) if isinstance(task, Chess) else logits


def longest_length(task: Task) -> int:
    """The longest training length."""
    if isinstance(task, BoundPermutations):
        return task.max_operations
    return task.max_length if isinstance(task, Copying) else task.length


def eval_points(options: TaskOptions, lengths: Sequence[int]) -> list[Point]:
    """The test lengths of a task. Raises ValueError unless there are as many --eval-definitions as
    --eval-lengths, or one."""
    if options.task != "bound":
        return list(lengths)
    definitions = options.eval_definitions
    if len(definitions) == 1:
        definitions *= len(lengths)
    if len(definitions) != len(lengths):
        raise ValueError(
            f"--eval-definitions must be one number or {len(lengths)}, as many as --eval-lengths, "
            f"got {options.eval_definitions}"
        )
    return list(zip(definitions, lengths, strict=True))


class Data:
    """Training and test rows for all seeds: tokens and labels (s, b, t)."""

    def __init__(self, options: TaskOptions, seeds: range, device: torch.device) -> None:
        self.options, self.task = options, make_task(options)
        if options.curriculum != "none" and options.task in ("mqar", "chess"):
            raise ValueError(
                f"--curriculum must be none for --task {options.task}: rows have one length"
            )
        self.longest = longest_length(self.task)
        first = first_length(options, self.longest)
        try:
            limited(self.task, first)
        except ValueError as error:
            raise ValueError(
                f"--curriculum-from must be a length of --task {options.task}, got {first}: {error}"
            ) from error
        self.reached = [first] * len(seeds)
        """The longest training length of each seed so far."""
        self.passed = [0] * len(seeds)
        """The longest training length of each seed at which its accuracy was that of
        --curriculum-threshold."""
        self.train = [stream("train", seed, device) for seed in seeds]
        self.test = [stream("test", seed, device) for seed in seeds]
        empty = self.task.sample(0, stream("train", 0))
        self.width = empty.tokens.shape[1]

    def batch(self, size: int, step: int, steps: int) -> tuple[Tensor, Tensor]:
        """Rows of a training step, filled up to the same number of tokens at every step."""
        if step >= self.options.curriculum_until * steps:
            self.reached = [self.longest] * len(self.reached)
        pairs = zip(self.reached, self.train, strict=True)
        rows = [self._train_rows(size, *pair) for pair in pairs]
        return torch.stack([r.tokens for r in rows]), torch.stack([r.labels for r in rows])

    def _train_rows(self, size: int, longest: int, source: Stream) -> Batch:
        task = self.task if longest == self.longest else limited(self.task, longest)
        tokens, labels = task.sample(size, source)
        missing = self.width - tokens.shape[1]
        return Batch(pad(tokens, (0, missing)), pad(labels, (0, missing), value=IGNORE))

    def batches(self, size: int, steps: int, ahead: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless batches, `ahead` of them drawn at once; a longer length comes into effect at the
        next draw."""
        step = 0
        while True:
            tokens, labels = self.batch(size * ahead, step, steps)
            yield from zip(tokens.split(size, 1), labels.split(size, 1), strict=True)
            step += ahead

    def advance(self, accuracy: list[float]) -> None:
        """Let the lengths grow after the training accuracies of the seeds."""
        self.passed = [
            max(passed, reached) if value >= self.options.curriculum_threshold else passed
            for passed, reached, value in zip(self.passed, self.reached, accuracy, strict=True)
        ]
        self.reached = [
            next_length(self.options, reached, self.longest, value)
            for reached, value in zip(self.reached, accuracy, strict=True)
        ]

    def eval_batch(self, size: int, point: Point) -> tuple[Tensor, Tensor]:
        """Test rows of one length, or from `eval_from` to it."""
        rows = [self._test_rows(size, point, source) for source in self.test]
        return torch.stack([r.tokens for r in rows]), torch.stack([r.labels for r in rows])

    def _test_rows(self, size: int, point: Point, source: Stream) -> Batch:
        if isinstance(self.task, BoundPermutations):
            assert isinstance(point, tuple)
            return self.task.sample(size, source, definitions=point[0], operations=point[1])
        assert isinstance(point, int)
        return self._rows_of_length(self.task, size, point, source)

    def _rows_of_length(
        self,
        task: WordProblem | Copying | Parity | ModularArithmetic | MQAR | Chess,
        size: int,
        length: int,
        source: Stream,
    ) -> Batch:
        if isinstance(task, MQAR):
            pairs = task.num_pairs * length // task.length
            return task.sample(size, source, length=length, num_pairs=pairs)
        if isinstance(task, Copying | WordProblem | Chess) or self.options.eval_from is None:
            return task.sample(size, source, length=length)
        least = min(self.options.eval_from, length)
        return replace(task, length=length, min_length=least).sample(size, source)


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
    if isinstance(task, WordProblem | MQAR | Chess):
        return replace(task, length=longest)
    least = longest if task.min_length is None else min(task.min_length, longest)
    return replace(task, length=longest, min_length=least)


def first_length(options: CurriculumOptions, longest: int) -> int:
    """The longest length at the first step. Raises ValueError if the curriculum starts above
    `longest`."""
    if options.curriculum != "none" and options.curriculum_from > longest:
        raise ValueError(
            f"--curriculum-from must be at most the training length {longest}, got "
            f"{options.curriculum_from}"
        )
    return options.curriculum_from if options.curriculum != "none" else longest


def next_length(options: CurriculumOptions, reached: int, longest: int, accuracy: float) -> int:
    """The longest length after an accuracy at training lengths up to `reached`."""
    passed = accuracy >= options.curriculum_threshold
    return min(FACTORS.get(options.curriculum, 1) * reached, longest) if passed else reached

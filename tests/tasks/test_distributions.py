"""What each task draws, and what is its own; rows and labels are judged in test_tasks.py."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
from tests.tasks.rows import is_uniform, left_part, read

from bedouin.tasks import (
    IGNORE,
    MQAR,
    BoundPermutations,
    Copying,
    Group,
    ModularArithmetic,
    Parity,
    WordProblem,
    cyclic,
    stream,
    symmetric,
)

A5, S5 = Group.from_name("A5"), symmetric(5)


@pytest.mark.parametrize(
    ("task", "padding", "possible"),
    [
        (Parity(length=6, min_length=3), 2, {3, 4, 5, 6}),
        (ModularArithmetic(length=9, min_length=3), 9, {4, 6, 8}),
        (ModularArithmetic(brackets=True, length=6, min_length=3), 11, {3, 4, 5, 6}),
    ],
)
def test_lengths_are_uniform(task: Any, padding: int, possible: set[int]) -> None:
    rows = 10_000
    tokens = task.sample(rows, stream("train", 0)).tokens
    assert tokens.shape == (rows, max(possible))
    lengths = Counter((tokens != padding).sum(-1).tolist())
    assert set(lengths) == possible and is_uniform(lengths.values(), rows / len(possible))


def test_bits_of_parity_are_uniform() -> None:
    for column in Parity(6, 3).sample(20_000, stream("train", 0)).tokens.T[:2]:
        assert is_uniform(column.bincount().tolist(), 10_000)


# -- word problems


@pytest.mark.parametrize(
    "options",
    [
        *({"label_at": "last"}, {"protocol": "official"}, {"tokens_per_transition": 2}),
        {"tokens_per_transition": 3, "label_at": "every"},
    ],
    ids=str,
)
def test_options_of_the_format_change_no_element(options: dict[str, Any]) -> None:
    plain, other = (WordProblem(A5, 6, **of) for of in ({}, options))
    elements, products = plain.sample(8, stream("train", 0))
    tokens, labels = other.sample(8, stream("train", 0))
    begin = int(other.protocol == "official")
    assert torch.equal(tokens[:, begin :: other.tokens_per_transition], elements)
    assert torch.equal(labels[:, -1], products[:, -1])


@pytest.mark.parametrize(
    ("task", "size", "moved"),
    [
        (WordProblem(S5, 12), 120, {0, 2, 3, 4, 5}),
        (WordProblem(S5, 12, "swaps"), 10, {2}),
        (WordProblem(S5, 12, "3-permutations"), 30, {2, 3}),
        (WordProblem(A5, 12, "3-permutations"), 20, {3}),
        (WordProblem(S5, 12, "swaps", include_identity=True), 11, {0, 2}),
        (WordProblem(S5, 12, "3-permutations", include_identity=True), 31, {0, 2, 3}),
        (WordProblem(A5, 40, generators=12, label_at="last"), 12, None),
        (WordProblem(S5, 40, generators=32, label_at="last"), 32, None),
    ],
)
def test_only_the_chosen_elements_are_drawn(
    task: WordProblem, size: int, moved: set[int] | None
) -> None:
    tokens, labels = task.sample(1000, stream("test", 0))
    assert len(task.alphabet) == size and set(tokens.flatten().tolist()) == set(task.alphabet)
    assert moved in (None, {task.group.num_moved[g] for g in task.alphabet})
    assert len(labels[labels != IGNORE].unique()) == task.group.order


def test_the_seed_chooses_the_generators() -> None:
    first, second = (WordProblem(A5, generators=12, generator_seed=seed) for seed in (0, 1))
    assert first.alphabet == WordProblem(A5, generators=12).alphabet
    assert first.alphabet != second.alphabet


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_split_is_uniform_over_its_rows(split: Any) -> None:
    task, draws = WordProblem(cyclic(5), length=3), 40_000
    counts = Counter(map(tuple, task.sample(draws, stream(split, 1)).tokens.tolist()))
    expected, freedom = draws / len(counts), len(counts) - 1
    chi_square = sum((n - expected) ** 2 / expected for n in counts.values())
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_every_position_sees_every_element() -> None:
    tokens, labels = WordProblem(A5, length=6).sample(20_000, stream("train", 0))
    for column in (*tokens.T, *labels.T):
        assert is_uniform(column.bincount(minlength=60).tolist(), 20_000 / 60)


# -- arithmetic


def test_left_parts_digits_and_operators_are_uniform() -> None:
    rows = 20_000
    task = ModularArithmetic(brackets=True, length=10)
    texts = task.decode(task.sample(rows, stream("train", 0)).tokens)
    left = Counter(len(left_part(text)) for text in texts)
    operators = Counter(text[1 + len(left_part(text))] for text in texts)
    digits = Counter(text.strip("(-")[0] for text in texts)
    assert set(left) == {1, 2, 3, 4, 5}
    for counts, values in ((left, 5), (operators, 3), (digits, 5)):
        assert len(counts) == values and is_uniform(counts.values(), rows / values)


# -- copying


def test_lengths_and_letters_of_strings_are_uniform() -> None:
    task = Copying(context_len=19, min_length=4, max_length=8)
    rows = task.decode(task.sample(20_000, stream("train", 0)).tokens)
    firsts = [found[1] for row in rows if (found := re.match(r"\$([a-z]+)\|", row))]
    lengths = Counter(map(len, firsts))
    assert set(lengths) == {4, 5, 6, 7, 8} and is_uniform(lengths.values(), 4000)
    for letters in (Counter(s[0] for s in firsts), Counter(s[-1] for s in firsts)):
        assert len(letters) == 26 and is_uniform(letters.values(), 20_000 / 26)


def strings_of(task: Copying, split: Any, length: int) -> set[str]:
    packed = task.decode(task.sample(3000, stream(split, 0)).tokens)
    single = task.decode(task.sample(3000, stream(split, 1), length=length).tokens)
    return {s for row in packed + single for s in re.findall(r"\$([a-z]+)\|", row)}


@pytest.mark.parametrize("length", [1, 2, 4])
def test_no_string_is_in_both_splits(length: int) -> None:
    """Packed rows and evaluation rows follow the same rule."""
    task = Copying(min_length=1, max_length=4, num_letters=4)
    train, test = (strings_of(task, split, length) for split in ("train", "test"))
    assert not train & test
    at_length = {s for s in train | test if len(s) == length}
    assert len(at_length) == 4**length
    assert sum(s in test for s in at_length) == 4 ** (length - 1)


def test_accuracies_of_copies_count_letters_only() -> None:
    task = Copying()
    _, labels = task.sample(4, stream("test", 0), length=5)
    predicted = labels.clamp(min=0)
    predicted[labels == task.symbols.index(".")] = 0  # a wrong final `.` does not count
    assert (
        task.character_accuracy(predicted, labels) == task.string_accuracy(predicted, labels) == 1
    )
    predicted[0, 6] = (predicted[0, 6] + 1) % 26
    logits = torch.nn.functional.one_hot(predicted, task.output_size).float()
    for prediction in (predicted, logits):
        assert task.character_accuracy(prediction, labels).item() == pytest.approx(19 / 20)
        assert task.string_accuracy(prediction, labels).item() == pytest.approx(3 / 4)


def test_symbols() -> None:
    assert Copying().symbols == "abcdefghijklmnopqrstuvwxyz$|.*"
    assert Copying(num_letters=3).symbols == "abc$|.*"
    assert re.fullmatch("[a-z. ]*", Copying().decode(Copying().sample(1, stream("all", 0))[1])[0])
    assert "".join(ModularArithmetic().symbols) == "01234+-*=_"
    assert "".join(ModularArithmetic(brackets=True).symbols) == "01234+-*()=_"


# -- recall


def test_queries_of_the_first_keys_come_soon() -> None:
    """The first key's distance has the probabilities of the power law."""
    task, rows = MQAR(64, 24, 2), 20_000
    tokens, labels = task.sample(rows, stream("train", 0))
    asked = (labels != IGNORE) & (tokens == tokens[:, :1])
    gap = (asked.int().argmax(-1) - 4) // 2
    weight = torch.arange(1, 11) ** (task.power - 1)
    expected = rows * weight / weight.sum()
    counts = gap.bincount(minlength=10)
    assert ((counts - expected).abs() < 5 * expected.sqrt()).all()


def test_kinds_names_and_elements_have_their_shares() -> None:
    task, rows = BoundPermutations(Group.from_name("S3"), 4, 7, 8, 8), 4000
    tokens, labels = task.sample(rows, stream("train", 0))
    rebinds, asks, uses = (int((tokens == 32 + i).sum()) for i in range(3))
    total = 8 * rows
    assert rebinds + asks + uses == total
    for number, share in ((rebinds, 0.1), (asks, 0.1), (uses, 0.8)):
        assert abs(number - share * total) < 5 * (share * (1 - share) * total) ** 0.5
    definitions = torch.tensor([read(row, task.group)[0] for row in tokens.tolist()])
    for values, kinds in ((definitions - 4, 4), (tokens[:, 0], 26), (tokens[:, 1] - 26, 6)):
        counts = values.bincount(minlength=kinds)
        assert len(counts) == kinds and is_uniform(counts.tolist(), rows / kinds)
    products, answers = task.products(labels, tokens), task.answers(labels, tokens)
    assert (products != IGNORE).sum() == uses and (answers != IGNORE).sum() == asks
    assert torch.equal(torch.where(products != IGNORE, products, answers), labels)


def test_numbers_of_the_call() -> None:
    tokens, labels = MQAR().sample(2, stream("test", 0), length=512, num_pairs=64)
    assert tokens.shape == (2, 512) and ((labels != IGNORE).sum(-1) == 64).all()
    task = BoundPermutations()
    tokens, labels = task.sample(5, stream("test", 0), definitions=24, operations=128)
    assert tokens.shape == (5, 2 * 24 + 3 * 128)
    for row, expected in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert read(row, task.group) == (24, 128, expected)

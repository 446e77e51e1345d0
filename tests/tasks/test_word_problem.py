"""Word problems: the rows of the docstring, what is drawn, and where labels stand."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tasks.rows import is_uniform

from bedouin.tasks import IGNORE, Batch, Group, WordProblem, cyclic, stream, symmetric

A5, S5 = Group.from_name("A5"), symmetric(5)


@pytest.mark.parametrize(
    ("options", "row", "labels"),
    [
        ({}, "3 0 4 1 1 2", "3 3 2 3 4 1"),
        ({"tokens_per_transition": 2}, "3 5 0 5 4 5 1 5 1 5 2 5", ". 3 . 3 . 2 . 3 . 4 . 1"),
        (
            {"tokens_per_transition": 2, "label_at": "every"},
            "3 5 0 5 4 5 1 5 1 5 2 5",
            "0 3 3 3 3 2 2 3 3 4 4 1",
        ),
        (
            {"tokens_per_transition": 2, "label_at": "last"},
            "3 5 0 5 4 5 1 5 1 5 2 5",
            ". . . . . . . . . . . 1",
        ),
        ({"protocol": "official"}, "6 3 0 4 1 1 2", "6 3 3 2 3 4 1"),
    ],
)
def test_the_rows_of_the_docstring(options: dict[str, Any], row: str, labels: str) -> None:
    elements = torch.tensor([[3, 0, 4, 1, 1, 2]])
    task = WordProblem(cyclic(5), 6, **options)
    found = task._add_specials(elements, task.group.prefix_products(elements))
    assert found.tokens.tolist() == [[int(v) for v in row.split()]]
    assert found.labels.tolist() == [[IGNORE if v == "." else int(v) for v in labels.split()]]
    for line in (row, labels):
        assert line in (WordProblem.__doc__ or "")


def test_fillers_and_bos_are_added_to_the_plain_rows() -> None:
    def sample(**options: Any) -> Batch:
        return WordProblem(cyclic(5), length=6, **options).sample(8, stream("train", 0))

    plain, filled, official = sample(), sample(tokens_per_transition=2), sample(protocol="official")
    assert torch.equal(filled.tokens[:, ::2], plain.tokens)
    assert torch.equal(filled.labels[:, 1::2], plain.labels)
    for full, row in zip(official, plain, strict=True):
        assert torch.equal(full[:, 1:], row)


@settings(max_examples=30)
@given(st.sampled_from(["transition", "every", "last"]), st.integers(1, 3), st.integers(1, 9))
def test_where_labels_stand_changes_no_token_and_no_last_label(
    label_at: Any, r: int, t: int
) -> None:
    plain = WordProblem(A5, t, tokens_per_transition=r).sample(4, stream("test", 0))
    other = WordProblem(A5, t, tokens_per_transition=r, label_at=label_at)
    tokens, labels = other.sample(4, stream("test", 0))
    assert torch.equal(tokens, plain.tokens)
    assert torch.equal(labels[:, -1], plain.labels[:, -1])


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
        (WordProblem(S5, 40, generators=8, label_at="last"), 8, None),
        (WordProblem(S5, 40, generators=32, label_at="last"), 32, None),
    ],
)
def test_only_the_chosen_elements_are_drawn(
    task: WordProblem, size: int, moved: set[int] | None
) -> None:
    tokens, labels = task.sample(1000, stream("test", 0))
    assert len(task.alphabet) == size and set(tokens.flatten().tolist()) == set(task.alphabet)
    if moved is not None:
        assert {task.group.num_moved[g] for g in task.alphabet} == moved
    assert len(labels[labels != IGNORE].unique()) == task.group.order


def test_the_seed_chooses_the_generators() -> None:
    first, second = (WordProblem(A5, generators=12, generator_seed=seed) for seed in (0, 1))
    assert first.alphabet == WordProblem(A5, generators=12).alphabet
    assert first.alphabet != second.alphabet


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_split_is_uniform_over_its_rows(split: Any) -> None:
    task = WordProblem(cyclic(5), length=3)
    draws = 40_000
    counts = Counter(map(tuple, task.sample(draws, stream(split, 1)).tokens.tolist()))
    expected = draws / len(counts)
    chi_square = sum((n - expected) ** 2 / expected for n in counts.values())
    freedom = len(counts) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_every_position_sees_every_element() -> None:
    tokens, labels = WordProblem(A5, length=6).sample(20_000, stream("train", 0))
    for column in (*tokens.T, *labels.T):
        assert is_uniform(column.bincount(minlength=60).tolist(), 20_000 / 60)

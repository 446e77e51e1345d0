"""Word problem rows: label law, variants, splits, protocols, messages."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bedouin.tasks import IGNORE, Batch, Group, WordProblem, cyclic, stream, symmetric

A5 = Group.from_name("A5")


def rows_of(tokens: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(row) for row in tokens.tolist()}


@given(
    st.sampled_from(["S3", "A5", "Z7", "D4", "A4xZ5"]),
    st.integers(0, 5),
    st.integers(1, 20),
    st.integers(0, 99),
)
def test_labels_are_prefix_products(name: str, b: int, t: int, seed: int) -> None:
    task = WordProblem(Group.from_name(name), length=t)
    tokens, labels = task.sample(b, stream("train", seed))
    assert tokens.shape == labels.shape == (b, t)
    assert tokens.dtype == labels.dtype == torch.int64
    running = torch.zeros(b, dtype=torch.int64)
    for step in range(t):
        running = task.group.table[running, tokens[:, step]]
        assert torch.equal(labels[:, step], running)


def test_the_rows_of_the_docstring() -> None:
    elements = torch.tensor([[3, 0, 4, 1, 1, 2]])
    products = cyclic(5).prefix_products(elements)
    assert products.tolist() == [[3, 3, 2, 3, 4, 1]]


def test_fillers_and_bos_are_added_to_the_plain_rows() -> None:
    def sample(**options: Any) -> Batch:
        return WordProblem(cyclic(5), length=6, **options).sample(8, stream("train", 0))

    plain, filled, official = sample(), sample(tokens_per_transition=2), sample(protocol="official")
    assert torch.equal(filled.tokens[:, ::2], plain.tokens)
    assert torch.equal(filled.labels[:, 1::2], plain.labels)
    assert bool((filled.tokens[:, 1::2] == 5).all() and (filled.labels[:, ::2] == IGNORE).all())
    for full, row in zip(official, plain, strict=True):
        assert torch.equal(full[:, 1:], row) and bool((full[:, 0] == 6).all())


def test_sizes() -> None:
    plain = WordProblem(A5)
    filled = WordProblem(A5, tokens_per_transition=4)
    official = WordProblem(A5, protocol="official")
    assert (plain.vocab_size, plain.output_size) == (60, 60)
    assert (filled.vocab_size, filled.output_size) == (61, 60)
    assert (official.vocab_size, official.output_size) == (67, 67)
    assert plain.chance == filled.chance == official.chance == 1 / 60


def test_equal_seeds_give_equal_batches() -> None:
    task = WordProblem(A5, length=8)
    first, second = (task.sample(16, stream("train", 5)) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens)
    assert not torch.equal(first.tokens, task.sample(16, stream("train", 6)).tokens)


@pytest.mark.parametrize(
    ("elements", "moved"), [("swaps", {2}), ("3-permutations", {2, 3}), ("all", {0, 2, 3, 4, 5})]
)
def test_only_the_chosen_elements_are_drawn(elements: Any, moved: set[int]) -> None:
    task = WordProblem(symmetric(5), length=12, elements=elements)
    tokens, labels = task.sample(200, stream("train", 0))
    drawn = set(tokens.flatten().tolist())
    assert drawn == set(task.alphabet)
    assert {task.group.num_moved[g] for g in drawn} == moved
    assert len(set(labels.flatten().tolist())) == 120
    assert task.vocab_size == 120


def test_alphabet_sizes() -> None:
    assert len(WordProblem(symmetric(5), elements="swaps").alphabet) == 10
    assert len(WordProblem(symmetric(5), elements="3-permutations").alphabet) == 30
    assert len(WordProblem(A5, elements="3-permutations").alphabet) == 20


def test_length_of_the_call() -> None:
    task = WordProblem(A5, length=6, tokens_per_transition=3)
    assert task.sample(2, stream("test", 0)).tokens.shape == (2, 18)
    assert task.sample(2, stream("test", 0), length=11).tokens.shape == (2, 33)


def test_splits_share_the_whole_space() -> None:
    task = WordProblem(cyclic(5), length=3)
    train = rows_of(task.sample(4000, stream("train", 0)).tokens)
    test = rows_of(task.sample(4000, stream("test", 0)).tokens)
    assert (len(train), len(test)) == (100, 25)
    assert not train & test
    assert len(rows_of(task.sample(4000, torch.Generator().manual_seed(0)).tokens)) == 125


@given(
    st.sampled_from(["Z2", "S3", "A5", "S5"]),
    st.integers(1, 4),
    st.integers(0, 999),
    st.integers(0, 999),
)
def test_no_row_is_in_both_splits(name: str, t: int, seed: int, other: int) -> None:
    task = WordProblem(Group.from_name(name), length=t)
    train = rows_of(task.sample(1000, stream("train", seed)).tokens)
    test = rows_of(task.sample(1000, stream("test", other)).tokens)
    assert not train & test


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
        counts = column.bincount(minlength=60).float()
        assert counts.min() > 20_000 / 60 - 5 * (20_000 / 60) ** 0.5
        assert counts.max() < 20_000 / 60 + 5 * (20_000 / 60) ** 0.5


def test_device_of_the_result() -> None:
    task = WordProblem(A5, length=4)
    moved = task.sample(2, stream("train", 0), device="meta")
    assert moved.tokens.device.type == moved.labels.device.type == "meta"


@pytest.mark.gpu
def test_batches_are_made_on_the_gpu(
    no_synchronization: Callable[[], AbstractContextManager[None]],
) -> None:
    task = WordProblem(A5, length=9)
    generator = stream("train", 0, "cuda")
    task.sample(2, generator)  # the first call copies the table to the device
    with no_synchronization():
        tokens, labels = task.sample(64, generator)
    assert tokens.is_cuda
    assert torch.equal(labels.cpu(), task.group.prefix_products(tokens.cpu()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"tokens_per_transition": 0}, "tokens_per_transition must be at least 1, got 0"),
        ({"elements": "some"}, r"elements must be one of \('all', 'swaps', .*got 'some'"),
        ({"protocol": "mine"}, r"protocol must be one of \('plain', 'official'\), got 'mine'"),
        ({"elements": "swaps"}, 'at least two elements of A5 .* got 0: use elements="all"'),
        ({"group": cyclic(1)}, "at least two elements of Z1"),
        ({"protocol": "official", "tokens_per_transition": 2}, "no fillers, got 2"),
    ],
)
def test_bad_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WordProblem(**{"group": A5, **fields})


def test_a_name_is_no_group() -> None:
    with pytest.raises(TypeError, match="group must be a Group, got 'A5'.*Group.from_name"):
        WordProblem("A5")  # type: ignore[arg-type]


def test_bad_calls() -> None:
    task = WordProblem(A5)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        task.sample(2, stream("train", 0), length=0)
    with pytest.raises(ValueError, match="batch_size must be at least 0, got -1"):
        task.sample(-1, stream("train", 0))
    with pytest.raises(ValueError, match="split must be that of the stream"):
        task.sample(1, stream("train", 0), split="test")


@pytest.mark.parametrize("name", ["length", "tokens_per_transition"])
@pytest.mark.parametrize("value", [True, 2.0, "2", None])
def test_fields_of_wrong_types(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an int, got {value!r}"):
        WordProblem(A5, **{name: value})


def test_samples_of_wrong_types() -> None:
    task = WordProblem(A5)
    with pytest.raises(TypeError, match=r"batch_size must be an int, got 2\.0"):
        task.sample(2.0, stream("train", 0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="length must be an int, got True"):
        task.sample(1, stream("train", 0), length=True)
    with pytest.raises(TypeError, match="generator must be a torch.Generator, got 0"):
        task.sample(1, 0)  # type: ignore[arg-type]

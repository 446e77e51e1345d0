"""Bound permutations: rows read token by token, splits, ranges, messages."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bedouin.tasks import IGNORE, BoundPermutations, Group, stream


def read(row: list[int], group: Group) -> tuple[int, int, list[int]]:
    """The numbers of definitions and operations of a row, and its labels; raises AssertionError
    for a row that breaks the grammar."""
    n, permutations = group.order, group.permutations
    rebind, ask, use, padding = (26 + n + i for i in range(4))
    tokens = row[: row.index(padding)] if padding in row else row
    assert set(row[len(tokens) :]) <= {padding}
    bound: dict[int, int] = {}
    labels: list[int] = []
    place = 0

    def element() -> int:
        assert 26 <= tokens[place] < 26 + n
        return tokens[place] - 26

    while place + 1 < len(tokens) and tokens[place] < 26 and tokens[place + 1] != use:
        name = tokens[place]
        assert name not in bound
        place += 1
        bound[name] = element()
        place += 1
        labels += [IGNORE] * 2
    definitions, operations, product = len(bound), 0, permutations[0]
    while place < len(tokens):
        operations += 1
        if tokens[place] == rebind:
            name = tokens[place + 1]
            assert name in bound
            place += 2
            bound[name] = element()
            place += 1
            labels += [IGNORE] * 3
        elif tokens[place] == ask:
            labels += [IGNORE, bound[tokens[place + 1]]]
            place += 2
        else:
            assert tokens[place + 1] == use
            g = permutations[bound[tokens[place]]]
            product = tuple(g[i] for i in product)  # first the product, then g
            labels += [IGNORE, permutations.index(product)]
            place += 2
    assert len(labels) == len(tokens)
    return definitions, operations, labels + [IGNORE] * (len(row) - len(tokens))


@settings(max_examples=40)
@given(
    st.sampled_from(["S3", "A4", "Z7"]),
    *(st.integers(1, 6), st.integers(0, 20), st.integers(1, 9), st.integers(0, 9)),
    *(st.integers(0, 5), st.integers(0, 99), st.sampled_from(["train", "test"])),
)
def test_labels_are_what_reading_the_row_gives(
    name: str, m: int, more: int, least: int, longer: int, b: int, seed: int, split: Any
) -> None:
    task = BoundPermutations(Group.from_name(name), m, m + more, least, least + longer)
    tokens, labels = task.sample(b, stream(split, seed))
    assert tokens.shape == labels.shape == (b, 2 * (m + more) + 3 * (least + longer))
    assert tokens.dtype == labels.dtype == torch.int64
    for row, expected in zip(tokens.tolist(), labels.tolist(), strict=True):
        definitions, operations, found = read(row, task.group)
        assert m <= definitions <= m + more and least <= operations <= least + longer
        assert found == expected


def test_numbers_of_the_call() -> None:
    task = BoundPermutations()
    tokens, _ = task.sample(5, stream("test", 0), definitions=24, operations=128)
    assert tokens.shape == (5, 2 * 24 + 3 * 128)
    for row in tokens.tolist():
        assert read(row, task.group)[:2] == (24, 128)


def test_the_row_of_the_docstring() -> None:
    """`read`, which the other tests compare with, gives its labels."""
    lines = (BoundPermutations.__doc__ or "").splitlines()
    (row,) = (line.removeprefix("        tokens  ") for line in lines if "tokens  a" in line)
    (shown,) = (line.removeprefix("        labels  ") for line in lines if "labels  " in line)
    ids = {"!": 31, "?": 32, ".": 33, "*": 34}
    tokens = [
        ids.get(v, ord(v) - ord("a") if v.isalpha() else 26 + ord(v) - ord("0"))
        for v in row.split()
    ]
    definitions, operations, labels = read(tokens, Group.from_name("Z5"))
    assert (definitions, operations) == (2, 5)
    assert {i: str(v) for i, v in enumerate(labels) if v != IGNORE} == {
        i // 2: v for i, v in enumerate(shown) if v != " "
    }


def test_kinds_names_and_elements_have_their_shares() -> None:
    task, rows = BoundPermutations(Group.from_name("S3"), 4, 7, 8, 8), 4000
    tokens, labels = task.sample(rows, stream("train", 0))
    rebinds, asks, uses = ((tokens == 32 + i).sum().item() for i in range(3))
    total = 8 * rows
    assert rebinds + asks + uses == total
    for number, share in ((rebinds, 0.1), (asks, 0.1), (uses, 0.8)):
        assert abs(number - share * total) < 5 * (share * (1 - share) * total) ** 0.5
    definitions = torch.tensor([read(row, task.group)[0] for row in tokens.tolist()])
    counts = definitions.bincount(minlength=8)[4:]
    assert (counts - rows / 4).abs().max() < 5 * (rows / 4) ** 0.5
    for column, least, kinds in ((0, 0, 26), (1, 26, 6)):
        counts = (tokens[:, column] - least).bincount(minlength=kinds)
        assert len(counts) == kinds
        assert (counts - rows / kinds).abs().max() < 5 * (rows / kinds) ** 0.5
    products, answers = task.products(labels, tokens), task.answers(labels, tokens)
    assert (products != IGNORE).sum() == uses and (answers != IGNORE).sum() == asks
    assert torch.equal(torch.where(products != IGNORE, products, answers), labels)


def test_no_row_is_in_both_splits_whatever_the_padding() -> None:
    group = Group.from_name("Z2")
    tasks = BoundPermutations(group, 1, 1, 1, 1), BoundPermutations(group, 1, 3, 1, 3)

    def drawn(task: BoundPermutations, split: Any) -> set[tuple[int, ...]]:
        rows = task.sample(6000, stream(split, 0)).tokens.tolist()
        return {tuple(v for v in row if v != 31) for row in rows}

    train = drawn(tasks[1], "train")
    for task in tasks:
        assert not train & drawn(task, "test")
    short = {row for row in train if len(row) == 4 and row[2] == row[0]}
    test = drawn(tasks[0], "test")
    assert {row[0] for row in test} == {row[0] for row in short} == set(range(26))


def test_sizes_and_device() -> None:
    task = BoundPermutations()
    assert (task.group.order, task.vocab_size, task.output_size) == (60, 90, 60)
    assert task.sample(2, stream("train", 0)).tokens.shape == (2, 128)
    moved = task.sample(2, stream("train", 0), device="meta")
    assert moved.tokens.device.type == moved.labels.device.type == "meta"


@pytest.mark.gpu
def test_rows_are_made_on_the_gpu_without_waiting(
    no_synchronization: Callable[[], AbstractContextManager[None]],
) -> None:
    task, generator = BoundPermutations(), stream("train", 0, "cuda")
    task.sample(1, generator)  # copies the group's table to the GPU
    with no_synchronization():
        tokens, labels = task.sample(64, generator)
    assert tokens.is_cuda
    for row, expected in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert read(row, task.group)[2] == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group": Group.from_name("Z1")}, "group must have at least two elements, got Z1"),
        ({"min_definitions": 0}, r"min_definitions must be in \[1, 17\), got 0"),
        ({"min_definitions": 17}, r"min_definitions must be in \[1, 17\), got 17"),
        ({"max_definitions": 27}, r"max_definitions must be in \[1, 27\), got 27"),
        ({"min_operations": 33}, r"min_operations must be in \[1, 33\), got 33"),
        ({"max_operations": 0}, "max_operations must be at least 1, got 0"),
    ],
)
def test_bad_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BoundPermutations(**fields)


def test_bad_calls() -> None:
    task = BoundPermutations()
    with pytest.raises(TypeError, match="group must be a Group, got 'A5'"):
        BoundPermutations("A5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"definitions must be in \[1, 27\), got 27"):
        task.sample(1, stream("train", 0), definitions=27)
    with pytest.raises(ValueError, match="operations must be at least 1, got 0"):
        task.sample(1, stream("train", 0), operations=0)
    with pytest.raises(ValueError, match="batch_size must be at least 0, got -1"):
        task.sample(-1, stream("train", 0))
    with pytest.raises(ValueError, match="split must be that of the stream"):
        task.sample(1, stream("train", 0), split="test")

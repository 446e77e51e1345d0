"""Associative recall rows: grammar, distances, splits, messages."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bedouin.tasks import IGNORE, MQAR, stream


@settings(max_examples=30)
@given(
    *(st.integers(1, 6), st.integers(0, 10), st.integers(7, 40)),
    *(st.integers(0, 5), st.integers(0, 99), st.sampled_from(["train", "test"])),
)
def test_a_label_is_the_value_of_its_key(
    r: int, more: int, half: int, b: int, seed: int, split: Any
) -> None:
    task = MQAR(2 * half, 4 * r + 2 * more, r)
    tokens, labels = task.sample(b, stream(split, seed))
    assert tokens.shape == labels.shape == (b, 4 * r + 2 * more)
    assert tokens.dtype == labels.dtype == torch.int64
    for row, answer in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert all(0 <= token < 2 * half for token in row)
        value = dict(zip(row[: 2 * r : 2], row[1 : 2 * r : 2], strict=True))
        assert len(value) == r and all(1 <= key < half for key in value)
        assert all(half <= v for v in value.values())
        assert len(set(list(value.values())[:-1])) == r - 1
        asked = [place for place, label in enumerate(answer) if label != IGNORE]
        assert all(place >= 2 * r and place % 2 == 0 for place in asked)
        assert sorted(row[place] for place in asked) == sorted(value)
        assert [answer[place] for place in asked] == [value[row[place]] for place in asked]


def test_the_row_of_the_docstring() -> None:
    lines = (MQAR.__doc__ or "").splitlines()
    (row,) = (v.partition("tokens  ")[2] for v in lines if "tokens  2" in v)
    (shown,) = (v.partition("labels  ")[2] for v in lines if "labels  " in v)
    tokens, task = row.split(), MQAR(vocab_size=12, length=16, num_pairs=2)
    assert len(tokens) == task.length
    value = dict(zip(tokens[:4:2], tokens[1:4:2], strict=True))
    assert {i // 2: v for i, v in enumerate(shown) if v != " "} == {
        i: value[v] for i, v in enumerate(tokens) if i >= 4 and v != "*"
    }


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


def test_splits_have_different_last_values() -> None:
    task = MQAR(4, 4, 1)
    train, test = (
        {tuple(row) for row in task.sample(3000, stream(split, 0)).tokens.tolist()}
        for split in ("train", "test")
    )
    assert not train & test and {row[1] for row in train} == {row[1] for row in test} == {2, 3}


def test_sizes_and_calls() -> None:
    task = MQAR()
    assert (task.vocab_size, task.output_size) == (8192, 8192)
    assert task.sample(2, stream("train", 0)).tokens.shape == (2, 256)
    tokens, labels = task.sample(2, stream("test", 0), length=512, num_pairs=64, device="meta")
    assert tokens.shape == labels.shape == (2, 512) and tokens.device.type == "meta"


@pytest.mark.gpu
def test_rows_are_made_on_the_gpu_without_waiting(
    no_synchronization: Callable[[], AbstractContextManager[None]],
) -> None:
    generator = stream("train", 0, "cuda")
    with no_synchronization():
        tokens, labels = MQAR().sample(64, generator)
    assert tokens.is_cuda and ((labels != IGNORE).sum(-1) == 32).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 3}, "vocab_size must be at least 4, got 3"),
        ({"num_pairs": 0}, r"num_pairs must be in \[1, 4096\), got 0"),
        ({"length": 127}, "length must be even and at least 4 num_pairs = 128, got 127"),
        ({"length": 126}, "length must be even and at least 4 num_pairs = 128, got 126"),
        ({"power": 0.0}, "power must be > 0, got 0.0"),
    ],
)
def test_bad_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MQAR(**fields)


def test_bad_calls() -> None:
    task = MQAR()
    with pytest.raises(ValueError, match="at least 4 num_pairs = 260, got 256"):
        task.sample(1, stream("train", 0), num_pairs=65)
    with pytest.raises(ValueError, match="split must be that of the stream"):
        task.sample(1, stream("train", 0), split="test")
    with pytest.raises(TypeError, match="length must be an int, got True"):
        MQAR(length=True)

"""Parity rows: label law, lengths, splits, messages."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bedouin.tasks import IGNORE, Parity, stream

X = IGNORE


@settings(max_examples=40)
@given(
    st.integers(1, 12),
    st.integers(0, 8),
    st.sampled_from(["last", "every"]),
    st.integers(0, 4),
    st.integers(0, 99),
)
def test_labels_are_parities(least: int, more: int, label_at: Any, b: int, seed: int) -> None:
    task = Parity(least + more, least, label_at)
    tokens, labels = task.sample(b, stream("train", seed))
    assert tokens.shape == labels.shape == (b, least + more)
    assert tokens.dtype == labels.dtype == torch.int64
    for row, answer in zip(tokens.tolist(), labels.tolist(), strict=True):
        bits = [token for token in row if token != 2]
        assert set(bits) <= {0, 1}
        assert least <= len(bits) <= least + more
        assert row == bits + [2] * (len(row) - len(bits))
        parities = [sum(bits[: i + 1]) % 2 for i in range(len(bits))]
        if label_at == "last":
            parities[:-1] = [X] * (len(bits) - 1)
        assert answer == parities + [X] * (len(row) - len(bits))


def test_the_length_of_the_call_has_no_padding() -> None:
    task = Parity(length=40, min_length=3)
    tokens, labels = task.sample(5, stream("test", 0), length=70)
    assert tokens.shape == (5, 70)
    assert tokens.max() <= 1
    assert ((labels != X).sum(-1) == 1).all()
    assert torch.equal(labels[:, -1], tokens.sum(-1) % 2)


def test_lengths_and_bits_are_uniform() -> None:
    rows = 20_000
    tokens, labels = Parity(length=6, min_length=3).sample(rows, stream("train", 0))
    lengths = (tokens != 2).sum(-1).bincount(minlength=7)
    assert lengths[:3].sum() == 0
    assert (lengths[3:] - rows / 4).abs().max() < 5 * (rows / 4) ** 0.5
    for column in tokens.T[:2]:
        assert abs(int(column.sum()) - rows / 2) < 5 * rows**0.5
    answers = labels[labels != X]
    assert len(answers) == rows


def test_splits_share_the_whole_space() -> None:
    task = Parity(length=5)
    train, test = (
        {tuple(row) for row in task.sample(3000, stream(split, 0)).tokens.tolist()}
        for split in ("train", "test")
    )
    assert not train & test
    assert len(train) == len(test) == 16
    assert {row[:4] for row in train} == {row[:4] for row in test}


def test_padding_changes_no_split() -> None:
    padded = Parity(length=9, min_length=1).sample(6000, stream("train", 0)).tokens
    train = {tuple(bit for bit in row if bit != 2) for row in padded.tolist()}
    for length in (1, 4, 5):
        test = Parity(length).sample(1000, stream("test", 0)).tokens
        assert not train & set(map(tuple, test.tolist()))
        assert sum(len(row) == length for row in train) == 2 ** (length - 1)


def test_sizes_and_device() -> None:
    task = Parity()
    assert (task.vocab_size, task.output_size, task.chance) == (3, 2, 0.5)
    assert task.sample(2, stream("train", 0)).tokens.shape == (2, 40)
    moved = task.sample(2, stream("train", 0), device="meta")
    assert moved.tokens.device.type == moved.labels.device.type == "meta"


@pytest.mark.gpu
def test_rows_are_made_on_the_gpu_without_waiting(
    no_synchronization: Callable[[], AbstractContextManager[None]],
) -> None:
    generator = stream("train", 0, "cuda")
    with no_synchronization():
        tokens, labels = Parity(length=20, min_length=20).sample(64, generator)
        Parity(length=20, min_length=3, label_at="every").sample(64, generator)
    assert tokens.is_cuda
    assert torch.equal(labels[:, -1], tokens.sum(-1) % 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"min_length": 0}, r"min_length must be in \[1, 41\), got 0"),
        ({"min_length": 41}, r"min_length must be in \[1, 41\), got 41"),
        ({"label_at": "first"}, r"label_at must be one of \('last', 'every'\), got 'first'"),
    ],
)
def test_bad_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parity(**fields)


def test_bad_calls() -> None:
    task = Parity()
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        task.sample(2, stream("train", 0), length=0)
    with pytest.raises(ValueError, match="batch_size must be at least 0, got -1"):
        task.sample(-1, stream("train", 0))
    with pytest.raises(ValueError, match="split must be that of the stream"):
        task.sample(1, stream("train", 0), split="test")
    with pytest.raises(TypeError, match="length must be an int, got True"):
        Parity(length=True)
    with pytest.raises(TypeError, match="generator must be a torch.Generator, got 0"):
        task.sample(1, 0)  # type: ignore[arg-type]

"""Copying rows, decoded and read as text: packing, mask, splits, accuracies, messages."""

import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bedouin.tasks import IGNORE, Copying, stream

tasks = st.builds(
    lambda low, more, room, letters: Copying(
        context_len=2 * (low + more) + 3 + room,
        min_length=low,
        max_length=low + more,
        num_letters=letters,
    ),
    st.integers(1, 6),
    st.integers(0, 5),
    st.integers(0, 40),
    st.sampled_from([2, 5, 26]),
)


def expected_labels(row: str) -> str:
    """The mask rule in plain Python: the answers of whole samples, shifted left by one."""
    blanks = [" "] * len(row)
    for found in re.finditer(r"\$([a-z]+)\|\1\.", row):
        for place in range(found.start() + len(found[1]) + 2, found.end()):
            blanks[place - 1] = row[place]
    return "".join(blanks)


@given(tasks, st.integers(0, 6), st.integers(0, 99))
def test_rows_are_packed_samples(task: Copying, b: int, seed: int) -> None:
    tokens, labels = task.sample(b, stream("train", seed))
    assert tokens.shape == labels.shape == (b, task.context_len)
    for row, answer in zip(task.decode(tokens), task.decode(labels), strict=True):
        whole, cut = re.match(r"((?:\$[a-z]+\|[a-z]+\.)*)(.*)", row).groups()  # type: ignore[union-attr]
        strings = re.findall(r"\$([a-z]+)\|([a-z]+)\.", whole)
        assert all(prompt == copied for prompt, copied in strings)
        assert all(task.min_length <= len(s) <= task.max_length for s, _ in strings)
        assert re.fullmatch(r"(\$[a-z]*(\|[a-z]*)?)?", cut)
        assert len(cut) < 2 * task.max_length + 3
        assert answer == expected_labels(row)


def test_the_rows_of_the_docstring() -> None:
    """The rule that the other tests compare sampled rows with gives the labels of the docstring."""
    row, labels = "$bat|bat.$node|node.$ox|", "    bat.      node.     "
    assert expected_labels(row) == labels
    for line in (row, labels):
        assert line.rstrip() in (Copying.__doc__ or "")


def test_vocabulary() -> None:
    task = Copying()
    assert task.symbols == "abcdefghijklmnopqrstuvwxyz$|.*"
    assert task.vocab_size == task.output_size == 30 and task.chance == 1 / 26
    assert Copying(num_letters=3).symbols == "abc$|.*"


@given(st.integers(1, 20), st.integers(0, 5), st.sampled_from(["train", "test"]))
def test_evaluation_rows_hold_one_string(length: int, b: int, split: Any) -> None:
    task = Copying()
    tokens, labels = task.sample_eval(b, length, stream(split, 0))
    assert tokens.shape == labels.shape == (b, 2 * length + 3)
    for row, answer in zip(task.decode(tokens), task.decode(labels), strict=True):
        assert re.fullmatch(rf"\$([a-z]{{{length}}})\|\1\.", row)
        assert answer == expected_labels(row)


def test_official_evaluation_is_filled_with_dots() -> None:
    plain, official = Copying(), Copying(protocol="official")
    row, labels = plain.sample_eval(2, 5, stream("test", 0))
    filled, filled_labels = official.sample_eval(2, 5, stream("test", 0))
    assert filled.shape == (2, 32)
    assert torch.equal(filled[:, :13], row)
    assert torch.equal(filled_labels[:, :13], labels)
    assert set(official.decode(filled[:, 13:])) == {"." * 19}
    assert (filled_labels[:, 13:] == IGNORE).all()
    assert official.sample_eval(2, 20, stream("test", 0)).tokens.shape == (2, 43)


def test_lengths_and_letters_are_uniform() -> None:
    task = Copying(context_len=19, min_length=4, max_length=8)
    rows = task.decode(task.sample(20_000, stream("train", 0)).tokens)
    firsts = [found[1] for row in rows if (found := re.match(r"\$([a-z]+)\|", row))]
    lengths = Counter(map(len, firsts))
    assert set(lengths) == {4, 5, 6, 7, 8}
    assert max(abs(n - 4000) for n in lengths.values()) < 5 * 4000**0.5
    for letters in (Counter(s[0] for s in firsts), Counter(s[-1] for s in firsts)):
        assert len(letters) == 26
        assert max(abs(n - 20_000 / 26) for n in letters.values()) < 5 * (20_000 / 26) ** 0.5


def strings_of(task: Copying, split: Any, length: int) -> set[str]:
    packed = task.decode(task.sample(3000, stream(split, 0)).tokens)
    single = task.decode(task.sample_eval(3000, length, stream(split, 1)).tokens)
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


def test_accuracies_count_letters_only() -> None:
    task = Copying()
    _, labels = task.sample_eval(4, 5, stream("test", 0))
    predicted = labels.clamp(min=0)
    predicted[labels == task.symbols.index(".")] = 0  # a wrong final `.` does not count
    assert task.character_accuracy(predicted, labels).item() == 1.0
    assert task.string_accuracy(predicted, labels).item() == 1.0
    predicted[0, 6] = (predicted[0, 6] + 1) % 26
    assert task.character_accuracy(predicted, labels).item() == pytest.approx(19 / 20)
    assert task.string_accuracy(predicted, labels).item() == pytest.approx(3 / 4)
    logits = torch.nn.functional.one_hot(predicted, task.output_size).float()
    assert task.character_accuracy(logits, labels).item() == pytest.approx(19 / 20)


@pytest.mark.gpu
def test_rows_are_made_on_the_gpu_without_waiting(
    no_synchronization: Callable[[], AbstractContextManager[None]],
) -> None:
    task = Copying()
    generator = stream("train", 0, "cuda")
    with no_synchronization():
        tokens, labels = task.sample(64, generator)
        task.sample_eval(64, 16, generator)
    assert tokens.is_cuda
    assert task.decode(labels) == [expected_labels(row) for row in task.decode(tokens)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_length": 0}, "min_length must be at least 1, got 0"),
        ({"min_length": 9}, "at most max_length, got min_length=9"),
        ({"context_len": 18}, r"2·max_length \+ 3 = 19, got 18: raise it"),
        ({"num_letters": 1}, r"num_letters must be in \[2, 26\], got 1"),
        ({"num_letters": 27}, "num_letters must be in"),
        ({"protocol": "mine"}, r"protocol must be one of \('plain', 'official'\), got 'mine'"),
    ],
)
def test_bad_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Copying(**fields)


def test_bad_calls() -> None:
    task = Copying()
    with pytest.raises(ValueError, match="batch_size must be at least 0, got -1"):
        task.sample(-1, stream("train", 0))
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        task.sample_eval(1, 0, stream("test", 0))
    with pytest.raises(ValueError, match="split must be that of the stream"):
        task.sample(1, stream("train", 0), split="test")


@pytest.mark.parametrize("name", ["context_len", "min_length", "max_length", "num_letters"])
@pytest.mark.parametrize("value", [True, 8.0, "8", None])
def test_fields_of_wrong_types(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an int, got {value!r}"):
        Copying(**{name: value})


def test_samples_of_wrong_types() -> None:
    task = Copying()
    with pytest.raises(TypeError, match=r"batch_size must be an int, got 2\.0"):
        task.sample(2.0, stream("train", 0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="length must be an int, got True"):
        task.sample_eval(1, True, stream("train", 0))
    with pytest.raises(TypeError, match="generator must be a torch.Generator, got 0"):
        task.sample(1, 0)  # type: ignore[arg-type]


def test_a_nan_counts_as_wrong() -> None:
    task = Copying()
    tokens, labels = task.sample_eval(2, 3, stream("test", 0))
    logits = torch.nn.functional.one_hot(labels.clamp(min=0), task.output_size).float()
    assert task.character_accuracy(logits, labels) == task.string_accuracy(logits, labels) == 1
    logits[0, 4, 7] = torch.nan
    assert task.character_accuracy(logits, labels).item() == pytest.approx(5 / 6)
    assert task.string_accuracy(logits, labels).item() == pytest.approx(1 / 2)

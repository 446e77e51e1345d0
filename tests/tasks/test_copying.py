"""Copying: the rows of the docstring, evaluation rows, distributions, accuracies."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
from tests.tasks.rows import check, check_row, is_uniform

from bedouin.tasks import IGNORE, Copying, stream


def test_the_rows_of_the_docstring() -> None:
    task = Copying(24, 2, 4)
    for row, labels in (
        ("$bat|bat.$node|node.$ox|", "    bat.      node.     "),
        ("$owl|owl.", "    owl. "),
    ):
        assert row in (Copying.__doc__ or "") and labels.rstrip() in (Copying.__doc__ or "")
        ids = [task.symbols.index(v) for v in row]
        answer = [IGNORE if v == " " else task.symbols.index(v) for v in labels]
        check_row(task, ids, answer, None)


def test_symbols() -> None:
    assert Copying().symbols == "abcdefghijklmnopqrstuvwxyz$|.*"
    assert Copying(num_letters=3).symbols == "abc$|.*"
    task = Copying()
    batch = task.sample(3, stream("train", 0))
    assert all(re.fullmatch(r"[a-z. ]*", row) for row in task.decode(batch.labels))


@pytest.mark.parametrize("length", [1, 2, 5, 20])
@pytest.mark.parametrize("split", ["train", "test"])
def test_evaluation_rows_hold_one_string(length: int, split: Any) -> None:
    task = Copying()
    for b in (0, 1, 5):
        batch = task.sample_eval(b, length, stream(split, 0))
        assert batch.tokens.shape == (b, 2 * length + 3)
        check(task, batch, length)
    for bad, error in ((0, ValueError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match="length must be"):
            task.sample_eval(1, bad, stream(split, 0))  # type: ignore[arg-type]


def test_official_evaluation_is_filled_with_dots() -> None:
    plain, official = Copying(), Copying(protocol="official")
    row, labels = plain.sample_eval(2, 5, stream("test", 0))
    filled, filled_labels = official.sample_eval(2, 5, stream("test", 0))
    assert filled.shape == (2, 32)
    assert torch.equal(filled[:, :13], row)
    assert torch.equal(filled_labels[:, :13], labels)
    assert set(official.decode(filled[:, 13:])) == {"." * 19}
    assert (filled_labels[:, 13:] == IGNORE).all()


def test_lengths_and_letters_are_uniform() -> None:
    task = Copying(context_len=19, min_length=4, max_length=8)
    rows = task.decode(task.sample(20_000, stream("train", 0)).tokens)
    firsts = [found[1] for row in rows if (found := re.match(r"\$([a-z]+)\|", row))]
    lengths = Counter(map(len, firsts))
    assert set(lengths) == {4, 5, 6, 7, 8} and is_uniform(lengths.values(), 4000)
    for letters in (Counter(s[0] for s in firsts), Counter(s[-1] for s in firsts)):
        assert len(letters) == 26 and is_uniform(letters.values(), 20_000 / 26)


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
    logits = torch.nn.functional.one_hot(predicted, task.output_size).float()
    for prediction in (predicted, logits):
        assert task.character_accuracy(prediction, labels).item() == pytest.approx(19 / 20)
        assert task.string_accuracy(prediction, labels).item() == pytest.approx(3 / 4)
    logits[1, 6, 7] = torch.nan  # counts as wrong
    assert task.character_accuracy(logits, labels).item() == pytest.approx(18 / 20)
    assert task.string_accuracy(logits, labels).item() == pytest.approx(1 / 2)

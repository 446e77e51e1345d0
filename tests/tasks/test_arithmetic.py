"""Expressions modulo m, decoded and judged by Python's own evaluation."""

import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bedouin.tasks import IGNORE, Batch, ModularArithmetic, stream
from bedouin.tasks.expressions import (
    Kind,
    Layout,
    bracketed_layout,
    bracketed_value,
    flat_layout,
    flat_value,
)

arithmetic = st.builds(
    lambda modulus, brackets, least, more, multiplication: ModularArithmetic(
        modulus, brackets, 2 * (least + more), 2 * least, multiplication
    ),
    st.integers(2, 12),
    st.booleans(),
    st.integers(1, 12),
    st.integers(0, 8),
    st.booleans(),
)


def expressions(task: ModularArithmetic, batch: Batch) -> list[str]:
    """Expressions without `=`, after a check of where the answers and the padding stand."""
    found = []
    for row, tokens, labels in zip(
        task.decode(batch.tokens), batch.tokens.tolist(), batch.labels.tolist(), strict=True
    ):
        match = re.fullmatch(r"([^=_]+)=_*", row)
        assert match is not None
        end = tokens.index(task.symbols.index("="))
        value = eval(match[1]) % task.modulus
        assert labels == [IGNORE] * end + [value] + [IGNORE] * (len(tokens) - end - 1)
        found.append(match[1])
    return found


def well_formed(text: str) -> bool:
    """Whether the grammar of bracketed expressions makes this text of one-digit numbers."""
    if re.fullmatch(r"-?\d|\(-?\d\)", text):
        return True
    if not (text.startswith("(") and text.endswith(")")):
        return False
    inside, depth = text[1:-1], 0
    for place, symbol in enumerate(inside):
        depth += (symbol == "(") - (symbol == ")")
        if place > 0 and depth == 0 and symbol in "+-*":
            return well_formed(inside[:place]) and well_formed(inside[place + 1 :])
    return False


@settings(max_examples=40)
@given(arithmetic, st.integers(0, 6), st.integers(0, 99))
def test_labels_are_values(task: ModularArithmetic, b: int, seed: int) -> None:
    batch = task.sample(b, stream("train", seed))
    assert batch.tokens.shape == batch.labels.shape == (b, task.length)
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    for text in expressions(task, batch):
        assert task.multiplication or "*" not in text
        if not task.brackets:
            assert re.fullmatch(r"\d+([-+*]\d+)*", text)


@settings(max_examples=40)
@given(st.integers(2, 60), st.integers(0, 99))
def test_bracketed_expressions_follow_the_grammar(length: int, seed: int) -> None:
    task = ModularArithmetic(brackets=True)
    batch = task.sample(8, stream("test", seed), length=length)
    for text in expressions(task, batch):
        assert len(text) == length - 1
        assert well_formed(text)


@pytest.mark.parametrize("brackets", [False, True])
def test_long_rows(brackets: bool) -> None:
    task = ModularArithmetic(brackets=brackets, length=256, min_length=40)
    assert len(expressions(task, task.sample(32, stream("test", 0)))) == 32


def parse(task: ModularArithmetic, text: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.tensor([[task.symbols.index(symbol) for symbol in text]])
    return ids, ids.clamp(max=task.modulus - 1), (ids - task.modulus).clamp(0, 2)


def test_the_rows_of_the_docstring() -> None:
    flat = ModularArithmetic(length=10, min_length=4)
    for text, value in (("2-3-3*2+4", 2), ("4*3+1", 3)):
        ids, digits, operators = parse(flat, text)
        layout = flat_layout(torch.tensor([[len(text)]]), len(text))
        assert flat_value(digits, operators, layout, 5).tolist() == [value]
        assert torch.equal(flat._expression(digits, operators, layout), ids)

    task = ModularArithmetic(brackets=True, length=13)
    ids, digits, operators = parse(task, "((-4)*(2+3))")
    kinds = [5, 4, 3, 1, 6, 2, 5, 1, 2, 1, 6, 6]
    right = torch.zeros_like(ids).scatter(-1, torch.tensor([[0, 6]]), torch.tensor([[6, 9]]))
    layout = Layout(torch.tensor([kinds]), right, depth=2)
    assert bracketed_value(digits, operators, layout, 5).tolist() == [0]
    assert torch.equal(task._expression(digits, operators, layout), ids)
    assert well_formed("((-4)*(2+3))")


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 30])
def test_layouts_of_two_lengths_side_by_side(length: int) -> None:
    """A row does not depend on how far its neighbours reach; further rounds change nothing."""
    lengths = torch.tensor([[length], [33]])
    kind, right, depth = bracketed_layout(lengths, 33, stream("train", 3))
    assert (kind[0, length:] == Kind.NOTHING).all()
    assert (kind[0, :length] != Kind.NOTHING).all()
    digits, operators = torch.full_like(kind, 3), torch.full_like(kind, 2)
    values = bracketed_value(digits, operators, Layout(kind, right, depth), 7)
    later = bracketed_value(digits, operators, Layout(kind, right, depth + 5), 7)
    assert torch.equal(values, later)


def test_left_parts_digits_and_operators_are_uniform() -> None:
    rows = 20_000
    task = ModularArithmetic(brackets=True, length=10)
    texts = task.decode(task.sample(rows, stream("train", 0)).tokens)
    left = Counter(len(part(text)) for text in texts)
    assert set(left) == {1, 2, 3, 4, 5}
    operators = Counter(text[1 + len(part(text))] for text in texts)
    digits = Counter(text.strip("(-")[0] for text in texts)
    for counts, values in ((left, 5), (operators, 3), (digits, 5)):
        expected = rows / values
        assert max(abs(n - expected) for n in counts.values()) < 5 * expected**0.5


def part(text: str) -> str:
    """The left part of `(left operator right)=`."""
    depth = 0
    for place, symbol in enumerate(text[1:], start=1):
        if place > 1 and depth == 0 and symbol in "+-*":
            return text[1:place]
        depth += (symbol == "(") - (symbol == ")")
    raise AssertionError(text)


def test_possible_lengths_are_drawn_uniformly() -> None:
    rows = 10_000
    flat = ModularArithmetic(length=9, min_length=3).sample(rows, stream("train", 0)).tokens
    assert flat.shape == (rows, 8)
    lengths = Counter((flat != 9).sum(-1).tolist())
    assert set(lengths) == {4, 6, 8}
    assert max(abs(n - rows / 3) for n in lengths.values()) < 5 * (rows / 3) ** 0.5
    task = ModularArithmetic(brackets=True, length=6, min_length=3)
    bracketed = task.sample(rows, stream("train", 0)).tokens
    assert set((bracketed != 11).sum(-1).tolist()) == {3, 4, 5, 6}


@pytest.mark.parametrize("brackets", [False, True])
def test_splits_share_the_whole_space(brackets: bool) -> None:
    task = ModularArithmetic(modulus=3, brackets=brackets, length=6 if brackets else 4)
    train, test, both = (
        set(task.decode(task.sample(4000, rng).tokens))
        for rng in (stream("train", 0), stream("test", 0), torch.Generator().manual_seed(0))
    )
    assert not train & test
    assert train | test == both
    assert len(both) == 27
    assert len(test) == 9


@pytest.mark.parametrize("brackets", [False, True])
def test_padding_changes_no_split(brackets: bool) -> None:
    """Padded rows of a train stream against rows of exactly one length of a test stream."""
    task = ModularArithmetic(modulus=3, brackets=brackets, length=12, min_length=2)
    train = {row.rstrip("_") for row in task.decode(task.sample(6000, stream("train", 0)).tokens)}
    for length in (2, 4, 6):
        found = task.sample(1000, stream("test", 0), length=length)
        test = set(task.decode(found.tokens))
        assert not train & test
        assert len([row for row in train if len(row) == length]) > len(test)


def test_vocabulary() -> None:
    assert "".join(ModularArithmetic().symbols) == "01234+-*=_"
    assert "".join(ModularArithmetic(brackets=True).symbols) == "01234+-*()=_"
    task = ModularArithmetic(modulus=11, brackets=True, multiplication=False)
    assert (task.vocab_size, task.output_size, task.chance) == (18, 11, 1 / 11)


def test_equal_seeds_give_equal_batches() -> None:
    task = ModularArithmetic(brackets=True)
    first, second = (task.sample(4, stream("train", 5)) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens)
    moved = task.sample(2, stream("train", 0), device="meta")
    assert moved.tokens.device.type == moved.labels.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.parametrize("brackets", [False, True])
def test_rows_are_made_on_the_gpu_without_waiting(
    brackets: bool, no_synchronization: Callable[[], AbstractContextManager[None]]
) -> None:
    task = ModularArithmetic(brackets=brackets, length=40, min_length=3)
    generator = stream("train", 0, "cuda")
    with no_synchronization():
        batch = task.sample(64, generator)
    assert batch.tokens.is_cuda
    assert len(expressions(task, batch)) == 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modulus": 1}, "modulus must be at least 2, got 1"),
        ({"length": 1}, "length must be at least 2, got 1"),
        ({"length": 41}, "length must be even without brackets, got 41: digits and operators"),
        ({"min_length": 1}, r"min_length must be in \[2, 41\), got 1"),
        ({"min_length": 41}, r"min_length must be in \[2, 41\), got 41"),
    ],
)
def test_bad_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModularArithmetic(**fields)


def test_bad_calls() -> None:
    task = ModularArithmetic()
    with pytest.raises(ValueError, match="length must be even without brackets, got 7"):
        task.sample(2, stream("train", 0), length=7)
    with pytest.raises(ValueError, match="length must be at least 2, got 1"):
        task.sample(2, stream("train", 0), length=1)
    with pytest.raises(ValueError, match="batch_size must be at least 0, got -1"):
        task.sample(-1, stream("train", 0))
    with pytest.raises(ValueError, match="split must be that of the stream"):
        task.sample(1, stream("train", 0), split="test")
    with pytest.raises(TypeError, match="modulus must be an int, got True"):
        ModularArithmetic(modulus=True)
    with pytest.raises(TypeError, match="generator must be a torch.Generator, got 0"):
        task.sample(1, 0)  # type: ignore[arg-type]

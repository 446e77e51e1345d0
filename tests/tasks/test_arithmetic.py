"""Expressions modulo m: values by hand, layouts, distributions. Rows are judged in test_tasks."""

from collections import Counter

import pytest
import torch
from tests.tasks.rows import is_uniform, left_part, well_formed

from bedouin.tasks import ModularArithmetic, stream
from bedouin.tasks.arithmetic import (
    Kind,
    Layout,
    bracketed_layout,
    bracketed_value,
    flat_layout,
    flat_value,
)


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
    """A row does not depend on how far its neighbors reach; further rounds change nothing."""
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
    left = Counter(len(left_part(text)) for text in texts)
    operators = Counter(text[1 + len(left_part(text))] for text in texts)
    digits = Counter(text.strip("(-")[0] for text in texts)
    assert set(left) == {1, 2, 3, 4, 5}
    for counts, values in ((left, 5), (operators, 3), (digits, 5)):
        assert len(counts) == values and is_uniform(counts.values(), rows / values)


@pytest.mark.parametrize(
    ("task", "possible"),
    [
        (ModularArithmetic(length=9, min_length=3), {4, 6, 8}),
        (ModularArithmetic(brackets=True, length=6, min_length=3), {3, 4, 5, 6}),
    ],
)
def test_possible_lengths_are_drawn_uniformly(task: ModularArithmetic, possible: set[int]) -> None:
    rows = 10_000
    tokens = task.sample(rows, stream("train", 0)).tokens
    assert tokens.shape == (rows, max(possible))
    lengths = Counter((tokens != task.symbols.index("_")).sum(-1).tolist())
    assert set(lengths) == possible and is_uniform(lengths.values(), rows / len(possible))


def test_symbols() -> None:
    assert "".join(ModularArithmetic().symbols) == "01234+-*=_"
    assert "".join(ModularArithmetic(brackets=True).symbols) == "01234+-*()=_"

"""What the rows of each task must be, read token by token in plain Python."""

import re
from collections.abc import Iterable
from functools import singledispatch
from typing import Any

import torch

from bedouin.tasks import (
    IGNORE,
    MQAR,
    Batch,
    BoundPermutations,
    Copying,
    Group,
    ModularArithmetic,
    Parity,
    WordProblem,
)


def check(task: Any, batch: Batch, length: int | None = None) -> None:
    """The labels are what reading the tokens gives; length: that of the call."""
    tokens, labels = batch
    assert tokens.shape == labels.shape and tokens.dtype == labels.dtype == torch.int64
    for row, answer in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert all(0 <= token < task.vocab_size for token in row)
        check_row(task, row, answer, length)


def rows_of(tokens: torch.Tensor, padding: int | None = None) -> set[tuple[int, ...]]:
    return {tuple(v for v in row if v != padding) for row in tokens.tolist()}


def is_uniform(counts: Iterable[float], expected: float) -> bool:
    """Whether no count is more than five standard deviations away."""
    return bool(max(abs(n - expected) for n in counts) < 5 * expected**0.5)


def padded(labels: list[int], row: list[int]) -> list[int]:
    return labels + [IGNORE] * (len(row) - len(labels))


@singledispatch
def check_row(task: Any, row: list[int], labels: list[int], length: int | None) -> None:
    """Raises AssertionError for a row that breaks the grammar of the task, or other labels."""
    raise NotImplementedError


@check_row.register
def _(task: WordProblem, row: list[int], labels: list[int], length: int | None) -> None:
    order, r, bos = task.group.order, task.tokens_per_transition, []
    if task.protocol == "official":
        bos, row = row[:1], row[1:]
        assert bos == [order + 1]
    assert len(row) == (length or task.length) * r and set(row[::r]) <= set(task.alphabet)
    assert all(token == order for i, token in enumerate(row) if i % r)
    products, running = [], 0
    for token in row:  # a filler counts as the identity
        running = running if token == order else int(task.group.table[running, token])
        products.append(running)
    late = ([0] * (r - 1) + products)[: len(row)]  # the published rule of label_at="every"
    expected = [p if i % r == r - 1 else IGNORE for i, p in enumerate(products)]
    if task.label_at == "last":
        expected[:-1] = padded([], row[1:])
    assert labels == bos + (late if task.label_at == "every" else expected)


@check_row.register
def _(task: Copying, row: list[int], labels: list[int], length: int | None) -> None:
    (text,), expected = task.decode(torch.tensor([row])), padded([], row)
    match = re.fullmatch(r"((?:\$[a-z]+\|[a-z]+\.)*)(\$[a-z]*(?:\|[a-z]*)?)?(\.*)", text)
    assert match is not None
    whole, cut, filled = match.groups(default="")
    least, most = (task.min_length, task.max_length) if length is None else (length, length)
    assert len(cut) < 2 * most + 3 and (not filled or task.protocol == "official")
    for found in re.finditer(r"\$([a-z]+)\|([a-z]+)\.", whole):
        assert found[1] == found[2] and least <= len(found[1]) <= most
        for place in range(found.start() + len(found[1]) + 2, found.end()):
            expected[place - 1] = row[place]
    assert labels == expected


@check_row.register
def _(task: Parity, row: list[int], labels: list[int], length: int | None) -> None:
    bits = [token for token in row if token != 2]
    least, most = (task.min_length or task.length, task.length) if length is None else (length,) * 2
    assert least <= len(bits) <= most == len(row) and row == bits + [2] * (len(row) - len(bits))
    parities = [sum(bits[: i + 1]) % 2 for i in range(len(bits))]
    if task.label_at == "last":
        parities[:-1] = [IGNORE] * (len(bits) - 1)
    assert labels == padded(parities, row)


@check_row.register
def _(task: ModularArithmetic, row: list[int], labels: list[int], length: int | None) -> None:
    match = re.fullmatch(r"([^=_]+)=_*", task.decode(torch.tensor([row]))[0])
    assert match is not None
    text, end = match[1], row.index(task.symbols.index("="))
    assert length in (None, end + 1) and (task.min_length or 0) <= end + 1 <= (
        length or task.length
    )
    assert task.multiplication or "*" not in text
    if not task.brackets:
        assert re.fullmatch(r"\d+([-+*]\d+)*", text)
    elif task.modulus <= 10:
        assert well_formed(text)
    assert labels == padded([IGNORE] * end + [eval(text) % task.modulus], row)


def well_formed(text: str) -> bool:
    """Whether the grammar of bracketed expressions makes this text of one-digit numbers."""
    if re.fullmatch(r"-?\d|\(-?\d\)", text):
        return True
    if not (text.startswith("(") and text.endswith(")")):
        return False
    left = left_part(text)
    return well_formed(left) and well_formed(text[len(left) + 2 : -1])


def left_part(text: str) -> str:
    """The left part of `(left operator right)`; nothing if there is none."""
    depth = 0
    for place, symbol in enumerate(text[1:], start=1):
        if place > 1 and depth == 0 and symbol in "+-*":
            return text[1:place]
        depth += (symbol == "(") - (symbol == ")")
    return ""


@check_row.register
def _(task: MQAR, row: list[int], labels: list[int], length: int | None) -> None:
    r, half = task.num_pairs, task.vocab_size // 2
    assert len(row) == (length or task.length)
    value = dict(zip(row[: 2 * r : 2], row[1 : 2 * r : 2], strict=True))
    assert len(value) == r and all(1 <= key < half for key in value)
    assert all(half <= v for v in value.values())
    assert len(set(list(value.values())[:-1])) == r - 1
    asked = [place for place, label in enumerate(labels) if label != IGNORE]
    assert all(place >= 2 * r and place % 2 == 0 for place in asked)
    assert sorted(row[place] for place in asked) == sorted(value)
    assert [labels[place] for place in asked] == [value[row[place]] for place in asked]


@check_row.register
def _(task: BoundPermutations, row: list[int], labels: list[int], length: int | None) -> None:
    definitions, operations, expected = read(row, task.group)
    assert task.min_definitions <= definitions <= task.max_definitions
    assert task.min_operations <= operations <= task.max_operations
    assert labels == expected


def read(row: list[int], group: Group) -> tuple[int, int, list[int]]:
    """The numbers of definitions and operations of a row, and its labels."""
    n, permutations = group.order, group.permutations
    rebind, ask, use, padding = (26 + n + i for i in range(4))
    tokens = row[: row.index(padding)] if padding in row else row
    assert set(row[len(tokens) :]) <= {padding}
    bound: dict[int, int] = {}
    labels: list[int] = []
    place = 0

    def bind(name: int, token: int) -> None:
        assert 26 <= token < 26 + n
        bound[name] = token - 26

    while place + 1 < len(tokens) and tokens[place] < 26 and tokens[place + 1] != use:
        assert tokens[place] not in bound
        bind(*tokens[place : place + 2])
        place += 2
        labels += [IGNORE] * 2
    definitions, operations, product = len(bound), 0, permutations[0]
    while place < len(tokens):
        operations += 1
        first, second = tokens[place : place + 2]
        place += 2
        if first == rebind:
            assert second in bound
            bind(second, tokens[place])
            place += 1
            labels += [IGNORE] * 3
        elif first == ask:
            labels += [IGNORE, bound[second]]
        else:
            assert second == use
            g = permutations[bound[first]]
            product = tuple(g[i] for i in product)  # first the product, then g
            labels += [IGNORE, permutations.index(product)]
    assert len(labels) == len(tokens)
    return definitions, operations, padded(labels, row)

"""Bound permutations: the row of the docstring, distributions. Rows are judged in test_tasks."""

import torch
from tests.tasks.rows import is_uniform, read

from bedouin.tasks import IGNORE, BoundPermutations, Group, stream


def test_numbers_of_the_call() -> None:
    task = BoundPermutations()
    tokens, labels = task.sample(5, stream("test", 0), definitions=24, operations=128)
    assert tokens.shape == (5, 2 * 24 + 3 * 128)
    for row, expected in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert read(row, task.group) == (24, 128, expected)


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
    rebinds, asks, uses = (int((tokens == 32 + i).sum()) for i in range(3))
    total = 8 * rows
    assert rebinds + asks + uses == total
    for number, share in ((rebinds, 0.1), (asks, 0.1), (uses, 0.8)):
        assert abs(number - share * total) < 5 * (share * (1 - share) * total) ** 0.5
    definitions = torch.tensor([read(row, task.group)[0] for row in tokens.tolist()])
    for values, kinds in ((definitions - 4, 4), (tokens[:, 0], 26), (tokens[:, 1] - 26, 6)):
        counts = values.bincount(minlength=kinds)
        assert len(counts) == kinds and is_uniform(counts.tolist(), rows / kinds)
    products, answers = task.products(labels, tokens), task.answers(labels, tokens)
    assert (products != IGNORE).sum() == uses and (answers != IGNORE).sum() == asks
    assert torch.equal(torch.where(products != IGNORE, products, answers), labels)

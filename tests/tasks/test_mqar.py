"""Associative recall: the row of the docstring, distances. Rows are judged in test_tasks."""

import torch

from bedouin.tasks import IGNORE, MQAR, stream


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


def test_numbers_of_the_call() -> None:
    tokens, labels = MQAR().sample(2, stream("test", 0), length=512, num_pairs=64)
    assert tokens.shape == (2, 512) and ((labels != IGNORE).sum(-1) == 64).all()

"""Parity: the rows of the docstring and distributions. Rows are judged in test_tasks."""

import pytest
from tests.tasks.rows import check_row, is_uniform

from bedouin.tasks import IGNORE, Parity, stream


@pytest.mark.parametrize(
    ("label_at", "row", "labels"),
    [
        ("last", "1 0 1 1 0 1", ". . . . . 0"),
        ("last", "1 1 1 0 2 2", ". . . 1 . ."),
        ("every", "1 0 1 1 0 1", "1 1 0 1 1 0"),
        ("every", "1 1 1 0 2 2", "1 0 1 1 . ."),
    ],
)
def test_the_rows_of_the_docstring(label_at: str, row: str, labels: str) -> None:
    task = Parity(6, 3, label_at)  # type: ignore[arg-type]
    assert row in (Parity.__doc__ or "") and labels in (Parity.__doc__ or "")
    answer = [IGNORE if v == "." else int(v) for v in labels.split()]
    check_row(task, [int(v) for v in row.split()], answer, None)


def test_lengths_and_bits_are_uniform() -> None:
    rows = 20_000
    tokens, labels = Parity(length=6, min_length=3).sample(rows, stream("train", 0))
    lengths = (tokens != 2).sum(-1).bincount(minlength=7)
    assert lengths[:3].sum() == 0 and is_uniform(lengths[3:].tolist(), rows / 4)
    for column in tokens.T[:2]:
        assert abs(int(column.sum()) - rows / 2) < 5 * rows**0.5
    assert (labels != IGNORE).sum() == rows

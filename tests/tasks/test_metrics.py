"""Last-position and scaled accuracy."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bedouin.tasks import (
    IGNORE,
    Parity,
    last_position_accuracy,
    scale_accuracy,
    scaled_accuracy,
    stream,
)

X = IGNORE


def test_only_the_last_label_of_a_row_counts() -> None:
    labels = torch.tensor([[1, 0, 1, 1], [0, 1, X, X], [X, X, X, X], [X, 0, X, 1]])
    predicted = torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]])
    assert last_position_accuracy(predicted, labels).item() == pytest.approx(2 / 3)
    logits = torch.nn.functional.one_hot(predicted, 2).float()
    assert last_position_accuracy(logits, labels).item() == pytest.approx(2 / 3)
    assert math.isnan(last_position_accuracy(predicted[2:3], labels[2:3]).item())


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 99))
def test_it_is_the_accuracy_of_the_last_label(length: int, b: int, seed: int) -> None:
    """Labels at every position judge the last one like labels at the last position."""
    rows = torch.Generator().manual_seed(seed)
    predicted = torch.randint(2, (b, length), generator=rows)
    every, last = (
        Parity(length, 1, label_at).sample(b, stream("test", seed))
        for label_at in ("every", "last")
    )
    assert torch.equal(
        last_position_accuracy(predicted, every.labels),
        last_position_accuracy(predicted, last.labels),
    )


def test_errors_are_those_of_token_accuracy() -> None:
    with pytest.raises(ValueError, match="prediction must be logits"):
        last_position_accuracy(torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match="labels must be of integer dtype"):
        last_position_accuracy(torch.zeros(2, 3, 2), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("accuracy", "chance", "scaled"),
    [(1.0, 0.2, 1.0), (0.2, 0.2, 0.0), (0.6, 0.2, 0.5), (0.75, 0.5, 0.5), (0.0, 0.5, -1.0)],
)
def test_scale(accuracy: float, chance: float, scaled: float) -> None:
    assert scale_accuracy(accuracy, chance) == pytest.approx(scaled)
    assert scale_accuracy(torch.tensor([accuracy]), chance).tolist() == pytest.approx([scaled])


def test_scaled_accuracy() -> None:
    labels = torch.tensor([[X, 1], [X, 0], [0, X], [X, 1]])
    predicted = torch.tensor([[0, 1], [0, 0], [0, 0], [0, 0]])
    assert scaled_accuracy(predicted, labels, chance=0.5).item() == pytest.approx(0.5)


@pytest.mark.parametrize("chance", [-0.1, 1.0, math.nan])
def test_bad_chance(chance: float) -> None:
    with pytest.raises(ValueError, match=r"chance must be in \[0, 1\), got"):
        scale_accuracy(0.5, chance)

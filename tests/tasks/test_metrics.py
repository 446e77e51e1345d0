"""Accuracies against values computed by hand: masks, logits and ids, rows without labels."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bedouin.tasks import (
    IGNORE,
    Parity,
    last_position_accuracy,
    scale_accuracy,
    scaled_accuracy,
    sequence_accuracy,
    stream,
    token_accuracy,
)

X = IGNORE
LABELS = torch.tensor([[1, 0, 1, 1], [0, 1, X, X], [X, X, X, X], [X, 0, X, 1]])
PREDICTED = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]])
BY_HAND = [
    (token_accuracy, 4 / 8),
    (sequence_accuracy, 1 / 3),
    (last_position_accuracy, 2 / 3),
]
accuracies = pytest.mark.parametrize("accuracy", [accuracy for accuracy, _ in BY_HAND])


@pytest.mark.parametrize(("accuracy", "expected"), BY_HAND)
def test_by_hand(accuracy: Callable[[Tensor, Tensor], Tensor], expected: float) -> None:
    found = accuracy(PREDICTED, LABELS)
    assert found.item() == pytest.approx(expected)
    assert found.shape == () and found.dtype == torch.float32
    logits = torch.nn.functional.one_hot(PREDICTED, 2).to(torch.bfloat16)
    assert torch.equal(accuracy(logits, LABELS), found)
    ignored = torch.full_like(LABELS, X)
    assert accuracy(ignored, LABELS) == 0  # a predicted IGNORE is wrong
    assert accuracy(PREDICTED, ignored).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_nan_counts_as_wrong(dtype: torch.dtype) -> None:
    """At class 0, at the right class, at another one, and everywhere."""
    labels = torch.zeros(1, 5, dtype=torch.int64)
    logits = torch.nn.functional.one_hot(labels, 3).to(dtype)
    assert token_accuracy(logits, labels) == sequence_accuracy(logits, labels) == 1
    logits[0, 0, 0] = logits[0, 1, 2] = torch.nan
    logits[0, 2] = torch.nan
    assert token_accuracy(logits, labels).item() == pytest.approx(2 / 5)
    assert sequence_accuracy(logits, labels).item() == 0.0
    assert sequence_accuracy(logits[:, 3:], labels[:, 3:]).item() == 1.0
    labels[0, :3] = IGNORE
    assert token_accuracy(logits, labels) == sequence_accuracy(logits, labels) == 1


@accuracies
@pytest.mark.parametrize(
    ("prediction", "labels", "error", "message"),
    [
        (PREDICTED[:, :2], LABELS, ValueError, r"logits .* or class ids \(4, 4\).* got \(4, 2\)"),
        (torch.zeros(4, 4, 0), LABELS, ValueError, r"at least one class, got \(4, 4, 0\)"),
        (PREDICTED.float(), LABELS, TypeError, r"integer dtype, got torch\.float32"),
        (PREDICTED, LABELS.float(), TypeError, "labels must be of integer dtype, got torch"),
        (torch.zeros(4, 4, 2).bool(), LABELS, TypeError, r"must be real numbers, got torch\.bool"),
    ],
)
def test_bad_arguments(
    accuracy: Callable[[Tensor, Tensor], Tensor],
    prediction: Tensor,
    labels: Tensor,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        accuracy(prediction, labels)


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 99))
def test_the_last_of_every_label_is_the_label_at_the_last_position(
    length: int, b: int, seed: int
) -> None:
    predicted = torch.randint(2, (b, length), generator=torch.Generator().manual_seed(seed))
    every, last = (
        last_position_accuracy(predicted, Parity(length, 1, at).sample(b, stream("test", 1)).labels)
        for at in ("every", "last")
    )
    assert torch.equal(every, last)


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

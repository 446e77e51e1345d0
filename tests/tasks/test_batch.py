"""Accuracies by hand: masks, logits and ids, rows without labels, messages."""

import pytest
import torch

from bedouin.tasks import IGNORE, sequence_accuracy, token_accuracy

LABELS = torch.tensor([[1, 2, IGNORE], [0, IGNORE, IGNORE], [IGNORE, IGNORE, IGNORE]])
PREDICTED = torch.tensor([[1, 0, 2], [0, 1, 1], [1, 1, 1]])


def test_by_hand() -> None:
    assert token_accuracy(PREDICTED, LABELS).item() == pytest.approx(2 / 3)
    assert sequence_accuracy(PREDICTED, LABELS).item() == pytest.approx(1 / 2)


def test_logits_and_ids_agree() -> None:
    logits = torch.nn.functional.one_hot(PREDICTED, 3).to(torch.bfloat16)
    assert torch.equal(token_accuracy(logits, LABELS), token_accuracy(PREDICTED, LABELS))
    assert torch.equal(sequence_accuracy(logits, LABELS), sequence_accuracy(PREDICTED, LABELS))


def test_a_predicted_ignore_label_is_not_counted() -> None:
    everything_ignored = torch.full_like(LABELS, IGNORE)
    assert token_accuracy(everything_ignored, LABELS).item() == 0.0
    assert token_accuracy(everything_ignored, everything_ignored).isnan()
    assert sequence_accuracy(everything_ignored, everything_ignored).isnan()


def test_results_are_scalar_tensors() -> None:
    for accuracy in (token_accuracy, sequence_accuracy):
        result = accuracy(PREDICTED, LABELS)
        assert result.shape == ()
        assert result.dtype == torch.float32


def test_bad_predictions() -> None:
    with pytest.raises(ValueError, match=r"class ids \(3, 3\).* got \(3, 2\)"):
        token_accuracy(PREDICTED[:, :2], LABELS)
    with pytest.raises(TypeError, match=r"integer dtype, got torch\.float32"):
        sequence_accuracy(PREDICTED.float(), LABELS)

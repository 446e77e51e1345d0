"""Accuracies against values computed by hand: masks, logits and ids, rows without labels."""

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


def test_labels_and_logits_of_wrong_types() -> None:
    logits = torch.zeros(3, 3, 4)
    for accuracy in (token_accuracy, sequence_accuracy):
        with pytest.raises(TypeError, match=r"labels must be of integer dtype, got torch\.float32"):
            accuracy(logits, LABELS.float())
        with pytest.raises(TypeError, match=r"logits must be real numbers, got torch\.bool"):
            accuracy(logits.bool(), LABELS)
        with pytest.raises(ValueError, match=r"at least one class, got \(3, 3, 0\)"):
            accuracy(logits[..., :0], LABELS)

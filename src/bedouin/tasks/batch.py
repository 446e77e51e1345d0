"""What a task returns, and how a prediction is judged.

Letters: b batch, t time, v classes.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

IGNORE: Final = -100
"""The label that no loss and no accuracy counts (`ignore_index` of `cross_entropy`)."""


class Batch(NamedTuple):
    """A batch of rows; unpacks as `tokens, labels = task.sample(...)`."""

    tokens: Tensor  # (b, t) int64
    labels: Tensor  # (b, t) int64, IGNORE where nothing is asked


def token_accuracy(prediction: Tensor, labels: Tensor) -> Tensor:
    """Fraction of the labels that are predicted right, as a scalar tensor (never reads the device).

    Args:
        prediction: logits (b, t, v), of which the largest is taken, or class ids (b, t).
        labels: (b, t); `IGNORE` marks positions that do not count.

    Returns:
        A float32 scalar; NaN where no label counts.

    Raises:
        ValueError: `prediction` fits `labels` neither as logits nor as class ids.
        TypeError: class ids that are not integers.
    """
    counted = labels != IGNORE
    correct = (_classes(prediction, labels) == labels) & counted
    return correct.sum().float() / counted.sum().float()


def sequence_accuracy(prediction: Tensor, labels: Tensor) -> Tensor:
    """Fraction of the rows in which *every* label is predicted right; as `token_accuracy` else.

    Rows without a label that counts are left out.
    """
    counted = labels != IGNORE
    correct = (_classes(prediction, labels) == labels) | ~counted
    rows = counted.any(dim=-1)
    return (correct.all(dim=-1) & rows).sum().float() / rows.sum().float()


def _classes(prediction: Tensor, labels: Tensor) -> Tensor:
    if prediction.shape[:-1] == labels.shape and prediction.ndim == labels.ndim + 1:
        return prediction.argmax(dim=-1)
    if prediction.shape != labels.shape:
        raise ValueError(
            f"prediction must be logits {(*labels.shape, 'v')} or class ids {tuple(labels.shape)} "
            f"for labels of shape {tuple(labels.shape)}, got {tuple(prediction.shape)}"
        )
    if prediction.is_floating_point() or prediction.dtype == torch.bool:
        raise TypeError(f"prediction of class ids must be of integer dtype, got {prediction.dtype}")
    return prediction

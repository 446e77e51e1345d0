"""Accuracies of predictions, none of which synchronizes with the device.

Letters: b batch, t time, v classes.
"""

from typing import TypeVar

import torch
from torch import Tensor

from bedouin.tasks.batch import IGNORE

Accuracy = TypeVar("Accuracy", float, Tensor)


def token_accuracy(prediction: Tensor, labels: Tensor) -> Tensor:
    """Fraction of the labels that are predicted correctly, a float32 scalar (); NaN without labels.
    prediction: logits (b, t, v), whose argmax is the predicted class, or class ids (b, t). A
    position at which any logit is NaN counts as wrong. labels: (b, t) integers; positions with
    `IGNORE` do not count. Raises ValueError for shapes that do not fit and v = 0, and TypeError for
    labels or class ids that are not integers and logits that are not real numbers."""
    counted = labels != IGNORE
    correct = (_classes(prediction, labels) == labels) & counted
    return correct.sum().float() / counted.sum().float()


def sequence_accuracy(prediction: Tensor, labels: Tensor) -> Tensor:
    """Fraction of the rows in which *every* label is predicted correctly; rows without labels do
    not count. Arguments, result and errors are those of `token_accuracy`."""
    counted = labels != IGNORE
    correct = (_classes(prediction, labels) == labels) | ~counted
    rows = counted.any(dim=-1)
    return (correct.all(dim=-1) & rows).sum().float() / rows.sum().float()


def last_position_accuracy(prediction: Tensor, labels: Tensor) -> Tensor:
    """Fraction of the rows whose last label other than `IGNORE` is predicted correctly; rows
    without labels do not count. Arguments, result and errors are those of `token_accuracy`."""
    remaining = (labels != IGNORE).flip(-1).cumsum(-1).flip(-1)  # labels from a position on
    return token_accuracy(prediction, labels.masked_fill(remaining > 1, IGNORE))


def scale_accuracy(accuracy: Accuracy, chance: float) -> Accuracy:
    """(accuracy - chance) / (1 - chance): 0 for guessing, 1 for no error, for a number or a tensor.
    chance: accuracy of guessing, in [0, 1), else ValueError: 1/2 for parity, 1/m modulo m."""
    if not 0 <= chance < 1:
        raise ValueError(f"chance must be in [0, 1), got {chance}")
    return (accuracy - chance) / (1 - chance)


def scaled_accuracy(prediction: Tensor, labels: Tensor, *, chance: float) -> Tensor:
    """`scale_accuracy` of `token_accuracy`, the metric of parity and modular arithmetic."""
    return scale_accuracy(token_accuracy(prediction, labels), chance)


def _classes(prediction: Tensor, labels: Tensor) -> Tensor:  # (b, t, v) or (b, t), (b, t)
    """Predicted class ids; IGNORE, which counts as wrong, where a logit is NaN."""
    _check_ids("labels", labels)
    if prediction.shape == labels.shape:
        _check_ids("prediction of class ids", prediction)
        return prediction
    if prediction.shape[:-1] != labels.shape:
        raise ValueError(
            f"prediction must be logits {(*labels.shape, 'v')} or class ids {tuple(labels.shape)} "
            f"for labels of shape {tuple(labels.shape)}, got {tuple(prediction.shape)}"
        )
    if prediction.shape[-1] == 0:
        raise ValueError(f"logits must have at least one class, got {tuple(prediction.shape)}")
    if prediction.is_complex() or prediction.dtype == torch.bool:
        raise TypeError(f"logits must be real numbers, got {prediction.dtype}")
    largest, classes = prediction.max(dim=-1)  # the maximum of a row with a NaN is NaN
    return classes.masked_fill(largest.isnan(), IGNORE)


def _check_ids(name: str, ids: Tensor) -> None:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} must be of integer dtype, got {ids.dtype}")

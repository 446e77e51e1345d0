"""The batches that a task returns, and the accuracy of predictions.

Letters: b batch, t time, v classes.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

IGNORE: Final = -100
"""The label of positions that losses and accuracies ignore (`ignore_index` of `cross_entropy`)."""


class Batch(NamedTuple):
    """A batch of rows; unpacks as `tokens, labels = task.sample(...)`."""

    tokens: Tensor  # (b, t) int64
    labels: Tensor  # (b, t) int64, IGNORE at positions without a label

    def to(self, device: torch.device | str | None) -> "Batch":
        """The same batch on a device; itself for None."""
        return self if device is None else Batch(self.tokens.to(device), self.labels.to(device))


def token_accuracy(prediction: Tensor, labels: Tensor) -> Tensor:
    """Fraction of the labels that are predicted correctly, without synchronization.

    Args:
        prediction: logits (b, t, v), whose argmax is the predicted class, or class ids (b, t). A
            position at which any logit is NaN counts as wrong.
        labels: (b, t) integers; positions with `IGNORE` do not count.

    Returns:
        A float32 scalar (); NaN if every label is `IGNORE`.

    Raises:
        ValueError: the shape of `prediction` is that of neither logits nor class ids for `labels`,
            or v is 0.
        TypeError: labels or class ids that are not integers, logits that are complex or bool.
    """
    counted = labels != IGNORE
    correct = (_classes(prediction, labels) == labels) & counted
    return correct.sum().float() / counted.sum().float()


def sequence_accuracy(prediction: Tensor, labels: Tensor) -> Tensor:
    """Fraction of the rows in which *every* label is predicted correctly.

    Arguments, result and errors are those of `token_accuracy`. Rows without labels do not count.
    """
    counted = labels != IGNORE
    correct = (_classes(prediction, labels) == labels) | ~counted
    rows = counted.any(dim=-1)
    return (correct.all(dim=-1) & rows).sum().float() / rows.sum().float()


def _classes(
    prediction: Tensor,  # (b, t, v) or (b, t)
    labels: Tensor,  # (b, t)
) -> Tensor:  # (b, t)
    """Predicted class ids; IGNORE, which counts as wrong, where a logit is NaN."""
    _check_ids("labels", labels)
    if prediction.shape[:-1] == labels.shape and prediction.ndim == labels.ndim + 1:
        _check_logits(prediction)
        largest, classes = prediction.max(dim=-1)  # the maximum of a row with a NaN is NaN
        return classes.masked_fill(largest.isnan(), IGNORE)
    if prediction.shape != labels.shape:
        raise ValueError(
            f"prediction must be logits {(*labels.shape, 'v')} or class ids {tuple(labels.shape)} "
            f"for labels of shape {tuple(labels.shape)}, got {tuple(prediction.shape)}"
        )
    _check_ids("prediction of class ids", prediction)
    return prediction


def _check_logits(
    logits: Tensor,  # (b, t, v)
) -> None:
    if logits.shape[-1] == 0:
        raise ValueError(f"logits must have at least one class, got {tuple(logits.shape)}")
    if logits.is_complex() or logits.dtype == torch.bool:
        raise TypeError(f"logits must be real numbers, got {logits.dtype}")


def _check_ids(
    name: str,
    ids: Tensor,  # (b, t)
) -> None:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} must be of integer dtype, got {ids.dtype}")

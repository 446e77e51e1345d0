"""Accuracies that published results of these tasks are given in.

Letters: b batch, t time, v classes.
"""

from typing import TypeVar

from torch import Tensor

from bedouin.tasks.batch import IGNORE, token_accuracy

Accuracy = TypeVar("Accuracy", float, Tensor)


def last_position_accuracy(prediction: Tensor, labels: Tensor) -> Tensor:
    """Fraction of the rows whose last label is predicted right, as a scalar tensor.

    The last label of a row is its last one that is not `IGNORE`, so padding on the right does not
    matter. Rows without a label are left out. Never reads the device.

    Args:
        prediction: logits (b, t, v), of which the largest is taken, or class ids (b, t).
        labels: (b, t) integers; `IGNORE` marks positions that do not count.

    Returns:
        A float32 scalar; NaN where no label counts.

    Raises:
        ValueError, TypeError: as `token_accuracy`.
    """
    remaining = (labels != IGNORE).flip(-1).cumsum(-1).flip(-1)  # labels from a position on
    return token_accuracy(prediction, labels.masked_fill(remaining > 1, IGNORE))


def scale_accuracy(accuracy: Accuracy, chance: float) -> Accuracy:
    """An accuracy moved to the scale of guessing: (accuracy - chance) / (1 - chance).

    Args:
        accuracy: a number or a tensor of any shape.
        chance: accuracy of guessing, in [0, 1): 1/2 for parity, 1/m for arithmetic modulo m.

    Returns:
        The same type and shape: 0 for guessing, 1 for no error, negative below chance.

    Raises:
        ValueError: a chance outside of [0, 1).
    """
    if not 0 <= chance < 1:
        raise ValueError(f"chance must be in [0, 1), got {chance}")
    return (accuracy - chance) / (1 - chance)


def scaled_accuracy(prediction: Tensor, labels: Tensor, *, chance: float) -> Tensor:
    """`token_accuracy` on the scale of guessing; the metric of parity and modular arithmetic.

    Args:
        prediction: logits (b, t, v), of which the largest is taken, or class ids (b, t).
        labels: (b, t) integers; `IGNORE` marks positions that do not count.
        chance: accuracy of guessing, in [0, 1); `task.chance`.

    Returns:
        A float32 scalar; NaN where no label counts.

    Raises:
        ValueError, TypeError: as `token_accuracy` and `scale_accuracy`.
    """
    return scale_accuracy(token_accuracy(prediction, labels), chance)

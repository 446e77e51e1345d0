"""Where in a string a model that copies makes its errors.

Letters: b rows, t time, v classes, l letters of a string.
"""

from torch import Tensor

from bedouin.tasks import IGNORE

PARTS = 10
"""Parts of a string whose accuracies are given."""


def by_position(
    logits: Tensor,  # (b, t, v)
    labels: Tensor,  # (b, t), those of test rows of one length l
) -> dict[str, float | list[float]]:
    """Accuracy in ten parts of the string, and of the letters after a right and a wrong one.

    A model that finds a letter by the letters before it errs at all positions alike; one that finds
    it by its position errs at positions beyond those of training. An accuracy over no letters is
    NaN.
    """
    length = int((labels[0] != IGNORE).sum()) - 1  # without the "." at the end
    start = int((labels[0] != IGNORE).nonzero()[0])
    here = slice(start, start + length)
    right = (logits[:, here].argmax(-1) == labels[:, here]).double()  # (b, l)
    parts = right.mean(0).tensor_split(min(PARTS, length))
    before, after = right[:, :-1].bool(), right[:, 1:]
    return {
        "parts": [round(float(part.mean()), 4) for part in parts],
        "after_right": round(float(after[before].mean()), 4),
        "after_wrong": round(float(after[~before].mean()), 4),
    }

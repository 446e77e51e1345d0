"""Where in a string a model that copies makes its errors, and for which pairs one that recalls.

Letters: b rows, t time, v classes, l letters of a string, r pairs.
"""

import torch
from torch import Tensor

from bedouin.tasks import IGNORE

PARTS = 10
"""Parts of a string, or of the pairs, whose accuracies are given."""


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
    before, after = right[:, :-1].bool(), right[:, 1:]
    return {
        "parts": _parts(right.mean(0)),
        "after_right": round(float(after[before].mean()), 4),
        "after_wrong": round(float(after[~before].mean()), 4),
    }


def by_pair(
    logits: Tensor,  # (b, t, v)
    labels: Tensor,  # (b, t), those of test rows of r pairs
    tokens: Tensor,  # (b, t)
) -> dict[str, float | list[float]]:
    """Accuracy in ten parts of the pairs, in the order in which a row gives them.

    A model that writes only at the positions where training had pairs errs at the later ones.
    """
    asked = labels != IGNORE
    r = int(asked[0].sum())
    right = (logits.argmax(-1) == labels)[asked].view(-1, r).double()
    keys = tokens[:, : 2 * r : 2]
    order = (tokens[asked].view(-1, r, 1) == keys.unsqueeze(1)).double().argmax(-1)  # (b, r)
    return {"parts": _parts(torch.zeros_like(right).scatter(1, order, right).mean(0))}


def _parts(
    right: Tensor,  # (k,)
) -> list[float]:
    """The means of up to PARTS parts."""
    parts = right.tensor_split(min(PARTS, len(right)))
    return [round(float(part.mean()), 4) for part in parts]

"""Documents in one row (`cu_seqlens`) beside the same documents as padded rows (`mask`).

A shape is the number of documents and the longest length. Letters: b documents, t the longest
length, m d_model.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.measure import Context, Numbers, Subject, layer_subject, measure_subject
from benchmarks.setting import Setting, Shape

TIMES = ("forward_ms", "both_ms")


def lengths_of(setting: Setting, shape: Shape, *, even: bool) -> Tensor:  # (b,) int64
    """The lengths of the documents: all t, or random in 1 … t, the same in every run."""
    if even:
        lengths = torch.full((shape.b,), shape.t)
    else:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, shape.t + 1, (shape.b,), generator=generator)
    return lengths.to(setting.device)


def bounds_of(
    lengths: Tensor,  # (b,)
) -> Tensor:  # (b + 1,)
    """cu_seqlens."""
    return pad(lengths.cumsum(0), (1, 0))


def packed(context: Context, shape: Shape, *, even: bool, feedback: bool = True) -> Numbers:
    """Times of the packed row; those of the padded rows with a mask and without one, and the ratios
    of forward + backward, by which `over_padded` is to be judged."""
    setting = context.setting
    lengths = lengths_of(setting, shape, even=even)
    options: dict[str, Any] = {} if feedback else {"feedback": ()}
    row, rows = Shape(1, int(lengths.sum())), Shape(shape.b, int(lengths.max()))
    mask = torch.arange(rows.t, device=setting.device) < lengths.unsqueeze(1)

    def numbers(call: Shape, **places: Tensor) -> Numbers:
        return measure_subject(context, lambda: _subject(setting, call, options, places))

    found = numbers(row, cu_seqlens=bounds_of(lengths))
    for name, places in (("padded", {"mask": mask}), ("unmasked", {})):
        other = numbers(rows, **places)
        found |= {f"{name}_{key}": other[key] for key in TIMES}
        found[f"over_{name}"] = found["both_ms"] / other["both_ms"]
    return found | {"documents": shape.b, "tokens": row.t, "padded_tokens": rows.tokens}


def _subject(
    setting: Setting, shape: Shape, options: dict[str, Any], places: dict[str, Any]
) -> Subject:
    """Calls of the layer with these arguments, eager, because cu_seqlens are read by the host."""
    layer = setting.layer(**options)
    subject = layer_subject(layer, setting, shape)
    return replace(subject, function=lambda x: layer(x, **places), has_graph=False)

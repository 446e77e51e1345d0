"""Kinds of calls of a layer's core, and what calls of one kind have in common."""

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from bedouin.kernels.direct.triton_constants import uses_tf32
from bedouin.kernels.tape import Kind

MAX_KINDS = 256
"""Kinds that are remembered, after which all are dropped: lengths of sequences may vary without
end."""

_KINDS: dict[tuple[Hashable, ...], Kind] = {}


def kind_of(
    name: str,
    tensors: Iterable[Tensor | None],  # any shapes
    others: tuple[Hashable, ...],
) -> Kind:
    """The kind of a call. `tensors` are all that the call is given, and `others` is all else that
    decides what it does."""
    looks: list[Hashable] = [name, others]
    single = False
    for v in tensors:
        # a dtype or None ends what is said of each tensor
        if v is None:
            looks.append(None)
            continue
        dtype = v.dtype
        looks += v.shape
        looks += v.stride()
        looks += v.get_device(), dtype
        single |= dtype is torch.float32
    # only products of float32 depend on the setting
    looks.append(single and uses_tf32())
    key = tuple(looks)
    kind = _KINDS.get(key)
    if kind is None:
        if len(_KINDS) >= MAX_KINDS:
            _KINDS.clear()
        kind = _KINDS[key] = Kind()
    return kind

"""Kinds of calls of a layer's core, and what calls of one kind have in common."""

from collections.abc import Hashable, Sequence

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
    tensors: Sequence[Tensor | None],  # any shapes
    others: tuple[Hashable, ...],
) -> Kind:
    """The kind of a call. `tensors` are all that the call is given, and `others` is all else that
    decides what it does."""
    # one tuple for each tensor takes less time than one for all
    looks = tuple(
        [v if v is None else (v.shape, v.stride(), v.dtype, v.get_device()) for v in tensors]
    )
    # only products of float32 depend on the setting
    single = any([v is not None and v.dtype is torch.float32 for v in tensors])
    key = name, others, looks, single and uses_tf32()
    kind = _KINDS.get(key)
    if kind is None:
        if len(_KINDS) >= MAX_KINDS:
            _KINDS.clear()
        kind = _KINDS[key] = Kind()
    return kind

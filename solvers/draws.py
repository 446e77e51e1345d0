"""The numbers of a layer's training calls, which random caps depend on."""

import weakref
from collections import OrderedDict
from typing import Any

import torch

from bedouin.solvers.caps import Cap
from bedouin.solvers.recompute import Region, checkpoint_regions, in_backward

MAX_CALLS = 4096
"""Calls that are remembered for implementations of checkpointing other than torch's; the oldest are
forgotten first. torch's are remembered for as long as their region may be recomputed."""

_SEVERAL = -1
"""In place of the number of a call whose key was drawn for several calls."""

_Calls = dict[int, set[int]]
"""Key -> numbers of the calls that drew it: one, unless the random state was set back."""


class Draws:
    """Counts training calls; a call that activation checkpointing runs again keeps its number.

    For a random cap a call draws a key from torch's default CPU generator. Checkpointing restores
    the state of that generator for a recomputation (preserve_rng_state=True, its default), which
    therefore draws the key of the call that it repeats. The region of torch.utils.checkpoint tells
    apart calls that drew the same key because the random state was set back in between. In a
    backward pass a call that cannot be identified is a RuntimeError, never another number.

    With other caps the number of a call has no influence: nothing is drawn, and calls in a backward
    pass are not counted. Copies keep the count and forget the calls.
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._regions: weakref.WeakKeyDictionary[object, _Calls] = weakref.WeakKeyDictionary()
        self._recent: OrderedDict[int, int] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Draws":
        return Draws(self.count)

    def __reduce__(self) -> tuple[type["Draws"], tuple[int]]:
        return Draws, (self.count,)

    def next(self, cap: Cap) -> int:
        """The number of the present training call, counted from 0."""
        if cap.is_random:
            return _identify_eagerly(self) if torch.compiler.is_compiling() else self._identify()
        if in_backward():
            return self.count
        self.count += 1
        return self.count - 1

    def _identify(self) -> int:
        key, regions = _draw_key(), checkpoint_regions()
        if in_backward() or any(region.recomputes for region in regions):
            index = self._recall(key, regions)
        else:
            index, self.count = self.count, self.count + 1
        self._remember(key, index, regions)
        return index

    def _remember(self, key: int, index: int, regions: list[Region]) -> None:
        for region in regions:
            calls = self._regions.setdefault(region.owner, {})
            calls.setdefault(key, set()).add(index)
        self._recent[key] = index if self._recent.get(key, index) == index else _SEVERAL
        if len(self._recent) > MAX_CALLS:
            self._recent.popitem(last=False)

    def _recall(self, key: int, regions: list[Region]) -> int:
        for region in regions:
            if not region.recomputes:
                continue  # a region inside a recomputed one, in its own forward
            calls = self._regions.get(region.owner, {})
            # without the random state there is no key to find, and none needed for a single call
            found = calls.get(key, set()) if region.preserves_rng else set().union(*calls.values())
            if len(found) == 1:
                return next(iter(found))
            if found:
                raise RuntimeError(_message("several calls fit"))
        index = self._recent.get(key)
        if index is None:
            raise RuntimeError(_message("no earlier call drew the same random key"))
        if index == _SEVERAL:
            raise RuntimeError(_message("several calls drew the same random key"))
        return index


# sys._getframe and the generator mean nothing to a graph; torch.compile itself is not imported here
_identify_eagerly = torch._disable_dynamo(Draws._identify)  # type: ignore[attr-defined]


def _draw_key() -> int:
    # below torch.func transforms, which refuse random operations or repeat them for each sample
    with torch._C._DisableFuncTorch():
        return int(torch.randint(2**63 - 1, (), device="cpu"))


def _message(reason: str) -> str:
    return (
        "a random cap (GammaCap) in a backward pass: activation checkpointing runs a call again, "
        f"which must get the draw of that call, and {reason}. Checkpoint with "
        "preserve_rng_state=True (the default), do not set torch's random state back between calls "
        "that are recomputed later, or use FixedCap"
    )

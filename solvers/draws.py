"""Numbering of a layer's training calls: a random cap is a function of the call's number."""

import weakref
from collections import OrderedDict
from typing import Any

import torch

from bedouin.solvers.caps import Cap
from bedouin.solvers.recompute import Region, checkpoint_regions, in_backward

MAX_CALLS = 4096
"""Calls remembered for checkpointing implementations other than torch's; the oldest are dropped
first. Calls inside a region of torch.utils.checkpoint are remembered for as long as the region may
be recomputed."""

_AMBIGUOUS = -1
"""Stored instead of a call's number if several calls drew the same key."""

_CallsByKey = dict[int, set[int]]
"""Key -> numbers of the calls that drew it: one, unless the random state was reset in between."""


class Draws:
    """Counts training calls; a call recomputed by activation checkpointing keeps its number.

    For a random cap each call draws a key from torch's default CPU generator. Checkpointing
    restores the state of that generator for a recomputation (preserve_rng_state=True, its default),
    so the recomputed call draws the key of the original. Calls that drew the same key, because the
    random state was reset between them, are distinguished by their region of
    torch.utils.checkpoint. A call in a backward pass that cannot be identified raises RuntimeError;
    it never gets a new number.

    With other caps the number of a call has no influence: no key is drawn, and calls in a backward
    pass are not counted. A copy keeps the count but not the record of earlier calls.

    count: training calls so far.
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._regions: weakref.WeakKeyDictionary[object, _CallsByKey] = weakref.WeakKeyDictionary()
        self._recent: OrderedDict[int, int] = OrderedDict()  # key -> number of the call

    def __deepcopy__(self, memo: dict[int, Any]) -> "Draws":
        return Draws(self.count)

    def __reduce__(self) -> tuple[type["Draws"], tuple[int]]:
        return Draws, (self.count,)

    def next(self, cap: Cap) -> int:
        """The number of the current training call, counted from 0.

        Raises RuntimeError for a recomputed call that cannot be identified (see the class).
        """
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
        self._recent[key] = index if self._recent.get(key, index) == index else _AMBIGUOUS
        if len(self._recent) > MAX_CALLS:
            self._recent.popitem(last=False)

    def _recall(self, key: int, regions: list[Region]) -> int:
        for region in regions:
            if not region.recomputes:
                continue  # nested in a recomputed region, but in its own forward pass
            calls = self._regions.get(region.owner, {})
            # if the random state is not restored the key is a new one, but a region with a single
            # call needs none
            found = calls.get(key, set()) if region.preserves_rng else set().union(*calls.values())
            if len(found) == 1:
                return next(iter(found))
            if found:
                raise RuntimeError(_message("several earlier calls match"))
        index = self._recent.get(key)
        if index is None:
            raise RuntimeError(_message("no earlier call drew the same random key"))
        if index == _AMBIGUOUS:
            raise RuntimeError(_message("several calls drew the same random key"))
        return index


# The Python stack and the generator do not exist inside a compiled graph. torch.compiler.disable
# would import the compiler.
_identify_eagerly = torch._disable_dynamo(Draws._identify)  # type: ignore[attr-defined]


def _draw_key() -> int:
    # outside torch.func transforms, which reject random operations or run them for each sample
    with torch._C._DisableFuncTorch():
        return int(torch.randint(2**63 - 1, (), device="cpu"))


def _message(reason: str) -> str:
    return (
        "a random cap (GammaCap) in a backward pass: activation checkpointing recomputes a call, "
        f"which must get the same cap as the original call, but {reason}. Use checkpointing with "
        "preserve_rng_state=True (the default), do not reset torch's random state between calls "
        "that are recomputed later, or use FixedCap"
    )

"""Numbering of a layer's training calls, on which random caps depend, and their recomputation by
activation checkpointing."""

from collections import OrderedDict

import torch

from bedouin.kernels.backend import in_backward, outside_of_graphs
from bedouin.solvers.caps import Cap

MAX_CALLS = 4096
"""Calls of a layer that are remembered for their recomputation; the oldest are dropped first."""

_AMBIGUOUS = -1  # stored instead of a call's number if several calls drew the same key


class Draws:
    """Counts training calls; a call recomputed by activation checkpointing keeps its number.

    For a random cap each call draws a key from torch's default CPU generator, which has no
    influence on the cap. Checkpointing restores the state of that generator for a recomputation
    (preserve_rng_state=True, its default), so that it draws the key of the original call. With
    other caps no key is drawn, and calls in a backward pass are not counted. A copy keeps the
    count, that of training calls so far, but not the record of earlier calls.
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._numbers: OrderedDict[int, int] = OrderedDict()  # key -> number of the call

    def __reduce__(self) -> tuple[type["Draws"], tuple[int]]:
        return Draws, (self.count,)  # for copies and pickles

    def next(self, cap: Cap) -> int:
        """The number of the current training call, counted from 0. Raises RuntimeError for a
        recomputed call whose key no call or more than one has drawn, because the random state was
        not restored or was reset between the calls."""
        if cap.is_random:
            return _identify_eagerly(self) if torch.compiler.is_compiling() else self._identify()
        if in_backward():
            return self.count
        self.count += 1
        return self.count - 1

    def _identify(self) -> int:
        # outside torch.func transforms, which reject random operations or run them for each sample
        with torch._C._DisableFuncTorch():
            key = int(torch.randint(2**63 - 1, (), device="cpu"))
        if in_backward():
            known = self._numbers.get(key)
            if known is None or known == _AMBIGUOUS:
                raise RuntimeError(
                    "a random cap (GammaCap) in a backward pass: activation checkpointing "
                    "recomputes a call, which must get the same cap as the original call, but "
                    f"{'no earlier call' if known is None else 'several calls'} drew the same "
                    "random key. Use checkpointing with preserve_rng_state=True (the default), do "
                    "not reset torch's random state between calls that are recomputed later, or "
                    "use FixedCap"
                )
            return known
        index, self.count = self.count, self.count + 1
        self._numbers[key] = _AMBIGUOUS if key in self._numbers else index
        if len(self._numbers) > MAX_CALLS:
            self._numbers.popitem(last=False)
        return index


_identify_eagerly = outside_of_graphs("a random cap needs torch's generator and autograd engine")(
    Draws._identify
)

"""Random streams that know their split, and the rule that keeps train and test apart.

Two independent guards:

1. *Seeds.* Train streams have even seeds, test streams odd ones, and (seed, rank) -> seed is one
   to one, also in the lower 32 bits (torch's CPU generator reads no more than those).
2. *Examples.* Of the n values that the last element of a sequence can take, the elements before it
   choose (by a hash) max(1, n // 16) that belong to the test split; the others belong to the train
   split. A sequence is therefore in exactly one of the two, whatever was drawn. Everything before
   the last element is uniform in both splits and the last one is uniform over what its split
   allows, so each split is the uniform distribution over its own sequences. Nothing is rejected
   and redrawn, so a draw costs the same every time and never waits for the device.

The guarantee is about *equal lengths*: sequences of different lengths differ anyway, but a long
test sequence may begin with a short training one.
"""

from typing import Any, Final, Literal, Self, get_args

import torch
from torch import Tensor

from bedouin.tasks.checks import whole_number

Split = Literal["train", "test", "all"]

MAX_SEED: Final = 2**20
MAX_RANK: Final = 2**11
_HELD_OUT: Final = 16


class Stream(torch.Generator):
    """A `torch.Generator` with a split; make one with `stream`.

    Its copies have the same split: copy, deepcopy, pickle, `torch.save`, `clone_state`,
    `graphsafe_get_state`. The tensor of `get_state` holds numbers only, so it must go into a stream
    of the same split: `set_state` and `graphsafe_set_state` raise ValueError where its seed is of
    the other one. `manual_seed` and `seed` take any seed, which gives up the guard of the seeds and
    keeps that of the examples.
    """

    _split: Split

    def __new__(cls, device: torch.device | str = "cpu", split: Split = "all") -> Self:
        # torch's stub gives the device to __init__, its class takes it here
        made = super().__new__(cls, device)  # type: ignore[call-arg]
        made._split = _checked_split(split)
        return made

    @property
    def split(self) -> Split:
        """The split that every sample comes from."""
        return self._split

    def __reduce__(self) -> tuple[Any, ...]:
        # torch's own names torch.Generator, so its state alone would come back
        state = super().__reduce__()[2]
        return type(self), (str(self.device), self.split), state

    def clone_state(self) -> Self:
        """A stream of the same split that draws the same from here on."""
        clone = type(self)(self.device, self.split)
        torch.Generator.set_state(clone, self.get_state())
        return clone

    def graphsafe_get_state(self) -> Self:
        """A stream of the same split that shares this one's state (CUDA only, as torch's)."""
        handle = type(self)(self.device, self.split)
        torch.Generator.graphsafe_set_state(handle, super().graphsafe_get_state())
        return handle

    def set_state(self, new_state: Tensor) -> Self:
        """Continue where `get_state` was called; ValueError for a state of another split."""
        before = self.clone_state()
        super().set_state(new_state)
        seed = self.initial_seed()
        if not before._fits(seed):
            super().set_state(before.get_state())
            raise ValueError(self._foreign("new_state", seed))
        return self

    def graphsafe_set_state(self, state: torch.Generator) -> Self:
        """Share another generator's state (CUDA only); ValueError for one of another split."""
        if not self._fits(state.initial_seed()):
            raise ValueError(self._foreign("state", state.initial_seed()))
        if isinstance(state, Stream):
            state = super(Stream, state).graphsafe_get_state()  # torch takes no subclass here
        super().graphsafe_set_state(state)
        return self

    def _fits(self, seed: int) -> bool:
        """Whether a seed is of this split, or already in use here (by `manual_seed`)."""
        if self.split == "all" or seed == self.initial_seed():
            return True
        return seed % 2 == (self.split == "test")

    def _foreign(self, name: str, seed: int) -> str:
        parity = "odd" if self.split == "test" else "even"
        return (
            f"{name} must come from a stream of split {self.split!r} (a generator with an {parity} "
            f"seed), got one with seed {seed}: keep the states of train and test apart"
        )


def stream(split: Split, seed: int, device: torch.device | str = "cpu", *, rank: int = 0) -> Stream:
    """The random stream of a split: every `sample(batch_size, stream)` stays inside that split.

    Args:
        split: `"train"`, `"test"`, or `"all"` for the distribution without a held-out part.
        seed: 0 <= seed < 2**20.
        device: where the stream lives, and so where the batches are made.
        rank: 0 <= rank < 2**11, for processes that must draw different data at the same seed.

    Returns:
        A generator; `get_state` and `set_state` checkpoint it. The split is not part of that state,
        but it is part of every copy of the stream.

    Raises:
        ValueError: unknown split, or seed or rank out of range.
        TypeError: a seed or rank that is no int.
    """
    number = whole_number("seed", seed, 0, MAX_SEED) * MAX_RANK
    number += whole_number("rank", rank, 0, MAX_RANK)
    generator = Stream(device, split)
    generator.manual_seed(2 * _mix31(number) + (split == "test"))
    return generator


def resolve_split(generator: torch.Generator, split: Split | None) -> Split:
    """The split to draw from: the stream's own; a plain generator has none and draws from all.

    Raises:
        ValueError: an unknown split, or one that contradicts the stream's.
        TypeError: no generator.
    """
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator, got {generator!r}: "
            'make one with stream("train", seed)'
        )
    if split is not None:
        _checked_split(split)
    if not isinstance(generator, Stream):
        return "all" if split is None else split
    if split is not None and split != generator.split:
        raise ValueError(
            f"split must be that of the stream ({generator.split!r}), got {split!r}: "
            f"make another one with stream({split!r}, seed)"
        )
    return generator.split


def _checked_split(split: Split) -> Split:
    if split not in get_args(Split):
        raise ValueError(f"split must be one of {get_args(Split)}, got {split!r}")
    return split


def draw_last(
    prefix_hash: Tensor,  # any shape, int64
    num_values: int,
    split: Split,
    generator: torch.Generator,
) -> Tensor:
    """Draw the last elements, uniform over those that keep their sequences in the split."""
    held_out = max(1, num_values // _HELD_OUT)
    low = held_out if split == "train" else 0
    high = held_out if split == "test" else num_values
    offset = torch.randint(
        low, high, prefix_hash.shape, generator=generator, device=generator.device
    )
    return (prefix_hash + offset) % num_values


def row_hash(tokens: Tensor) -> Tensor:
    """A nonnegative hash below 2**31 of the last dimension: (..., t) int64 -> (...) int64.

    A weighted sum modulo 2**64 with one random weight for each position, mixed at the end.
    Zeros appended to a row do not change its hash.
    """
    weights = _mix64(torch.arange(1, tokens.shape[-1] + 1, device=tokens.device))
    return _mix64((tokens * weights).sum(dim=-1)) & 0x7FFF_FFFF


def _mix64(x: Tensor) -> Tensor:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014) on int64, which wraps around."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return x ^ ((x >> 31) & (2**33 - 1))


def _mix31(x: int) -> int:
    """One to one on [0, 2**31): odd multipliers and xor-shifts both have inverses."""
    mask = 2**31 - 1
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & mask
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & mask
    return x ^ (x >> 16)

"""Random streams with a split, and the rule that keeps training and test data disjoint.

1. *Seeds.* Training streams have even seeds and test streams odd ones, and the map from
   (seed, rank) to the generator's seed is one to one, also in the lower 32 bits, which are all that
   torch's CPU generator reads.
2. *Sequences.* A hash of all elements but the last selects max(1, n // 16) of the n possible last
   elements for the test split; the others belong to the training split. Every sequence of a length
   is therefore in exactly one split, and each split is the uniform distribution over its own
   sequences, without rejection sampling and synchronization. A long test sequence may begin with a
   short training sequence.
"""

from numbers import Integral
from typing import Any, Final, Literal, Self, get_args

import torch
from torch import Tensor

Split = Literal["train", "test", "all"]

MAX_SEED: Final = 2**20
MAX_RANK: Final = 2**11
_HELD_OUT: Final = 16


def whole_number(name: str, value: int, low: int, high: int | None = None) -> int:
    """`value`, an integer of Python or NumPy in [low, high), as an int; TypeError for anything else
    and for a bool, ValueError outside of the range."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < low or (high is not None and value >= high):
        wanted = f"at least {low}" if high is None else f"in [{low}, {high})"
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return int(value)


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


class Stream(torch.Generator):
    """A `torch.Generator` with a split; made by `stream`. All copies have the same split. The
    tensor that `get_state` returns has no split, so `set_state` raises ValueError if its seed
    belongs to the other one; nor has the generator of `graphsafe_get_state`. `manual_seed` and
    `seed` accept any seed, which breaks the first rule above but not the second one."""

    split: Split
    """The split that every sample comes from."""

    def __new__(cls, device: torch.device | str = "cpu", split: Split = "all") -> Self:
        # torch.Generator reads the device in __new__, although its stub declares it in __init__
        made = super().__new__(cls, device)  # type: ignore[call-arg]
        one_of("split", split, get_args(Split))
        made.split = split
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        # torch.Generator.__reduce__ names its own class, which would lose the split
        state = super().__reduce__()[2]
        return type(self), (str(self.device), self.split), state

    def clone_state(self) -> Self:
        """A stream of the same split that draws the same numbers from here on."""
        clone = type(self)(self.device, self.split)
        torch.Generator.set_state(clone, self.get_state())
        return clone

    def set_state(self, new_state: Tensor) -> Self:
        """Continue where `get_state` returned this uint8 vector. ValueError for the other split."""
        source = torch.Generator(self.device)
        source.set_state(new_state)
        seed, parity = source.initial_seed(), "odd" if self.split == "test" else "even"
        own = self.split == "all" or seed % 2 == (self.split == "test")
        if not own and seed != self.initial_seed():  # which `manual_seed` may have set here
            raise ValueError(
                f"new_state must come from a stream of split {self.split!r} (a generator with an "
                f"{parity} seed), got one with seed {seed}: keep the states of train and test apart"
            )
        super().set_state(new_state)
        return self


def stream(split: Split, seed: int, device: torch.device | str = "cpu", *, rank: int = 0) -> Stream:
    """A random stream of a split: `sample(batch_size, stream)` draws from that split only.
    Checkpoint it with `get_state` and `set_state`. split: `"train"`, `"test"`, or `"all"` for the
    distribution over all sequences. seed: 0 <= seed < 2**20. rank: 0 <= rank < 2**11, for processes
    that must draw different data with the same seed. Raises ValueError for a value out of its range
    and TypeError for a number that is not an int."""
    number = whole_number("seed", seed, 0, MAX_SEED) * MAX_RANK
    number += whole_number("rank", rank, 0, MAX_RANK)
    # a one-to-one map on [0, 2**31): odd multipliers and xor-shifts are both invertible
    for factor in (0x45D9F3B, 0x2C1B3C6D):
        number = ((number ^ (number >> 16)) * factor) & (2**31 - 1)
    generator = Stream(device, split)
    generator.manual_seed(2 * (number ^ (number >> 16)) + (split == "test"))
    return generator


def resolve_split(generator: torch.Generator, split: Split | None) -> Split:
    """The split to draw from: the stream's own, or for a plain generator `split` (None: "all")."""
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator, got {generator!r}: "
            'make one with stream("train", seed)'
        )
    if split is not None:
        one_of("split", split, get_args(Split))
    if not isinstance(generator, Stream):
        return split or "all"
    if split not in (None, generator.split):
        raise ValueError(
            f"split must be that of the stream ({generator.split!r}), got {split!r}: "
            f"make another one with stream({split!r}, seed)"
        )
    return generator.split


def draw_last(
    prefix_hash: Tensor, num_values: int, split: Split, generator: torch.Generator
) -> Tensor:  # (...) int64, the `row_hash` of the elements before -> (...) int64
    """Draw the last elements of sequences, uniform over those that the split allows."""
    held_out = max(1, num_values // _HELD_OUT)
    low = held_out if split == "train" else 0
    high = held_out if split == "test" else num_values
    return (prefix_hash + integers(low, high, prefix_hash.shape, generator)) % num_values


def draw_lengths(batch_size: int, allowed: range, generator: torch.Generator) -> Tensor:  # (b, 1)
    """Lengths uniform over `allowed`, which is not empty; a single one draws no random number."""
    if len(allowed) == 1:
        return torch.full((batch_size, 1), allowed[0], device=generator.device)
    which = integers(0, len(allowed), (batch_size, 1), generator)
    return allowed.start + allowed.step * which


def integers(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform int64 numbers in [low, high) on the generator's device."""
    return torch.randint(low, high, shape, generator=generator, device=generator.device)


def row_hash(tokens: Tensor) -> Tensor:  # (..., t) int64 -> (...) int64
    """A hash in [0, 2**31) of each row, which zeros appended to a row do not change."""
    weights = _mix64(torch.arange(1, tokens.shape[-1] + 1, device=tokens.device))
    return _mix64((tokens * weights).sum(dim=-1)) & 0x7FFF_FFFF


def _mix64(x: Tensor) -> Tensor:  # (...) int64
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014), modulo 2**64."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return x ^ ((x >> 31) & (2**33 - 1))

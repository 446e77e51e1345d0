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

from typing import Final, Literal, get_args

import torch
from torch import Tensor

Split = Literal["train", "test", "all"]

MAX_SEED: Final = 2**20
MAX_RANK: Final = 2**11
_HELD_OUT: Final = 16


class Stream(torch.Generator):
    """A `torch.Generator` with a split; make one with `stream`."""

    split: Split = "all"


def stream(split: Split, seed: int, device: torch.device | str = "cpu", *, rank: int = 0) -> Stream:
    """The random stream of a split: every `sample(batch_size, stream)` stays inside that split.

    Args:
        split: `"train"`, `"test"`, or `"all"` for the distribution without a held-out part.
        seed: 0 <= seed < 2**20.
        device: where the stream lives, and so where the batches are made.
        rank: 0 <= rank < 2**11, for processes that must draw different data at the same seed.

    Returns:
        A generator; `get_state` and `set_state` checkpoint it (the split is not part of the state).

    Raises:
        ValueError: unknown split, or seed or rank out of range.
    """
    if split not in get_args(Split):
        raise ValueError(f"split must be one of {get_args(Split)}, got {split!r}")
    if not 0 <= seed < MAX_SEED:
        raise ValueError(f"seed must be in [0, {MAX_SEED}), got {seed}")
    if not 0 <= rank < MAX_RANK:
        raise ValueError(f"rank must be in [0, {MAX_RANK}), got {rank}")
    generator = Stream(device=device)
    generator.split = split
    generator.manual_seed(2 * _mix31(seed * MAX_RANK + rank) + (split == "test"))
    return generator


def resolve_split(generator: torch.Generator, split: Split | None) -> Split:
    """The split to draw from: the stream's own; a plain generator has none and draws from all.

    Raises:
        ValueError: an unknown split, or one that contradicts the stream's.
    """
    if split is not None and split not in get_args(Split):
        raise ValueError(f"split must be one of {get_args(Split)}, got {split!r}")
    if not isinstance(generator, Stream):
        return "all" if split is None else split
    if split is not None and split != generator.split:
        raise ValueError(
            f"split must be that of the stream ({generator.split!r}), got {split!r}: "
            f"make another one with stream({split!r}, seed)"
        )
    return generator.split


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

"""Streams: seeds that never meet, and the rule that puts every sequence into one split."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bedouin.tasks import Stream, stream
from bedouin.tasks.streams import MAX_RANK, MAX_SEED, draw_last, resolve_split, row_hash

seeds = st.integers(0, MAX_SEED - 1)
ranks = st.integers(0, MAX_RANK - 1)


@given(seeds, seeds, ranks, ranks)
def test_train_and_test_seeds_never_meet(seed: int, other: int, rank: int, other_rank: int) -> None:
    train = stream("train", seed, rank=rank).initial_seed()
    test = stream("test", other, rank=other_rank).initial_seed()
    assert train % 2 == 0
    assert test % 2 == 1
    assert max(train, test) < 2**32  # the CPU generator ignores higher bits


@given(st.tuples(seeds, ranks), st.tuples(seeds, ranks))
def test_seed_and_rank_name_one_stream(one: tuple[int, int], other: tuple[int, int]) -> None:
    first = stream("train", one[0], rank=one[1]).initial_seed()
    second = stream("train", other[0], rank=other[1]).initial_seed()
    assert (first == second) == (one == other)


def test_a_stream_repeats() -> None:
    draws = [torch.rand(5, generator=stream("train", 3)) for _ in range(2)]
    assert torch.equal(*draws)
    assert not torch.equal(draws[0], torch.rand(5, generator=stream("test", 3)))


def test_state_continues() -> None:
    generator = stream("train", 3)
    state = generator.get_state()
    expected = torch.rand(5, generator=generator)
    resumed = stream("train", 99)
    resumed.set_state(state)
    assert torch.equal(torch.rand(5, generator=resumed), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"split": "val", "seed": 0},
            r"split must be one of \('train', 'test', 'all'\), got 'val'",
        ),
        ({"split": "test", "seed": -1}, r"seed must be in \[0, 1048576\), got -1"),
        ({"split": "test", "seed": MAX_SEED}, "seed must be in"),
        ({"split": "test", "seed": 0, "rank": MAX_RANK}, r"rank must be in \[0, 2048\), got 2048"),
    ],
)
def test_bad_streams(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(**arguments)


def test_the_stream_decides_the_split() -> None:
    assert resolve_split(stream("test", 0), None) == "test"
    assert resolve_split(stream("test", 0), "test") == "test"
    assert resolve_split(torch.Generator(), None) == "all"
    assert resolve_split(torch.Generator(), "train") == "train"
    assert Stream().split == "all"
    with pytest.raises(ValueError, match=r"that of the stream \('test'\), got 'train'.*another"):
        resolve_split(stream("test", 0), "train")
    with pytest.raises(ValueError, match="split must be one of"):
        resolve_split(torch.Generator(), "both")  # type: ignore[arg-type]


@given(st.integers(2, 70), st.integers(0, 2**31 - 1))
def test_each_value_belongs_to_exactly_one_split(num_values: int, hashed: int) -> None:
    hashes = torch.full((4000,), hashed)
    generator = torch.Generator().manual_seed(0)
    train = set(draw_last(hashes, num_values, "train", generator).tolist())
    test = set(draw_last(hashes, num_values, "test", generator).tolist())
    assert not train & test
    assert train | test == set(range(num_values))
    assert len(test) == max(1, num_values // 16)


def test_row_hash_spreads_and_ignores_zeros_behind() -> None:
    rows = torch.cartesian_prod(*[torch.arange(6)] * 4)  # (1296, 4)
    hashes = row_hash(rows)
    assert len(set(hashes.tolist())) == len(rows)
    assert int(hashes.min()) >= 0
    counts = (hashes % 6).bincount()
    assert counts.float().std() < 3 * (1296 / 6) ** 0.5
    assert torch.equal(hashes, row_hash(torch.nn.functional.pad(rows, (0, 3))))
    assert row_hash(torch.zeros(2, 0, dtype=torch.int64)).shape == (2,)

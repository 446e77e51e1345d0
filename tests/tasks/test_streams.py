"""Streams: disjoint seeds, and the rule that assigns every sequence to one split."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bedouin.tasks import Split, Stream, stream
from bedouin.tasks.streams import MAX_RANK, MAX_SEED

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


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"split": "val"}, ValueError, r"split must be one of \('train', 'test', 'all'\), got 'val'"),
    ({"seed": -1}, ValueError, r"seed must be in \[0, 1048576\), got -1"),
    ({"seed": MAX_SEED}, ValueError, "seed must be in"),
    ({"rank": MAX_RANK}, ValueError, r"rank must be in \[0, 2048\), got 2048"),
    ({"seed": True}, TypeError, "seed must be an int, got True"),
    ({"seed": 1.5}, TypeError, r"seed must be an int, got 1\.5"),
    ({"rank": "0"}, TypeError, "rank must be an int, got '0'"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_bad_streams(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stream(**{"split": "train", "seed": 0, **arguments})


def saved_and_loaded(generator: Stream) -> Any:
    file = io.BytesIO()
    torch.save(generator, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Stream], Any]] = {
    "torch.save": saved_and_loaded,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),  # as for another process
    "clone_state": lambda s: s.clone_state(),
    "inside a container": lambda s: copy.deepcopy({"streams": [s]})["streams"][0],
}


@pytest.mark.parametrize("split", ["train", "test", "all"])
@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_copies_keep_split_and_place(make: Callable[[Stream], Any], split: Split) -> None:
    original = stream(split, 3)
    torch.rand(5, generator=original)
    made = make(original)
    assert type(made) is Stream and made.split == split and made is not original
    assert made.device == original.device and made.initial_seed() == original.initial_seed()
    expected = torch.rand(5, generator=original)
    assert torch.equal(torch.rand(5, generator=made), expected)


@pytest.mark.gpu
def test_copies_on_a_gpu_keep_split_and_place() -> None:
    original = stream("test", 3, "cuda")
    torch.rand(5, generator=original, device="cuda")
    shared = original.graphsafe_get_state()
    made = [make(original) for make in COPIES.values()]
    expected = torch.rand(5, generator=original, device="cuda")
    for one in made:
        assert type(one) is Stream and one.split == "test" and one.device == original.device
        assert torch.equal(torch.rand(5, generator=one, device="cuda"), expected)
    assert type(shared) is Stream and shared.split == "test"
    assert shared.get_offset() == original.get_offset()
    original.graphsafe_set_state(made[0])
    with pytest.raises(ValueError, match="state must come from a stream of split 'test'"):
        original.graphsafe_set_state(stream("train", 0, "cuda").graphsafe_get_state())


def test_a_state_of_another_split_is_refused_and_changes_nothing() -> None:
    for one, other in (("train", "test"), ("test", "train"), ("test", "all")):
        generator = stream(one, 3)  # type: ignore[arg-type]
        expected = torch.rand(5, generator=generator.clone_state())
        with pytest.raises(ValueError, match=f"new_state must come from a stream of split '{one}'"):
            generator.set_state(stream(other, 3).get_state())  # type: ignore[arg-type]
        assert torch.equal(torch.rand(5, generator=generator), expected)


def test_a_seed_set_by_hand_survives_a_copy_and_a_state() -> None:
    generator = stream("test", 0)
    generator.manual_seed(4)
    state, made = generator.get_state(), [make(generator) for make in COPIES.values()]
    expected = torch.rand(3, generator=generator)
    generator.set_state(state)
    for one in (generator, *made):
        assert one.split == "test"
        assert torch.equal(torch.rand(3, generator=one), expected)


def test_a_stream_of_all_rows_takes_every_state() -> None:
    for split in ("train", "test", "all"):
        source = stream(split, 3)
        taken = Stream().set_state(source.get_state())
        assert torch.equal(torch.rand(3, generator=taken), torch.rand(3, generator=source))

"""What tasks are made of. Streams: disjoint seeds, and the rule that assigns every sequence to one
split; accuracies against values computed by hand; group tables against permutations composed by
hand, and the group laws."""

import copy
import itertools
import math
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.layer_cases import saved
from tests.messages import Row, of, refused
from tests.tasks.rows import is_uniform
from torch import Tensor

from bedouin.tasks import (
    IGNORE,
    Group,
    Split,
    Stream,
    alternating,
    cyclic,
    dihedral,
    direct_product,
    generating_set,
    last_position_accuracy,
    scale_accuracy,
    scaled_accuracy,
    sequence_accuracy,
    stream,
    symmetric,
    token_accuracy,
)
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


BAD: list[Row] = [
    ({"split": "val"}, ValueError, "split must be one of ('train', 'test', 'all'), got 'val'"),
    ({"seed": -1}, ValueError, "seed must be in [0, 1048576), got -1"),
    ({"seed": MAX_SEED}, ValueError, "seed must be in"),
    ({"rank": MAX_RANK}, ValueError, "rank must be in [0, 2048), got 2048"),
    ({"seed": True}, TypeError, "seed must be an int, got True"),
    ({"seed": 1.5}, TypeError, "seed must be an int, got 1.5"),
    ({"rank": "0"}, TypeError, "rank must be an int, got '0'"),
]


test_bad_streams = refused(BAD, of(stream, split="train", seed=0))


COPIES: dict[str, Callable[[Stream], Any]] = {
    "torch.save": saved,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),  # as for another process
    "clone_state": lambda s: s.clone_state(),
    "inside a container": lambda s: copy.deepcopy({"streams": [s]})["streams"][0],
}


@pytest.mark.parametrize("split", ["train", "test", "all"])
@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_keep_split_and_place(
    make: Callable[[Stream], Any], split: Split, device: str
) -> None:
    original = stream(split, 3, device)
    torch.rand(5, generator=original, device=device)
    made = make(original)
    assert type(made) is Stream and made.split == split and made is not original
    assert made.device == original.device and made.initial_seed() == original.initial_seed()
    expected = torch.rand(5, generator=original, device=device)
    assert torch.equal(torch.rand(5, generator=made, device=device), expected)


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


X = IGNORE
LABELS = torch.tensor([[1, 0, 1, 1], [0, 1, X, X], [X, X, X, X], [X, 0, X, 1]])
PREDICTED = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]])
BY_HAND = [(token_accuracy, 4 / 8), (sequence_accuracy, 1 / 3), (last_position_accuracy, 2 / 3)]


@pytest.mark.parametrize(("accuracy", "expected"), BY_HAND)
def test_by_hand(accuracy: Callable[[Tensor, Tensor], Tensor], expected: float) -> None:
    found = accuracy(PREDICTED, LABELS)
    assert found.item() == pytest.approx(expected)
    assert found.shape == () and found.dtype == torch.float32
    logits = torch.nn.functional.one_hot(PREDICTED, 2).to(torch.bfloat16)
    assert torch.equal(accuracy(logits, LABELS), found)
    ignored = torch.full_like(LABELS, X)
    assert accuracy(ignored, LABELS) == 0  # a predicted IGNORE is wrong
    assert accuracy(PREDICTED, ignored).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_nan_counts_as_wrong(dtype: torch.dtype) -> None:
    """At class 0, at the right class, at another one, and everywhere."""
    labels = torch.zeros(1, 5, dtype=torch.int64)
    logits = torch.nn.functional.one_hot(labels, 3).to(dtype)
    assert token_accuracy(logits, labels) == sequence_accuracy(logits, labels) == 1
    logits[0, 0, 0] = logits[0, 1, 2] = torch.nan
    logits[0, 2] = torch.nan
    assert token_accuracy(logits, labels).item() == pytest.approx(2 / 5)
    assert sequence_accuracy(logits, labels).item() == 0.0
    assert sequence_accuracy(logits[:, 3:], labels[:, 3:]).item() == 1.0
    labels[0, :3] = IGNORE
    assert token_accuracy(logits, labels) == sequence_accuracy(logits, labels) == 1


WRONG_LABELS: list[Row] = [
    ((PREDICTED[:, :2], LABELS), ValueError, "logits ... or class ids (4, 4)... got (4, 2)"),
    ((torch.zeros(4, 4, 0), LABELS), ValueError, "at least one class, got (4, 4, 0)"),
    ((PREDICTED.float(), LABELS), TypeError, "integer dtype, got torch.float32"),
    ((PREDICTED, LABELS.float()), TypeError, "labels must be of integer dtype, got torch"),
    ((torch.zeros(4, 4, 2).bool(), LABELS), TypeError, "must be real numbers, got torch.bool"),
]
test_bad_arguments = refused(
    [
        (of(accuracy, *given), kind, message)
        for accuracy, _ in BY_HAND
        for given, kind, message in WRONG_LABELS
    ]
)


@pytest.mark.parametrize(
    ("accuracy", "chance", "scaled"),
    [(1.0, 0.2, 1.0), (0.2, 0.2, 0.0), (0.6, 0.2, 0.5), (0.75, 0.5, 0.5), (0.0, 0.5, -1.0)],
)
def test_scale(accuracy: float, chance: float, scaled: float) -> None:
    assert scale_accuracy(accuracy, chance) == pytest.approx(scaled)
    assert scale_accuracy(torch.tensor([accuracy]), chance).tolist() == pytest.approx([scaled])


def test_scaled_accuracy() -> None:
    labels = torch.tensor([[X, 1], [X, 0], [0, X], [X, 1]])
    predicted = torch.tensor([[0, 1], [0, 0], [0, 0], [0, 0]])
    assert scaled_accuracy(predicted, labels, chance=0.5).item() == pytest.approx(0.5)


ORDERS = {
    **{"S1": 1, "S2": 2, "S3": 6, "S4": 24, "S5": 120, "A3": 3, "A4": 12, "A5": 60},
    **{"Z1": 1, "Z2": 2, "Z60": 60, "D3": 6, "D8": 16, "A4xZ5": 60, "S3xZ2xZ2": 24},
}
ELEMENTARY = Group.from_name("Z2xZ2xZ2")


@pytest.mark.parametrize(("name", "order"), ORDERS.items())
def test_table_is_composition_from_left_to_right(name: str, order: int) -> None:
    """Of a set that contains the products and, first, the identity: a group. Elements are numbered
    in lexicographic order."""
    group = Group.from_name(name)
    numbers = {p: i for i, p in enumerate(group.permutations)}
    assert [*numbers] == sorted(numbers) and len(numbers) == group.order == order
    assert group.permutations[0] == tuple(range(group.degree))
    assert group.table.shape == (order, order) and group.table.dtype == torch.int64
    for (g, i), (h, j) in itertools.product(numbers.items(), repeat=2):
        assert int(group.table[i, j]) == numbers[tuple(h[image] for image in g)]


def test_direct_product_multiplies_by_component() -> None:
    g, h = symmetric(3), cyclic(4)
    product = direct_product(g, h)
    number = torch.arange(product.order)
    left, right = number // h.order, number % h.order
    expected = g.table[left[:, None], left] * h.order + h.table[right[:, None], right]
    assert product.name == "S3xZ4"
    assert torch.equal(product.table, expected)


@pytest.mark.parametrize("name", ["A4xZ5", "A4_x_Z5", "A4*Z5"])
def test_product_names(name: str) -> None:
    group = Group.from_name(name)
    assert group == direct_product(alternating(4), cyclic(5))
    assert group.name == "A4xZ5"
    assert hash(group) == hash(Group.from_name("A4xZ5"))


WRONG: list[Row] = [
    (of(symmetric, 0), ValueError, "n of symmetric(n) must be at least 1, got 0"),
    (of(alternating, 2), ValueError, "n of alternating(n) must be at least 3, got 2"),
    (of(cyclic, 0), ValueError, "n of cyclic(n) must be at least 1, got 0"),
    (of(dihedral, 2), ValueError, "n of dihedral(n) must be at least 3, got 2"),
    (lambda: Group.from_name("S7"), ValueError, "group S7 must have at most 1024 elements"),
    (of(cyclic, 99999), ValueError, "must be at most 1024, the largest order, got 99999"),
    (lambda: Group("", ()), ValueError, "generators must hold at least one permutation"),
    (lambda: Group("", ((0, 0),)), ValueError, "must be permutations of 0 … 1"),
    (lambda: Group("", ((1, 0), (0, 1, 2))), ValueError, "got (0, 1, 2)"),
    (of(generating_set, ELEMENTARY, 2, 0), ValueError, "generate Z2xZ2xZ2 ... ask for more"),
    (of(Group.from_name, 5), TypeError, "must be a string such as S5, ... got 5"),
    (of(cyclic, 2.5), TypeError, "n of cyclic(n) must be an int, got 2.5"),
    (of(symmetric, True), TypeError, "n of symmetric(n) must be an int, got True"),
    (of(direct_product, cyclic(2), 2), TypeError, "h must be a Group, got 2"),
    (of(cyclic(2).prefix_products, torch.ones(1, 3, dtype=torch.bool)), TypeError,
     "elements must be of dtype torch.int64, got torch.bool"),
    *((of(Group, "mine", wrong), TypeError, "generators must be a tuple of tuples of ints, got")
      for wrong in ([(1, 0)], ([1, 0],), ((True, False),), ((1.0, 0.0),), 3)),
    *((of(Group.from_name, name), ValueError,
       "must be of the form S5, A5, Z60, D8 ... A4xZ5, got")
      for name in ("", "A", "a5", "B5", "A5x", "xA5", "A5 x Z2", "A-5", "A5y")),
    *((of(scale_accuracy, 0.5, chance), ValueError, "chance must be in [0, 1), got")
      for chance in (-0.1, 1.0, math.nan)),
]  # fmt: skip

test_wrong_groups_and_chances = refused(WRONG)


@settings(max_examples=30)
@given(
    st.sampled_from(["S3", "A4", "D5", "Z12", "A5", "S5", "Z2xZ2"]),
    *(st.integers(2, 5), st.integers(0, 2**40)),
)
def test_a_generating_set_generates(name: str, size: int, seed: int) -> None:
    group = Group.from_name(name)
    size = min(size, group.order - 1)
    chosen = generating_set(group, size, seed)
    assert len(set(chosen)) == size and list(chosen) == sorted(chosen) and 0 not in chosen
    generated = Group("generated", tuple(group.permutations[g] for g in chosen))
    assert generated.permutations == group.permutations


def test_a_generating_set_is_fixed() -> None:
    assert generating_set(symmetric(4), 3, 0) == (1, 11, 16)
    assert generating_set(symmetric(5), 8, 0) != generating_set(symmetric(5), 8, 1)


def test_generating_sets_are_uniform() -> None:
    """Z6 is generated by two of its elements 1 ... 5 unless they are 2 and 4."""
    counts = Counter(generating_set(cyclic(6), 2, seed) for seed in range(1800))
    assert len(counts) == 9 and (2, 4) not in counts
    assert is_uniform(counts.values(), 200)

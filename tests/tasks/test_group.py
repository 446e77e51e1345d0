"""Group tables against permutations composed by hand, and the group laws."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tasks.rows import is_uniform

from bedouin.tasks import (
    Group,
    alternating,
    cyclic,
    dihedral,
    direct_product,
    generating_set,
    symmetric,
)
from bedouin.tasks.group import compose

NAMES = ("S1", "S3", "S4", "A3", "A4", "A5", "Z1", "Z2", "Z12", "D3", "D8", "A4xZ5", "S3xZ2xZ2")
groups = st.sampled_from(NAMES).map(Group.from_name)
ELEMENTARY = Group.from_name("Z2xZ2xZ2")


def test_s3_by_hand() -> None:
    group = symmetric(3)
    assert group.permutations == tuple(itertools.permutations(range(3)))
    by_hand = [
        [0, 1, 2, 3, 4, 5],
        [1, 0, 3, 2, 5, 4],
        [2, 4, 0, 5, 1, 3],
        [3, 5, 1, 4, 0, 2],
        [4, 2, 5, 0, 3, 1],
        [5, 3, 4, 1, 2, 0],
    ]
    assert group.table.tolist() == by_hand
    assert group.num_moved == (0, 2, 2, 3, 3, 2)


@pytest.mark.parametrize("name", NAMES)
def test_table_is_composition_from_left_to_right(name: str) -> None:
    """Of a set that contains the products and, first, the identity: a group."""
    group = Group.from_name(name)
    assert group.permutations[0] == tuple(range(len(group.permutations[0])))
    assert len(set(group.permutations)) == group.order
    numbers = {p: i for i, p in enumerate(group.permutations)}
    for (i, g), (j, h) in itertools.product(enumerate(group.permutations), repeat=2):
        assert int(group.table[i, j]) == numbers[compose(g, h)]


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *(("S1", 1), ("S2", 2), ("S5", 120), ("A3", 3), ("A5", 60), ("A6", 360)),
        *(("Z1", 1), ("Z60", 60), ("D3", 6), ("D8", 16), ("A4xZ5", 60)),
    ],
)
def test_orders(name: str, order: int) -> None:
    group = Group.from_name(name)
    assert group.order == order
    assert group.table.shape == (order, order) and group.table.dtype == torch.int64


def test_cyclic_is_addition() -> None:
    i = torch.arange(7)
    assert torch.equal(cyclic(7).table, (i[:, None] + i) % 7)


def test_direct_product_multiplies_by_component() -> None:
    g, h = symmetric(3), cyclic(4)
    product = direct_product(g, h)
    number = torch.arange(product.order)
    left, right = number // h.order, number % h.order
    expected = g.table[left[:, None], left] * h.order + h.table[right[:, None], right]
    assert product.name == "S3xZ4"
    assert torch.equal(product.table, expected)


@given(groups, st.integers(0, 9), st.integers(0, 40), st.integers(0, 99))
def test_prefix_products_are_running_products(group: Group, b: int, t: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    elements = torch.randint(group.order, (b, t), generator=generator)
    products = group.prefix_products(elements)
    assert products.shape == (b, t)
    running = torch.zeros(b, dtype=torch.int64)
    for step in range(t):
        running = group.table[running, elements[:, step]]
        assert torch.equal(products[:, step], running)


@pytest.mark.parametrize("name", ["A4xZ5", "A4_x_Z5", "A4*Z5"])
def test_product_names(name: str) -> None:
    group = Group.from_name(name)
    assert group == direct_product(alternating(4), cyclic(5))
    assert group.name == "A4xZ5"
    assert hash(group) == hash(Group.from_name("A4xZ5"))
    assert alternating(4) * cyclic(5) == group


@pytest.mark.parametrize("name", ["", "A", "a5", "B5", "A5x", "xA5", "A5 x Z2", "A-5", "A5y"])
def test_bad_names_list_the_forms(name: str) -> None:
    with pytest.raises(ValueError, match="must be of the form S5, A5, Z60, D8 .* A4xZ5, got"):
        Group.from_name(name)


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: symmetric(0), ValueError, r"n of symmetric\(n\) must be at least 1, got 0"),
    (lambda: alternating(2), ValueError, r"n of alternating\(n\) must be at least 3, got 2"),
    (lambda: cyclic(0), ValueError, r"n of cyclic\(n\) must be at least 1, got 0"),
    (lambda: dihedral(2), ValueError, r"n of dihedral\(n\) must be at least 3, got 2"),
    (lambda: Group.from_name("S7"), ValueError, "group S7 must have at most 1024 elements"),
    (lambda: cyclic(99999), ValueError, "must be at most 1024, the largest order, got 99999"),
    (lambda: Group("", ()), ValueError, "generators must hold at least one permutation"),
    (lambda: Group("", ((0, 0),)), ValueError, "must be permutations of 0 … 1"),
    (lambda: Group("", ((1, 0), (0, 1, 2))), ValueError, r"got \(0, 1, 2\)"),
    (lambda: generating_set(ELEMENTARY, 2, 0), ValueError, "generate Z2xZ2xZ2 .* ask for more"),
    (lambda: Group.from_name(5), TypeError, "must be a string such as S5, .* got 5"),  # type: ignore[arg-type]
    (lambda: cyclic(2.5), TypeError, r"n of cyclic\(n\) must be an int, got 2\.5"),  # type: ignore[arg-type]
    (lambda: symmetric(True), TypeError, r"n of symmetric\(n\) must be an int, got True"),
    (lambda: cyclic(2) * 2, TypeError, "h must be a Group, got 2"),  # type: ignore[operator]
    (
        lambda: cyclic(2).prefix_products(torch.ones(1, 3, dtype=torch.bool)),
        TypeError,
        r"elements must be of dtype torch\.int64, got torch\.bool",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_arguments(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("generators", [[(1, 0)], ([1, 0],), ((True, False),), ((1.0, 0.0),), 3])
def test_generators_of_wrong_types(generators: Any) -> None:
    with pytest.raises(TypeError, match="generators must be a tuple of tuples of ints, got"):
        Group("mine", generators)


def test_own_generators() -> None:
    klein = Group("V4", ((1, 0, 3, 2), (2, 3, 0, 1)))
    assert klein.order == 4
    assert torch.equal(klein.table.diagonal(), torch.zeros(4, dtype=torch.int64))


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

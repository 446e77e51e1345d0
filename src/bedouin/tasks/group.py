"""Finite groups as permutation groups, given by generators.

Products are read from left to right, like a sequence of tokens: `g · h` is "first g, then h",
(g · h)(i) = h(g(i)). The opposite convention gives other labels but an equally hard task.
"""

import random
import re
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Final

import torch
from torch import Tensor

from bedouin.tasks.streams import whole_number

Permutation = tuple[int, ...]

MAX_ORDER: Final = 1024
"""The largest order of a group; its multiplication table has order² entries (S6 has order 720)."""
_MAX_TRIES: Final = 1000
_FORMS: Final = "S5, A5, Z60, D8 or a product such as A4xZ5"


@dataclass(frozen=True)
class Group:
    """A finite permutation group, given by generators.

    Elements are numbered in lexicographic order of their permutations, so 0 is the identity,
    element i of Z_n is the rotation by i, and (a, b) of G x H has the number a·|H| + b. S3 in this
    order is 012, 021, 102, 120, 201, 210 (images of 0, 1, 2). `table[1, 2]` is 3, because 021
    followed by 102 maps 0 -> 0 -> 1, 1 -> 2 -> 2 and 2 -> 1 -> 0, which is 120.

    generators: permutations of 0 … degree - 1, each the tuple of its images. Raises ValueError for
    no generator, one that is not a permutation, or more than 1024 elements, TypeError for
    generators that are not tuples of ints.
    """

    name: str
    generators: tuple[Permutation, ...]

    def __post_init__(self) -> None:
        # a group is a key of the cache of tables and must be hashable
        nested = isinstance(self.generators, tuple) and all(
            isinstance(g, tuple) and all(type(image) is int for image in g) for g in self.generators
        )
        if not nested:
            raise TypeError(
                f"generators must be a tuple of tuples of ints, got {self.generators!r}"
            )
        if not self.generators:
            raise ValueError("generators must hold at least one permutation, got none")
        for generator in self.generators:
            if sorted(generator) != list(range(self.degree)):
                raise ValueError(
                    f"generators must be permutations of 0 … {self.degree - 1}, got {generator}"
                )
        _ = self.permutations

    @property
    def degree(self) -> int:
        """Number of points that the permutations act on."""
        return len(self.generators[0])

    @property
    def order(self) -> int:
        """Number of elements."""
        return len(self.permutations)

    @cached_property
    def permutations(self) -> tuple[Permutation, ...]:
        """All elements in lexicographic order, so the identity is the first."""
        found = [tuple(range(self.degree))]
        seen = set(found)
        for g in found:
            new = {compose(g, s) for s in self.generators} - seen
            found += new
            seen |= new
            if len(seen) > MAX_ORDER:
                raise ValueError(
                    f"group {self.name} must have at most {MAX_ORDER} elements, "
                    f"got more: its table would not fit; take a smaller one"
                )
        return tuple(sorted(seen))

    @cached_property
    def table(self) -> Tensor:
        """Multiplication table (order, order) int64 on the CPU: `table[g, h]` is g · h."""
        number = {p: i for i, p in enumerate(self.permutations)}
        times = {  # the column of each generator
            s: torch.tensor([number[compose(g, s)] for g in self.permutations])
            for s in self.generators
        }
        found = [self.permutations[0]]
        columns = {found[0]: torch.arange(self.order)}
        for h in found:
            for s, column in times.items():
                product = compose(h, s)
                if product not in columns:
                    columns[product] = column[columns[h]]  # g · (h · s) = (g · h) · s
                    found.append(product)
        return torch.stack([columns[p] for p in self.permutations], dim=-1)

    @cached_property
    def num_moved(self) -> tuple[int, ...]:
        """The number of points that each element moves (2 for a transposition)."""
        return tuple(sum(i != image for i, image in enumerate(p)) for p in self.permutations)

    def prefix_products(self, elements: Tensor) -> Tensor:  # (..., t) int64 -> (..., t) int64
        """Running products g_0 · g_1 · … · g_t, a parallel scan of about log2(t) table look-ups."""
        if elements.dtype != torch.int64:
            raise TypeError(f"elements must be of dtype torch.int64, got {elements.dtype}")
        table, span, products = on_device(self, "table", elements.device), 1, elements
        while span < elements.shape[-1]:
            longer = table[products[..., :-span], products[..., span:]]
            products = torch.cat([products[..., :span], longer], dim=-1)
            span *= 2
        return products

    @classmethod
    def from_name(cls, name: str) -> "Group":
        """Parse S5, A5, Z60, D8 (the octagon's, 16 elements) or products: A4xZ5, A4_x_Z5, A4*Z5.
        Raises ValueError for another name, and what the constructors raise."""
        if not isinstance(name, str):
            raise TypeError(f"group name must be a string such as {_FORMS}, got {name!r}")
        factor = r"([SAZD])(\d{1,5})"
        if not re.fullmatch(rf"{factor}((_x_|x|\*){factor})*", name):
            raise ValueError(f"group name must be of the form {_FORMS}, got {name!r}")
        made = (_CONSTRUCTORS[letter](int(n)) for letter, n in re.findall(factor, name))
        return reduce(direct_product, made)


def compose(first: Permutation, second: Permutation) -> Permutation:
    """First `first`, then `second`: i -> second(first(i))."""
    return tuple(second[i] for i in first)


@lru_cache(maxsize=64)
def generating_set(group: Group, size: int, seed: int) -> tuple[int, ...]:
    """Numbers of `size` elements, the identity excluded, that generate the group, ascending. Drawn
    uniformly among all such sets; the same arguments give the same set on every machine. Raises
    ValueError for a number out of range or if 1000 draws fail, TypeError for one that is no int."""
    whole_number("size", size, 2, group.order)
    draws = random.Random(whole_number("seed", seed, 0))
    for _ in range(_MAX_TRIES):
        keys = [draws.random() for _ in range(group.order)]
        chosen = sorted(sorted(range(1, group.order), key=keys.__getitem__)[:size])
        if Group(group.name, tuple(group.permutations[g] for g in chosen)).order == group.order:
            return tuple(chosen)
    raise ValueError(
        f"no {size} elements that generate {group.name} were found in {_MAX_TRIES} tries: "
        "ask for more"
    )


def symmetric(n: int) -> Group:
    """S_n: all n! permutations of n points."""
    _check_n("symmetric", n, 1)
    swap = (1, 0, *range(2, n)) if n > 1 else (0,)
    return Group(f"S{n}", (swap, _rotation(n)))


def alternating(n: int) -> Group:
    """A_n: the n!/2 even permutations of n >= 3 points. A5 is the smallest non-solvable group."""
    _check_n("alternating", n, 3)
    cycles = ({0: 1, 1: last, last: 0} for last in range(2, n))
    return Group(f"A{n}", tuple(tuple(c.get(i, i) for i in range(n)) for c in cycles))


def cyclic(n: int) -> Group:
    """Z_n: the n rotations of n points; element i is the rotation by i, g · h = (g + h) mod n."""
    _check_n("cyclic", n, 1)
    return Group(f"Z{n}", (_rotation(n),))


def dihedral(n: int) -> Group:
    """D_n: the 2n symmetries of the regular polygon with n >= 3 corners (D8 has 16 elements)."""
    _check_n("dihedral", n, 3)
    return Group(f"D{n}", (_rotation(n), tuple(-i % n for i in range(n))))


def direct_product(g: Group, h: Group) -> Group:
    """G x H on disjoint points; (a, b) has the number a·|H| + b. TypeError for no group."""
    check_group("g", g)
    check_group("h", h)
    left = [(*p, *range(g.degree, g.degree + h.degree)) for p in g.generators]
    right = [(*range(g.degree), *(g.degree + i for i in p)) for p in h.generators]
    return Group(f"{g.name}x{h.name}", (*left, *right))


_CONSTRUCTORS: Final = {"S": symmetric, "A": alternating, "Z": cyclic, "D": dihedral}


def check_group(name: str, group: Group) -> None:
    """Raise TypeError unless `group` is a Group."""
    if not isinstance(group, Group):
        raise TypeError(f"{name} must be a Group, got {group!r}: parse names with Group.from_name")


def _rotation(n: int) -> Permutation:
    return tuple((i + 1) % n for i in range(n))


def _check_n(constructor: str, n: int, least: int) -> None:
    """Raise an error unless least <= n <= MAX_ORDER; a group on more points would be too large."""
    name = f"n of {constructor}(n)"
    if whole_number(name, n, least) > MAX_ORDER:
        raise ValueError(f"{name} must be at most {MAX_ORDER}, the largest order, got {n}")


@lru_cache(maxsize=64)
def on_device(owner: Hashable, name: str, device: torch.device) -> Tensor:
    """An attribute as a tensor on a device, which keeps its copy for the next calls."""
    return torch.as_tensor(getattr(owner, name), device=device)

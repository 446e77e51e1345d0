"""Tuples, lists and dictionaries of tensors as the one tensor that solvers iterate.

Letters: b batch, t tokens of a sample, c the values of a token, over all tensors.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bedouin.solvers.base import Map, MapWrapper, TimeDim


class TensorTree:
    """The structure of y0 (tuples, lists, dictionaries of tensors), and the way to one tensor.

    The tensors (b, ...), or with time_dim=1 (b, t, ...), are joined along their last axes, so they
    must agree in the others, in dtype and in device. Raises TypeError or ValueError otherwise.
    """

    def __init__(self, y0: Any, time_dim: TimeDim) -> None:
        leaves, self.spec = pytree.tree_flatten(y0)
        if not leaves:
            raise ValueError("y0 must contain at least one tensor, got none")
        self.kept = 2 if time_dim == 1 else 1
        for leaf in leaves:
            self._check(leaf, leaves[0])
        self.shapes = [leaf.shape for leaf in leaves]
        self.sizes = [math.prod(shape[self.kept :]) for shape in self.shapes]

    def _check(self, leaf: object, first: object) -> None:
        if not isinstance(leaf, Tensor) or not isinstance(first, Tensor):
            raise TypeError(
                f"y0 must be a tensor, or tuples, lists and dictionaries of tensors, got one of "
                f"{type(leaf).__name__}"
            )
        for name in ("dtype", "device"):
            if getattr(leaf, name) != getattr(first, name):
                raise ValueError(
                    f"the tensors of y0 must have one {name}, got {getattr(first, name)} and "
                    f"{getattr(leaf, name)}"
                )
        axes = "(b, t)" if self.kept == 2 else "(b,)"
        if leaf.dim() < self.kept or leaf.shape[: self.kept] != first.shape[: self.kept]:
            raise ValueError(
                f"the tensors of y0 must begin with the same axes {axes}, got "
                f"{tuple(first.shape)} and {tuple(leaf.shape)}"
            )

    def join(self, tree: Any) -> Tensor:
        """One tensor (b, c) or (b, t, c). Raises ValueError for another structure or shape."""
        leaves, spec = pytree.tree_flatten(tree)
        shapes = [leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves]
        if spec != self.spec or shapes != self.shapes:
            got = [None if shape is None else tuple(shape) for shape in shapes]
            raise ValueError(
                "f must return tensors of the structure and the shapes of y0, expected "
                f"{[tuple(shape) for shape in self.shapes]}, got {type(tree).__name__} of {got}"
            )
        pairs = zip(leaves, self.sizes, strict=True)
        return torch.cat([v.reshape(*v.shape[: self.kept], size) for v, size in pairs], -1)

    def split(self, y: Tensor) -> Any:
        """The inverse of `join`, of y (b, c) or (b, t, c)."""
        parts = zip(y.split(self.sizes, -1), self.shapes, strict=True)
        return pytree.tree_unflatten([part.reshape(shape) for part, shape in parts], self.spec)


class TreeMap(MapWrapper):
    """A map of trees as a map of the joined tensor."""

    def __init__(self, f: Callable[[Any], Any], tree: TensorTree) -> None:
        super().__init__(f)
        self.tree = tree

    def __call__(self, y: Tensor) -> Tensor:  # (b, c) or (b, t, c), as the result
        return self.tree.join(self.f(self.tree.split(y)))


def as_tensor_problem(
    f: Callable[[Any], Any], y0: Any, time_dim: TimeDim
) -> tuple[Map, Tensor, Callable[[Tensor], Any]]:
    """f and y0 with one tensor in place of a tree, and the function that splits the tensor."""
    if isinstance(y0, Tensor):
        return f, y0, lambda y: y
    tree = TensorTree(y0, time_dim)
    return TreeMap(f, tree), tree.join(y0), tree.split

"""What the adjoint of a chunk reads: the tensors that the forward sweep leaves, or new ones.

Letters: b batch, c tokens of a chunk, i = c b rows (token by token), d channels, n state per
channel, k reflections, r raw values.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.direct.buffered.rows import RowMaker, RowMemory, Rows
from bedouin.kernels.householder import wy_factor_of


class Mixed(NamedTuple):
    """The mixing of tokens whose y is known."""

    T: Tensor  # (i, k, k)
    e: Tensor  # (i, 1, k), T U (y - x)
    mixed: Tensor  # (i, 1, d), x~ = x + U^T e

    @staticmethod
    def allocate(maker: RowMaker, i: int) -> "Mixed":
        """New memory."""
        new, d, k = maker.like.new_empty, maker.d, maker.k
        return Mixed(new(i, k, k), new(i, 1, k), new(i, 1, d))

    def first(self, count: int) -> "Mixed":
        """Views of the first rows."""
        return self if count == len(self.T) else Mixed(*(v[:count] for v in self))

    def fill(
        self,
        rows: Rows,
        v: Tensor,  # (i, 1, d), y - x
    ) -> None:
        """All of it; `mixed` must contain x."""
        if self.T.numel():
            self.T.copy_(wy_factor_of(rows.dots, rows.beta.squeeze(-1)))
            torch.bmm(torch.bmm(v, rows.U_columns), self.T.mT, out=self.e)
            self.mixed.baddbmm_(self.e, rows.U)


class Trace(NamedTuple):
    """A chunk that has been solved."""

    rows: RowMemory
    mixed: Mixed
    h: Tensor  # (c, b, n, d), h before each token

    @staticmethod
    def allocate(maker: RowMaker, c: int, b: int, n: int) -> "Trace":
        """New memory."""
        h = maker.like.new_empty(c, b, n, maker.d)
        return Trace(maker.allocate(c * b), Mixed.allocate(maker, c * b), h)

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors one by one; the first are the raw values, as (c, b, r or r + d)."""
        raw, *others = self.rows
        return raw.view(*self.h.shape[:2], -1), *others, *self.mixed, self.h

    @staticmethod
    def of(tensors: tuple[Tensor, ...]) -> "Trace":
        """The inverse of `tensors`."""
        raw, *others, T, e, mixed, h = tensors
        rows = RowMemory(raw.view(-1, 1, raw.shape[-1]), *others)
        return Trace(rows, Mixed(T, e, mixed), h)

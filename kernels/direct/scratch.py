"""Buffers of the size of h that a sweep reuses for every token.

On a CPU, writing to newly allocated megabytes takes several times as long as the arithmetic itself.
"""

import torch
from torch import Tensor

from bedouin.kernels.backend import is_batched, is_transformed
from bedouin.kernels.householder import rows_dot


class Scratch:
    """Products in named buffers; a buffer is overwritten by the next product of its name.

    Allocates new memory instead where reuse is impossible (batched tensors support no `out=`) or
    useless (the caching allocator of a GPU, torch.compile). The methods that end in `_` work in
    place only if no operand is batched, since the result may have a batch axis that their first
    argument lacks.
    """

    def __init__(
        self,
        *operands: Tensor,  # at least one, of any shape
    ) -> None:
        """`operands`: the tensors that vmap or is_grads_batched may have batched."""
        self.in_place = not (is_transformed() or is_batched(*operands))
        on_cpu = operands[0].device.type == "cpu"
        self.reuses = self.in_place and on_cpu and not torch.compiler.is_compiling()
        self.buffers: dict[str, Tensor] = {}

    def product(
        self,
        name: str,
        a: Tensor,  # any shape
        b: Tensor,  # a shape that broadcasts with that of a
    ) -> Tensor:  # the broadcast shape
        """a * b, valid until the next product of this name."""
        if not self.reuses:
            return a * b
        buffer = self.buffers.get(name)
        if buffer is None:
            buffer = self.buffers[name] = a * b
            return buffer
        return torch.mul(a, b, out=buffer)

    def add_(
        self,
        a: Tensor,  # any shape
        b: Tensor,  # a shape that expands to that of a
    ) -> Tensor:  # as a
        """a + b, in the memory of a if possible."""
        return a.add_(b) if self.in_place else a + b

    def sub_(
        self,
        a: Tensor,  # any shape
        b: Tensor,  # a shape that expands to that of a
    ) -> Tensor:  # as a
        """a - b, in the memory of a if possible."""
        return a.sub_(b) if self.in_place else a - b

    def mul_(
        self,
        a: Tensor,  # any shape
        b: Tensor,  # a shape that expands to that of a
    ) -> Tensor:  # as a
        """a * b, in the memory of a if possible."""
        return a.mul_(b) if self.in_place else a * b

    def rows_dot(
        self,
        rows: Tensor,  # (..., n, d)
        v: Tensor,  # (..., d)
    ) -> Tensor:  # (..., n)
        """The function `rows_dot`, for rows of the size of h."""
        if not self.reuses:
            return rows_dot(rows, v)
        return self.product("outer", rows, v.unsqueeze(-2)).sum(-1)

    def keep(
        self,
        h: Tensor,  # (b, n, d)
    ) -> Tensor:  # (b, n, d)
        """h, copied if a later product could overwrite it."""
        return h.clone() if self.reuses else h

"""Buffers as large as h that a sweep uses again for every token.

On a CPU, touching new memory of some megabytes costs several times the arithmetic done in it.
"""

import torch
from torch import Tensor

from bedouin.kernels.backend import is_batched, is_transformed
from bedouin.kernels.householder import rows_dot


class Scratch:
    """Products in named buffers; a buffer is overwritten by the next product of its name.

    New memory instead where reuse is impossible (batched tensors have no `out=`) or pointless (a
    GPU's caching allocator, torch.compile). What changes a tensor in place elsewhere does so only
    where no operand is batched: the result may have a batch axis that the tensor lacks.
    """

    def __init__(
        self,
        *operands: Tensor,  # at least one, of any shape
    ) -> None:
        """`operands`: the tensors, one at least, that torch may batch (vmap, is_grads_batched)."""
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
        """a + b, in the memory of a if possible; the same holds for `sub_` and `mul_`."""
        return a.add_(b) if self.in_place else a + b

    def sub_(
        self,
        a: Tensor,  # any shape
        b: Tensor,  # a shape that expands to that of a
    ) -> Tensor:  # as a
        return a.sub_(b) if self.in_place else a - b

    def mul_(
        self,
        a: Tensor,  # any shape
        b: Tensor,  # a shape that expands to that of a
    ) -> Tensor:  # as a
        return a.mul_(b) if self.in_place else a * b

    def rows_dot(
        self,
        rows: Tensor,  # (..., n, d)
        v: Tensor,  # (..., d)
    ) -> Tensor:  # (..., n)
        """`rows_dot` (..., n) for rows (..., n, d) as large as h."""
        if not self.reuses:
            return rows_dot(rows, v)
        return self.product("outer", rows, v.unsqueeze(-2)).sum(-1)

    def keep(
        self,
        h: Tensor,  # (b, n, d)
    ) -> Tensor:  # (b, n, d)
        """h as a tensor that no later product overwrites."""
        return h.clone() if self.reuses else h

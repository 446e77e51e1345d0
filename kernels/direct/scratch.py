"""Buffers as large as h that a sweep uses again for every token.

On a CPU, touching new memory of some megabytes costs several times the arithmetic done in it.
"""

import torch
from torch import Tensor

from bedouin.kernels.householder import rows_dot


class Scratch:
    """Products in named buffers; a buffer is overwritten by the next product of its name.

    New memory instead where reuse is impossible (torch.func transforms have no `out=`) or pointless
    (a GPU's caching allocator, torch.compile).
    """

    def __init__(self, like: Tensor) -> None:
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        self.reuses = like.device.type == "cpu" and not (
            transformed or torch.compiler.is_compiling()
        )
        self.buffers: dict[str, Tensor] = {}

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a * b, valid until the next product of this name."""
        if not self.reuses:
            return a * b
        buffer = self.buffers.get(name)
        if buffer is None:
            buffer = self.buffers[name] = a * b
            return buffer
        return torch.mul(a, b, out=buffer)

    def rows_dot(self, rows: Tensor, v: Tensor) -> Tensor:
        """`rows_dot` (..., n) for rows (..., n, d) as large as h."""
        if not self.reuses:
            return rows_dot(rows, v)
        return self.product("outer", rows, v.unsqueeze(-2)).sum(-1)

    def keep(self, h: Tensor) -> Tensor:
        """h as a tensor that no later product overwrites."""
        return h.clone() if self.reuses else h

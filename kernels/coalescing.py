"""Compilation without Triton's pass TritonGPUCoalesce, which chooses layouts for large loads and
stores.

The kernels of the tracker are written for the layouts that shapes alone give to tensors; the pass
would replace them. It follows each load and store through the whole kernel, which takes a half to
three quarters of the compilation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

_LEFT_OUT: ContextVar[bool] = ContextVar("coalescing is left out", default=False)


@contextmanager
def without_coalescing() -> Iterator[None]:
    """Compilations in this context leave the pass out; those of other threads do not."""
    _install()
    token = _LEFT_OUT.set(True)
    try:
        yield
    finally:
        _LEFT_OUT.reset(token)


@cache
def _install() -> None:
    """Let Triton's compiler ask before it adds the pass: it offers no option for that."""
    from triton._C.libtriton import passes

    add = passes.ttgpuir.add_coalesce

    def add_unless_left_out(pass_manager: Any) -> None:
        if not _LEFT_OUT.get():
            add(pass_manager)

    passes.ttgpuir.add_coalesce = add_unless_left_out

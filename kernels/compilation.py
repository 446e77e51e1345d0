"""Compilation of a kernel without Triton's pass Coalesce.

That pass takes 98 percent of the time in which kernels of many interleaved blocks are compiled: the
reverse sweep of heads takes 20 instead of 56 s for the first call of a layer, and runs as fast (on
an H100, within 2 percent at 128x16 to 8x4096). The addresses of such kernels are given in an order
that is coalesced without it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton._C.libtriton import passes

NAME = "bedouin: without Coalesce"
"""Of this pipeline of passes, in the key of the compiler's cache."""

_LOCK = threading.RLock()
"""Held inside, since a thread would otherwise restore what another one has installed."""


@contextmanager
def without_coalescing() -> Iterator[None]:
    """What this thread compiles inside is compiled without the pass; a hook that is installed
    already is called, too. Other threads that enter wait."""
    with _LOCK, _hooked():
        yield


@contextmanager
def _hooked() -> Iterator[None]:
    before = knobs.runtime.add_stages_inspection_hook
    thread = threading.get_ident()

    def hook(*given: Any) -> tuple[str, str] | None:
        """With arguments: change the stages of a compilation; without: the cache's key."""
        found = before(*given) if before is not None else None
        if threading.get_ident() != thread:
            return found or (None if given else ("", ""))
        if not given:
            key, digest = found or ("", "")
            return key + NAME, digest + NAME
        stages = given[1]
        stages["ttgir"] = _without_coalescing(stages["ttgir"])
        return None

    knobs.runtime.add_stages_inspection_hook = hook
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = before


def _without_coalescing(stage: Callable[..., Any]) -> Callable[..., Any]:
    """A stage whose pipeline lacks the pass."""

    def run(*given: Any) -> Any:
        add, thread = passes.ttgpuir.add_coalesce, threading.get_ident()

        def skip(manager: Any) -> None:
            # other threads may compile, too
            if threading.get_ident() != thread:
                add(manager)

        passes.ttgpuir.add_coalesce = skip
        try:
            return stage(*given)
        finally:
            passes.ttgpuir.add_coalesce = add

    return run

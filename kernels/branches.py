"""Branches of a CUDA graph: launches beside those that the result waits for.

A graph of one token is a chain of small launches. Each starts two or three microseconds after the
one before it, even if it does not read its results. Within `branched`, `beside` puts launches on a
branch of their own; elsewhere `beside` and `join` do nothing.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor

Branch = Literal["parameters", "decay", "gate", "statistics", "state"]
"""Each is a chain of launches of its own. "parameters" and "decay" begin with the token and may
read nothing but parameters. So does "gate", which may also read what "parameters" has made and the
state before the token. The others read what was launched before."""

_EARLY: tuple[Branch, ...] = "parameters", "decay", "gate"
"""The branches that begin with the token."""


class _Branches:
    """The streams of a capture."""

    def __init__(self) -> None:
        self.main = torch.cuda.current_stream()
        self.streams: dict[Branch, torch.cuda.Stream] = {}
        # Tensors made on one stream and read on another. They are held until the end, because the
        # allocator may reuse their memory on the first stream while the second still reads it.
        self.kept: list[Tensor | None] = []
        for branch in _EARLY:
            self.open(branch)

    def open(self, branch: Branch) -> torch.cuda.Stream:
        """The stream of a branch, which waits for what it may read."""
        is_open = branch in self.streams
        if not is_open:
            self.streams[branch] = _CURRENT.stream(branch)
        stream = self.streams[branch]
        if not is_open or branch not in _EARLY:
            stream.wait_stream(self.main)
        elif branch == "gate":
            stream.wait_stream(self.streams["parameters"])
        return stream


class _Current(threading.local):
    """The branches of a thread, and its streams for them by device.

    The same in every capture, because cuBLAS keeps a workspace of megabytes for each stream."""

    def __init__(self) -> None:
        self.branches: _Branches | None = None
        self._streams: dict[tuple[int, Branch], torch.cuda.Stream] = {}

    def stream(self, branch: Branch) -> torch.cuda.Stream:
        """That of a branch on the current device."""
        key = torch.cuda.current_device(), branch
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream()
        return self._streams[key]


_CURRENT = _Current()


@contextmanager
def branched() -> Iterator[None]:
    """A context with branches from the current stream, which waits for all of them at its end."""
    opened = _CURRENT.branches = _Branches()
    try:
        yield
    finally:
        _CURRENT.branches = None
        for stream in opened.streams.values():
            opened.main.wait_stream(stream)


@contextmanager
def unbranched() -> Iterator[None]:
    """A context without branches, for launches that do not keep to what these may read."""
    opened, _CURRENT.branches = _CURRENT.branches, None
    try:
        yield
    finally:
        _CURRENT.branches = opened


def beside(branch: Branch, *read: Tensor | None) -> AbstractContextManager[object]:
    """A context whose launches are on the branch; `read` are the tensors that were made elsewhere,
    parameters left out. What they write may be read on the same branch, or after `join`."""
    if torch.compiler.is_compiling() or _CURRENT.branches is None:
        return nullcontext()
    _CURRENT.branches.kept.extend(read)
    return torch.cuda.stream(_CURRENT.branches.open(branch))


def join(branch: Branch, *made: Tensor | None) -> None:
    """Let later launches wait for the branch, on which the tensors were made."""
    if torch.compiler.is_compiling() or _CURRENT.branches is None:
        return
    opened = _CURRENT.branches
    opened.kept.extend(made)
    if branch in opened.streams:
        opened.main.wait_stream(opened.streams[branch])

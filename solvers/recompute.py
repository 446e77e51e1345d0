"""Activation checkpointing: which calls run inside a checkpointed region, and which run again.

torch.utils.checkpoint tells the code inside a region neither. What it holds while it runs is read
from the Python stack: the region's node (reentrant) or frame object (non-reentrant), the same
object in the forward and in each recomputation. If a version of torch names these locals otherwise,
no region is found, and callers have less to go by (see `bedouin.solvers.draws`).
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import torch
import torch.utils.checkpoint


class Region(NamedTuple):
    """A checkpointed region that the present call is part of."""

    owner: object
    """Lives as long as the region may be recomputed."""
    recomputes: bool
    """Whether the region's forward is over: this run restores what it did not keep."""
    preserves_rng: bool
    """Whether the random state is restored for the recomputation (where `recomputes`)."""
    reentrant: bool
    """Whether the recomputation's own graph is taken back; else it only restores tensors."""


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread, as in every usual recomputation."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


def checkpoint_regions() -> list[Region]:
    """The regions around the present call, innermost first."""
    return list(_regions(sys._getframe(1)))


def is_recomputation() -> bool:
    """Whether torch.utils.checkpoint runs this call again, after its forward."""
    return in_backward() and any(region.recomputes for region in checkpoint_regions())


def restores_tensors_only() -> bool:
    """Whether this is a recomputation whose own graph is never taken back (use_reentrant=False)."""
    if not in_backward():
        return False
    return any(region.recomputes and not region.reentrant for region in checkpoint_regions())


def _regions(frame: FrameType | None) -> Iterator[Region]:
    preserves_rng = True
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            values, name = frame.f_locals, frame.f_code.co_name
            if name == "recompute_fn":
                preserves_rng = bool(values.get("preserve_rng_state", True))
            elif name == "unpack_hook" and "frame" in values:
                yield Region(values["frame"], True, preserves_rng, False)
            elif name in ("forward", "backward") and "ctx" in values:
                ctx, again = values["ctx"], name == "backward"
                yield Region(ctx, again, bool(getattr(ctx, "preserve_rng_state", True)), True)
            elif name == "checkpoint" and "gen" in values:
                yield from _started(values["gen"])
        frame = frame.f_back


def _started(generator: object) -> Iterator[Region]:
    """The region of a non-reentrant forward, whose set-up is suspended in a generator."""
    frame = getattr(generator, "gi_frame", None)
    if frame is not None and "new_frame" in frame.f_locals:
        yield Region(frame.f_locals["new_frame"], False, True, False)

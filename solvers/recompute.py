"""Activation checkpointing: whether a call is inside a checkpointed region, or a recomputation.

torch.utils.checkpoint has no public function for either question, so both are answered from local
variables on the Python stack: the region's autograd node (reentrant) or its frame object
(non-reentrant), which is the same object in the forward pass and in each recomputation. With a
version of torch that renames these variables no region is found, and `bedouin.solvers.draws`
identifies calls by their random key alone.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import torch
import torch.utils.checkpoint


class Region(NamedTuple):
    """A checkpointed region that contains the current call."""

    owner: object
    """The region's identity; alive as long as the region may be recomputed."""
    recomputes: bool
    """Whether this run is a recomputation, after the region's forward pass."""
    preserves_rng: bool
    """Whether the random state is restored for the recomputation (if `recomputes`)."""
    reentrant: bool
    """use_reentrant=True: backward runs through the recomputation's graph. False: the recomputation
    only restores saved tensors, and its graph is discarded."""


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


def checkpoint_regions() -> list[Region]:
    """The checkpointed regions that contain the current call, innermost first."""
    return list(_regions(sys._getframe(1)))


def is_recomputation() -> bool:
    """Whether torch.utils.checkpoint is recomputing this call in a backward pass."""
    return in_backward() and any(region.recomputes for region in checkpoint_regions())


def restores_tensors_only() -> bool:
    """Whether this is a recomputation whose own graph is discarded (use_reentrant=False)."""
    if not in_backward():
        return False
    return any(region.recomputes and not region.reentrant for region in checkpoint_regions())


def _regions(frame: FrameType | None) -> Iterator[Region]:
    """The regions on the stack from `frame` outwards."""
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
                yield from _non_reentrant_forward(values["gen"])
        frame = frame.f_back


def _non_reentrant_forward(generator: object) -> Iterator[Region]:
    """The region of a non-reentrant forward pass, whose frame object is a local variable of the
    suspended generator that set it up."""
    frame = getattr(generator, "gi_frame", None)
    if frame is not None and "new_frame" in frame.f_locals:
        yield Region(frame.f_locals["new_frame"], False, True, False)

"""Launches that begin before the one before them has ended (programmatic dependent launch).

The kernels of a token are a chain of short launches, whose time is mostly that of starting and of
the first loads. On a GPU of compute capability 9 or more a kernel may be started while the kernel
before it runs: it loads what no kernel of the chain writes, and waits before it reads anything
else. Every kernel of the chain waits, so one that has waited sees the writes of all before it.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from bedouin.kernels.backend import interpreter_is_on

ENABLED = True
"""Whether launches overlap where the device can."""


@triton.jit
def start_next(OVERLAPS: tl.constexpr):
    """Allow the launch after this one to start."""
    if OVERLAPS:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(OVERLAPS: tl.constexpr):
    """Wait until the launch before this one has ended and its writes are visible."""
    if OVERLAPS:
        cuda.gdc_wait()


def can_overlap(device: torch.device) -> bool:
    """Whether kernels on the device may start early; not in the interpreter."""
    return ENABLED and not interpreter_is_on() and _starts_early(device)


@cache
def _starts_early(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)

"""Launches that overlap."""

import triton
import triton.language as tl


@triton.jit
def await_launch(OVERLAP: tl.constexpr):
    """Wait for the launch before this one, and let the next one begin. With OVERLAP both are
    programmatic dependent launches: a kernel may begin while the one before it runs, and may read
    what that one writes only after this call. What still earlier launches have written can be read
    at once, because a kernel begins when all programs of the one before it have passed this call,
    or have ended."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

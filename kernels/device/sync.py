"""Order between the programs of one cooperative launch: counters in device memory.

A program that has written its part announces it; a program that reads it waits until the counter
has reached the number of announcements it needs.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _read(counter, COMPILED: tl.constexpr):
    """The counter, read before all that the program reads after its next barrier."""
    if COMPILED:
        # One thread reads: all of them would queue up at one address. The others do not wait,
        # but for the barrier.
        return tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            mov.u32 $0, 0x7fffffff;
            @first ld.global.acquire.gpu.b32 $0, [$1];
            }""",
            "=r,l",
            [counter.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return tl.atomic_add(counter, 0, sem="acquire", scope="gpu")


@triton.jit
def wait_for(counter, target, COMPILED: tl.constexpr):
    """Spin until the counter has reached the target; what was written before it is visible then."""
    while _read(counter, COMPILED) < target:
        pass
    tl.debug_barrier()


@triton.jit
def announce(counter):
    """Count this program, after all its threads have written."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def load_stream(ptr, mask):
    """Values that are read once: past the first level of cache, where A is to stay."""
    return tl.load(ptr, mask=mask, other=0.0, cache_modifier=".cg")

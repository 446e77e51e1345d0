"""Phases and products as they are compiled for a GPU, without one: barriers, registers, sizes.

The layouts of kernels/direct/phases/device.py depend on what the compiler leaves as it is; each
barrier that it inserts otherwise costs a token as much as a tenth of its arithmetic.
"""

import re
from typing import Any

import pytest
import torch
import triton
from tests.kernels.sass import cuobjdump, instructions, loops, waits
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct.phases.limits import Sizes
from bedouin.kernels.direct.phases.spec import (
    FINISH_REFLECTIONS,
    GRADIENTS,
    PREPARE_REFLECTIONS,
    REVERSE,
    SOLVED_STATISTICS,
    SWEEP,
    LaunchSpec,
    phase_constants,
)
from bedouin.kernels.direct.triton_launch import MOST_SAMPLES, PRODUCT, product_launch
from bedouin.kernels.operands import Parameterization, RawLayout
from bedouin.kernels.plans import PlannedKernel

pytestmark = pytest.mark.skipif(interpreter_is_on(), reason="the interpreter compiles nothing")

PAIRS = {"kept_ptr": "i64", "adjoint_ptr": "i64", "B_ptr": "i32", "C_ptr": "i32"}
PAIRS["scratch_ptr"] = "i64"
WORDS = {"B_ptr": "i64", "C_ptr": "i64", "scratch_ptr": "i64"}
LOW = ("x_ptr", "raw_ptr", "W_ptr", "grad_raw_ptr")


def compiled(
    kernel: Any, constants: dict[str, Any], types: dict[str, str], capability: int
) -> CompiledKernel:
    """The kernel for a GPU of a compute capability; pointers are to float32 unless `types` names
    another dtype."""
    launch = {"num_warps": constants["num_warps"], "num_stages": 1, "enable_fp_fusion": True}
    chosen = {k: v for k, v in constants.items() if k in kernel.arg_names}
    signature = {
        name: "constexpr"
        if name in chosen
        else f"*{types.get(name, 'fp32')}"
        if name.endswith("_ptr")
        else "i32"
        for name in kernel.arg_names
    }
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=chosen, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)


def launched(
    kernel: PlannedKernel,
    V: int,
    channels: int,
    k: int,
    capability: int,
    *,
    states: int = 64,
    feedback: bool = True,
) -> CompiledKernel:
    """A kernel of the phases, for heads with k reflections."""
    layout = RawLayout("softplus", True, k, 1.0)
    options = Parameterization(layout, "bounded_delta", "positive", 1e-5)
    sizes = Sizes(1, 1, channels, states, channels, states, V, 2 + feedback, k)
    how = LaunchSpec(sizes[2:], feedback, options)
    types = PAIRS if kernel is GRADIENTS else WORDS
    types = types | {name: "bf16" if V == 4 else "fp32" for name in LOW}
    types["factors_ptr"] = "bf16" if sizes.factor_type == torch.bfloat16 else "fp32"
    with kernel.compiling():
        return compiled(kernel.kernel, phase_constants(kernel, how), types, capability)


SPILLED = 32
"""Bytes of phase S with 64 states, which takes all 255 registers of a thread: by version of the
compiler it keeps a few values of a token in memory, or none."""


def spilled(kernel: CompiledKernel) -> int:
    """Bytes of a thread's stack, where values are that do not fit its registers."""
    found = re.search(r"STACK:(\d+)", cuobjdump(kernel, "-res-usage"))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(
    ("kernel", "V", "barriers", "stack"),
    [
        (SWEEP, 4, 4, SPILLED),
        (REVERSE, 4, 5, 0),
        # a thread has at most 255 registers, and float32 needs twice as many words as bfloat16
        (SWEEP, 2, 4, 384),
        (REVERSE, 2, 5, 288),
        # and here it has what is read of two tokens
        (GRADIENTS, 4, 0, 0),
        (GRADIENTS, 2, 0, 128),
    ],
)
def test_barriers_and_registers(kernel: PlannedKernel, V: int, barriers: int, stack: int) -> None:
    """Two barriers a token where a token's values cross the warps, of which S computes two at each
    pass, in R with those of the norm's adjoint four, and one before."""
    found = launched(kernel, V, 64, 0, 90)
    assert found.asm["ptx"].count("bar.sync") <= barriers
    assert spilled(found) <= stack


@pytest.mark.parametrize("channels", [32, 64])
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize(("kernel", "barriers"), [(SWEEP, 4), (REVERSE, 5), (GRADIENTS, 0)])
def test_many_states(kernel: PlannedKernel, barriers: int, feedback: bool, channels: int) -> None:
    found = launched(kernel, 4, channels, 0, 90, states=128, feedback=feedback)
    assert found.asm["ptx"].count("bar.sync") <= (barriers if feedback else 1)
    # a thread of phase R holds 32 states and their cotangents; with more lanes it is slower
    assert spilled(found) <= (256 if kernel is REVERSE else SPILLED)


@pytest.mark.parametrize("states", [32, 64])
@pytest.mark.parametrize("kernel", [SWEEP, REVERSE, GRADIENTS], ids=["sweep", "reverse", "grads"])
def test_a_token_waits_for_loads_that_are_old(kernel: PlannedKernel, states: int) -> None:
    """The wait of a loop for most of its loads: when it came right behind the last of them, it took
    20 to 50 % of a kernel's time on an H100."""
    found = loops(instructions(launched(kernel, 4, 64, 0, 90, states=states)), 200)
    assert found
    for loop in found:
        most = max(waits(loop))
        assert most.loads > 8
        # R waits behind the product with W^y, which is short
        assert most.distance >= (60 if kernel is REVERSE else 150)


@pytest.mark.parametrize("kernel", [SWEEP, REVERSE, GRADIENTS], ids=["sweep", "reverse", "grads"])
def test_rows_of_a_later_chunk_are_prefetched(kernel: PlannedKernel) -> None:
    """By the first warp alone: from all warps the same requests took longer than they saved."""
    text = launched(kernel, 4, 64, 0, 90).asm["ptx"]
    found = re.findall(r"(@\S+ )?prefetch\.global\.L2", text)
    assert found and all(found)


@pytest.mark.parametrize("kernel", [REVERSE, GRADIENTS], ids=["reverse", "gradients"])
@pytest.mark.parametrize("V", [2, 4])
@pytest.mark.parametrize("channels", [16, 64])
def test_a_thread_reads_what_it_wrote(kernel: PlannedKernel, V: int, channels: int) -> None:
    """In scratch memory, since there is no barrier between: all accesses have one layout."""
    text = launched(kernel, V, channels, 0, 90).asm["ttgir"]
    words = r"tt\.(load|store) .*tensor<(\d+x\d+x\d+)x!tt\.ptr<i64>, (#\w+)>"
    found = re.findall(words, text)
    (shape,) = {shape for kind, shape, _ in found if kind == "store"}
    kinds, layouts = zip(
        *[(kind, layout) for kind, at, layout in found if at == shape], strict=True
    )
    assert "load" in kinds and len(set(layouts)) == 1


REFLECTIONS = PREPARE_REFLECTIONS, SOLVED_STATISTICS, FINISH_REFLECTIONS


@pytest.mark.parametrize("kernel", [SWEEP, REVERSE, *REFLECTIONS])
def test_reflections(kernel: PlannedKernel) -> None:
    assert spilled(launched(kernel, 4, 64, 2, 90)) <= (192 if kernel is SWEEP else 64)


@pytest.mark.parametrize(("channels", "states"), [(128, 32), (256, 16)])
@pytest.mark.parametrize("V", [2, 4])
@pytest.mark.parametrize("kernel", [SWEEP, REVERSE, GRADIENTS, *REFLECTIONS])
def test_large_heads_without_feedback(
    kernel: PlannedKernel, V: int, channels: int, states: int
) -> None:
    found = launched(kernel, V, channels, 2, 90, states=states, feedback=False)
    assert found.metadata.shared <= 4096
    assert spilled(found) <= 288


@pytest.mark.parametrize(("channels", "states"), [(64, 64), (128, 32), (256, 16)])
@pytest.mark.parametrize("V", [2, 4])
@pytest.mark.parametrize(("kernel", "barriers"), [(SWEEP, 0), (REVERSE, 1), (GRADIENTS, 0)])
def test_no_barrier_of_a_token_without_feedback(
    kernel: PlannedKernel, barriers: int, V: int, channels: int, states: int
) -> None:
    """R has one before its tokens; sums over channels of G stay within a warp."""
    found = launched(kernel, V, channels, 0, 90, states=states, feedback=False)
    assert found.asm["ptx"].count("bar.sync") <= barriers


@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize("kernel", [SWEEP, REVERSE, GRADIENTS])
def test_other_gpus(kernel: PlannedKernel, capability: int) -> None:
    found = launched(kernel, 4, 64, 0, capability)
    assert found.metadata.shared <= 4096
    assert spilled(found) <= (SPILLED if kernel is SWEEP else 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("samples", [16, MOST_SAMPLES])
def test_the_product_of_one_head(samples: int, dtype: torch.dtype) -> None:
    *_, constants = product_launch((5184, 1024), dtype, samples, False, True)
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    found = compiled(PRODUCT.kernel, constants, {"v_ptr": name, "W_ptr": name}, 90)
    assert found.metadata.shared <= 99 * 1024
    assert spilled(found) <= (128 if dtype == torch.float32 else 0)

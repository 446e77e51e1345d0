"""The kernels of heads as they are compiled for a GPU, without one: registers, barriers.

Letters: p channels of a head, n state per channel, k reflections.
"""

import re
from typing import Any

import pytest
import triton
from tests.kernels.sass import cuobjdump, instructions, loops, waits
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct.heads import launch
from bedouin.kernels.direct.heads.launch import EDGES, REVERSE, SWEEP
from bedouin.kernels.direct.triton_bundles import local_width
from bedouin.kernels.launch import next_power_of_two
from bedouin.kernels.operands import Parameterization, RawLayout
from bedouin.kernels.plans import PlannedKernel
from bedouin.kernels.scan import InputScale

pytestmark = pytest.mark.skipif(interpreter_is_on(), reason="the interpreter compiles nothing")

LOW = ("x_ptr", "raw_ptr", "grad_x_ptr", "grad_raw_ptr")
"""Pointers to the dtype of x; all others are to float32."""


def compiled(
    kernel: PlannedKernel,
    p: int,
    n: int,
    k: int,
    input_scale: InputScale = "bounded_delta",
    dtype: str = "bf16",
) -> CompiledKernel:
    """A kernel without feedback for sm_90, as the launches of one sample choose it."""
    layout = RawLayout("softplus", True, k, 1.0)
    options = Parameterization(layout, input_scale, "positive", 1e-5)
    samples, parts = 1, launch.choose_parts(max(16, next_power_of_two(p)), 1)
    given = (2, n, p), None, options, samples, parts, False, 16
    constants = launch._constants(kernel, *given, local_width(k, n))
    names = kernel.kernel.arg_names
    known: dict[str, Any] = {name: v for name, v in constants.items() if name in names}
    known |= {"d": p, "n": n}
    signature, aligned = {}, {}
    for place, name in enumerate(names):
        if name in known:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = f"*{dtype if name in LOW else 'fp32'}"
            aligned[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
    chosen = {name: v for name, v in constants.items() if name not in names}
    source = ASTSource(fn=kernel.kernel, signature=signature, constexprs=known, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=chosen)


def stack(kernel: CompiledKernel) -> int:
    """Bytes of a thread's stack, where values are that do not fit its registers."""
    found = re.search(r"STACK:(\d+)", cuobjdump(kernel, "-res-usage"))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("kernel", [SWEEP, EDGES, REVERSE], ids=["sweep", "edges", "reverse"])
@pytest.mark.parametrize(
    ("p", "n", "k", "input_scale", "dtype"),
    [
        (64, 16, 0, "bounded_delta", "bf16"),
        (128, 16, 1, "bounded_delta", "bf16"),
        (64, 16, 2, "delta", "fp32"),
        (100, 9, 4, "one_minus_decay", "bf16"),
    ],
)
def test_a_token_fits_the_registers(
    kernel: PlannedKernel, p: int, n: int, k: int, input_scale: InputScale, dtype: str
) -> None:
    found = compiled(kernel, p, n, k, input_scale, dtype)
    assert stack(found) == 0
    # no W^y: only what is exchanged between the warps of a sample
    assert found.metadata.shared <= 1024


@pytest.mark.parametrize(("n", "most"), [(32, 32), (64, 384)])
@pytest.mark.parametrize("kernel", [SWEEP, EDGES, REVERSE], ids=["sweep", "edges", "reverse"])
def test_many_states(kernel: PlannedKernel, n: int, most: int) -> None:
    assert stack(compiled(kernel, 128, n, 2)) <= (most if kernel is REVERSE else 0)


@pytest.mark.parametrize(
    ("kernel", "p", "k", "barriers"),
    [(SWEEP, 64, 0, 1), (SWEEP, 64, 2, 4), (EDGES, 64, 0, 0), (EDGES, 64, 2, 2)],
)
def test_warps_of_a_sample_wait_for_each_other_once_for_reflections(
    kernel: PlannedKernel, p: int, k: int, barriers: int
) -> None:
    """With reflections one exchange of sums a token, in the sweep one more after the last one, and
    there a barrier for B, C and alpha."""
    assert compiled(kernel, p, 16, k).asm["ptx"].count("bar.sync") <= barriers


@pytest.mark.parametrize("kernel", [SWEEP, EDGES, REVERSE], ids=["sweep", "edges", "reverse"])
def test_a_token_waits_for_loads_that_are_old(kernel: PlannedKernel) -> None:
    """The longest wait of the last loop with loads, which is that of the tokens."""
    *_, loop = loops(instructions(compiled(kernel, 64, 16, 0)), 100)
    assert max(waits(loop)).distance >= 100

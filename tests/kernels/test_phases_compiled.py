"""The phases as they are compiled for a GPU, without one: barriers, spilled registers, sizes.

The layouts of kernels/direct/phases/device.py depend on hints that the compiler is free to ignore;
each barrier that it then inserts costs a token as much as a tenth of its arithmetic.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct.phases.launch import (
    gradient_constants,
    reverse_constants,
    sweep_constants,
)
from bedouin.kernels.direct.phases.limits import Sizes
from bedouin.kernels.direct.phases.triton_gradients import gradient_kernel
from bedouin.kernels.direct.phases.triton_reverse import reverse_kernel
from bedouin.kernels.direct.phases.triton_sweep import sweep_kernel
from bedouin.kernels.operands import Parameterization, RawLayout

pytestmark = pytest.mark.skipif(interpreter_is_on(), reason="the interpreter compiles nothing")

OPTIONS = Parameterization(
    RawLayout("softplus", True, 0, 1.0, 1.0), "delta", "positive", 1e-5, feeds_x=True
)
PAIRS = {"kept_ptr": "i64", "adjoint_ptr": "i64", "B_ptr": "i32", "C_ptr": "i32"}


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


def kernels(V: int, size: int) -> dict[str, tuple[Any, Any, dict[str, str]]]:
    """Kernel, constants and dtypes of each phase, for heads of `size` channels and states."""
    sizes = Sizes(1, 1, size, size, size, size, V, 7)
    low = "bf16" if V == 4 else "fp32"
    words = {"B_ptr": "i64", "C_ptr": "i64", "scratch_ptr": "i64"}
    pairs = PAIRS | {"scratch_ptr": "i32" if V == 4 else "i64"}
    forward = words | {"x_ptr": low, "raw_ptr": low, "W_ptr": low}
    both = True, True
    return {
        "sweep": (sweep_kernel, sweep_constants(sizes[2:], both, OPTIONS, True), forward),
        "reverse": (
            reverse_kernel,
            reverse_constants(sizes[2:7], both, OPTIONS),
            words | {"W_ptr": low, "fed_ptr": low},
        ),
        "gradients": (gradient_kernel, gradient_constants(sizes[2:], OPTIONS), pairs),
    }


def spilled(kernel: CompiledKernel) -> int:
    """Bytes of a thread's stack, where values are that do not fit its registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        shown = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"STACK:(\d+)", shown.stdout + shown.stderr)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("V", [4, 2])
@pytest.mark.parametrize(("name", "barriers"), [("sweep", 2), ("reverse", 3), ("gradients", 2)])
def test_barriers_and_registers(name: str, barriers: int, V: int) -> None:
    """Two a token where a token's values cross the warps, and those of a chunk: one between the
    replay and the tokens of R and G, and one after the tokens of G."""
    kernel = compiled(*kernels(V, 64)[name], capability=90)
    assert kernel.asm["ptx"].count("bar.sync") <= barriers
    assert spilled(kernel) == 0


@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize("name", ["sweep", "reverse", "gradients"])
def test_other_gpus(name: str, capability: int) -> None:
    kernel = compiled(*kernels(4, 64)[name], capability=capability)
    assert kernel.metadata.shared <= 4096
    assert spilled(kernel) <= 64

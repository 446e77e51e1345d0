"""Kernels as Triton compiles them for a GPU, without one."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from bedouin.kernels.launch import LAUNCH_OPTIONS


def compile_kernel(
    kernel: Any,
    known: dict[str, Any],
    kind_of: Callable[[str], str],
    *,
    multiples: Collection[str] = (),
    capability: int = 90,
) -> CompiledKernel:
    """The kernel for a GPU of a compute capability.

    `known` has its constants and launch options, and may have more; `kind_of` gives Triton's type
    of every other parameter by its name. Pointers are multiples of 16, and so are the parameters
    `multiples`.
    """
    names = kernel.arg_names
    constants = {name: v for name, v in known.items() if name in names}
    kinds = {name: "constexpr" if name in constants else kind_of(name) for name in names}
    aligned = [name for name, kind in kinds.items() if kind[0] == "*" or name in multiples]
    source = ASTSource(
        fn=kernel,
        signature=kinds,
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    launch = {name: v for name, v in known.items() if name in LAUNCH_OPTIONS}
    options = launch | {"enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack_size(kernel: CompiledKernel) -> int:
    """Bytes of a thread's stack, where values are that do not fit its registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [str(tool), "-res-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", shown.stdout + shown.stderr)
    assert found is not None
    return int(found[1])


def adds_in_a_fixed_order(kernel: CompiledKernel) -> bool:
    """Whether no two programs add to one place, in an order that may differ between runs."""
    return not re.search(r"\b(atom|red)\.", kernel.asm["ptx"])

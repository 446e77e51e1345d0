"""The kernels of the tracker as they are compiled for a GPU, without one: barriers, registers.

Each barrier of a token's chain costs as much as a tenth of its arithmetic.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.kernels.compiled import adds_in_a_fixed_order, compile_kernel, stack_size
from triton.compiler import CompiledKernel

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.coalescing import without_coalescing
from bedouin.kernels.track.limits import Sizes
from bedouin.kernels.track.registered import FLAGS, options
from bedouin.kernels.track.triton_gradients import gradients_kernel
from bedouin.kernels.track.triton_output import output_backward_kernel, output_kernel
from bedouin.kernels.track.triton_reverse import replay_kernel, reverse_kernel
from bedouin.kernels.track.triton_sweep import sweep_kernel
from bedouin.kernels.track.triton_tokens import finish_kernel, prepare_kernel

pytestmark = pytest.mark.skipif(interpreter_is_on(), reason="the interpreter compiles nothing")

SEQUENTIAL = sweep_kernel, replay_kernel, reverse_kernel, gradients_kernel
PAIRS = ("B_ptr", "C_ptr", "rows_ptr", "adjoint_ptr", "memory_ptr", "slopes_ptr", "past_ptr")
FLOAT32 = set("scalars A_log W D weight dt_bias erase_bias h0 y0 h y states inverse last H".split())
FLOAT32 |= set("edges grad_y grad_y0 unit_B unit_C grad_A_log sums".split())
"""Parameters of kernels; pointers to all others are to the dtype of x."""


def compiled(kernel: Any, c: int, n: int, dtype: torch.dtype) -> CompiledKernel:
    """The kernel with all that a call may have, for sm_90."""
    sizes = Sizes.of(1, 1, 1, c, n, dtype)
    known = options(kernel, sizes, dtype, (1e-5, 1e-5), FLAGS)
    low = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    couple = "i32" if dtype == torch.bfloat16 else "i64"

    def kind_of(name: str) -> str:
        if not name.endswith("_ptr"):
            return "i32"
        if name in PAIRS:
            return "*i32" if kernel is prepare_kernel else "*i64"
        if name in ("fed_ptr", "factors_ptr"):
            return f"*{couple}"
        return "*fp32" if name.removesuffix("_ptr") in FLOAT32 else f"*{low}"

    with without_coalescing() if kernel in SEQUENTIAL else nullcontext():
        return compile_kernel(kernel, known, kind_of)


@pytest.mark.parametrize("n", [64, 128])
@pytest.mark.parametrize(
    ("kernel", "barriers", "most"), [(sweep_kernel, 4, 96), (reverse_kernel, 2, 96)]
)
def test_barriers_and_registers_of_the_chains(
    kernel: Any, barriers: int, most: int, n: int
) -> None:
    """One exchange between warps a token, before and after which they wait; the sweep computes two
    tokens at each pass."""
    found = compiled(kernel, 64, n, torch.bfloat16)
    assert found.asm["ptx"].count("bar.sync") <= barriers
    assert stack_size(found) <= most


@pytest.mark.parametrize(
    ("c", "n", "dtype"),
    [(40, 100, torch.bfloat16), (64, 128, torch.float32), (3, 128, torch.float16)],
    ids=str,
)
@pytest.mark.parametrize(
    "kernel",
    [*SEQUENTIAL, prepare_kernel, finish_kernel, output_kernel, output_backward_kernel],
    ids=lambda kernel: kernel.__name__,
)
def test_every_kernel_compiles_and_adds_in_a_fixed_order(
    kernel: Any, c: int, n: int, dtype: torch.dtype
) -> None:
    made = compiled(kernel, c, n, dtype)
    assert adds_in_a_fixed_order(made)
    assert made.metadata.shared <= 232448

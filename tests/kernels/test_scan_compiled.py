"""The kernels of the scan as they are compiled for a GPU, without one."""

from typing import Any

import pytest
from tests.kernels.compiled import adds_in_a_fixed_order, compile_kernel, stack_size

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.scan.types import SCAN_CHUNK

pytestmark = pytest.mark.skipif(interpreter_is_on(), reason="the interpreter compiles nothing")

FLOAT32 = {"start_ptr", "kept_ptr", "work_ptr", "A_ptr", "D_ptr", "grad_A_ptr", "grad_D_ptr"}
FLOAT32 |= {"grad_B_ptr", "grad_C_ptr", "end_ptr", "grad_end_ptr", "grad_h0_ptr"}
"""Pointers to float32; all others are to the dtype of x."""


@pytest.mark.parametrize("input_scale", ["bounded_delta", "one_minus_decay"])
@pytest.mark.parametrize("name", ["forward_kernel", "backward_kernel"])
def test_the_kernels_compile_and_fit_the_registers(name: str, input_scale: str) -> None:
    from bedouin.kernels.scan import triton_backward, triton_forward

    kernel = getattr(triton_forward if name == "forward_kernel" else triton_backward, name)
    known: dict[str, Any] = {"INPUT_SCALE": input_scale, "FULL": False, "FAST": True, "KEEP": True}
    known |= {"EXCLUSIVE": False, "HEADS": True, "HAS_D": True, "CHUNK": SCAN_CHUNK}
    known |= {"BLOCK_D": 32, "BLOCK_N": 16, "num_warps": 1}

    def kind_of(name: str) -> str:
        if not name.endswith("_ptr"):
            return "i32"
        return "*fp32" if name in FLOAT32 else "*bf16"

    made = compile_kernel(kernel, known, kind_of, multiples=("d", "n"))
    assert adds_in_a_fixed_order(made)
    # the coupled scale of all states beside their decays
    assert stack_size(made) <= (64 if input_scale == "one_minus_decay" else 0)

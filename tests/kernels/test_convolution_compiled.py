"""The kernels of the short convolution as they are compiled for a GPU, without one."""

from typing import Any

import pytest
from tests.kernels.compiled import adds_in_a_fixed_order, compile_kernel

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.convolution.triton_kernels import (
    convolution_kernel,
    cotangent_kernel,
    input_kernel,
)

pytestmark = pytest.mark.skipif(interpreter_is_on(), reason="the interpreter compiles nothing")


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("kernel", [convolution_kernel, cotangent_kernel, input_kernel])
def test_every_kernel_compiles_and_adds_in_a_fixed_order(
    kernel: Any, adds: bool, norms: bool
) -> None:
    every = {"EPS": 1e-6, "WIDTH": 4, "ADDS": adds, "NORMS": norms}
    every |= {"TOKENS": 32, "SIZE": 128, "BLOCK": 128}
    low = {"sums_ptr": "*fp32"} if kernel is input_kernel else {}
    made = compile_kernel(
        kernel, every, lambda name: low.get(name, "*bf16") if name.endswith("_ptr") else "i32"
    )
    assert adds_in_a_fixed_order(made)

"""The kernels of the short convolution as they are compiled for a GPU, without one."""

import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.convolution.triton_kernels import (
    convolution_kernel,
    cotangent_kernel,
    input_kernel,
)

LAUNCH = {"enable_fp_fusion": True}

pytestmark = pytest.mark.skipif(interpreter_is_on(), reason="the interpreter compiles nothing")


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("kernel", [convolution_kernel, cotangent_kernel, input_kernel])
def test_every_kernel_compiles_and_adds_in_a_fixed_order(
    kernel: Any, adds: bool, norms: bool
) -> None:
    every = {"EPS": 1e-6, "WIDTH": 4, "ADDS": adds, "NORMS": norms}
    every |= {"TOKENS": 32, "SIZE": 128, "BLOCK": 128}
    known = {name: v for name, v in every.items() if name in kernel.arg_names}
    kinds = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    signature = kinds | {"sums_ptr": "*fp32"} if kernel is input_kernel else kinds
    signature |= dict.fromkeys(known, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=known)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=LAUNCH)
    assert not re.search(r"\b(atom|red)\.", made.asm["ptx"])

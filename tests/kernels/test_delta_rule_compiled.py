"""The chunk kernels of the delta rule as they are compiled for a GPU, without one.

Letters: t time, p key channels and v value channels of a head.
"""

import re
from typing import Any

import pytest
import torch
from tests.kernels.compiled import adds_in_a_fixed_order, compile_kernel
from triton.compiler import CompiledKernel

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.delta_rule.registered import constants, value_block
from bedouin.kernels.delta_rule.triton_chunks import prepare_kernel, sweep_kernel
from bedouin.kernels.delta_rule.triton_chunks_backward import gradients_kernel, reverse_kernel

pytestmark = pytest.mark.skipif(interpreter_is_on(), reason="the interpreter compiles nothing")

KERNELS = (prepare_kernel, sweep_kernel, reverse_kernel, gradients_kernel)
FLOAT32 = ("BETA", "DECAY", "GBETA", "GDECAY", "S0", "S_LAST", "GS_LAST", "GS0")
"""Of the tensors; the others have the dtype of products."""

SHARED_MEMORY = 232448
"""Bytes that a program on sm_90 can have."""


def compiled(kernel: Any, t: int, p: int, v: int, dtype: torch.dtype) -> CompiledKernel:
    """The kernel with a decay, a memory, and all that can be wanted, for sm_90."""
    known = constants(torch.empty(1, t, 1, p, dtype=dtype, device="meta"), True)
    known |= dict.fromkeys(("STARTED", "ENDED", "WANTED", "KEEP"), True)
    known |= {"V_SIZE": v, "V_BLOCK": value_block(p, v, dtype)}
    low = "fp32" if dtype == torch.float32 else "bf16"

    def kind_of(name: str) -> str:
        if name in ("t", "H", "N") or name.endswith("_ROW"):
            return "i32"
        return "*fp32" if name in FLOAT32 else f"*{low}"

    rows = [name for name in kernel.arg_names if name.endswith("_ROW")]
    return compile_kernel(kernel, known, kind_of, multiples=rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("t", "p", "v", "dtype"),
    [
        (1000, 128, 256, torch.bfloat16),
        (16, 40, 64, torch.bfloat16),
        (1000, 256, 64, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_wgmma_reads_no_registers_and_the_tiles_fit(
    kernel: Any, t: int, p: int, v: int, dtype: torch.dtype
) -> None:
    made = compiled(kernel, t, p, v, dtype)
    products = re.findall(r"warp_group_dot %\S+, .*? : (\S+?)<", made.asm["ttgir"])
    assert set(products) <= {"!ttg.memdesc"}
    assert bool(products) is (dtype == torch.bfloat16 and (t >= 64 or kernel is not prepare_kernel))
    assert made.metadata.shared <= SHARED_MEMORY
    assert adds_in_a_fixed_order(made)

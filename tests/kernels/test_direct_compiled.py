"""The kernels of heads as they are compiled for a GPU, without one: registers, barriers.

Letters: p channels of a head, n state per channel, k reflections.
"""

from typing import Any

import pytest
import torch
from tests.kernels.compiled import compile_kernel, stack_size
from triton.compiler import CompiledKernel

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct import launch
from bedouin.kernels.direct.limits import head_blocks
from bedouin.kernels.direct.triton_forward import sweep_kernel as SWEEP
from bedouin.kernels.direct.triton_reverse import reverse_kernel as REVERSE
from bedouin.kernels.launch import next_power_of_two
from bedouin.kernels.operands import Parameterization, RawLayout
from bedouin.kernels.scan import InputScale

pytestmark = pytest.mark.skipif(interpreter_is_on(), reason="the interpreter compiles nothing")

KERNELS = SWEEP, REVERSE

SM_80, SM_89, SM_90 = (80, 166912), (89, 101376), (90, 232448)
"""Compute capabilities, and bytes of shared memory that one program can have."""

WEIGHTS = ("W_ptr", "first_ptr", "fed_ptr")
"""Pointers to the dtype of W^y."""

LOW = ("x_ptr", "raw_ptr", "grad_x_ptr", "grad_raw_ptr")
"""Pointers to the dtype of x; all others are to float32."""


def compiled(
    kernel: Any,
    p: int,
    n: int,
    k: int,
    input_scale: InputScale = "bounded_delta",
    dtype: str = "bf16",
    weights: torch.dtype | None = None,
    target: tuple[int, int] = SM_90,
) -> CompiledKernel:
    """A kernel as the launches of few samples choose it, without feedback or with W^y in the dtype
    `weights`, for a GPU with that compute capability and shared memory of a program."""
    layout = RawLayout("softplus", True, k, 1.0)
    options = Parameterization(layout, input_scale, "positive", 1e-5)
    samples = 1 if weights is None else 2
    parts = launch.choose_parts(max(16, next_power_of_two(p)), samples)
    given = (2, n, p), weights, options, (samples, parts), False, 16, target[1]
    constants = launch.head_constants(kernel, *given)

    def kind_of(name: str) -> str:
        if not name.endswith("_ptr"):
            return "i32"
        if name in LOW:
            return f"*{dtype}"
        return "*bf16" if name in WEIGHTS and weights == torch.bfloat16 else "*fp32"

    return compile_kernel(kernel, constants | {"d": p, "n": n}, kind_of, capability=target[0])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize(
    ("p", "n", "k", "input_scale", "dtype"),
    [
        (64, 16, 0, "bounded_delta", "bf16"),
        (128, 16, 1, "bounded_delta", "bf16"),
        (64, 16, 2, "delta", "fp32"),
        (100, 1, 4, "one_minus_decay", "bf16"),
    ],
)
def test_a_token_fits_the_registers(
    kernel: Any, p: int, n: int, k: int, input_scale: InputScale, dtype: str
) -> None:
    found = compiled(kernel, p, n, k, input_scale, dtype)
    assert stack_size(found) == 0
    # no W^y: only what is exchanged between the warps of a sample
    assert found.metadata.shared <= 1024


@pytest.mark.slow
@pytest.mark.parametrize("kernel", (SWEEP, REVERSE), ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize(
    ("target", "weights", "k", "streamed"),
    [
        (SM_90, torch.bfloat16, 4, False),
        (SM_90, torch.float32, 2, True),
        (SM_80, torch.bfloat16, 2, False),
        (SM_80, torch.bfloat16, 4, True),
        (SM_89, torch.float32, 4, True),
        (SM_89, torch.bfloat16, 2, True),
    ],
)
def test_weights_fit_the_shared_memory(
    kernel: Any,
    target: tuple[int, int],
    weights: torch.dtype,
    k: int,
    streamed: bool,
) -> None:
    blocks = head_blocks(128, 16, RawLayout("softplus", True, k, 1.0))
    assert blocks.streams(weights.itemsize, target[1]) == streamed
    dtype = "bf16" if weights == torch.bfloat16 else "fp32"
    found = compiled(kernel, 128, 16, k, dtype=dtype, weights=weights, target=target)
    assert found.metadata.shared <= target[1]


@pytest.mark.parametrize(("n", "most"), [(32, 32), (64, 384)])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_many_states(kernel: Any, n: int, most: int) -> None:
    assert stack_size(compiled(kernel, 128, n, 2)) <= (most if kernel is REVERSE else 0)


@pytest.mark.parametrize(("k", "barriers"), [(0, 1), (2, 4)])
def test_warps_of_a_sample_wait_for_each_other_once_for_reflections(k: int, barriers: int) -> None:
    """With reflections one exchange of sums a token and one more after the last one, and a barrier
    for B, C and alpha."""
    assert compiled(SWEEP, 64, 16, k).asm["ptx"].count("bar.sync") <= barriers

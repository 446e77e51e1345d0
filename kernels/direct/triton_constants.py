"""Compile-time constants and launch options of the direct sweep's kernels."""

import math
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.householder import UNIT_EPS
from bedouin.kernels.launch import arguments_of, next_power_of_two
from bedouin.kernels.operands import Parameterization

Shape = tuple[int, ...]

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Triton's names of the dtypes that W^y may have."""


def input_strides(
    x: Tensor,  # (b, t, d)
    A: Tensor,  # (H, n, d)
) -> tuple[int, ...]:
    """Strides of the axes of heads, batch and time."""
    of_heads: Tensor = x.unflatten(0, (len(A), -1))
    return of_heads.stride()[:3]


def token_strides(
    fed: Tensor | None,  # (b, t, r)
) -> tuple[int, ...]:
    """Strides of the batch and time axes; zeros for None."""
    return (0, 0) if fed is None else fed.stride()[:2]


def product_constants(dtype: torch.dtype, tf32: bool) -> dict[str, Any]:
    """The precision of products with W^y of a dtype within a kernel; in the interpreter the factors
    are of float32, since its 16-bit products are wrong."""
    factors = torch.float32 if interpreter_is_on() else dtype
    return {"PRECISION": "tf32" if tf32 else "ieee", "DOT": DTYPES[factors]}


def uses_tf32() -> bool:
    """Whether products of float32 are rounded to TF32, as torch's setting says."""
    # the newer of two names: reading the older one, allow_tf32, raises if the newer one was set
    return torch.backends.cuda.matmul.fp32_precision == "tf32" and not interpreter_is_on()


def map_constants(
    A: Shape,  # (H, n, d)
    options: Parameterization,
) -> dict[str, Any]:
    """Blocks, discretization, the norm of the feedback, and the mixer."""
    layout, eps = options.known_layout(), options.feedback_norm_eps
    return {
        "BLOCK_D": next_power_of_two(A[-1]),
        "BLOCK_N": next_power_of_two(A[-2]),
        "ACTIVATION": layout.activation,
        "SELECTIVE": layout.selective,
        "INPUT_SCALE": options.input_scale,
        "EPS": UNIT_EPS,
        "FAST": not interpreter_is_on(),
        "NORM": eps is not None,
        "NORM_EPS": 0.0 if eps is None else eps,
        "K": layout.num_householder,
        "BETA_MAX": layout.beta_max,
    }


@lru_cache(maxsize=1024)
def kernel_constants(
    kernel: Any,  # of Triton
    A: Shape,  # (H, n, d)
    options: Parameterization,
    strides: tuple[int, ...],
    **own: Any,
) -> dict[str, Any]:
    """The constants that a kernel has as parameters, and its launch options: its `own`, and those
    that options, sizes, and strides of rows of raw values determine. Not to be changed."""
    # a power of two, at most 8, that divides all strides between rows of raw values
    every = {**map_constants(A, options), "ALIGNED": math.gcd(8, *strides), **own}
    return arguments_of(kernel, every)

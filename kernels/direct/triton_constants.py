"""Compile-time constants and launch options of the direct sweep's kernels."""

import math
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.householder import UNIT_EPS
from bedouin.kernels.launch import ceil_div, next_power_of_two
from bedouin.kernels.operands import Parameterization
from bedouin.kernels.plans import KEPT_CONSTANTS, Constants, PlannedKernel

Shape = tuple[int, ...]

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Triton's names of the dtypes that W^y may have."""

REPLAY_CHANNELS = 128
"""Channels of a block whose memory is replayed."""

MOST_WARPS = 16
"""Most warps of a program."""

WARP_ELEMENTS = 2048
"""Elements of a tensor in a warp's registers: 64 registers a thread."""

LANES = 32
"""Threads of a warp."""

CHANNELS_OF_ROW = 128
"""Most channels of a warp that holds all their states, four neighbours in each thread; it may also
hold a half or a quarter. See triton_sums.py."""

STATES_AT_A_TIME = 8
"""States of a block in the reverse kernel: of more at a time, some would be spilled."""


def rows_of_channels(d: int, n: int) -> int:
    """The number of warps of a sample's program if each holds channels with all their states, from
    one to four in a thread; otherwise 0.

    The compiler would otherwise spread the states of a channel over several warps, and each sum
    over states would need a barrier.
    """
    warps = num_warps(d, n)
    return warps if LANES <= next_power_of_two(d) // warps <= CHANNELS_OF_ROW else 0


@lru_cache(maxsize=KEPT_CONSTANTS)
def memory_constants(
    A: Shape,  # (n, d)
    overlaps: bool,
    *,
    always: bool,
) -> dict[str, int]:
    """Of a kernel of a token that holds the memory of a sample: warps, one stage, because it has no
    loop over tokens to pipeline, `overlapping`, and the states in blocks, `always` or where a
    thread has all states of its channels.

    It would otherwise hold all of B and C as well: for 32 states these take 64 registers, and a
    quarter of a token's instructions would move them.
    """
    n, d = A
    rows, states = rows_of_channels(d, n), next_power_of_two(n)
    blocks = ceil_div(states, STATES_AT_A_TIME) if rows or always else 1
    sizes = {"ROWS": rows, "BLOCKS": blocks, "BLOCK_N": states // blocks}
    return {**sizes, "num_warps": num_warps(d, n), "num_stages": 1, **overlapping(overlaps)}


def per_head(
    A: Tensor,  # (n, d) or (H, n, d)
    b: int,
) -> int | None:
    """Samples of a head, or None if there is one head."""
    return None if A.dim() == 2 else b // A.shape[0]


def input_strides(
    x: Tensor,  # (b, t, d)
    A: Tensor,  # (n, d) or (H, n, d)
) -> tuple[int | None, ...]:
    """Strides of the axes of heads, of which there is none for one head, batch and time."""
    if A.dim() == 2:
        return None, *x.stride()[:2]
    of_heads: Tensor = x.unflatten(0, (len(A), -1))
    return of_heads.stride()[:3]


def token_strides(
    fed: Tensor | None,  # (b, t, r)
) -> tuple[int, ...]:
    """Strides of the batch and time axes; zeros for None."""
    return (0, 0) if fed is None else fed.stride()[:2]


def overlapping(overlaps: bool) -> dict[str, bool]:
    """Of kernels whose launches may overlap (`await_launch`)."""
    return {"OVERLAP": overlaps, **({"launch_pdl": True} if overlaps else {})}


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
    A: Shape,  # (n, d) or (H, n, d)
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
        "FULL": options.eigenvalues == "full",
        "EPS": UNIT_EPS,
        "FAST": not interpreter_is_on(),
        "NORM": eps is not None,
        "NORM_EPS": 0.0 if eps is None else eps,
        "K": layout.num_householder,
        "BETA_MAX": layout.beta_max,
    }


def num_warps(d: int, rows: int) -> int:
    """Warps such that a tile (rows, d) takes at most 64 registers a thread, and one row 4."""
    elements = next_power_of_two(d) * next_power_of_two(rows)
    few = max(4, elements // WARP_ELEMENTS, next_power_of_two(d) // 128)
    return int(min(MOST_WARPS, few))


@lru_cache(maxsize=KEPT_CONSTANTS)
def kernel_constants(
    kernel: PlannedKernel,
    A: Shape,  # (n, d) or (H, n, d)
    options: Parameterization,
    strides: tuple[int, ...],
    **own: Any,
) -> Constants:
    """The constants that a kernel has as parameters, and its launch options: its `own`, and those
    that options, sizes, and strides of rows of raw values determine."""
    # a power of two, at most 8, that divides all strides between rows of raw values
    every = {**map_constants(A, options), "ALIGNED": math.gcd(8, *strides), **own}
    return Constants.of(kernel, every)

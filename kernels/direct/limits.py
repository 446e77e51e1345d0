"""Which sweeps the Triton kernels cover.

Letters: d channels of a head, n state per channel.
"""

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, Implementation, choose_backend, warn_of_reference
from bedouin.kernels.device import MAX_REFLECTIONS
from bedouin.kernels.direct.heads.blocks import head_blocks
from bedouin.kernels.direct.layout import is_covered
from bedouin.kernels.launch import Device, next_power_of_two
from bedouin.kernels.operands import Operands, Parameterization

MAX_STATE = 32768
"""Most elements of a sample's memory, with both axes rounded up to a power of two, because one
program holds it in registers: for example 2048 channels with 16 states."""


MAX_HEAD = 128
"""Most channels of a head whose sweep is one program's work: a warp holds the rows of a sample."""

MAX_HEAD_STATES = 64
"""Most states of such a head: of more, the memory of even 32 channels would not fit the registers
of a warp, beside its cotangent."""


def is_small_head(
    A: Tensor,  # (d, n) or (H, d, n)
) -> bool:
    """Whether one program holds the rows of a head's sample."""
    d, n = A.shape[-2:]
    return d <= MAX_HEAD and n <= MAX_HEAD_STATES


def takes_heads_together(operands: Operands, parameterization: Parameterization) -> bool:
    """Whether the kernels of `kernels/direct/heads` run: for heads whose size they hold, with a
    tile of W^y if there is feedback.

    The kernels of one head take other heads one after the other.
    """
    W_y, A = operands.W_y, operands.A
    if not is_small_head(A):
        return False
    if W_y is None:
        return True
    layout, (d, n) = parameterization.known_layout(), A.shape[-2:]
    blocks = head_blocks(d, n, layout.num_householder, layout.selective)
    return blocks.fits(W_y.itemsize, Device.of(A.device).shared_memory)


def choose_sweep(
    backend: Backend,
    operands: Operands,
    parameterization: Parameterization,
    bind_parameters: tuple[Tensor, ...] = (),  # any shapes
) -> Implementation:
    """The implementation of a sweep; raises as `choose_backend` does. Warns of a sweep on a GPU
    that has no kernel, unless it is in float64, for which there are none at all."""
    unsupported = _unsupported(operands, parameterization, bind_parameters)
    device, dtype = operands.x.device, operands.x.dtype
    chosen = choose_backend(backend, device, dtype, unsupported)
    if unsupported is not None and backend == "auto" and operands.A.dtype != torch.float64:
        warn_of_reference(device, unsupported)
    return chosen


def _unsupported(
    operands: Operands,
    parameterization: Parameterization,
    bind_parameters: tuple[Tensor, ...],  # any shapes
) -> str | None:
    """The first property that the kernels do not support, as part of an error message; None if they
    support the call."""
    x, raw, A = operands.x, operands.raw, operands.A
    layout = parameterization.layout
    if layout is None or not is_covered(layout, raw, A, bind_parameters):
        return parameterization.without_layout
    dtypes = x.dtype, raw.dtype, A.dtype
    if A.dtype != torch.float32 or torch.float64 in dtypes:
        found = ", ".join(map(str, dtypes))
        return f"x, raw and A of {found} (A must be float32, x and raw at most that)"
    if parameterization.plain_only is not None:
        return parameterization.plain_only
    d, n = A.shape[-2:]
    k = max(layout.num_householder, 1)  # `with_reflection`
    if k > MAX_REFLECTIONS:
        return f"{k} reflections (at most {MAX_REFLECTIONS})"
    if d < 1 or n < 1 or next_power_of_two(d) * next_power_of_two(n) > MAX_STATE:
        return f"{d} channels with {n} states (at most {MAX_STATE} together)"
    if next_power_of_two(d) * next_power_of_two(k) > MAX_STATE // 2:
        return f"{k} reflections of {d} channels"
    return None

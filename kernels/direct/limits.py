"""Which sweeps the Triton kernels cover.

Letters: d channels of a head, n state per channel.
"""

import torch
from torch import Tensor

from bedouin.kernels.backend import (
    Backend,
    Implementation,
    choose_backend,
    interpreter_is_on,
    warn_of_reference,
)
from bedouin.kernels.direct.heads.blocks import head_blocks
from bedouin.kernels.direct.layout import is_covered
from bedouin.kernels.launch import Device
from bedouin.kernels.operands import Operands, Parameterization

MAX_CHANNELS = 128
"""Most channels of a head: a warp holds the rows of a sample."""

MAX_STATES = 64
"""Most states of a head: of more, the memory of even 32 channels would not fit the registers of a
warp, beside its cotangent."""

MAX_REFLECTIONS = 4
"""Most reflections, whose k x k algebra is unrolled at compile time."""


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
    x, raw, W_y, A, _, _ = operands
    layout = parameterization.layout
    if layout is None or not is_covered(layout, raw, A, bind_parameters):
        return parameterization.without_layout
    dtypes = x.dtype, raw.dtype, A.dtype
    if A.dtype != torch.float32 or torch.float64 in dtypes:
        found = ", ".join(map(str, dtypes))
        return f"x, raw and A of {found} (A must be float32, x and raw at most that)"
    if parameterization.plain_only is not None:
        return parameterization.plain_only
    if parameterization.eigenvalues == "full":
        return "eigenvalues='full' in a sweep (only 'positive')"
    d, n = A.shape[-2:]
    if parameterization.input_scale == "one_minus_decay" and n > 1:
        return f"input_scale='one_minus_decay' with {n} states in a sweep (only with 1)"
    k = layout.num_householder
    if k > MAX_REFLECTIONS:
        return f"{k} reflections in a sweep (at most {MAX_REFLECTIONS})"
    if not (1 <= d <= MAX_CHANNELS and 1 <= n <= MAX_STATES):
        return (
            f"heads of {d} channels with {n} states in a sweep "
            f"(at most {MAX_CHANNELS} with {MAX_STATES}; set num_heads)"
        )
    blocks = head_blocks(d, n, k, layout.selective)
    if W_y is not None and (x.is_cuda or interpreter_is_on()):
        shared_memory = Device.of(A.device).shared_memory
        if not blocks.fits(W_y.itemsize, shared_memory):
            return f"feedback of {d} channels with {shared_memory} bytes of shared memory"
    return None

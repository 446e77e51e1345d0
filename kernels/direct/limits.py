"""Which sweeps the Triton kernels cover, and sizes; free of Triton.

Letters: d channels of a head, n state per channel, k reflections, r raw values.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, Implementation, choose_backend
from bedouin.kernels.direct.layout import is_covered
from bedouin.kernels.launch import next_power_of_two
from bedouin.kernels.operands import Operands, Parameterization, RawLayout
from bedouin.kernels.scan.reference import SCAN_CHUNK

MAX_CHANNELS = 1024
"""Most channels of a head."""

MAX_STATES = 64
"""Most states of a head: of more, the memory of even 32 channels would not fit the registers of a
warp, beside its cotangent."""

MAX_MEMORY = 16384
"""Most values of h of all samples of a program, with channels and states rounded up: of more, most
would be spilled in every token."""

MAX_SIDE = 128
"""Most channels of a head whose product with W^y is a part of the sweep's program."""

MAX_REFLECTIONS = 4
"""Most reflections, whose k x k algebra is unrolled at compile time."""

SCRATCH = 8192
"""Bytes of shared memory that a sweep may need beside W^y, which stays there if it fits."""

CHUNK = SCAN_CHUNK
"""Tokens between two kept h, as many as of a scan. The reverse sweep's workspace is this many
tensors (b, n, d)."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Gradients of x, raw, W_y, A, h0, y0, and the statistics (2, b, t) of the adjoint equation."""


class HeadBlocks(NamedTuple):
    """Sizes rounded up: sides of tiles are powers of two, and at least 16 in a product."""

    channels: int
    states: int
    small: int  # B, C and alpha in the forward sweep
    rows: int  # of W^y in shared memory, of the sweep that holds more of them
    rows_of_tile: int  # of its largest tile that is read anew for each token

    def streams(self, itemsize: int, shared_memory: int) -> bool:
        """Whether W^y, with entries of `itemsize` bytes, does not fit beside what else is there."""
        return SCRATCH + self.rows * self.channels * itemsize > shared_memory

    def is_single(self, itemsize: int, shared_memory: int) -> bool:
        """Whether not even its tiles fit, one after the other: then launches have a single token,
        between which cuBLAS computes the products with W^y."""
        tile = SCRATCH + self.rows_of_tile * self.channels * itemsize
        return self.channels > MAX_SIDE or tile > shared_memory


def head_blocks(d: int, n: int, layout: RawLayout) -> HeadBlocks:
    """Sizes of the tiles of W^y for heads of d channels with n states."""
    channels, states = max(16, next_power_of_two(d)), next_power_of_two(n)
    k, both = layout.num_householder, 2 * n if layout.selective else 0
    small = max(16, next_power_of_two(both + k))
    # B and C, and as many for alpha, at least one for each thread of a warp
    reverse = 2 * max(2 * states, min(32, channels))
    rows = (k + 1) * channels + max(small, reverse)
    return HeadBlocks(channels, states, small, rows, max(channels, small, reverse))


def choose_sweep(
    backend: Backend,
    operands: Operands,
    parameterization: Parameterization,
    bind_parameters: tuple[Tensor, ...] = (),  # any shapes
) -> Implementation:
    """The implementation of a sweep; raises as `choose_backend` does. Warns of a sweep on a GPU
    that has no kernel, unless it is in float64, for which there are none at all."""
    unsupported = _unsupported(operands, parameterization, bind_parameters)
    warning = None if operands.A.dtype == torch.float64 else unsupported
    x = operands.x
    return choose_backend(backend, x.device, x.dtype, unsupported, warning=warning)


def _unsupported(
    operands: Operands,
    parameterization: Parameterization,
    bind_parameters: tuple[Tensor, ...],  # any shapes
) -> str | None:
    """The first property that the kernels do not support, as part of an error message; None if they
    support the call."""
    x, raw, _, A, _, _ = operands
    layout = parameterization.layout
    if layout is None or not is_covered(layout, raw, A, bind_parameters):
        return parameterization.without_layout
    dtypes = x.dtype, raw.dtype, A.dtype
    if A.dtype != torch.float32 or torch.float64 in dtypes:
        found = ", ".join(map(str, dtypes))
        return f"x, raw and A of {found} (A must be float32, x and raw at most that)"
    if parameterization.eigenvalues == "full":
        return "eigenvalues='full' in a sweep (only 'positive')"
    d, n = A.shape[-2:]
    if parameterization.input_scale == "one_minus_decay" and n > 1:
        return f"input_scale='one_minus_decay' with {n} states in a sweep (only with 1)"
    k = layout.num_householder
    if k > MAX_REFLECTIONS:
        return f"{k} reflections in a sweep (at most {MAX_REFLECTIONS})"
    values = next_power_of_two(d) * next_power_of_two(n)
    if not (1 <= d <= MAX_CHANNELS and 1 <= n <= MAX_STATES and values <= MAX_MEMORY):
        most = MAX_MEMORY // MAX_CHANNELS, MAX_MEMORY // MAX_STATES
        return (
            f"heads of {d} channels with {n} states in a sweep (at most {MAX_CHANNELS} with "
            f"{most[0]}, or {most[1]} with {MAX_STATES}; set num_heads)"
        )
    return None

"""Which sweeps the phases take; does not import Triton.

Letters: b folded samples, t time, d channels of a head, n state per channel; P and N: d and n
rounded up to powers of two, at least 16.
"""

from typing import NamedTuple

import torch

from bedouin.kernels.direct.buffers import CHUNK
from bedouin.kernels.launch import ceil_div, next_power_of_two
from bedouin.kernels.operands import Operands, Parameterization

PHASE_CHANNELS = 64
"""Most channels of a head with feedback: W^y of Delta is in the registers of one program."""

UNFED_CHANNELS, UNFED_MEMORY = 256, 4096
"""Most channels of a head without feedback, and most values of the memory, P N, of one with more
than 64 channels: of 1,024 channels with 16 states the kernels of one head are faster (5.8 ms
instead of 8.0 at 64x256)."""

PHASE_REFLECTIONS = 4

PHASE_STATES = 128
"""Most states of a channel: its memory and the cotangent of that are in registers, too."""


def takes_phases(operands: Operands, options: Parameterization) -> bool:
    """Whether the phases solve this call: they hold its heads, feedback is of nothing but all of
    Delta, and nothing is erased."""
    (d, n), W_y, layout = operands.A.shape[-2:], operands.W_y, options.layout
    if layout is None or not layout.selective or layout.num_householder > PHASE_REFLECTIONS:
        return False
    if options.plain_only is not None:
        return False
    if n > PHASE_STATES or options.input_scale == "one_minus_decay":
        return False
    if W_y is None:
        is_small = padded_size(d) * padded_size(n) <= UNFED_MEMORY
        return d <= PHASE_CHANNELS or (d <= UNFED_CHANNELS and is_small)
    return d <= PHASE_CHANNELS and W_y.shape[-2] == d


def padded_size(size: int) -> int:
    """P or N."""
    return max(16, next_power_of_two(size))


class Sizes(NamedTuple):
    """Sizes of a call."""

    b: int
    t: int
    d: int
    n: int
    P: int
    N: int
    V: int  # values of a word: 4 bfloat16 or 2 float32
    factors: int  # vectors that phase S keeps of a token beside Delta and `written`
    k: int

    @property
    def chunks(self) -> int:
        return ceil_div(self.t, CHUNK)

    def chunk_of(self, t: int) -> int:
        """The chunk of a token: they are counted from the end, so that the first may be shorter."""
        return self.chunks - ceil_div(self.t - t, CHUNK)

    @property
    def kept(self) -> int:
        """What phase S keeps of a sample, in float32: vectors of each token, h of each chunk,
        1 / rms, and the solutions of the local equation."""
        vectors = 2 * self.P + self.factors * self.P * self.factor_type.itemsize // 4
        return self.t * (vectors + 1 + self.solved) + self.chunks * self.P * self.N

    @property
    def factor_type(self) -> torch.dtype:
        """The dtype of these vectors. They only multiply cotangents, and gradients in bfloat16 are
        rounded anyway. With reflections the defect of the solution is measured with them, too."""
        return torch.bfloat16 if self.V == 4 and not self.k else torch.float32

    @property
    def solved(self) -> int:
        """Numbers of a token's local equation: e, its smallest pivot, S."""
        return self.k + 1 + self.k * (self.k + 1) // 2 if self.k else 0

    @property
    def scalars(self) -> int:
        """Numbers of a token from phase P: B C, and 1 / |u|, T, G and beta."""
        return 1 + self.k * (self.k + 3)


def sizes_of(operands: Operands, options: Parameterization) -> Sizes:
    """The sizes of a call that `takes_phases`."""
    (b, t, d), n = operands.x.shape, operands.A.shape[-1]
    P, N = padded_size(d), padded_size(n)
    V = 4 if operands.x.dtype == torch.bfloat16 else 2
    factors = 2 if operands.W_y is None else 3
    return Sizes(b, t, d, n, P, N, V, factors, options.known_layout().num_householder)

"""Which sweeps the phases take; does not import Triton.

Letters: b folded samples, t time, d channels of a head, n state per channel; P and N: d and n
rounded up to powers of two, at least 16.
"""

from typing import NamedTuple

import torch

from bedouin.kernels.direct.buffers import CHUNK
from bedouin.kernels.feedback import reads_all_heads
from bedouin.kernels.heads import count_heads
from bedouin.kernels.launch import ceil_div, next_power_of_two
from bedouin.kernels.operands import Operands, Parameterization

PHASE_CHANNELS = 64
"""Most channels of a head with feedback: W^y of Delta and of x is in the registers of one
program."""

UNFED_CHANNELS, UNFED_MEMORY = 256, 4096
"""Most channels of a head without feedback, and most values of the memory, P N, of one with more
than 64 channels: of 1,024 channels with 16 states the kernels of one head are faster (5.8 ms
instead of 8.0 at 64x256)."""

PHASE_REFLECTIONS = 4

PHASE_STATES = 128
"""Most states of a channel: its memory and the cotangent of that are in registers, too."""


def fed_vectors(operands: Operands, options: Parameterization) -> tuple[bool, bool]:
    """Whether y_{t-1} is fed back to Delta and to x."""
    if operands.W_y is None:
        return False, False
    rows = operands.W_y.shape[-2] - (operands.x.shape[-1] if options.feeds_x else 0)
    return rows > 0, options.feeds_x


def feeds_all_heads(operands: Operands) -> bool:
    """Whether W^y is no part of phases S and R, but a launch of its own for each token, because it
    reads the outputs of all heads."""
    W_y = operands.W_y
    return W_y is not None and reads_all_heads(W_y, operands.x.shape[-1])


def takes_phases(operands: Operands, options: Parameterization) -> bool:
    """Whether the phases solve this call: they hold its heads, feedback is of nothing but all of
    Delta and x, x is bounded in all heads or in none, and there are no reflections where it is
    or where W^y reads all heads."""
    (d, n), W_y, layout = operands.A.shape[-2:], operands.W_y, options.layout
    if layout is None or not layout.selective or layout.num_householder > PHASE_REFLECTIONS:
        return False
    if n > PHASE_STATES or options.input_scale == "one_minus_decay":
        return False
    if W_y is None:
        is_small = padded_size(d) * padded_size(n) <= UNFED_MEMORY
        return d <= PHASE_CHANNELS or (d <= UNFED_CHANNELS and is_small)
    if options.bounded_heads and options.bounded_heads != count_heads(operands.A):
        return False
    rows = W_y.shape[-2] - (d if options.feeds_x else 0)
    reads_all = layout.num_householder > 0 and reads_all_heads(W_y, d)
    mixes = layout.num_householder > 0 and options.bounded_heads > 0
    return d <= PHASE_CHANNELS and rows in (0, d) and not (reads_all or mixes)


def padded_size(size: int) -> int:
    """P or N."""
    return max(16, next_power_of_two(size))


def describe_limits() -> str:
    """What `takes_phases` requires of erase and feedback of x, as a part of an error message."""
    return (
        f"but in the exact sweep of heads with at most {PHASE_CHANNELS} channels (without feedback "
        f"{UNFED_CHANNELS} with a memory of {UNFED_MEMORY} values), {PHASE_STATES} states and "
        f"{PHASE_REFLECTIONS} reflections, none with feedback of all heads or bounded x, which "
        "feed back y to Delta and x alone, with another input scale than 'one_minus_decay'"
    )


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
        """Numbers of a token from phase P: B C, beta^e, and 1 / |u|, T, G and beta."""
        return 2 + self.k * (self.k + 3)


def sizes_of(operands: Operands, options: Parameterization) -> Sizes:
    """The sizes of a call that `takes_phases`."""
    (b, t, d), n = operands.x.shape, operands.A.shape[-1]
    P, N = padded_size(d), padded_size(n)
    layout, V = options.known_layout(), 4 if operands.x.dtype == torch.bfloat16 else 2
    fed = fed_vectors(operands, options)
    bounded = fed[1] and options.bounded_heads > 0
    factors = 2 + (0 if feeds_all_heads(operands) else sum(fed)) + bounded + (layout.erase > 0)
    return Sizes(b, t, d, n, P, N, V, factors, layout.num_householder)

"""What a decoded token is made of.

Letters: b batch, d channels, n state per channel, k reflections, r raw values, f fed-back ones, H
heads, p = d / H channels of a head; r and f are those of a head. A weight has j rows and c columns.
Channels of the first head come first, and so do parameters. One head (H = 1, p = d) has no axis of
heads.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from bedouin.kernels.operands import Parameterization, RawLayout

DecayKind = Literal["exp", "softplus", "one"]
"""A from its parameter p: -exp(p), -sharpness softplus(p), or -1 without one."""


@dataclass(frozen=True)
class StepOptions(Parameterization):
    """The parameterization of a layer, and what a token needs beyond it."""

    layout: RawLayout
    decay: DecayKind
    sharpness: float
    fed: tuple[bool, bool, bool, bool]
    """Which of Delta, B, C and the reflections have rows among the fed-back values."""
    norm_eps: float | None
    """Of the output norm; None: the paper's output stage, gate * SiLU(y + D x)."""
    num_heads: int = 1
    """H; each head has its own projections, local solve and norms."""

    def part_sizes(self, p: int, n: int) -> tuple[int, int, int, int]:
        """Raw values of Delta, B, C and the reflections, of a head."""
        states = n if self.layout.selective else 0
        return p, states, states, self.layout.num_householder * (p + 1)


class Product(NamedTuple):
    """out = W v, for each head and sample; v and out may be rows of wider tensors."""

    weight: Tensor  # (j, c) or (H, j, c), contiguous
    v: Tensor  # (b, c) or (H, b, c)
    out: Tensor  # (b, j) or (H, b, j), written


class StepParameters(NamedTuple):
    """Read by every token, so that a change in place takes effect with the next one."""

    decay: Tensor | None  # (d, n)
    delta_bias: Tensor  # (d,)
    raw_bias: Tensor | None  # (H r,), of a head: all raw values but Delta's, then the gate
    D: Tensor  # (d,)
    norm: Tensor | None  # (d,)


class StepOperands(NamedTuple):
    """Tensors of one token; x, drive, z, raw and fed may be rows of wider tensors."""

    x: Tensor  # (b, d)
    drive: Tensor  # (b, p) or (H, b, p): what the mixer sees of x
    z: Tensor | None  # (b, d)
    raw: Tensor  # (b, r + p) or (H, b, r + p): W^x x without its bias; the gate is last
    fed: Tensor | None  # (b, f + p) or (H, b, f + p): W^y norm(y_{t-1}); the gate is last
    h: Tensor  # (b, n, d), in place
    y: Tensor  # (b, d), written
    normed: Tensor  # (b, d), written: norm(y), in the dtype of W^y
    hidden: Tensor  # (b, d), written: the output before its projection
    residual: Tensor  # (H b,), written
    pivot: Tensor  # (H b,), written
    converged: Tensor  # (H b,) uint8, written
    all_converged: Tensor  # (H b,) uint8, in place: 0 once a token has not converged

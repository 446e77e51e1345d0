"""What the output stage takes; free of Triton.

Letters: b batch, t time, d channels, H heads (kernels/heads.py).
"""

from typing import NamedTuple

from torch import Tensor


class OutputOperands(NamedTuple):
    """The tensors of the gated output, in the order of the arguments of `gated_output`."""

    y: Tensor  # (b, t, d)
    x: Tensor  # (b, t, d)
    D: Tensor  # (d,) or (H, d)
    gate: Tensor  # (b, t, d)
    fed: Tensor | None  # (b, t, d)
    z: Tensor | None  # (b, t, d)
    weight: Tensor | None  # (d,) or (H, d), of the norm

    @property
    def heads(self) -> int:
        """H."""
        return len(self.D) if self.D.dim() == 2 else 1

    @property
    def joined_shape(self) -> tuple[int, int, int]:
        """The shape of the output, in which the heads of a sample are side by side."""
        b, t, d = self.y.shape
        return b // self.heads, t, self.heads * d

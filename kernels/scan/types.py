"""What a scan takes and returns; free of Triton.

Letters: b batch, t time, d channels, n state per channel, H heads (kernels/heads.py).
"""

from typing import Literal, NamedTuple

from torch import Tensor

InputScale = Literal["delta", "bounded_delta", "one_minus_decay"]
Eigenvalues = Literal["positive", "full"]

SCAN_CHUNK = 16
"""Tokens between two memories that the forward kernel stores, and in the backward's workspace."""


class ScanOperands(NamedTuple):
    """The tensors of a scan, in the order of the arguments of `selective_scan`."""

    x: Tensor  # (b, t, d)
    delta: Tensor  # (b, t, d)
    A: Tensor  # (d, n) or (H, d, n)
    B: Tensor  # (b, t, n)
    C: Tensor  # (b, t, n)
    h0: Tensor  # (b, d, n)
    D: Tensor | None = None  # (d,) or (H, d), as A

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, delta, B and C, with a row for each token."""
        return self.x, self.delta, self.B, self.C


class ScanOptions(NamedTuple):
    """What describes a scan besides its tensors."""

    input_scale: InputScale
    eigenvalues: Eigenvalues
    exclusive: bool

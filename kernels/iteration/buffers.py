"""The tensors of a fused iteration, as its launches read and write them.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values,
H heads (kernels/heads.py).
"""

from dataclasses import dataclass

from torch import Tensor

KEPT, FROZEN, FAILED, STEPS = 1, 2, 3, 4
"""Rows of the counters (5, b): tokens whose y stays (the converged prefix, or all tokens of a
failed sample), the converged prefix, 1 if failed, steps. Row 0 is KEPT before the last decision."""


@dataclass
class IterationBuffers:
    """Inputs, iterates and statistics; a step exchanges y with y_next."""

    x: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r), the part that x determines
    W_y: Tensor | None  # (r or more, d) or (H, r or more, d)
    A: Tensor  # (n, d) or (H, n, d)
    h0: Tensor  # (b, n, d)
    y: Tensor  # (b, t, d)
    y_next: Tensor  # (b, t, d)
    value: Tensor | None  # (b, t, d), F(y) of each token where a solve returns it
    mixed: Tensor  # (b, t, d), x~
    BC: Tensor  # (b t + tokens read ahead, 2, n), unit B and C
    parts: Tensor  # (2, b, parts, t), defect and scale of blocks of channels
    norms: Tensor  # (2, b, t), defect and scale
    counters: Tensor  # (5, b), int32
    normed: Tensor  # (b, t, d), norm(y_{t-1}) in the dtype of W^y; y without feedback
    fed_back: Tensor  # (b, t, r or more), W^y norm(y_{t-1}); raw without feedback
    lengths: Tensor | None  # (b,) int32, tokens before the padding; None: no padding

    @property
    def kept(self) -> Tensor:
        """(b,): tokens whose y stays."""
        return self.counters[KEPT]

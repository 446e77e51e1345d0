"""What the core of a layer takes and saves; free of Triton.

Letters: b batch, t time, d channels, n state per channel, r raw values, w = 2 d, or d without z.
"""

from typing import Literal, NamedTuple

from torch import Tensor

from bedouin.kernels.operands import Parameterization

DecayParameter = Literal["exp", "softplus"]
"""A = -exp(parameter), or -sharpness softplus(parameter)."""


class CoreTensors(NamedTuple):
    """What the output of a layer's core depends on, without the bias."""

    projected: Tensor  # (b, t, w): x, and behind it z
    W_x: Tensor  # (r + d, d), of the raw values and of the gate
    W_y: Tensor | None  # (r + d, d), as W_x; None: no feedback
    decay: Tensor  # (d, n), the parameter behind A
    D: Tensor  # (d,)
    weight: Tensor | None  # (d,), of the norm; None: the paper's output, without z
    h0: Tensor | None  # (b, d, n); None: zeros
    y0: Tensor | None  # (b, d); None: zeros

    def split(self) -> tuple[Tensor, Tensor | None]:  # (b, t, d)
        """x, and z or None: views."""
        d = self.decay.shape[0]
        if self.weight is None:
            return self.projected, None
        return self.projected[..., :d], self.projected[..., d:]


class CoreSaved(NamedTuple):
    """What the forward pass computes and the backward pass reads."""

    y: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r + padding), raw^x; any values from column r on
    gate: Tensor  # (b, t, d), with feedback, without z
    normed: Tensor  # (b, t, d), norm(y_{t-1}); empty without feedback
    kept: Tensor  # (b, slots, n, d): see `SweepBuffers`
    A: Tensor  # (n, d), log2(e) A


class CoreOptions(NamedTuple):
    """The options of a core."""

    parameterization: Parameterization
    decay: DecayParameter
    sharpness: float
    eps: float  # of the output norm
    keep_every: int  # tokens between two kept h

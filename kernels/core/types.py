"""What the core of a layer takes and saves; free of Triton.

Letters: b batch, t time, d channels, n state per channel, w = 2 d, or d without z; H heads of
p = d / H channels with r raw values each, b' = H b folded samples, i = b t rows of a head. The
tensors of one head have no axis H: they are those of p = d. The first f raw values have feedback.
"""

from typing import Literal, NamedTuple

from torch import Tensor

from bedouin.kernels.operands import Parameterization

DecayParameter = Literal["exp", "softplus"]
"""A = -exp(parameter), or -sharpness softplus(parameter)."""


class CoreTensors(NamedTuple):
    """What the output of a layer's core depends on, without the bias."""

    projected: Tensor  # (b, t, w): x, and behind it z
    W_x: Tensor  # (r + p, p) or (H, r + p, p), of the raw values and of the gate, in any dtype
    W_y: Tensor | None  # (f + p, p) or (H, f + p, p), of the same; None: no feedback
    decay: Tensor  # (d, n), the parameter behind A
    D: Tensor  # (d,)
    weight: Tensor | None  # (d,), of the norm; None: the paper's output, without z
    h0: Tensor | None  # (b', p, n); None: zeros
    y0: Tensor | None  # (b', p); None: zeros

    @property
    def x(self) -> Tensor:  # (b, t, d), a view
        return self.projected[..., : self.decay.shape[0]]

    def sizes(self) -> "CoreSizes":
        b, t, _ = self.projected.shape
        (rows, p), (d, n) = self.W_x.shape[-2:], self.decay.shape
        f = 0 if self.W_y is None else self.W_y.shape[-2] - p
        return CoreSizes(d // p, b, t, p, n, rows - p, f)


class CoreSizes(NamedTuple):
    """The letters."""

    H: int
    b: int
    t: int
    p: int
    n: int
    r: int
    f: int

    @property
    def folded(self) -> int:
        return self.H * self.b

    def of_heads(self, *shape: int) -> tuple[int, ...]:
        """The shape with an axis H in front if there are several heads."""
        return shape if self.H == 1 else (self.H, *shape)


class CoreSaved(NamedTuple):
    """What the forward pass computes and the backward pass reads."""

    y: Tensor  # (b', t, p)
    raw: Tensor  # (b', t, r + padding), raw^x; any values from column r on
    gate: Tensor  # (i, p) or (H, i, p), with feedback, without z
    normed: Tensor  # (b', t, p), norm(y_{t-1}); empty without feedback
    kept: Tensor  # (b', slots, n, p): see `SweepBuffers`
    A: Tensor  # (n, p) or (H, n, p), log2(e) A
    W_x: Tensor  # W_x and W_y in the dtype of `projected`; empty if they have it already
    W_y: Tensor

    def weights(self, tensors: CoreTensors) -> tuple[Tensor, Tensor | None]:
        """W_x and W_y in the dtype of `projected`."""
        W_x = self.W_x if self.W_x.numel() else tensors.W_x
        return W_x, self.W_y if self.W_y.numel() else tensors.W_y


class CoreOptions(NamedTuple):
    """The options of a core."""

    parameterization: Parameterization
    decay: DecayParameter
    sharpness: float
    eps: float  # of the output norm
    keep_every: int  # tokens between two kept h

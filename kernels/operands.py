"""The two objects that travel from a layer to its kernels: `Operands` and `Parameterization`.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values, H heads
(kernels/heads.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.heads import check_heads, count_heads
from bedouin.kernels.scan import Eigenvalues, InputScale

Activation = Literal["softplus", "softplus_of_minus", "sigmoid"]
"""How Delta follows from its raw values; "softplus_of_minus" is softplus(-raw)."""

SCALARS = (
    "str activation, bool selective, SymInt num_householder, float beta_max, "
    "str input_scale, str eigenvalues, float? norm_eps"
)
"""`Parameterization.scalars` in the schema of an operation."""
NUM_SCALARS = 7


class Operands(NamedTuple):
    """The tensors that determine a map, which do not change while its fixed point is computed.

    With several heads the batch is H groups of b/H samples: sample i belongs to head i // (b/H) and
    uses the W_y and the A of that head; d are the channels of a head. W_y has rows of zeros for
    raw values without feedback. x, raw and W_y may have a lower dtype than A, whose dtype the state
    and the iterates have.
    """

    x: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r), the part that x determines
    W_y: Tensor | None  # (r, d) or (H, r, d); None: no feedback
    A: Tensor  # (d, n) or (H, d, n)
    h0: Tensor | None  # (b, d, n), the memory before the first token; None: zeros
    y0: Tensor | None  # (b, d), the output before the first token; None: zeros

    def start(self) -> tuple[Tensor, Tensor]:
        """h0 (b, d, n) and y0 (b, d), None replaced by zeros."""
        b, A = self.x.shape[0], self.A
        # the states before the channels in memory, as the sweeps store h
        h0 = A.new_zeros(b, *A.mT.shape[-2:]).mT if self.h0 is None else self.h0
        return h0, A.new_zeros(b, A.shape[-2]) if self.y0 is None else self.y0

    def check(self) -> None:
        """Raise ValueError unless W_y has the heads of A, r rows and d columns, and each head as
        many samples."""
        A, W_y, d, r = self.A, self.W_y, self.A.shape[-2], self.raw.shape[-1]
        if W_y is not None and W_y.shape[:-2] != A.shape[:-2]:
            shapes = f"{tuple(W_y.shape)} and {tuple(A.shape)}"
            raise ValueError(f"W_y and A must have the same heads as first axis, got {shapes}")
        if W_y is not None and W_y.shape[-2] != r:
            raise ValueError(
                f"W_y must have {r} rows, one for each raw value, got shape {tuple(W_y.shape)}; "
                "pass None for no feedback"
            )
        if W_y is not None and W_y.shape[-1] != d:
            raise ValueError(
                f"W_y must have a column for each channel of a head, {d}, got shape "
                f"{tuple(W_y.shape)}"
            )
        check_heads(count_heads(A), self.x.shape[0], "A")

    def with_head_axis(self) -> "Operands":
        """W_y (H, r, d) and A (H, d, n), also of a single head."""
        if self.A.dim() == 3:
            return self
        W_y = None if self.W_y is None else self.W_y.unsqueeze(0)
        return self._replace(W_y=W_y, A=self.A.unsqueeze(0))

    def wide(self) -> "Operands":
        """x and raw in the dtype of A, which plain torch computes in, and h0 and y0 as tensors."""
        dtype = self.A.dtype
        x, raw = self.x.to(dtype), self.raw.to(dtype)
        return Operands(x, raw, self.W_y, self.A, *self.start())


class Coefficients(NamedTuple):
    """What the raw values of a token determine; leading axes (b,) or (b, t)."""

    delta: Tensor  # (..., d)
    B: Tensor  # (..., n)
    C: Tensor  # (..., n)
    e: Tensor  # (..., 1) or (..., d); (..., 0) for e = 0
    U: Tensor  # (..., k, d)
    M: Tensor  # (..., k, k)


Bind = Callable[..., Coefficients]
"""bind(raw, *bind_parameters): the coefficients of raw values (..., r)."""


@dataclass(frozen=True)
class RawLayout:
    """How kernels compute the coefficients themselves, without a `Bind`: Householder form, e = 0.

    Raw values of a token: [Delta d | B n | C n | u_1 .. u_k k d | alpha k], with Delta =
    activation(raw), B, C and u_i made unit, and beta = beta_max sigmoid(alpha); without `selective`
    [Delta d | u k d | alpha k] and B = C = 1.
    """

    activation: Activation
    selective: bool
    num_householder: int
    beta_max: float

    def parts(self, d: int, n: int) -> list[int]:
        """The sizes of Delta, of B and C if selective, of u and alpha."""
        k, memory = self.num_householder, [n, n] if self.selective else []
        return [d, *memory, k * d, k]

    def size(self, d: int, n: int) -> int:
        """r: raw values a token."""
        return sum(self.parts(d, n))


CLOSED = 1e30
"""The size of a raw value of Delta in the padding after the tokens of a sample, for which Delta is
exactly 0, whatever the feedback adds: the memory passes."""


def closed_value(closed: float, dtype: torch.dtype) -> float:
    """`closed`, or what is nearest to it in a dtype of a smaller range."""
    limit = torch.finfo(dtype).max
    return min(max(closed, -limit), limit)


NO_LAYOUT = "this mixer (only HouseholderProduct)"


@dataclass(frozen=True)
class Parameterization:
    """The fixed options of a map."""

    layout: RawLayout | None  # None: only a `Bind` can read the raw values
    input_scale: InputScale
    eigenvalues: Eigenvalues
    feedback_norm_eps: float | None  # None: W^y is applied to y itself
    # what the kernels do not support where there is no layout that describes the raw values
    without_layout: str = field(default=NO_LAYOUT, kw_only=True)

    def diagonal(self, e: Tensor) -> Tensor | None:  # (..., 1) or (..., d)
        """e, or None where it is 0, as the layout or an empty axis says: its terms are then not
        computed."""
        return e if self.layout is None and e.shape[-1] else None

    def known_layout(self) -> RawLayout:
        """`layout` for code that cannot do without; ValueError where it is None."""
        if self.layout is None:
            raise ValueError("parameterization.layout must be a RawLayout, got None")
        return self.layout

    def scalars(self) -> tuple[Any, ...]:
        """The fields of the layout, then the others, since operations take no objects."""
        of = self.known_layout()
        fields = of.activation, of.selective, of.num_householder, of.beta_max
        return *fields, self.input_scale, self.eigenvalues, self.feedback_norm_eps

    @staticmethod
    def from_scalars(*scalars: Any) -> "Parameterization":
        """The inverse of `scalars`."""
        return Parameterization(RawLayout(*scalars[:4]), *scalars[4:])

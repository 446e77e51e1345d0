"""The sizes of the layer and the shapes of its input.

Letters: b batch, t time, m d_model, d d_inner, n d_state, k num_householder, h heads, p channels of
a head, r raw values.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bedouin import Bedouin

Precision = Literal["bf16", "float32"]


@dataclass(frozen=True)
class Shape:
    """The batch and time axes of the layer's input."""

    b: int
    t: int

    @property
    def label(self) -> str:
        return f"{self.b}x{self.t}"

    @property
    def tokens(self) -> int:
        return self.b * self.t

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Parse BATCHxTIME, such as "64x256". Raises ValueError for anything else."""
        match = re.fullmatch(r"(\d+)x(\d+)", text)
        if match is None or not all(int(size) for size in match.groups()):
            raise ValueError(f"a shape must read BATCHxTIME, such as 64x256, got {text!r}")
        return cls(*(int(size) for size in match.groups()))


@dataclass(frozen=True)
class Setting:
    """Sizes and precision in one run of the benchmark."""

    device: torch.device
    precision: Precision = "bf16"
    m: int = 512
    expand: float = 2
    n: int = 16
    k: int = 4
    h: int = 1

    @property
    def d(self) -> int:
        return round(self.expand * self.m)

    @property
    def p(self) -> int:
        return self.d // self.h

    @property
    def r(self) -> int:
        """The raw values of a token in all heads."""
        return self.h * (self.p + 2 * self.n + self.k * (self.p + 1))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and inputs."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def layer(self, **options: Any) -> Bedouin:
        """One layer of these sizes from a fixed seed, which never checks its convergence."""
        torch.manual_seed(0)
        return Bedouin(
            self.m,
            d_state=self.n,
            expand=self.expand,
            num_householder=self.k,
            num_heads=self.h,
            on_unconverged="ignore",
            device=self.device,
            dtype=self.dtype,
            **options,
        )

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

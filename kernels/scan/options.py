"""What describes a scan besides its tensors; free of Triton."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bedouin.kernels.scan.reference import Eigenvalues, InputScale

CHUNK = 16
"""Tokens between two kept h, and in the backward's workspace."""

Cotangents = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of x, delta, A, B, C, h0 and D (empty without D), in the dtypes of those."""


@dataclass(frozen=True)
class ScanOptions:
    """The options of a scan, and the dtype in which it is computed."""

    input_scale: InputScale
    eigenvalues: Eigenvalues
    exclusive: bool
    accumulator: torch.dtype

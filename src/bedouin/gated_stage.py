"""The output stage of a layer before its last projection.

Letters: b' folded samples (bedouin.heads), t time, p head_dim, H heads.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from bedouin.heads import by_head
from bedouin.kernels.backend import Backend, choose_backend
from bedouin.kernels.feedback import apply_feedback_weight
from bedouin.kernels.output import gated_output, shifted_norm
from bedouin.kernels.output.eager import FedOutput, fed_output, takes_one_function
from bedouin.wrapped import norm_parameters


class GatedLayer(Protocol):
    """What the stage uses of a layer, which this module therefore need not import."""

    num_heads: int
    norm: nn.RMSNorm | None
    D: nn.Parameter
    backend: Any

    @property
    def feedback_norm_eps(self) -> float | None: ...


class GatedStage(NamedTuple):
    """What a call computes before the solve and reads after it."""

    x: Tensor  # (b', t, p)
    z: Tensor | None  # (b', t, p)
    gate: Tensor | None  # (b', t, p), the part that x determines; None: z includes it
    W_gate: Tensor | None  # (p, p), (H, p, p) or (H, p, d)
    y0: Tensor | None  # (b', p)
    dtype: torch.dtype  # of the products and of the result

    def gated(
        self,
        layer: GatedLayer,
        y: Tensor,  # (b', t, p), the fixed point
    ) -> Tensor:  # (b, t, d)
        """SiLU(gate + z) * norm(y + D x), or the paper's gate * SiLU(y + D x), where the gate
        includes its feedback W^y norm(y_{t-1})."""
        backend: Backend = layer.backend
        weight, norm_eps = norm_parameters(layer.norm)
        found = self._in_one_function(layer, y, weight, norm_eps)
        if found is not None:
            return found
        fed = None
        if self.W_gate is not None and y.shape[1]:
            eps, dtype = layer.feedback_norm_eps, self.W_gate.dtype
            normed = shifted_norm(y, self.y0, eps, dtype=dtype, backend=backend)
            fed = apply_feedback_weight(normed, self.W_gate)
        norm: dict[str, Any] = {}
        if weight is not None:
            norm = {"z": self.z, "weight": by_head(weight, layer.num_heads), "eps": norm_eps}
        gate, fed = (fed, None) if self.gate is None else (self.gate, fed)
        if gate is None:
            gate = torch.zeros_like(self.x)
        common: dict[str, Any] = {"dtype": self.dtype, "backend": backend}
        return gated_output(
            y, self.x, by_head(layer.D, layer.num_heads), gate, fed, **norm, **common
        )

    def _in_one_function(
        self,
        layer: GatedLayer,
        y: Tensor,  # (b', t, p)
        weight: Tensor | None,  # (d,), of the norm
        eps: float,
    ) -> Tensor | None:  # (b', t, p)
        """The result of `fed_output` if this can compute the stage, else None."""
        z, W = self.z, self.W_gate
        if layer.num_heads > 1 or weight is None or z is None or W is None:
            return None
        stage = FedOutput(y, self.y0, self.x, layer.D, z, W, weight)
        if y.dtype != self.dtype or not takes_one_function(stage):
            return None
        if choose_backend(layer.backend, y.device, y.dtype) != "reference":
            return None
        if self.gate is not None:
            stage = stage._replace(gate=self.gate + z)
        return fed_output(stage, layer.feedback_norm_eps, eps)

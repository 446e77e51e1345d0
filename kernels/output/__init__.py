"""The output stage of a layer: the gate's view of the past, the gate, the norm."""

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, Implementation, choose_backend
from bedouin.kernels.output.autograd import apply_output, apply_shifted_norm
from bedouin.kernels.output.reference import gated_output_reference, shifted_norm_reference

__all__ = [
    "gated_output",
    "gated_output_reference",
    "shifted_norm",
    "shifted_norm_reference",
]

MAX_CHANNELS = 16384
"""The Triton kernels hold all channels of a token in one program's registers."""


def gated_output(
    y: Tensor,  # (b, t, d)
    x: Tensor,  # (b, t, d)
    D: Tensor,  # (d,)
    gate: Tensor,  # (b, t, d)
    fed: Tensor | None = None,  # (b, t, d)
    z: Tensor | None = None,  # (b, t, d)
    weight: Tensor | None = None,  # (d,)
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor:  # (b, t, d)
    """SiLU(gate + fed + z) * rms_norm(y + D x) * weight, or (gate + fed) * SiLU(y + D x).

    The first with z and weight, the second, the paper's, with neither. Computes in the dtype of y;
    the others may have a lower one. The result has `dtype`, by default that of y.
    Source: Fixed-Point RNNs (arXiv 2503.10799), section 5. The Triton version is once
    differentiable and saves its operands only.

    Raises ValueError for shapes that do not fit, z without weight, or a backend that cannot run.
    """
    _check_output(y, D, {"x": x, "gate": gate, "fed": fed, "z": z}, weight)
    dtype = y.dtype if dtype is None else dtype
    if _choose(backend, y) == "triton":
        out: Tensor = apply_output(y, x, D, gate, fed, z, weight, eps, dtype)
        return out
    return gated_output_reference(y, x, D, gate, fed, z, weight, eps).to(dtype)


def shifted_norm(
    y: Tensor,  # (b, t, d)
    y0: Tensor | None,  # (b, d); None: zeros
    eps: float | None,
    *,
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor:  # (b, t, d)
    """RMSNorm over channels of y_{t-1}, y_{t-1} itself for eps None; the first token sees y0.

    Computes in the dtype of y; the result has `dtype`, by default that of y. The Triton version is
    once differentiable and saves its operands only.

    Raises ValueError for shapes that do not fit, or a backend that cannot run.
    """
    _check_tokens(y)
    if y0 is not None and y0.shape != (y.shape[0], y.shape[2]):
        expected = (y.shape[0], y.shape[2])
        raise ValueError(f"y0 must have shape (b, d) = {expected}, got {tuple(y0.shape)}")
    dtype = y.dtype if dtype is None else dtype
    if _choose(backend, y) == "triton":
        normed: Tensor = apply_shifted_norm(y, y0, eps, dtype)
        return normed
    return shifted_norm_reference(y, y0, eps).to(dtype) if y.shape[1] else y.to(dtype)


def _choose(backend: Backend, y: Tensor) -> Implementation:
    d = y.shape[-1]
    unsupported = f"{d} channels (at most {MAX_CHANNELS})" if d > MAX_CHANNELS else None
    implementation = choose_backend(backend, y.device, y.dtype, unsupported)
    return implementation if y.numel() else "reference"


def _check_tokens(y: Tensor) -> None:
    if y.dim() != 3:
        raise ValueError(f"y must have shape (b, t, d), got {tuple(y.shape)}")


def _check_output(
    y: Tensor, D: Tensor, tokens: dict[str, Tensor | None], weight: Tensor | None
) -> None:
    _check_tokens(y)
    if (tokens["z"] is None) != (weight is None):
        raise ValueError(
            "z and weight must be given together, or neither for the paper's output, got "
            f"{'z' if weight is None else 'weight'} alone"
        )
    for name, tensor in tokens.items():
        if tensor is not None and tensor.shape != y.shape:
            raise ValueError(
                f"{name} must have the shape of y {tuple(y.shape)}, got {tuple(tensor.shape)}"
            )
    for name, vector in {"D": D, "weight": weight}.items():
        if vector is not None and vector.shape != y.shape[-1:]:
            raise ValueError(
                f"{name} must have shape (d,) = {tuple(y.shape[-1:])}, got {tuple(vector.shape)}"
            )

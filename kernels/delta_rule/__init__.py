"""The gated delta rule: the public operation (checks, choice of implementation).

Letters: b batch, t time, h heads, k Householder steps a token, p key channels and v value channels
of a head.
"""

from typing import get_args

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, choose_backend
from bedouin.kernels.checks import one_of
from bedouin.kernels.delta_rule import fla
from bedouin.kernels.delta_rule.chunks import delta_rule_chunked
from bedouin.kernels.delta_rule.reference import delta_rule_reference
from bedouin.kernels.delta_rule.tokens import delta_rule_operation
from bedouin.kernels.delta_rule.types import DeltaBackend, DeltaInputs

__all__ = [
    "DeltaBackend",
    "DeltaInputs",
    "check_delta_backend",
    "delta_rule",
    "delta_rule_chunked",
    "delta_rule_reference",
]

KERNEL_CHANNELS = 256
"""The most key channels of a head in the Triton kernel, which holds all of them in one program."""


def check_delta_backend(backend: str) -> None:
    """ValueError for an unknown name, and for "fla" without that package."""
    one_of("backend", backend, get_args(DeltaBackend))
    if backend == "fla" and not fla.FLA_IS_INSTALLED:
        raise ValueError(
            "backend='fla' needs the package flash-linear-attention: install it, or use "
            "backend='auto' or 'torch'"
        )


def delta_rule(
    inputs: DeltaInputs,
    memory: Tensor,  # (b, h, p, v)
    dtype: torch.dtype,
    backend: DeltaBackend,
) -> tuple[Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v)
    """S <- exp(log_decay) S, then k times S <- (I - beta key key^T) S + beta key value^T; returns
    S^T query / sqrt(p) of every token, and the last S.

    `dtype` is the one that products have in this call. "torch" computes in the dtype of `inputs`,
    in chunks, which take a half to a quarter of the loop's time on a CPU. "triton" computes in
    float32, token by token; it has no second derivative. "fla" casts query, key, value and beta to
    `dtype`, which must be bfloat16 or float16. "auto" is "fla" for more than one token where that
    is possible, the package is installed, and Triton compiles it correctly (`fla_is_wrong`); else
    "triton" on a GPU, except in float64 and under transforms of torch.func.
    Sources: DeltaNet (arXiv 2406.06484), Gated DeltaNet (2412.06464), DeltaProduct (2502.10297).
    """
    if _takes_fla(inputs.query, dtype, backend):
        return fla.delta_rule_fla(inputs, memory, dtype)
    if _takes_kernel(inputs, backend):
        o, last, _ = delta_rule_operation(*inputs, memory)
        return o, last
    if inputs.query.shape[1] == 1:
        return delta_rule_reference(inputs, memory)
    return delta_rule_chunked(inputs, memory)


def _takes_fla(
    query: Tensor,  # (b, t, h, p)
    dtype: torch.dtype,
    backend: DeltaBackend,
) -> bool:
    """Whether `delta_rule` calls flash-linear-attention; ValueError where it must and cannot."""
    fits = query.is_cuda and dtype in fla.FLA_DTYPES
    if backend == "fla" and not fits:
        raise ValueError(
            "backend='fla' needs a CUDA device and bfloat16 or float16, got "
            f"{query.device.type} and {dtype}: use torch.autocast('cuda', torch.bfloat16), or "
            "backend='auto' or 'torch'"
        )
    if backend == "auto":
        usable = fits and query.shape[1] > 1 and fla.FLA_IS_INSTALLED
        return usable and not fla.fla_is_wrong(query.device)
    return backend == "fla"


def _takes_kernel(inputs: DeltaInputs, backend: DeltaBackend) -> bool:
    """Whether `delta_rule` calls the Triton kernel; ValueError where it must and cannot."""
    if backend == "torch":
        return False
    unfit, p = None, inputs.key.shape[-1]
    if p > KERNEL_CHANNELS:
        unfit = f"heads of {p} key channels, more than {KERNEL_CHANNELS}"
    chosen: Backend = "triton" if backend == "triton" else "auto"
    device, dtype = inputs.key.device, inputs.key.dtype
    return choose_backend(chosen, device, dtype, unfit, plain="torch") == "triton"

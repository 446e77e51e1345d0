"""The gated delta rule: the public operation (checks, choice of implementation).

Letters: b batch, t time, h heads, k Householder steps a token, p key channels and v value channels
of a head.
"""

from typing import get_args

import torch
from torch import Tensor

from bedouin.kernels.backend import KERNEL_DTYPES, Backend, choose_backend
from bedouin.kernels.checks import check_shape, one_of
from bedouin.kernels.delta_rule import fla
from bedouin.kernels.delta_rule.rates import delta_rates, delta_rates_reference
from bedouin.kernels.delta_rule.reference import (
    delta_rule_chunked,
    delta_rule_plain,
    delta_rule_reference,
    rounded,
    steps_as_tokens,
)
from bedouin.kernels.delta_rule.registered import chunk_kernels, plain_chunks
from bedouin.kernels.delta_rule.types import DeltaBackend, DeltaInputs
from bedouin.kernels.launch import accumulator

__all__ = [
    "DeltaBackend",
    "DeltaInputs",
    "check_delta_backend",
    "delta_rates",
    "delta_rates_reference",
    "delta_rule",
    "delta_rule_chunked",
    "delta_rule_reference",
    "kernel_backend",
]

KERNEL_CHANNELS = 256
"""The most key channels of a head in the Triton kernels, whose programs hold all of them."""


def check_delta_backend(backend: str) -> None:
    """ValueError for an unknown name, and for "fla" without that package."""
    one_of("backend", backend, get_args(DeltaBackend))
    if backend == "fla" and not fla.FLA_IS_INSTALLED:
        raise ValueError(
            "backend='fla' needs the package flash-linear-attention: install it, or use "
            "backend='auto' or 'torch'"
        )


def kernel_backend(backend: DeltaBackend) -> Backend:
    """What other kernels of a layer take where its delta rule takes `backend`."""
    if backend == "torch":
        return "reference"
    return "triton" if backend == "triton" else "auto"


def delta_rule(
    inputs: DeltaInputs,
    memory: Tensor | None,  # (b, h, p, v); None: zeros
    dtype: torch.dtype,
    backend: DeltaBackend,
) -> tuple[Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v)
    """S <- exp(log_decay) S, then k times S <- (I - beta key key^T) S + beta key value^T; returns
    S^T query / sqrt(p) of every token, in the dtype of the values, and the last S, in the dtype of
    the memory or without one in at least float32.

    The inputs may have any dtypes; sums and memories are in at least float32. `dtype` is the one
    that the factors of products have in the Triton kernels and in "fla", to which query,
    key and value are cast: given in this dtype they are neither copied nor kept twice. A caller
    that rounds keys of length 1 itself should divide beta by their squared lengths (`rounded`).

    "torch": plain torch in chunks, in at least float32 throughout. "triton": kernels of chunks of
    Householder steps; p may be at most 256, and there is no second derivative. "fla": the kernels
    of flash-linear-attention, on a GPU in bfloat16 or float16. "auto": "triton" on a GPU, except in
    float64 and under transforms of torch.func, else "torch". Under torch.compile every
    implementation is one operation for all lengths, once differentiable.
    Sources: DeltaNet (arXiv 2406.06484), Gated DeltaNet (2412.06464), DeltaProduct (2502.10297).

    Raises ValueError for shapes that do not fit, an unknown backend, and one that cannot run.
    """
    one_of("backend", backend, get_args(DeltaBackend))
    _check_shapes(inputs, memory)
    if backend == "fla":
        fla.check_call(inputs.query, dtype)
        check_delta_backend(backend)
        return fla.delta_rule_fla(inputs, _or_zeros(memory, inputs), dtype)
    by_kernel = _takes_kernel(inputs, memory, dtype, backend)
    if not inputs.query.shape[1]:
        return delta_rule_plain(inputs, _or_zeros(memory, inputs))
    if by_kernel:
        k, by_steps = inputs.key.shape[2], steps_as_tokens(rounded(inputs, dtype))
        keep = torch.is_grad_enabled() and any(
            [v is not None and v.requires_grad for v in (*by_steps, memory)]
        )
        o, last, *_ = chunk_kernels(*by_steps, memory, keep)
        o = o if k == 1 else o[:, k - 1 :: k]
        return o.to(inputs.value.dtype), last
    memory = _or_zeros(memory, inputs)
    # a graph of torch.compile would otherwise have the operations of all chunks
    if torch.compiler.is_compiling():
        found: tuple[Tensor, Tensor] = plain_chunks(*inputs, memory)
        return found
    return delta_rule_plain(inputs, memory)


def _check_shapes(
    inputs: DeltaInputs,
    memory: Tensor | None,  # (b, h, p, v)
) -> None:
    if inputs.key.dim() != 5 or inputs.value.dim() != 5:
        shapes = f"{tuple(inputs.key.shape)} and {tuple(inputs.value.shape)}"
        raise ValueError(
            f"key and value must have shapes (b, t, k, h, p) and (b, t, k, h, v), got {shapes}: "
            "for one Householder step a token, use key.unsqueeze(2) and value.unsqueeze(2)"
        )
    (b, t, k, h, p), v = inputs.key.shape, inputs.value.shape[-1]
    check_shape("query", inputs.query, (b, t, h, p), "(b, t, h, p)")
    check_shape("value", inputs.value, (b, t, k, h, v), "(b, t, k, h, v)")
    check_shape("beta", inputs.beta, (b, t, k, h), "(b, t, k, h)")
    check_shape("log_decay", inputs.log_decay, (b, t, h), "(b, t, h)")
    check_shape("memory", memory, (b, h, p, v), "(b, h, p, v)")


def _takes_kernel(
    inputs: DeltaInputs,
    memory: Tensor | None,  # (b, h, p, v)
    dtype: torch.dtype,
    backend: DeltaBackend,
) -> bool:
    """Whether `delta_rule` calls a Triton kernel; ValueError where it must and cannot."""
    if backend == "torch":
        return False
    unfit, p = None, inputs.key.shape[-1]
    if p > KERNEL_CHANNELS:
        unfit = f"heads of {p} key channels, more than {KERNEL_CHANNELS}"
    elif dtype not in KERNEL_DTYPES:
        unfit = f"products in {dtype}"
    chosen: Backend = "triton" if backend == "triton" else "auto"
    widest = accumulator(*(v.dtype for v in (*inputs, memory) if v is not None))
    return choose_backend(chosen, inputs.key.device, widest, unfit, plain="torch") == "triton"


def _or_zeros(
    memory: Tensor | None,  # (b, h, p, v)
    inputs: DeltaInputs,
) -> Tensor:  # (b, h, p, v)
    if memory is not None:
        return memory
    (b, _, _, h, p), v = inputs.key.shape, inputs.value.shape[-1]
    return inputs.key.new_zeros(b, h, p, v, dtype=accumulator(inputs.key.dtype))

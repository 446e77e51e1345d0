"""Launches of the chunk kernels of the gated delta rule.

Letters: b batch, t time, h heads, p key channels and v value channels of a head.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.delta_rule.kept import LEAST, Kept, chunk_size, longest_chunk
from bedouin.kernels.delta_rule.triton_chunks import prepare_kernel, sweep_kernel
from bedouin.kernels.delta_rule.triton_chunks_backward import gradients_kernel, reverse_kernel
from bedouin.kernels.delta_rule.types import DeltaInputs
from bedouin.kernels.launch import ceil_div, next_power_of_two

STATE_CELLS = 8192
"""Most cells of S in a program: 64 registers of each thread."""

VALUE_BLOCK = 64
"""Most value channels of a program."""

FLOAT32_PRODUCTS = "tf32x3"
"""Of float32 factors: three products on tensor cores, whose sum has nearly float32's precision.
"ieee" has all of it, without tensor cores."""


def launch_forward(
    inputs: DeltaInputs,
    memory: Tensor | None,  # (b, h, p, v); None: zeros
    keep: bool,
) -> tuple[Tensor, ...]:
    """Outputs (b, t, h, v) in the dtype of query, key and value, which is that of the products; the
    last memory (b, h, p, v) in the dtype of the memory or float32; and the four tensors of `Kept`,
    without `keep` all empty."""
    rows, gated = _rows(inputs.query, inputs.key, inputs.beta, inputs.log_decay)
    (query, key, beta, decay), value = rows, spaced_rows(inputs.value.squeeze(2))
    (b, t, h, p), v, dtype = query.shape, value.shape[-1], query.dtype
    kept = Kept.empty(query, v, keep, memory is not None)
    squares = kept[:2] if keep else Kept.squares(query)
    o = query.new_empty(b, t, h, v)
    last = query.new_empty(b, h, p, v, dtype=torch.float32 if memory is None else memory.dtype)
    n, common = ceil_div(t, longest_chunk(dtype)), constants(query, gated)
    sizes = t, h, n, query.stride(1), key.stride(1)
    prepare_kernel[(b * h * n,)](*rows, *squares, *sizes, **common)
    block = value_block(p, v, dtype)
    sweep_kernel[(b * h * ceil_div(v, block),)](
        *(query, key, value, beta, decay, *squares),
        *(last if memory is None else memory.contiguous(), o, last, *kept[2:]),
        *(*sizes, value.stride(1)),
        STARTED=memory is not None,
        KEEP=keep,
        V_SIZE=v,
        V_BLOCK=block,
        **common,
    )
    return o, last, *kept


def launch_backward(
    grads: tuple[Tensor, Tensor | None],  # (b, t, h, v), (b, h, p, v); None: zeros
    read: tuple[Tensor, Tensor, Tensor, Tensor | None],  # query, key, beta and log_decay
    kept: Kept,
    started: bool,
    memory_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, beta, the log decays and the memory; of the latter two
    empty where there is no decay, and for a memory_dtype of None."""
    rows, gated = _rows(*read)
    query, key, beta, decay = rows
    (b, t, h, p), v, dtype = query.shape, kept.errors.shape[-1], query.dtype
    grad_o, grad_last = spaced_rows(grads[0]), grads[1]
    grad_q, grad_k = (query.new_empty(b, t, h, p) for _ in range(2))
    grad_v, grad_beta = query.new_empty(b, t, h, v), torch.empty_like(beta)
    grad_decay = decay.new_empty(decay.shape if gated else 0)
    grad_memory = query.new_empty(0 if memory_dtype is None else (b, h, p, v), dtype=memory_dtype)
    n, block = ceil_div(t, longest_chunk(dtype)), value_block(p, v, dtype)
    grad_states = query.new_empty(b * h, n - 1 if grad_last is None else n, p, v)
    sizes = t, h, n, query.stride(1), key.stride(1), grad_o.stride(1)
    common = constants(query, gated) | {
        "ENDED": grad_last is not None,
        "V_SIZE": v,
        "V_BLOCK": block,
    }
    reverse_kernel[(b * h * ceil_div(v, block),)](
        *(*rows, kept.inverses, kept.scores, grad_o),
        grad_o if grad_last is None else grad_last.contiguous(),
        *(grad_v, grad_states, grad_memory, *sizes),
        WANTED=memory_dtype is not None,
        **common,
    )
    gradients_kernel[(b * h * n,)](
        *(*rows, kept.errors, kept.states, grad_o, grad_v, grad_states),
        *(grad_q, grad_k, grad_beta, grad_decay, *sizes),
        STARTED=started,
        **common,
    )
    singles = (v.unsqueeze(2) for v in (grad_k, grad_v, grad_beta))
    return grad_q, *singles, grad_decay, grad_memory


def _rows(
    query: Tensor,  # (b, t, h, p)
    key: Tensor,  # (b, t, 1, h, p)
    beta: Tensor,  # (b, t, 1, h)
    log_decay: Tensor | None,  # (b, t, h)
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], bool]:
    """What the kernels read, (b, t, h, p), (b, t, h, p), (b, t, h) and (b, t, h), and whether there
    is a decay; without one beta is in its place, unread."""
    beta = beta.squeeze(2).contiguous()
    decay = beta if log_decay is None else log_decay.contiguous()
    return (spaced_rows(query), spaced_rows(key.squeeze(2)), beta, decay), log_decay is not None


def spaced_rows(
    v: Tensor,  # (b, t, h, p)
) -> Tensor:  # (b, t, h, p)
    """v, copied unless the b t rows of h p numbers are contiguous and evenly spaced in memory."""
    (_, t, _, p), (to_sample, to_token, to_head, to_channel) = v.shape, v.stride()
    spaced = to_channel == 1 and to_head == p and to_sample == t * to_token
    return v if spaced else v.contiguous()


def _part(p: int, dtype: torch.dtype) -> int:
    """Key channels of a part of S."""
    return min(longest_chunk(dtype), max(LEAST, next_power_of_two(p)))


def value_block(p: int, v: int, dtype: torch.dtype) -> int:
    """Value channels of a program; fewer in float32, whose products take more registers."""
    part = _part(p, dtype)
    most = STATE_CELLS // (ceil_div(p, part) * part)
    if dtype == torch.float32:
        most //= 2
    return max(LEAST, min(VALUE_BLOCK, 1 << (most.bit_length() - 1), next_power_of_two(v)))


def constants(
    query: Tensor,  # (b, t, h, p)
    gated: bool,
) -> dict[str, Any]:
    """What all kernels have in common at compile time."""
    _, t, _, p = query.shape
    dot = torch.float32 if interpreter_is_on() else query.dtype
    return {
        "GATED": gated,
        "P_SIZE": p,
        "PART": _part(p, query.dtype),
        "C": chunk_size(t, query.dtype),
        "DOT": getattr(triton.language, str(dot).removeprefix("torch.")),
        "PRECISION": FLOAT32_PRODUCTS,
        "enable_fp_fusion": True,
        "num_warps": 4,  # no more (triton_chunks.py)
        # in float32 nothing is copied ahead, as all factors pass registers
        "num_stages": 1 if query.dtype == torch.float32 else 2,
    }

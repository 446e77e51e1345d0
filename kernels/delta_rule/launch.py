"""Launches of the chunk kernels of the gated delta rule.

Letters: b batch, t time, h heads, p key channels and v value channels of a head, n chunks, c tokens
of a chunk.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.delta_rule.kept import Kept
from bedouin.kernels.delta_rule.triton_chunks import prepare_kernel, sweep_kernel
from bedouin.kernels.delta_rule.triton_chunks_backward import gradients_kernel, reverse_kernel
from bedouin.kernels.delta_rule.types import CHUNK, DeltaInputs
from bedouin.kernels.launch import ceil_div, next_power_of_two

LEAST = 16
"""The least size of a factor of tl.dot."""

STATE_CELLS = 8192
"""Most cells of S in a program of a sweep: 64 registers of each of 128 threads."""

FLOAT32_PRODUCTS = "tf32x3"
"""Of float32 factors: three products on tensor cores, whose sum has nearly float32's precision.
"ieee" has all of it, without tensor cores."""

Rows = tuple[Tensor, Tensor, Tensor, Tensor]
"""query (b, t, h, p), key (b, t, h, p), beta (b, t, h) and the log decays (b, t, h), or beta again
without a decay, as the kernels read them."""


def launch_forward(
    inputs: DeltaInputs,
    memory: Tensor | None,  # (b, h, p, v); None: zeros
    dtype: torch.dtype,
    keep: bool,
) -> tuple[Tensor, ...]:
    """Outputs (b, t, h, v) in the dtype of the values, the last memory (b, h, p, v) in that of the
    memory or float32, and the four tensors of `Kept`, without `keep` all empty; with products in
    `dtype`."""
    query, key, value, beta, log_decay = inputs
    query, key, beta, decay = rows = _rows(query, key, beta, log_decay)
    value = spaced_rows(value.squeeze(2))
    (b, t, h, p), v = query.shape, value.shape[-1]
    kept = Kept.empty(query, v, dtype, keep)
    squares = kept[:2] if keep else Kept.empty(query, v, dtype, True)[:2]
    o = value.new_empty(b, t, h, v)
    last = value.new_empty(b, h, p, v, dtype=torch.float32 if memory is None else memory.dtype)
    n, block, common = ceil_div(t, CHUNK), _value_block(p, v, dtype), _constants(p, t, dtype)
    common["GATED"] = log_decay is not None
    strides = query.stride(1), key.stride(1)
    prepare_kernel[(b * h * n,)](*rows, *squares, t, h, n, *strides, **common, num_warps=4)
    sweep_kernel[(b * h * ceil_div(v, block),)](
        *(query, key, value, beta, decay, *squares),
        *(last if memory is None else memory.contiguous(), o, last, *kept[2:]),
        *(t, h, n, *strides, value.stride(1)),
        STARTED=memory is not None,
        KEEP=keep,
        V_SIZE=v,
        V_BLOCK=block,
        **common,
        num_warps=4,
    )
    return o, last, *kept


def launch_backward(
    grads: tuple[Tensor, Tensor | None],  # (b, t, h, v), (b, h, p, v); None: zeros
    read: tuple[Tensor, Tensor, Tensor, Tensor | None],  # query, key, beta and log_decay
    kept: Kept,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    started: bool,
) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, beta, the log decays and the memory; of the latter two
    empty where there is no decay, and where no gradient of the memory is wanted. dtypes: of the
    values and of that gradient, None where it is not."""
    rows, gated = _rows(*read), read[3] is not None
    query, key, beta, decay = rows
    (b, t, h, p), v = query.shape, kept.errors.shape[-1]
    grad_o, grad_last = spaced_rows(grads[0]), grads[1]
    grad_q, grad_k = query.new_empty(b, t, h, p), key.new_empty(b, t, h, p)
    grad_v = query.new_empty(b, t, h, v, dtype=dtypes[0])
    grad_beta = torch.empty_like(beta)
    grad_decay = decay.new_empty(decay.shape if gated else 0)
    grad_states = torch.empty_like(kept.states)
    grad_memory = query.new_empty(0 if dtypes[1] is None else (b, h, p, v), dtype=dtypes[1])
    n, dtype = ceil_div(t, CHUNK), kept.errors.dtype
    block, common = _value_block(p, v, dtype), _constants(p, t, dtype)
    common |= {"GATED": gated, "ENDED": grad_last is not None, "V_SIZE": v, "V_BLOCK": block}
    sizes = t, h, n, query.stride(1), key.stride(1), grad_o.stride(1)
    reverse_kernel[(b * h * ceil_div(v, block),)](
        *(*rows, kept.inverses, kept.scores, grad_o),
        grad_o if grad_last is None else grad_last.contiguous(),
        *(grad_v, grad_states, grad_memory, *sizes),
        WANTED=dtypes[1] is not None,
        **common,
        num_warps=4,
    )
    gradients_kernel[(b * h * n,)](
        *(*rows, kept.errors, kept.states, grad_o, grad_v, grad_states),
        *(grad_q, grad_k, grad_beta, grad_decay, *sizes),
        STARTED=started,
        **common,
        num_warps=8,
    )
    singles = (v.unsqueeze(2) for v in (grad_k, grad_v, grad_beta))
    return grad_q, *singles, grad_decay, grad_memory


def _rows(
    query: Tensor,  # (b, t, h, p)
    key: Tensor,  # (b, t, 1, h, p)
    beta: Tensor,  # (b, t, 1, h)
    log_decay: Tensor | None,  # (b, t, h)
) -> Rows:
    beta = beta.squeeze(2).contiguous()
    decay = beta if log_decay is None else log_decay.contiguous()
    return spaced_rows(query), spaced_rows(key.squeeze(2)), beta, decay


def spaced_rows(
    v: Tensor,  # (b, t, h, p)
) -> Tensor:  # (b, t, h, p)
    """v, copied unless the b t rows of h p numbers are contiguous and evenly spaced in memory."""
    (_, t, _, p), (to_sample, to_token, to_head, to_channel) = v.shape, v.stride()
    spaced = to_channel == 1 and to_head == p and to_sample == t * to_token
    return v if spaced else v.contiguous()


def chunk_size(t: int) -> int:
    """Tokens of a chunk in a call of t tokens, less than CHUNK where there are fewer."""
    return min(CHUNK, max(LEAST, next_power_of_two(max(1, t))))


def _value_block(p: int, v: int, dtype: torch.dtype) -> int:
    """Value channels of a program; fewer in float32, whose tiles take twice the shared memory."""
    most = STATE_CELLS // max(LEAST, next_power_of_two(p))
    if dtype == torch.float32:
        most //= 2
    return max(LEAST, min(64, most, next_power_of_two(v)))


def _constants(p: int, t: int, dtype: torch.dtype) -> dict[str, Any]:
    """What all kernels have in common at compile time."""
    dot = torch.float32 if interpreter_is_on() else dtype
    return {
        "P_SIZE": p,
        "P_BLOCK": max(LEAST, next_power_of_two(p)),
        "C": chunk_size(t),
        "DOT": getattr(triton.language, str(dot).removeprefix("torch.")),
        "PRECISION": FLOAT32_PRODUCTS,
        "enable_fp_fusion": True,
        # float32 tiles of two stages exceed the shared memory
        "num_stages": 1 if dtype == torch.float32 else 2,
    }

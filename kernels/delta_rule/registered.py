"""The gated delta rule in chunks as operations of torch.library.

`chunk_kernels` launches the Triton kernels, which are imported when an operation runs;
`plain_chunks` calls plain torch, whose loop over chunks torch.compile would otherwise unroll.

Letters: b batch, t time, h heads, k Householder steps a token, p key channels and v value channels
of a head, n chunks, c tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.delta_rule.reference import delta_rule_plain
from bedouin.kernels.delta_rule.types import CHUNK, DeltaInputs
from bedouin.kernels.launch import (
    ceil_div,
    dtype_of_factors,
    evenly_spaced,
    next_power_of_two,
)
from bedouin.kernels.operation import empty_like, operation, plain_operation

INPUTS = "Tensor query, Tensor key, Tensor value, Tensor beta"

LEAST = 16
"""The least size of a factor of tl.dot."""

STATE_CELLS = 8192
"""Most cells of S in a program: 64 registers of each thread."""

VALUE_BLOCK = 64
"""Most value channels of a program."""

STEP_CELLS = 2048
"""Most cells of S in a program of a single token: of fewer, more programs share its one read."""

FLOAT32_PRODUCTS = "tf32x3"
"""Of float32 factors: three products on tensor cores, whose sum has nearly float32's precision.
"ieee" has all of it, without tensor cores."""


def longest_chunk(dtype: torch.dtype) -> int:
    """Most tokens of a chunk whose products have factors of `dtype`. The factors of float32 are
    computed from the tiles, so they must have fewer than 64 rows (triton_chunks.py)."""
    return CHUNK // 2 if dtype == torch.float32 else CHUNK


def chunk_size(t: int, dtype: torch.dtype) -> int:
    """Tokens of a chunk in a call of t tokens, less than the longest one where there are fewer."""
    return min(longest_chunk(dtype), max(LEAST, next_power_of_two(max(1, t))))


class Kept(NamedTuple):
    """In the dtype of the products. A call shorter than a chunk uses a part of the squares."""

    inverses: Tensor  # (b h, n, c, c)
    scores: Tensor  # (b h, n, c, c)
    errors: Tensor  # (b, t, h, v)
    states: Tensor  # (b h, n, p, v), before each chunk, and n - 1 where the first has zeros

    @staticmethod
    def empty(
        query: Tensor,  # (b, t, h, p)
        v: int,
        keep: bool,
        started: bool,
    ) -> "Kept":
        """Uninitialized tensors, without `keep` of no size. No size branches on the length."""
        if not keep:
            return Kept(*(query.new_empty(0) for _ in range(4)))
        (b, t, h, p), c = query.shape, longest_chunk(query.dtype)
        n = ceil_div(t, c)
        inverses, scores = (query.new_empty(b * h, n, c, c) for _ in range(2))
        states = query.new_empty(b * h, n if started else n - 1, p, v)
        return Kept(inverses, scores, query.new_empty(b, t, h, v), states)


def _rows(
    query: Tensor,  # (b, t, h, p)
    key: Tensor,  # (b, t, 1, h, p)
    beta: Tensor,  # (b, t, 1, h)
    log_decay: Tensor,  # (b, t, h)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the kernels read: evenly spaced (b, t, h p) and (b, t, h p), (b, t, h) and (b, t, h)."""
    numbers = beta.squeeze(2).contiguous(), log_decay.contiguous()
    return evenly_spaced(query.flatten(2)), evenly_spaced(key.flatten(2)), *numbers


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
) -> dict[str, Any]:
    """What all kernels have in common at compile time."""
    _, t, _, p = query.shape
    return {
        "P_SIZE": p,
        "PART": _part(p, query.dtype),
        "C": chunk_size(t, query.dtype),
        "DOT": dtype_of_factors(query.dtype),
        "PRECISION": FLOAT32_PRODUCTS,
        "enable_fp_fusion": True,
        "num_warps": 4,  # no more (triton_chunks.py)
        # in float32 nothing is copied ahead, as all factors pass registers
        "num_stages": 1 if query.dtype == torch.float32 else 2,
    }


def _like(*given: Any) -> tuple[Tensor, ...]:
    query, _, value, _, _, memory, keep = given
    (b, t, h, p), v = query.shape, value.shape[-1]
    o = value.new_empty(b, t, h, v)
    last = value.new_empty(b, h, p, v, dtype=torch.float32 if memory is None else memory.dtype)
    return o, last, *Kept.empty(query, v, keep, memory is not None)


@operation(
    "delta_rule_chunks",
    f"({INPUTS}, Tensor log_decay, Tensor? memory, bool keep) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _like,
)
def chunk_kernels(*given: Any) -> tuple[Tensor, ...]:
    """The outputs (b, t, h, v), the last memory (b, h, p, v) in the dtype of the memory or float32,
    and the tensors of `Kept`. The inputs are those of `DeltaInputs` with k = 1 and a decay. query,
    key and value have one of the kernels' dtypes, which the factors of products and the outputs
    have, too."""
    from bedouin.kernels.delta_rule.triton_chunks import prepare_kernel, sweep_kernel

    query, key, value, beta, log_decay, memory, keep = given
    o, last, *kept = _like(*given)
    (b, t, h, p), v, dtype = query.shape, value.shape[-1], query.dtype
    rows, value = _rows(query, key, beta, log_decay), evenly_spaced(value.flatten(2))
    tokens = *rows[:2], value, *rows[2:]
    if t == 1 and not keep:
        _step(tokens, memory, (o, last))
        return o, last, *kept
    # what the sweep reads is there without `keep`, too
    squares = kept[:2] if keep else Kept.empty(query, 0, keep=True, started=True)[:2]
    n, common = ceil_div(t, longest_chunk(dtype)), constants(query)
    sizes = t, h, n, rows[0].stride(1), rows[1].stride(1)
    prepare_kernel[(b * h * n,)](*rows, *squares, *sizes, **common)
    block = value_block(p, v, dtype)
    sweep_kernel[(b * h * ceil_div(v, block),)](
        *(*tokens, *squares),
        *(last if memory is None else memory.contiguous(), o, last, *kept[2:]),
        *(*sizes, value.stride(1)),
        STARTED=memory is not None,
        KEEP=keep,
        V_SIZE=v,
        V_BLOCK=block,
        **common,
    )
    return o, last, *kept


def _step(
    tokens: tuple[Tensor, ...],  # those of `_rows`, with those of the values (b, 1, h v) third
    memory: Tensor | None,  # (b, h, p, v); None: zeros
    found: tuple[Tensor, Tensor],  # o and last, written
) -> None:
    """The same for a single token whose gradient is not wanted."""
    from bedouin.kernels.delta_rule.triton_step import step_kernel

    b, h, p, v = found[1].shape
    P = next_power_of_two(p)
    block = min(STEP_CELLS // P, VALUE_BLOCK, next_power_of_two(v))
    step_kernel[(b * h * ceil_div(v, block),)](
        *(*tokens, found[1] if memory is None else memory.contiguous(), *found),
        *(h, *(rows.stride(1) for rows in tokens[:3])),
        STARTED=memory is not None,
        P_SIZE=p,
        V_SIZE=v,
        P=P,
        V_BLOCK=block,
    )


@chunk_kernels.register_vjp(kept=4, optional=(1,))
def _backward(
    grad_o: Tensor,  # (b, t, h, v)
    grad_last: Tensor | None,  # (b, h, p, v); None: zeros
    *given: Any,
) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, beta, log_decay and, where there is one, memory."""
    from bedouin.kernels.delta_rule.triton_chunks_backward import gradients_kernel, reverse_kernel

    kept, (query, key, value, beta, decay, memory) = Kept(*given[:4]), given[4:]
    found = empty_like(query, key, value, beta, decay, memory)
    grad_q, grad_k, grad_v, grad_beta, grad_decay, grad_memory = found
    (b, t, h, p), v, dtype = query.shape, value.shape[-1], query.dtype
    rows, grad_o = _rows(query, key, beta, decay), evenly_spaced(grad_o.flatten(2))
    n, block = ceil_div(t, longest_chunk(dtype)), value_block(p, v, dtype)
    grad_states = query.new_empty(b * h, n - 1 if grad_last is None else n, p, v)
    sizes = t, h, n, rows[0].stride(1), rows[1].stride(1), grad_o.stride(1)
    common: dict[str, Any] = {"ENDED": grad_last is not None, "STARTED": memory is not None}
    common |= {"V_SIZE": v, "V_BLOCK": block} | constants(query)
    reverse_kernel[(b * h * ceil_div(v, block),)](
        *(*rows, kept.inverses, kept.scores, grad_o),
        grad_o if grad_last is None else grad_last.contiguous(),
        *(grad_v, grad_states, grad_memory, *sizes),
        **common,
    )
    gradients_kernel[(b * h * n,)](
        *(*rows, kept.errors, kept.states, grad_o, grad_v, grad_states),
        *(grad_q, grad_k, grad_beta, grad_decay, *sizes),
        **common,
    )
    return found


def _plain(*given: Any) -> tuple[Tensor, Tensor]:
    """The outputs (b, t, h, v) and the last memory (b, h, p, v) of `delta_rule_plain`, whose memory
    is given."""
    return delta_rule_plain(DeltaInputs(*given[:5]), given[5])


def _plain_like(*given: Any) -> tuple[Tensor, Tensor]:
    query, _, value, _, _, memory = given
    return value.new_empty(*query.shape[:3], value.shape[-1]), memory.new_empty(memory.shape)


plain_chunks = plain_operation(
    "plain_delta_rule",
    f"({INPUTS}, Tensor? log_decay, Tensor memory) -> (Tensor, Tensor)",
    _plain,
    _plain_like,
)

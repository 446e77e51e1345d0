"""The gated delta rule: the public operation, and its operations of torch.library.

`chunk_kernels` launches the Triton kernels, which are imported when an operation runs;
`plain_chunks` calls plain torch, whose loop over chunks torch.compile would otherwise unroll.

Letters: b batch, t time, h heads, k Householder steps a token, p key channels and v value channels
of a head, n chunks, c tokens of a chunk.
"""

from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from bedouin.kernels.backend import KERNEL_DTYPES, Backend, choose_backend
from bedouin.kernels.checks import check_shape, one_of
from bedouin.kernels.delta_rule import fla
from bedouin.kernels.delta_rule.rates import delta_rates, delta_rates_reference
from bedouin.kernels.delta_rule.reference import (
    CHUNK,
    DeltaBackend,
    DeltaInputs,
    delta_rule_chunked,
    delta_rule_plain,
    delta_rule_reference,
    steps_as_tokens,
)
from bedouin.kernels.launch import (
    accumulator,
    ceil_div,
    dtype_of_factors,
    evenly_spaced,
    next_power_of_two,
)
from bedouin.kernels.operation import empty_like, operation, plain_operation

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
    backend: DeltaBackend,
) -> tuple[Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v)
    """S <- exp(log_decay) S, then k times S <- (I - beta key key^T) S + beta key value^T; returns
    S^T query / sqrt(p) of every token, in the dtype of the values, and the last S, in the dtype of
    the memory or without one in at least float32.

    Sums and memories are in at least float32. query, key and value have one dtype, which in the
    Triton kernels and in "fla" the factors of products have. beta should be divided by the squared
    lengths of rounded keys, as `delta_rates` does: with beta = 2 and a length that rounding has
    made greater than 1, the memory would grow at every token that repeats the key.

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
        fla.check_call(inputs.query)
        check_delta_backend(backend)
        return fla.delta_rule_fla(inputs, _or_zeros(memory, inputs))
    by_kernel = _takes_kernel(inputs, memory, backend)
    if not inputs.query.shape[1]:
        return delta_rule_plain(inputs, _or_zeros(memory, inputs))
    if by_kernel:
        k, by_steps = inputs.key.shape[2], steps_as_tokens(inputs)
        keep = torch.is_grad_enabled() and any(
            [v is not None and v.requires_grad for v in (*by_steps, memory)]
        )
        o, last, *_ = chunk_kernels(*by_steps, memory, keep)
        o = o if k == 1 else o[:, k - 1 :: k]
        return o, last
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
    backend: DeltaBackend,
) -> bool:
    """Whether `delta_rule` calls a Triton kernel; ValueError where it must and cannot."""
    if backend == "torch":
        return False
    unfit, p, dtype = None, inputs.key.shape[-1], inputs.query.dtype
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
    from bedouin.kernels.delta_rule.triton_chunks import step_kernel

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

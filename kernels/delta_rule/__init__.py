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
from bedouin.kernels.checks import check_shapes, one_of
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
    as_constants,
    ceil_div,
    evenly_spaced,
    next_power_of_two,
)
from bedouin.kernels.operation import empty_like, is_recorded, operation, plain_operation

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
    kinds: dict[str, Backend] = {"torch": "reference", "reference": "reference", "triton": "triton"}
    return kinds.get(backend, "auto")


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

    "torch" or "reference": plain torch in chunks, in at least float32 throughout. "triton": kernels
    of chunks of Householder steps; p may be at most 256, and there is no second derivative. "fla":
    the kernels of flash-linear-attention, on a GPU in bfloat16 or float16. "auto": "triton" on a
    GPU, except in float64 and under transforms of torch.func, else "torch". Under torch.compile
    every implementation is one operation for all lengths, once differentiable.
    Sources: DeltaNet (arXiv 2406.06484), Gated DeltaNet (2412.06464), DeltaProduct (2502.10297).

    Raises ValueError for shapes that do not fit, an unknown backend, and one that cannot run.
    """
    one_of("backend", backend, get_args(DeltaBackend))
    _check_shapes(inputs, memory)
    if backend == "fla":
        fla.check_call(inputs.query)
        check_delta_backend(backend)
        return fla.delta_rule_fla(inputs, _or_zeros(memory, inputs))
    if _takes_kernel(inputs, memory, backend) and inputs.query.shape[1]:
        k, by_steps = inputs.key.shape[2], steps_as_tokens(inputs)
        o, last, *_ = chunk_kernels(*by_steps, memory, is_recorded(*by_steps, memory))
        return o if k == 1 else o[:, k - 1 :: k], last
    memory = _or_zeros(memory, inputs)
    # a graph of torch.compile would otherwise have the operations of all chunks
    if torch.compiler.is_compiling() and inputs.query.shape[1]:
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
    check_shapes((b, t, h, p), "(b, t, h, p)", query=inputs.query)
    check_shapes((b, t, k, h, v), "(b, t, k, h, v)", value=inputs.value)
    check_shapes((b, t, k, h), "(b, t, k, h)", beta=inputs.beta)
    check_shapes((b, t, h), "(b, t, h)", log_decay=inputs.log_decay)
    check_shapes((b, h, p, v), "(b, h, p, v)", memory=memory)


def _takes_kernel(
    inputs: DeltaInputs,
    memory: Tensor | None,  # (b, h, p, v)
    backend: DeltaBackend,
) -> bool:
    """Whether `delta_rule` calls a Triton kernel; ValueError where it must and cannot."""
    unfit, p, dtype = None, inputs.key.shape[-1], inputs.query.dtype
    if p > KERNEL_CHANNELS:
        unfit = f"heads of {p} key channels, more than {KERNEL_CHANNELS}"
    elif dtype not in KERNEL_DTYPES:
        unfit = f"products in {dtype}"
    widest = accumulator(*(v.dtype for v in (*inputs, memory) if v is not None))
    kind = kernel_backend(backend)
    return choose_backend(kind, inputs.key.device, widest, unfit) == "triton"


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


def longest_chunk(dtype: torch.dtype) -> int:
    """Most tokens of a chunk whose products have factors of `dtype`. The factors of float32 are
    computed from the tiles, so they must have fewer than 64 rows (triton_chunks.py)."""
    return CHUNK // 2 if dtype == torch.float32 else CHUNK


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
    value: Tensor,  # (b, t, 1, h, v)
    beta: Tensor,  # (b, t, 1, h)
    log_decay: Tensor,  # (b, t, h)
) -> DeltaInputs:
    """What the kernels read: evenly spaced (b, t, h p) and (b, t, h v), contiguous (b, t, h)."""
    query, key, value = (evenly_spaced(v.flatten(2)) for v in (query, key, value))
    return DeltaInputs(query, key, value, beta.contiguous(), log_decay.contiguous())


class Tiles(NamedTuple):
    """Sizes that the kernels of chunks take as one tuple of constants."""

    P: int  # key channels of a head
    V: int  # value channels of a head
    PART: int  # key channels of a part of S
    BLOCK: int  # value channels of a program
    C: int  # tokens of a chunk, less than of the longest one where there are fewer

    @staticmethod
    def of(
        query: Tensor,  # (b, t, h, p)
        v: int,
    ) -> "Tiles":
        (_, t, _, p), longest = query.shape, longest_chunk(query.dtype)
        part = min(longest, max(LEAST, next_power_of_two(p)))
        # of float32 half as many, whose products take more registers
        halves = 2 if query.dtype == torch.float32 else 1
        most = STATE_CELLS // (ceil_div(p, part) * part) // halves
        block = min(VALUE_BLOCK, 1 << (most.bit_length() - 1), next_power_of_two(v))
        tokens = min(longest, max(LEAST, next_power_of_two(max(1, t))))
        return Tiles(p, v, part, max(LEAST, block), tokens)


def launch_options(tiles: Tiles, dtype: torch.dtype) -> dict[str, Any]:
    """What all kernels of chunks are launched with."""
    # four warps, no more (triton_chunks.py); in float32 nothing is copied ahead, as all factors
    # pass registers
    stages = 1 if dtype == torch.float32 else 2
    how = {"num_warps": 4, "num_stages": stages, "enable_fp_fusion": True}
    return how | {"s": as_constants(tiles)}


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
    from bedouin.kernels.delta_rule.triton_chunks import prepare_kernel, step_kernel, sweep_kernel

    query, key, value, beta, log_decay, memory, keep = given
    o, last, *kept = _like(*given)
    (b, t, h, p), v = query.shape, value.shape[-1]
    inputs = _rows(query, key, value, beta, log_decay)
    apart = tuple(v.stride(1) for v in inputs[:3])
    memory = None if memory is None else memory.contiguous()
    if t == 1 and not keep:
        P = next_power_of_two(p)
        block = min(STEP_CELLS // P, VALUE_BLOCK, next_power_of_two(v))
        step_kernel[(b * h * ceil_div(v, block),)](
            *(inputs, apart, memory, o, last, h), P_SIZE=p, V_SIZE=v, P=P, V_BLOCK=block
        )
        return o, last, *kept
    # what the sweep reads is there without `keep`, too
    found: list[Any] = kept
    if not keep:
        found = [*Kept.empty(query, 0, keep=True, started=True)[:2], None, None]
    n, tiles = ceil_div(t, longest_chunk(query.dtype)), Tiles.of(query, v)
    how = launch_options(tiles, query.dtype)
    prepare_kernel[(b * h * n,)](inputs, apart, Kept(*found), t, h, n, **how)
    sweep_kernel[(b * h * ceil_div(v, tiles.BLOCK),)](
        *(inputs, apart, Kept(*found), memory, o, last, t, h, n), **how
    )
    return o, last, *kept


@chunk_kernels.register_vjp(kept=4, optional=(1,))
def _backward(
    grad_o: Tensor,  # (b, t, h, v)
    grad_last: Tensor | None,  # (b, h, p, v); None: zeros
    *given: Any,
) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, beta, log_decay and, where there is one, memory."""
    from bedouin.kernels.delta_rule.triton_chunks_backward import gradients_kernel, reverse_kernel

    kept, (query, _, value, *_, memory) = Kept(*given[:4]), given[4:]
    found = empty_like(*given[4:])
    (b, t, h, p), v = query.shape, value.shape[-1]
    inputs, grad_o = _rows(*given[4:9]), evenly_spaced(grad_o.flatten(2))
    n, tiles = ceil_div(t, longest_chunk(query.dtype)), Tiles.of(query, v)
    grad_states = query.new_empty(b * h, n - 1 if grad_last is None else n, p, v)
    apart, grads = tuple(v.stride(1) for v in (*inputs[:2], grad_o)), DeltaInputs(*found[:5])
    last = None if grad_last is None else grad_last.contiguous()
    how = launch_options(tiles, query.dtype)
    reverse_kernel[(b * h * ceil_div(v, tiles.BLOCK),)](
        *(inputs, apart, kept, grad_o, last, grad_states, grads),
        *(None if memory is None else found[5], t, h, n),
        **how,
    )
    gradients_kernel[(b * h * n,)](
        *(inputs, apart, kept, grad_o, grad_states, grads, t, h, n),
        *(last is not None, memory is not None),
        **how,
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

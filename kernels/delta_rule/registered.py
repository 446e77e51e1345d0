"""The gated delta rule in chunks as registered operations, which torch.compile does not trace.

`chunk_kernels` calls the Triton kernels, `plain_chunks` plain torch, whose loop over chunks
torch.compile would otherwise unroll. Triton is imported when an operation runs.

Letters: b batch, t time, h heads, k Householder steps a token, p key channels and v value channels
of a head, n chunks, c tokens of a chunk.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.delta_rule.chunks import delta_rule_plain
from bedouin.kernels.delta_rule.kept import Kept
from bedouin.kernels.delta_rule.types import DeltaInputs
from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.operation import operation, recording

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor beta, Tensor? log_decay, Tensor? memory"
_READ = "Tensor query, Tensor key, Tensor beta, Tensor? log_decay"
_KEPT = "Tensor inverses, Tensor scores, Tensor errors, Tensor states"

# The Triton kernels


@operation(
    "delta_rule_chunks",
    f"({_INPUTS}, bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def chunk_kernels(*given: Any) -> tuple[Tensor, ...]:
    """The outputs (b, t, h, v) and the last memory (b, h, p, v), and with `keep` what the backward
    reads, else four empty tensors. The inputs are those of `DeltaInputs` with k = 1. query, key and
    value have one of the kernels' dtypes, which the factors of products and the outputs have, too.
    """
    from bedouin.kernels.delta_rule.launch import launch_forward

    *inputs, memory, keep = given
    return launch_forward(DeltaInputs(*inputs), memory, keep)


@chunk_kernels.register_fake
def _chunks_fake(*given: Any) -> tuple[Tensor, ...]:
    query, _, value, _, _, memory, keep = given
    (b, t, h, p), v = query.shape, value.shape[-1]
    o = value.new_empty(b, t, h, v)
    last = value.new_empty(b, h, p, v, dtype=torch.float32 if memory is None else memory.dtype)
    return o, last, *Kept.empty(query, v, keep, memory is not None)


@operation(
    "delta_rule_chunks_backward",
    f"(Tensor grad_o, Tensor? grad_last, {_READ}, {_KEPT}, bool started, "
    "ScalarType? memory_dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _chunks_backward(*given: Any) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, beta, log_decay and memory; of the latter two empty
    without a decay and for a memory_dtype of None. A grad_last of None is zeros; `started`: whether
    there was a memory before the first token."""
    from bedouin.kernels.delta_rule.launch import launch_backward

    return launch_backward(given[:2], given[2:6], Kept(*given[6:10]), *given[10:])


@_chunks_backward.register_fake
def _chunks_backward_fake(*given: Any) -> tuple[Tensor, ...]:
    _, _, query, key, beta, decay, _, _, errors, _, _, memory_dtype = given
    (b, t, h, p), v = query.shape, errors.shape[-1]
    grad_memory = query.new_empty(0 if memory_dtype is None else (b, h, p, v), dtype=memory_dtype)
    return (
        *(v.new_empty(v.shape) for v in (query, key)),
        query.new_empty(b, t, 1, h, v),
        beta.new_empty(beta.shape),
        beta.new_empty(0) if decay is None else decay.new_empty(decay.shape),
        grad_memory,
    )


def _save_chunks(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, _, beta, log_decay, memory, keep = inputs
    if not keep:
        raise ValueError("keep must be True where gradients are recorded, got False")
    kept = output[2:]
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)  # zeros for what is kept would be written and not read
    # neither the values nor the memory are read again
    ctx.save_for_backward(query, key, beta, log_decay, *kept)
    ctx.started = memory is not None
    ctx.memory_dtype = None if memory is None else memory.dtype


def _chunk_gradients(
    ctx: Any,
    grad_o: Tensor | None,  # (b, t, h, v)
    grad_last: Tensor | None,  # (b, h, p, v)
    *_: None,  # of what is kept
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if grad_o is None:
        grad_o = torch.zeros_like(saved[6])  # of the size of the errors
    memory_dtype = ctx.memory_dtype if ctx.needs_input_grad[5] else None
    with torch.no_grad():
        found = _chunks_backward(grad_o, grad_last, *saved, ctx.started, memory_dtype)
    grads: list[Tensor | None] = list(found)
    grads[4] = None if saved[3] is None else grads[4]
    grads[5] = None if memory_dtype is None else grads[5]
    return *refuse_second_derivative(grads, [grad_o, grad_last, *saved[:4]]), None


chunk_kernels.register_autograd(_chunk_gradients, setup_context=_save_chunks)

# Plain torch


@operation("plain_delta_rule", f"({_INPUTS}) -> (Tensor, Tensor)")
def plain_chunks(*given: Any) -> tuple[Tensor, Tensor]:
    """The outputs (b, t, h, v) and the last memory (b, h, p, v) of `delta_rule_plain`, whose memory
    is given."""
    *inputs, memory = given
    o, last = delta_rule_plain(DeltaInputs(*inputs), memory)
    return o.contiguous(), last.clone(memory_format=torch.contiguous_format)


@plain_chunks.register_fake
def _plain_fake(*given: Any) -> tuple[Tensor, Tensor]:
    query, _, value, _, _, memory = given
    return value.new_empty(*query.shape[:3], value.shape[-1]), memory.new_empty(memory.shape)


@operation(
    "plain_delta_rule_backward",
    f"(Tensor grad_o, Tensor grad_last, {_INPUTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _plain_backward(
    grad_o: Tensor,  # (b, t, h, v)
    grad_last: Tensor,  # (b, h, p, v)
    *given: Any,
) -> tuple[Tensor, ...]:
    """The gradients of the inputs, of the log decays empty where there are none."""
    with recording():
        leaves: list[Any] = [None if v is None else v.detach().requires_grad_() for v in given]
        found = delta_rule_plain(DeltaInputs(*leaves[:5]), leaves[5])
        present = [v for v in leaves if v is not None]
        grads = iter(
            torch.autograd.grad(found, present, (grad_o, grad_last), materialize_grads=True)
        )
    return tuple(grad_o.new_empty(0) if v is None else next(grads).contiguous() for v in leaves)


@_plain_backward.register_fake
def _plain_backward_fake(grad_o: Tensor, grad_last: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """Shapes as in `_plain_backward`."""
    return tuple(grad_o.new_empty(0) if v is None else v.new_empty(v.shape) for v in given)


def _save_plain(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _plain_gradients(
    ctx: Any,
    grad_o: Tensor,  # (b, t, h, v)
    grad_last: Tensor,  # (b, h, p, v)
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    with torch.no_grad():
        found = _plain_backward(grad_o, grad_last, *saved)
    grads = [None if v is None else grad for v, grad in zip(saved, found, strict=True)]
    return refuse_second_derivative(grads, [grad_o, grad_last, *saved])


plain_chunks.register_autograd(_plain_gradients, setup_context=_save_plain)

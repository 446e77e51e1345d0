"""The recurrence of M2RNN in Triton: a program for each sample and head.

The memory stays in registers for all tokens; backward reads that of every token, which forward has
written, and computes the candidates anew.

Letters: b batch, t time, h heads, p key channels and v value channels of a head, powers of two from
16 on; r = 2 p + v.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from bedouin.kernels.guard import Launching
from bedouin.kernels.outside import outside_of_graphs
from bedouin.layers.options import LAUNCH

CELLS = 1024
"""Numbers of a memory for each warp of a program, of which there are at most 8."""

REGISTERS = 168
"""Of a thread in backward, at most: 12 warps fit on a multiprocessor of sm_90."""


@triton.jit
def _token(QKV, F, token, P: tl.constexpr, V: tl.constexpr):
    """q, k, v and f of a token."""
    i, j = tl.arange(0, P), tl.arange(0, V)
    qkv = QKV + token * (2 * P + V)
    return tl.load(qkv + i), tl.load(qkv + P + i), tl.load(qkv + 2 * P + j), tl.load(F + token)


@triton.jit
def _candidate(S, W, k, v):
    """tanh(S W + k v^T)."""
    mixed = tl.dot(S, W, input_precision="ieee") + k[:, None] * v[None, :]
    return 2 * tl.sigmoid(2 * mixed) - 1


@triton.jit
def forward_kernel(
    QKV,
    F,
    W,
    S0,
    Y,
    MEMORY,
    S_LAST,
    t,
    H,
    P: tl.constexpr,
    V: tl.constexpr,
    KEEP: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    b, h = program // H, program % H
    i, j, row = tl.arange(0, P), tl.arange(0, V), tl.arange(0, V)
    cell = i[:, None] * V + j[None, :]
    weight = tl.load(W + (h * V + row[:, None]) * V + j[None, :])
    S = tl.load(S0 + program * P * V + cell)
    ahead = _token(QKV, F, b * t * H + h, P, V)
    for place in range(t):
        token = (b * t + place) * H + h
        if KEEP:
            tl.store(MEMORY + (program * t + place) * P * V + cell, S)
        q, k, v, f = ahead
        ahead = _token(QKV, F, (b * t + tl.minimum(place + 1, t - 1)) * H + h, P, V)
        S = f * S + (1 - f) * _candidate(S, weight, k, v)
        tl.store(Y + token * V + j, tl.sum(q[:, None] * S, 0))
    tl.store(S_LAST + program * P * V + cell, S)


@triton.jit
def backward_kernel(
    QKV,
    F,
    W,
    MEMORY,
    GY,
    GS_LAST,
    GQKV,
    GF,
    GW,
    GS0,
    t,
    H,
    P: tl.constexpr,
    V: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    b, h = program // H, program % H
    i, j, row = tl.arange(0, P), tl.arange(0, V), tl.arange(0, V)
    cell = i[:, None] * V + j[None, :]
    square = row[:, None] * V + j[None, :]
    weight = tl.load(W + h * V * V + square)
    grad_S = tl.load(GS_LAST + program * P * V + cell)
    grad_W = tl.zeros((V, V), grad_S.dtype)
    for passed in range(t):
        place = t - 1 - passed
        token = (b * t + place) * H + h
        q, k, v, f = _token(QKV, F, token, P, V)
        grads = GQKV + token * (2 * P + V)
        before = tl.load(MEMORY + (program * t + place) * P * V + cell)
        candidate = _candidate(before, weight, k, v)
        grad_y = tl.load(GY + token * V + j)
        S = f * before + (1 - f) * candidate
        tl.store(grads + i, tl.sum(S * grad_y[None, :], 1))
        grad_S += q[:, None] * grad_y[None, :]
        tl.store(GF + token, tl.sum(tl.sum(grad_S * (before - candidate), 1), 0))
        grad_mixed = (1 - f) * grad_S * (1 - candidate * candidate)
        tl.store(grads + P + i, tl.sum(grad_mixed * v[None, :], 1))
        tl.store(grads + 2 * P + j, tl.sum(grad_mixed * k[:, None], 0))
        grad_W += tl.dot(tl.trans(before), grad_mixed, input_precision="ieee")
        grad_S = f * grad_S + tl.dot(grad_mixed, tl.trans(weight), input_precision="ieee")
    tl.store(GS0 + program * P * V + cell, grad_S)
    tl.store(GW + program * V * V + square, grad_W)


class Recurrence(torch.autograd.Function):
    """S^T q of every token (b, t, h, v), and the memory (b, h, p, v) after the last one."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,  # (b, t, h, r)
        f: Tensor,  # (b, t, h)
        W: Tensor,  # (h, v, v)
        memory: Tensor,  # (b, h, p, v)
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        """keep: whether there will be a backward call."""
        qkv, f, W, memory = (tensor.contiguous() for tensor in (qkv, f, W, memory))
        b, t, h, _ = qkv.shape
        p, v = memory.shape[2:]
        o, last = qkv.new_empty(b, t, h, v), torch.empty_like(memory)
        memories = qkv.new_empty((b, h, t, p, v) if keep else (0,))
        with Launching(qkv):
            forward_kernel[b * h,](
                *(qkv, f, W, memory, o, memories, last, t, h, p, v, keep),
                **LAUNCH,
                num_warps=min(max(p * v // CELLS, 1), 8),
            )
        ctx.save_for_backward(qkv, f, W, memories)
        return o, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, f, W, memories = ctx.saved_tensors
        grad_o, grad_last = (grad.contiguous() for grad in grads)
        b, h, t, p, v = memories.shape
        grad_qkv, grad_f, grad_memory = map(torch.empty_like, (qkv, f, grad_last))
        grad_W = W.new_empty(b, h, v, v)
        with Launching(qkv):
            backward_kernel[b * h,](
                *(qkv, f, W, memories, grad_o, grad_last),
                *(grad_qkv, grad_f, grad_W, grad_memory, t, h, p, v),
                **LAUNCH,
                num_warps=min(max(p * v // CELLS, 1), 8),
                maxnreg=REGISTERS,
            )
        return grad_qkv, grad_f, grad_W.sum(0), grad_memory, None


@outside_of_graphs("the recurrence is a kernel")
def launch(
    qkv: Tensor,  # (b, t, h, r)
    f: Tensor,  # (b, t, h)
    W: Tensor,  # (h, v, v)
    memory: Tensor,  # (b, h, p, v)
) -> tuple[Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v)
    """The outputs, and the memory after the last token."""
    wants_grad = torch.is_grad_enabled()  # within an autograd.Function it is not
    outputs, last = Recurrence.apply(qkv, f, W, memory, wants_grad)
    return outputs, last

"""The recurrence of the Recurrent Delta Net in Triton: a program for each sample and head.

The memory stays in registers for all tokens. Backward subtracts what each token wrote, so that no
memory of an earlier token is kept, only q, k, the written values and the rate. Loads are issued a
token ahead.

Letters: b batch, t time, h heads, p key channels and v value channels of a head, powers of two;
r = 2 p + v + 1.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bedouin.kernels.guard import Launching
from bedouin.kernels.outside import outside_of_graphs
from bedouin.layers.options import LAUNCH

CELLS = 2048
"""Numbers of a memory for each warp of a program. One warp sums without barriers."""


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _softmax(x):
    e = tl.exp(x - tl.max(x, 0))
    return e / tl.sum(e, 0)


@triton.jit
def _fed(R, h, P: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr):
    """The parts of R of a head, with rows of SIZE numbers, that give q, k, v and beta."""
    i, j = tl.arange(0, P), tl.arange(0, V)
    rows = R + (h * V + j[:, None]) * SIZE  # channels of y
    R_b = tl.load(R + (h * V + j) * SIZE + 2 * P + V)
    R_q, R_k = tl.load(rows + i[None, :]), tl.load(rows + P + i[None, :])
    return R_q, R_k, tl.load(rows + 2 * P + j[None, :]), R_b


@triton.jit
def _row(X, token, P: tl.constexpr, V: tl.constexpr):
    """The parts of a row of r numbers."""
    i, j = tl.arange(0, P), tl.arange(0, V)
    row = X + token * (2 * P + V + 1)
    q, k = tl.load(row + i), tl.load(row + P + i)
    return q, k, tl.load(row + 2 * P + j), tl.load(row + 2 * P + V)


@triton.jit
def _store_row(X, token, q, k, v, b, P: tl.constexpr, V: tl.constexpr):
    i, j = tl.arange(0, P), tl.arange(0, V)
    row = X + token * (2 * P + V + 1)
    tl.store(row + i, q)
    tl.store(row + P + i, k)
    tl.store(row + 2 * P + j, v)
    tl.store(row + 2 * P + V, b)


@triton.jit
def forward_kernel(RAW, R, S0, Y0, Y, KEPT, S_LAST, t, H, P: tl.constexpr, V: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    b, h = program // H, program % H
    i, j = tl.arange(0, P), tl.arange(0, V)
    cell = program * P * V + i[:, None] * V + j[None, :]
    R_q, R_k, R_v, R_b = _fed(R, h, P, V, 2 * P + V + 1)
    S, y = tl.load(S0 + cell), tl.load(Y0 + program * V + j)
    ahead = _row(RAW, b * t * H + h, P, V)
    for place in range(t):
        token = (b * t + place) * H + h
        q, k, v, beta = ahead
        ahead = _row(RAW, (b * t + tl.minimum(place + 1, t - 1)) * H + h, P, V)
        u = _tanh(y)
        q = _softmax(q + tl.sum(u[:, None] * R_q, 0))
        k = _softmax(k + tl.sum(u[:, None] * R_k, 0))
        rate = tl.sigmoid(beta + tl.sum(u * R_b, 0))
        step = rate * (v + tl.sum(u[:, None] * R_v, 0) - tl.sum(k[:, None] * S, 0))
        S += k[:, None] * step[None, :]
        y = tl.sum(q[:, None] * S, 0)
        tl.store(Y + token * V + j, y)
        _store_row(KEPT, token, q, k, step, rate, P, V)
    tl.store(S_LAST + cell, S)


@triton.jit
def backward_kernel(
    KEPT,
    R,
    U,
    S_LAST,
    GY,
    GS_LAST,
    GRAW,
    GS0,
    GY0,
    t,
    H,
    P: tl.constexpr,
    V: tl.constexpr,
):
    """Of memories transposed, and R with rows that are padded, so that threads load vectors."""
    program = tl.program_id(0).to(tl.int64)
    b, h = program // H, program % H
    i, j = tl.arange(0, P), tl.arange(0, V)
    cell = program * P * V + j[:, None] * P + i[None, :]
    R_q, R_k, R_v, R_b = _fed(R, h, P, V, 2 * P + V + 4)
    S, grad_S = tl.load(S_LAST + cell), tl.load(GS_LAST + cell)
    carried = tl.zeros((V,), S.dtype)  # the cotangent of y from the token after
    before = (b * t + t - 1) * H + h
    ahead = _row(KEPT, before, P, V)
    next_u, next_y = tl.load(U + before * V + j), tl.load(GY + before * V + j)
    for passed in range(t):
        token = (b * t + t - 1 - passed) * H + h
        q, k, step, rate = ahead
        u, grad_y = next_u, next_y + carried
        before = (b * t + tl.maximum(t - 2 - passed, 0)) * H + h
        ahead = _row(KEPT, before, P, V)
        next_u, next_y = tl.load(U + before * V + j), tl.load(GY + before * V + j)
        grad_q = tl.sum(S * grad_y[:, None], 0)
        grad_S += grad_y[:, None] * q[None, :]
        grad_step = tl.sum(grad_S * k[None, :], 1)
        S -= step[:, None] * k[None, :]  # the memory before the token
        grad_v = rate * grad_step
        grad_b = tl.sum(grad_step * step, 0) * (1 - rate)
        grad_k = tl.sum(grad_S * step[:, None] - S * grad_v[:, None], 0)
        grad_S -= grad_v[:, None] * k[None, :]
        grad_q = q * (grad_q - tl.sum(q * grad_q, 0))
        grad_k = k * (grad_k - tl.sum(k * grad_k, 0))
        _store_row(GRAW, token, grad_q, grad_k, grad_v, grad_b, P, V)
        grad_u = tl.sum(R_q * grad_q[None, :] + R_k * grad_k[None, :], 1)
        carried = (grad_u + tl.sum(R_v * grad_v[None, :], 1) + R_b * grad_b) * (1 - u * u)
    tl.store(GS0 + cell, grad_S)
    tl.store(GY0 + program * V + j, carried)


class Recurrence(torch.autograd.Function):
    """The outputs (b, t, h, v) and the memory (b, h, p, v) after the last token."""

    @staticmethod
    def forward(
        ctx: Any,
        raw: Tensor,  # (b, t, h, r)
        R: Tensor,  # (h, v, r)
        memory: Tensor,  # (b, h, p, v)
        y: Tensor,  # (b, h, v)
    ) -> tuple[Tensor, Tensor]:
        raw, R, memory, y = (tensor.contiguous() for tensor in (raw, R, memory, y))
        b, t, h, _ = raw.shape
        p, v = memory.shape[2:]
        outputs, last = raw.new_empty(b, t, h, v), torch.empty_like(memory)
        kept = torch.empty_like(raw)
        with Launching(raw):
            forward_kernel[b * h,](
                *(raw, R, memory, y, outputs, kept, last, t, h, p, v),
                **LAUNCH,
                num_warps=max(1, p * v // CELLS),
            )
        ctx.save_for_backward(kept, R, y, outputs, last)
        return outputs, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        kept, R, y, outputs, last = ctx.saved_tensors
        (b, t, h, _), (p, v) = kept.shape, last.shape[2:]
        u = torch.tanh(torch.cat([y.unsqueeze(1), outputs[:, :-1]], dim=1))
        last, grad_last = (tensor.mT.contiguous() for tensor in (last, grads[1]))
        grad_raw, grad_memory, grad_y = map(torch.empty_like, (kept, last, y))
        with Launching(kept):
            backward_kernel[b * h,](
                *(kept, F.pad(R, (0, 3)), u, last, grads[0].contiguous(), grad_last),
                *(grad_raw, grad_memory, grad_y, t, h, p, v),
                **LAUNCH,
                num_warps=max(1, p * v // CELLS),
            )
        grad_R = torch.einsum("bthv,bthr->hvr", u, grad_raw)
        return grad_raw, grad_R, grad_memory.mT, grad_y


@outside_of_graphs("the recurrence is a kernel")
def launch(
    raw: Tensor,  # (b, t, h, r)
    R: Tensor,  # (h, v, r)
    memory: Tensor,  # (b, h, p, v)
    y: Tensor,  # (b, h, v)
) -> tuple[Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v)
    """The outputs, and the memory after the last token."""
    outputs, last = Recurrence.apply(raw, R, memory, y)
    return outputs, last

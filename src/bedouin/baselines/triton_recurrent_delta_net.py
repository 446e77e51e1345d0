"""The recurrence of the Recurrent Delta Net in Triton: a program for each sample and head.

The memory stays in registers for all tokens. Backward subtracts what each token wrote, so that no
memory of an earlier token is kept.

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

from bedouin.baselines.options import LAUNCH
from bedouin.kernels.guard import Launching
from bedouin.kernels.outside import outside_of_graphs


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _softmax(x):
    e = tl.exp(x - tl.max(x, 0))
    return e / tl.sum(e, 0)


@triton.jit
def _fed(R, h, P: tl.constexpr, V: tl.constexpr):
    """The parts of R of a head that give q, k, v (rows: channels of y) and beta."""
    i, j = tl.arange(0, P), tl.arange(0, V)
    rows = R + (h * V + j[:, None]) * (2 * P + V + 1)
    of_beta = R + (h * V + j) * (2 * P + V + 1) + 2 * P + V
    R_q, R_k = tl.load(rows + i[None, :]), tl.load(rows + P + i[None, :])
    return R_q, R_k, tl.load(rows + 2 * P + j[None, :]), tl.load(of_beta)


@triton.jit
def _token(RAW, token, u, R_q, R_k, R_v, R_b, P: tl.constexpr, V: tl.constexpr):
    """q, k, v and the rate of a token, u = tanh(y) of the token before."""
    i, j = tl.arange(0, P), tl.arange(0, V)
    raw = RAW + token * (2 * P + V + 1)
    q = _softmax(tl.load(raw + i) + tl.sum(u[:, None] * R_q, 0))
    k = _softmax(tl.load(raw + P + i) + tl.sum(u[:, None] * R_k, 0))
    v = tl.load(raw + 2 * P + j) + tl.sum(u[:, None] * R_v, 0)
    return q, k, v, tl.sigmoid(tl.load(raw + 2 * P + V) + tl.sum(u * R_b, 0))


@triton.jit
def forward_kernel(RAW, R, S0, Y0, Y, STEP, S_LAST, t, H, P: tl.constexpr, V: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    b, h = program // H, program % H
    i, j = tl.arange(0, P), tl.arange(0, V)
    cell = program * P * V + i[:, None] * V + j[None, :]
    R_q, R_k, R_v, R_b = _fed(R, h, P, V)
    S, y = tl.load(S0 + cell), tl.load(Y0 + program * V + j)
    for place in range(t):
        token = (b * t + place) * H + h
        q, k, v, rate = _token(RAW, token, _tanh(y), R_q, R_k, R_v, R_b, P, V)
        step = rate * (v - tl.sum(k[:, None] * S, 0))
        S += k[:, None] * step[None, :]
        y = tl.sum(q[:, None] * S, 0)
        tl.store(Y + token * V + j, y)
        tl.store(STEP + token * V + j, step)
    tl.store(S_LAST + cell, S)


@triton.jit
def backward_kernel(
    RAW,
    R,
    BEFORE,
    STEP,
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
    program = tl.program_id(0).to(tl.int64)
    b, h = program // H, program % H
    i, j = tl.arange(0, P), tl.arange(0, V)
    cell = program * P * V + i[:, None] * V + j[None, :]
    R_q, R_k, R_v, R_b = _fed(R, h, P, V)
    S, grad_S = tl.load(S_LAST + cell), tl.load(GS_LAST + cell)
    carried = tl.zeros((V,), S.dtype)  # the cotangent of y from the token after
    for passed in range(t):
        token = (b * t + t - 1 - passed) * H + h
        u, step = _tanh(tl.load(BEFORE + token * V + j)), tl.load(STEP + token * V + j)
        q, k, _, rate = _token(RAW, token, u, R_q, R_k, R_v, R_b, P, V)
        grad_y = tl.load(GY + token * V + j) + carried
        grad_q = tl.sum(S * grad_y[None, :], 1)
        grad_S += q[:, None] * grad_y[None, :]
        grad_k = tl.sum(grad_S * step[None, :], 1)
        grad_step = tl.sum(grad_S * k[:, None], 0)
        S -= k[:, None] * step[None, :]  # the memory before the token
        grad_v = rate * grad_step
        grad_b = tl.sum(grad_step * step, 0) * (1 - rate)
        grad_k -= tl.sum(S * grad_v[None, :], 1)
        grad_S -= k[:, None] * grad_v[None, :]
        grad_q = q * (grad_q - tl.sum(q * grad_q, 0))
        grad_k = k * (grad_k - tl.sum(k * grad_k, 0))
        raw = GRAW + token * (2 * P + V + 1)
        tl.store(raw + i, grad_q)
        tl.store(raw + P + i, grad_k)
        tl.store(raw + 2 * P + j, grad_v)
        tl.store(raw + 2 * P + V, grad_b)
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
        steps = torch.empty_like(outputs)
        with Launching(raw):
            forward_kernel[b * h,](raw, R, memory, y, outputs, steps, last, t, h, p, v, **LAUNCH)
        ctx.save_for_backward(raw, R, y, outputs, steps, last)
        return outputs, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        raw, R, y, outputs, steps, last = ctx.saved_tensors
        grad_outputs, grad_last = (grad.contiguous() for grad in grads)
        b, t, h, _ = raw.shape
        before = torch.cat([y.unsqueeze(1), outputs[:, :-1]], dim=1)
        grad_raw, grad_memory, grad_y = map(torch.empty_like, (raw, last, y))
        with Launching(raw):
            backward_kernel[b * h,](
                *(raw, R, before, steps, last, grad_outputs, grad_last),
                *(grad_raw, grad_memory, grad_y, t, h, *last.shape[2:]),
                **LAUNCH,
            )
        grad_R = torch.einsum("bthv,bthr->hvr", torch.tanh(before), grad_raw)
        return grad_raw, grad_R, grad_memory, grad_y


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

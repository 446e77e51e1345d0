"""The gated delta rule in Triton: a program for each sample, head and block of value channels.

The memory S stays in registers for all tokens. Forward keeps the error value - S^T key of each
step, which has v numbers where S has p v. Backward carries the cotangent of S from the last token
to the first, for which the errors suffice, and then computes S again from the first token to the
last, as forward did: S of no token is kept, and none is divided by a decay, which may be 0. Both
passes together have the sums and products of one pass in which S is at hand.

Letters: b batch, t time, k Householder steps a token, h heads, p key channels and v value channels
of a head, n blocks of value channels.
"""
# The kernels are written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bedouin.baselines.options import LAUNCH

CELLS = 2048
"""Numbers of a block of S, 64 registers of each thread: one warp sums them without barriers. With
half as many, the steps of a head of 68 channels have 9 % more instructions, compiled for sm_90."""


@triton.jit
def _row(X, at, i, SIZE: tl.constexpr):
    """Row `at` of rows of SIZE numbers, and zeros after its end."""
    return tl.load(X + at * SIZE + i, i < SIZE, 0.0).to(tl.float32)


@triton.jit
def forward_kernel(
    Q,
    K,
    V,
    BETA,
    DECAY,
    S0,
    Y,
    ERROR,
    S_LAST,
    t,
    H,
    GATED: tl.constexpr,
    STEPS: tl.constexpr,
    P_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    b, h = program // H, program % H
    i, j = tl.arange(0, P), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cell = (program * P_SIZE + i[:, None]) * V_SIZE + j[None, :]
    inside = (i[:, None] < P_SIZE) & (j[None, :] < V_SIZE)
    S = tl.load(S0 + cell, inside, 0.0).to(tl.float32)
    for place in range(t):
        token = (b * t + place) * H + h
        if GATED:
            S *= tl.exp(tl.load(DECAY + token).to(tl.float32))
        for step in range(STEPS):
            at = ((b * t + place) * STEPS + step) * H + h
            k, beta = _row(K, at, i, P_SIZE), tl.load(BETA + at).to(tl.float32)
            error = _row(V, at, j, V_SIZE) - tl.sum(k[:, None] * S, 0)
            tl.store(ERROR + at * V_SIZE + j, error, j < V_SIZE)
            S += k[:, None] * (beta * error)[None, :]
        q = _row(Q, token, i, P_SIZE) * P_SIZE**-0.5
        tl.store(Y + token * V_SIZE + j, tl.sum(q[:, None] * S, 0), j < V_SIZE)
    tl.store(S_LAST + cell, S, inside)


@triton.jit
def backward_kernel(
    Q,
    K,
    V,
    BETA,
    DECAY,
    S0,
    ERROR,
    GY,
    GS_LAST,
    GQ,
    GK,
    GV,
    GBETA,
    GDECAY,
    GS0,
    t,
    H,
    GATED: tl.constexpr,
    STEPS: tl.constexpr,
    P_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """GQ, GK, GBETA and GDECAY are the parts of their gradients that a block of channels gives."""
    program = tl.program_id(0).to(tl.int64)
    b, h = program // H, program % H
    i, j = tl.arange(0, P), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cell = (program * P_SIZE + i[:, None]) * V_SIZE + j[None, :]
    inside = (i[:, None] < P_SIZE) & (j[None, :] < V_SIZE)
    part = tl.program_id(1).to(tl.int64) * tl.num_programs(0) * t  # in tokens
    grad_S = tl.load(GS_LAST + cell, inside, 0.0).to(tl.float32)
    for passed in range(t):
        place = t - 1 - passed
        token = (b * t + place) * H + h
        q, grad_o = _row(Q, token, i, P_SIZE) * P_SIZE**-0.5, _row(GY, token, j, V_SIZE)
        grad_S += q[:, None] * grad_o[None, :]
        for back in range(STEPS):
            at = ((b * t + place) * STEPS + STEPS - 1 - back) * H + h
            k, beta = _row(K, at, i, P_SIZE), tl.load(BETA + at).to(tl.float32)
            error = _row(ERROR, at, j, V_SIZE)
            grad_k = tl.sum(grad_S * (beta * error)[None, :], 1)
            tl.store(GK + (part * STEPS + at) * P_SIZE + i, grad_k, i < P_SIZE)
            grad_step = tl.sum(grad_S * k[:, None], 0)
            tl.store(GBETA + part * STEPS + at, tl.sum(grad_step * error, 0))
            grad_v = beta * grad_step
            tl.store(GV + at * V_SIZE + j, grad_v, j < V_SIZE)
            grad_S -= k[:, None] * grad_v[None, :]
        if GATED:
            grad_S *= tl.exp(tl.load(DECAY + token).to(tl.float32))
    tl.store(GS0 + cell, grad_S, inside)

    tl.debug_barrier()  # before a thread reads of GK and GV what another has written
    S = tl.load(S0 + cell, inside, 0.0).to(tl.float32)
    # The gradient of a log decay is the sum of S times its cotangent. A decay leaves that sum, a
    # step adds value * grad_value to it, and an output takes o * grad_o = query * grad_query.
    product = tl.sum(tl.sum(S * grad_S, 1), 0)
    for place in range(t):
        token = (b * t + place) * H + h
        if GATED:
            tl.store(GDECAY + part + token, product)
            S *= tl.exp(tl.load(DECAY + token).to(tl.float32))
        for step in range(STEPS):
            at = ((b * t + place) * STEPS + step) * H + h
            k, beta = _row(K, at, i, P_SIZE), tl.load(BETA + at).to(tl.float32)
            error, grad_v = _row(ERROR, at, j, V_SIZE), _row(GV, at, j, V_SIZE)
            own = part * STEPS + at
            grad_k = _row(GK, own, i, P_SIZE) - tl.sum(S * grad_v[None, :], 1)
            tl.store(GK + own * P_SIZE + i, grad_k, i < P_SIZE)
            S += k[:, None] * (beta * error)[None, :]
            if GATED:
                product += tl.sum(grad_v * _row(V, at, j, V_SIZE), 0)
        grad_o = _row(GY, token, j, V_SIZE)
        grad_q = tl.sum(S * grad_o[None, :], 1) * P_SIZE**-0.5
        tl.store(GQ + (part + token) * P_SIZE + i, grad_q, i < P_SIZE)
        if GATED:
            product -= tl.sum(grad_q * _row(Q, token, i, P_SIZE), 0)


class Launch(NamedTuple):
    """Grid and compile-time constants of both kernels."""

    grid: tuple[int, int]
    constants: tuple[int, ...]

    @staticmethod
    def of(
        key: Tensor,  # (b, t, k, h, p)
        v: int,
        *,
        gated: bool,
    ) -> "Launch":
        b, _, k, h, p = key.shape
        P = triton.next_power_of_2(p)
        block = min(triton.next_power_of_2(v), max(1, CELLS // P))
        return Launch((b * h, triton.cdiv(v, block)), (gated, k, p, v, P, block))


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]
"""query, key, value, beta and log_decay as in `DeltaInputs`, and the memory (b, h, p, v)."""


def launch_forward(
    inputs: Inputs,
) -> tuple[Tensor, Tensor, Tensor]:  # (b, t, h, v), (b, h, p, v), (b, t, k, h, v)
    """S^T query / sqrt(p) of every token and the memory after the last one, in the dtype of the
    memory, and the errors in float32."""
    query, key, value, _, _, memory = inputs
    (b, t, h, _), v = query.shape, memory.shape[-1]
    grid, constants = Launch.of(key, v, gated=inputs[4] is not None)
    read = _read(inputs)
    o, last = memory.new_empty(b, t, h, v), torch.empty_like(read[-1])
    error = value.new_empty(value.shape, dtype=torch.float32)
    forward_kernel[grid](*read, o, error, last, t, h, *constants, **LAUNCH, num_warps=1)
    return o, last, error


def launch_backward(
    grad_o: Tensor,  # (b, t, h, v)
    grad_last: Tensor,  # (b, h, p, v)
    error: Tensor,  # (b, t, k, h, v), of `launch_forward`
    inputs: Inputs,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the inputs, in their dtypes. That of log_decay is empty where there is no
    decay, in the dtype of the memory."""
    query, key, value, beta, log_decay, memory = inputs
    gated, (t, h) = log_decay is not None, query.shape[1:3]
    grid, constants = Launch.of(key, memory.shape[-1], gated=gated)
    n, read = grid[1], _read(inputs)
    decay = read[4]
    grad_q, grad_k, grad_beta = (error.new_empty(n, *v.shape) for v in (query, key, beta))
    grad_decay = error.new_empty((n, *decay.shape) if gated else (n, 0))
    grad_v, grad_memory = torch.empty_like(error), torch.empty_like(read[-1])
    backward_kernel[grid](
        *(*read, error, grad_o.contiguous(), grad_last.contiguous()),
        *(grad_q, grad_k, grad_v, grad_beta, grad_decay, grad_memory),
        *(t, h, *constants),
        **LAUNCH,
        num_warps=1,
    )
    grad_q, grad_k, grad_beta, grad_decay = (
        (grad.sum(0) if n > 1 else grad[0]).to(v.dtype)
        for grad, v in ((grad_q, query), (grad_k, key), (grad_beta, beta), (grad_decay, decay))
    )
    return grad_q, grad_k, grad_v.to(value.dtype), grad_beta, grad_decay, grad_memory


def _read(inputs: Inputs) -> list[Tensor]:
    """The inputs as the kernels read them; without a decay the memory is in its place, unread."""
    return [(inputs[-1] if v is None else v).contiguous() for v in inputs]

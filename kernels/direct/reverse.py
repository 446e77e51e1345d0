"""The reverse sweep: the exact adjoint of the direct sweep, backward in time.

With w_t the cotangent of F(y)_t, H_t that of h_t from the future, g_t that of y_t (from the loss
and the feedback of token t+1), the adjoint equation w = g + (dF/dy)^T w is block upper-triangular:

    (I - (I - Q_t)^T diag(sigma_t)) w_t = g_t + (I - Q_t)^T sum_n s_t H_t B_t
    H_{t-1} = lambda_t * (H_t + C_t w_t^T)

What does not depend on the cotangents is computed for a chunk of tokens at once, the gradient of
W^y in one product after the loop. Memory is laid out as in forward.py: h and H are (b, n, d).

Letters: b batch, t time, c tokens of a chunk, d channels, n state per channel, k reflections,
r raw values.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.backend import is_transformed
from bedouin.kernels.direct.forward import discretize_rows, gain_rows, gap_rows, write_rows_
from bedouin.kernels.direct.layout import bind_vjp, is_covered
from bedouin.kernels.direct.local import LocalFactors, factor_local, solve_local_transposed
from bedouin.kernels.direct.reference import (
    Coefficients,
    SweepOptions,
    full_raw,
    normalize_feedback,
    shifted,
)
from bedouin.kernels.direct.scratch import Scratch
from bedouin.kernels.householder import (
    apply_complement_transposed,
    combine_rows,
    mix_channels,
    rows_dot,
)

ReportBackward = Callable[[Tensor, Tensor], None]
"""Receives defect (b, t) and scale (b, t) of the adjoint equation."""


class Inputs(NamedTuple):
    """The saved tensors of a sweep, with the whole raw values."""

    y: Tensor  # (b, t, d)
    y_before: Tensor  # (b, t, d), y shifted by one token
    x: Tensor  # (b, t, d)
    full: Tensor  # (b, t, r), raw^x + W^y norm(y_before)
    W_y: Tensor | None  # (r, d)
    A: Tensor  # (d, n)
    bind_parameters: tuple[Tensor, ...]


def saved_inputs(
    y: Tensor,  # (b, t, d)
    x: Tensor,  # (b, t, d)
    raw: Tensor,  # (b, t, r)
    W_y: Tensor | None,
    A: Tensor,
    y0: Tensor,  # (b, d)
    bind_parameters: tuple[Tensor, ...],
    options: SweepOptions,
) -> Inputs:
    """What the reverse sweep reads, from what the forward one keeps."""
    full = full_raw(y, raw, W_y, y0, options)
    return Inputs(y, shifted(y, y0), x, full, W_y, A, bind_parameters)


class _Chunk(NamedTuple):
    """Tokens of a chunk: all that the cotangents do not change."""

    c: Coefficients  # (b, c, ...)
    sigma: Tensor  # (b, c, d)
    factors: LocalFactors  # (b, c, ...)
    v: Tensor  # (b, c, d), y - x
    mixed: Tensor  # (b, c, d)
    U_v: Tensor  # (b, c, k)
    h: list[Tensor]  # c + 1 of (b, n, d): before each token, and after the last


def _prepare(
    h: Tensor,
    tokens: slice,
    inputs: Inputs,
    A: Tensor,
    options: SweepOptions,
    scratch: Scratch,
) -> _Chunk:
    """Replay a chunk from the memory h (b, n, d) before it; A is (n, d)."""
    x, y = inputs.x[:, tokens], inputs.y[:, tokens]
    c = options.bind(inputs.full[:, tokens], *inputs.bind_parameters)
    v, e = y - x, options.diagonal(c.e)
    mixed = mix_channels(x, y, e, c.U, c.M)
    hs, sigmas, gaps = [h], [], []
    for i in range(x.shape[1]):
        decay, s = discretize_rows(scratch, f"h{i}", c.delta[:, i], A, options)
        gaps.append(None if e is None else gap_rows(decay, c.B[:, i], c.C[:, i], options))
        hs.append(write_rows_(scratch, scratch.mul_(decay, hs[-1]), s, mixed[:, i], c.B[:, i]))
        sigmas.append(gain_rows(s, c.B[:, i], c.C[:, i]))
    sigma = torch.stack(sigmas, 1)
    known = [gap for gap in gaps if gap is not None]
    factors = factor_local(sigma, e, c.U, c.M, torch.stack(known, 1) if known else None)
    return _Chunk(c, sigma, factors, v, mixed, rows_dot(c.U, v), hs)


def _at(values: tuple[Tensor, ...], i: int) -> list[Tensor]:
    return [value[:, i] for value in values]


class _Cotangents(NamedTuple):
    """What one reverse token hands on."""

    H: Tensor  # (b, n, d), of h_{t-1}
    x: Tensor  # (b, d)
    coefficients: Coefficients
    A: Tensor  # (n, d)
    w: Tensor  # (b, d)
    rhs: Tensor  # (b, d)


def _reverse_token(
    chunk: _Chunk,
    i: int,
    g: Tensor,
    H: Tensor,
    A: Tensor,
    options: SweepOptions,
    scratch: Scratch,
) -> _Cotangents:
    """The adjoint of token i of the chunk: from the cotangents of y_t and h_t (H is consumed)."""
    c, mixed = Coefficients(*_at(chunk.c, i)), chunk.mixed[:, i]
    e = options.diagonal(c.e)
    decay, s = discretize_rows(scratch, "decay", c.delta, A, options)
    coupled = s.shape[-2] > 1
    B_H = combine_rows(c.B, s * H if coupled else H)
    from_memory = B_H if coupled else s.squeeze(-2) * B_H
    rhs = g + apply_complement_transposed(from_memory, e, c.U, c.M)
    w = solve_local_transposed(rhs, chunk.factors.token(i))

    H = scratch.add_(H, scratch.product("outer", c.C.unsqueeze(-1), w.unsqueeze(-2)))
    grad_mixed = from_memory + chunk.sigma[:, i] * w
    if coupled:
        outer = H * mixed.unsqueeze(-2)
        grad_B, grad_s = (outer * s).sum(-1), outer * c.B.unsqueeze(-1)
    else:
        grad_B = scratch.rows_dot(H, s.squeeze(-2) * mixed)
        B_H = B_H + (c.B * c.C).sum(-1, keepdim=True) * w
        grad_s = (B_H * mixed).unsqueeze(-2)
    grad_C = scratch.rows_dot(chunk.h[i + 1], w)
    grad_decay = scratch.product("grad", H, chunk.h[i])
    discretized = decay, s, c.delta, A
    grad_delta, grad_A = _discretize_vjp(grad_decay, grad_s, *discretized, options, scratch)

    U_g = rows_dot(c.U, grad_mixed)
    M_U_v = (c.M @ chunk.U_v[:, i].unsqueeze(-1)).squeeze(-1)
    M_U_g = (c.M.mT @ U_g.unsqueeze(-1)).squeeze(-1)
    v = chunk.v[:, i]
    grad_U = M_U_v.unsqueeze(-1) * grad_mixed.unsqueeze(-2) + M_U_g.unsqueeze(-1) * v.unsqueeze(-2)
    grad_M = U_g.unsqueeze(-1) * chunk.U_v[:, i].unsqueeze(-2)
    taken = combine_rows(M_U_g, c.U)
    if e is None:
        grad_e, grad_x = torch.zeros_like(c.e), grad_mixed - taken
    else:
        grad_e = (grad_mixed * v).sum_to_size(c.e.shape)
        grad_x = (1 - e) * grad_mixed - taken
    coefficients = Coefficients(grad_delta, grad_B, grad_C, grad_e, grad_U, grad_M)
    return _Cotangents(scratch.mul_(H, decay), grad_x, coefficients, grad_A, w, rhs)


def _discretize_vjp(
    grad_decay: Tensor,  # (b, n, d)
    grad_s: Tensor,  # (b, 1, d) or (b, n, d)
    decay: Tensor,  # (b, n, d)
    s: Tensor,  # as grad_s
    delta: Tensor,  # (b, d)
    A: Tensor,  # (n, d)
    options: SweepOptions,
    scratch: Scratch,
) -> tuple[Tensor, Tensor]:
    """Cotangents of delta (b, d) and A (n, d): `discretize_vjp`, state-major, in place."""
    full = options.eigenvalues == "full"
    reach = decay + 1 if full else decay
    if options.input_scale == "one_minus_decay":
        grad_decay = scratch.sub_(grad_decay, decay.sign() * grad_s if full else grad_s)
        if full:
            # the same 2 exp(A delta), where the sum has lost its digits
            reach = torch.where(decay < 0, s, reach)
    grad_exponent = scratch.mul_(grad_decay, reach)
    grad_delta = scratch.product("outer", grad_exponent, A).sum(-2)
    grad_A = scratch.mul_(grad_exponent, delta.unsqueeze(-2)).sum(0)
    if options.input_scale == "delta":
        grad_delta = grad_delta + grad_s.squeeze(-2)
    elif options.input_scale == "bounded_delta":
        grad_delta = grad_delta + grad_s.squeeze(-2) / (1 + delta).square()
    return grad_delta, grad_A


def _bind_puller(
    inputs: Inputs, options: SweepOptions
) -> Callable[[int, Coefficients], tuple[Tensor, ...]]:
    """t, cotangents of the coefficients of token t -> those of its raw values (b, r) and of the
    bind parameters."""
    if is_covered(options.layout, inputs.full, inputs.A, inputs.bind_parameters):
        return lambda t, grads: (bind_vjp(options, inputs.full[:, t], grads),)
    # torch.func.vjp refuses hooks on saved tensors, such as those of save_on_cpu; under a transform
    # there are none, and no leaves of a graph of its own either
    pull = torch.func.vjp if is_transformed() else _vjp
    parameters = inputs.bind_parameters
    return lambda t, grads: pull(options.bind, inputs.full[:, t], *parameters)[1](grads)


def _vjp(
    bind: Callable[..., Coefficients], *operands: Tensor
) -> tuple[Coefficients, Callable[[Coefficients], tuple[Tensor, ...]]]:
    """`torch.func.vjp` for tensors that no transform holds."""
    leaves = [v.detach().requires_grad_() for v in operands]
    with torch.enable_grad():
        found = bind(*leaves)

    def pull(cotangents: Coefficients) -> tuple[Tensor, ...]:
        pairs = [(c, g) for c, g in zip(found, cotangents, strict=True) if c.requires_grad]
        outputs, grads = zip(*pairs, strict=True)
        return torch.autograd.grad(
            outputs, leaves, grads, allow_unused=True, materialize_grads=True
        )

    return found, pull


class _Totals:
    """Gradients as they come in, last token first."""

    def __init__(self, inputs: Inputs, A: Tensor) -> None:
        self.x: list[Tensor] = []
        self.raw: list[Tensor] = []
        self.A = torch.zeros_like(A)
        self.bind = [torch.zeros_like(p) for p in inputs.bind_parameters]
        self.defect: list[Tensor] = []
        self.scale: list[Tensor] = []

    def add(self, step: _Cotangents, grad_raw: Tensor, grad_bind: Sequence[Tensor]) -> None:
        self.x.append(step.x)
        self.raw.append(grad_raw)
        self.A = self.A + step.A
        self.bind = [total + g for total, g in zip(self.bind, grad_bind, strict=True)]

    def check(self, chunk: _Chunk, steps: list[_Cotangents], options: SweepOptions) -> None:
        """Defect of the adjoint equation, for a chunk at once (steps come last token first)."""
        w = torch.stack([step.w for step in reversed(steps)], 1)
        rhs = torch.stack([step.rhs for step in reversed(steps)], 1)
        c, e = chunk.c, options.diagonal(chunk.c.e)
        applied = rhs + apply_complement_transposed(chunk.sigma * w, e, c.U, c.M)
        self.defect.append((applied - w).abs().amax(-1).flip(1))
        self.scale.append(applied.abs().amax(-1).flip(1))


def reverse_sweep(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor,  # (b, d, n)
    checkpoints: Tensor,  # (b, ceil(t / keep_every), n, d)
    keep_every: int,
    inputs: Inputs,
    options: SweepOptions,
    report: ReportBackward | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, raw, W_y, A, h0, y0 and the bind parameters."""
    t_end, W_y = inputs.x.shape[1], inputs.W_y
    A = inputs.A.mT.contiguous()
    grad_feedback = torch.zeros_like(inputs.x.sum(1))
    H = grad_feedback.unsqueeze(1) + grad_h.mT  # a copy, which the tokens overwrite
    pull_bind = _bind_puller(inputs, options)
    totals, scratch = _Totals(inputs, A), Scratch(inputs.x, grad_y, grad_h)
    for start in reversed(range(0, t_end, keep_every)):
        tokens = slice(start, min(start + keep_every, t_end))
        h = checkpoints[:, start // keep_every]
        chunk = _prepare(h, tokens, inputs, A, options, scratch)
        steps = []
        for t in reversed(range(tokens.start, tokens.stop)):
            g = grad_y[:, t] + grad_feedback
            step = _reverse_token(chunk, t - start, g, H, A, options, scratch)
            grad_raw, *grad_bind = pull_bind(t, step.coefficients)
            totals.add(step, grad_raw, grad_bind)
            steps.append(step)
            H = step.H
            if W_y is not None:
                pulled = (grad_raw.to(W_y.dtype) @ W_y).to(grad_raw.dtype)
                grad_feedback = feedback_vjp(pulled, inputs.y_before[:, t], options)
        totals.check(chunk, steps, options)
    return _finish(totals, H, grad_feedback, inputs, options, report)


def _finish(
    totals: _Totals,
    H: Tensor,
    grad_feedback: Tensor,
    inputs: Inputs,
    options: SweepOptions,
    report: ReportBackward | None,
) -> tuple[Tensor | None, ...]:
    W_y = inputs.W_y
    if not totals.x:
        no_W_y = None if W_y is None else torch.zeros_like(W_y)
        zeros = (torch.zeros_like(inputs.x), torch.zeros_like(inputs.full), no_W_y)
        return (*zeros, totals.A.mT, H.mT, grad_feedback, *totals.bind)
    if report is not None:
        report(torch.cat(totals.defect, 1).flip(1), torch.cat(totals.scale, 1).flip(1))
    grad_x, grad_raw = torch.stack(totals.x[::-1], 1), torch.stack(totals.raw[::-1], 1)
    grad_W_y = weight_gradient(grad_raw, inputs, options)
    return (grad_x, grad_raw, grad_W_y, totals.A.mT, H.mT, grad_feedback, *totals.bind)


def feedback_vjp(grad: Tensor, y: Tensor, options: SweepOptions) -> Tensor:
    """Cotangent of y_{t-1} (b, d) from that of norm(y_{t-1}), in the dtype of y."""
    eps = options.feedback_norm_eps
    if eps is None:
        return grad
    rms = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return rms * (grad - y * rms.square() * (grad * y).mean(-1, keepdim=True))


def weight_gradient(grad_raw: Tensor, inputs: Inputs, options: SweepOptions) -> Tensor | None:
    """Gradient of W_y (r, d) from that of all raw values (b, t, r), in one product."""
    W_y = inputs.W_y
    if W_y is None:
        return None
    fed = normalize_feedback(inputs.y_before, options.feedback_norm_eps).to(W_y.dtype)
    # not flatten, which batched cotangents have no rule for
    return grad_raw.to(W_y.dtype).reshape(-1, W_y.shape[0]).mT @ fed.flatten(0, 1)

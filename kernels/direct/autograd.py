"""The direct sweep with its exact adjoint: one sweep backward in time, no tolerance.

With w_t the cotangent of F(y)_t, H_t that of h_t from the future, g_t that of y_t (from the loss and
from the feedback of token t+1), the adjoint equation w = g + (dF/dy)^T w is block upper-triangular:

    (I - (I - Q_t)^T diag(sigma_t)) w_t = g_t + (I - Q_t)^T sum_n s_t H_t B_t
    H_{t-1} = lambda_t * (H_t + w_t C_t^T)

The parameter gradient of W^y is one large product after the loop. Memory: h at every
`CHUNK`-th token, from which the tokens between are computed again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from bedouin.kernels.direct.local import factor_local, solve_local_transposed
from bedouin.kernels.direct.reference import (
    Coefficients,
    Sweep,
    SweepOptions,
    direct_sweep_reference,
    input_gain,
    normalize_feedback,
    project_feedback,
    write_memory,
)
from bedouin.kernels.householder import apply_complement, apply_complement_transposed
from bedouin.kernels.once import refuse_second_derivative
from bedouin.kernels.scan import contract, discretize, discretize_vjp

CHUNK = 16
"""Tokens between two kept h: the backward's workspace is this many (b, d, n) tensors."""

ReportBackward = Callable[[Tensor, Tensor], None]
"""Receives defect (b, t) and scale (b, t) of the adjoint sweep."""


class _DirectSweep(torch.autograd.Function):
    """y*, last h, kept h, defect, scale, pivot; y* is solved, or taken as `y_star` where given."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        options: SweepOptions,
        report: ReportBackward | None,
        y_star: Tensor | None,
        x: Tensor,
        raw: Tensor,
        W_y: Tensor | None,
        A: Tensor,
        h0: Tensor,
        y0: Tensor,
        *bind_parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        if y_star is None:
            sweep, kept = direct_sweep_reference(
                x, raw, W_y, A, h0, y0, bind_parameters, options, keep_every=CHUNK
            )
            y, h, defect, scale, pivot = sweep
        else:
            y = y_star.clone()
            h, kept = _remember(y, x, raw, W_y, A, h0, y0, bind_parameters, options)
            defect = scale = x.new_zeros(x.shape[:2])
            pivot = x.new_zeros(x.shape[:1])
        checkpoints = torch.stack(kept, 1) if kept else h0.unsqueeze(1)[:, :0]
        return y, h.clone(), checkpoints, defect, scale, pivot

    @staticmethod
    def setup_context(
        ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
    ) -> None:
        options, report, _, x, raw, W_y, A, h0, y0, *bind_parameters = inputs
        y, _, checkpoints, defect, scale, pivot = output
        ctx.mark_non_differentiable(checkpoints, defect, scale, pivot)
        ctx.save_for_backward(y, checkpoints, x, raw, W_y, A, y0, *bind_parameters)
        ctx.options, ctx.report = options, report  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_h: Tensor, *unused: Tensor) -> tuple[Any, ...]:
        y, checkpoints, x, raw, W_y, A, y0, *bind_parameters = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            grads = _reverse_sweep(
                grad_y,
                grad_h,
                y,
                checkpoints,
                x,
                raw,
                W_y,
                A,
                y0,
                bind_parameters,
                ctx.options,
                ctx.report,
            )
        sources = [grad_y, grad_h, x, raw, W_y, A, y0, *bind_parameters]
        return (None, None, None, *refuse_second_derivative(grads, sources))


def direct_sweep(
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor,
    y0: Tensor,
    bind_parameters: tuple[Tensor, ...],
    options: SweepOptions,
    *,
    y_star: Tensor | None = None,
    report: ReportBackward | None = None,
) -> Sweep:
    """The exact fixed point with the exact implicit gradient; shapes as `direct_sweep_reference`.

    With `y_star`, a fixed point found elsewhere, nothing is solved: the result is y_star with that
    gradient (defect, scale and pivot are then zero). Once differentiable.
    """
    y, h, _, defect, scale, pivot = _DirectSweep.apply(
        options, report, y_star, x, raw, W_y, A, h0, y0, *bind_parameters
    )
    return Sweep(y, h, defect.detach(), scale.detach(), pivot.detach())


def _shift(y: Tensor, y0: Tensor) -> Tensor:
    return torch.cat([y0.unsqueeze(1), y[:, :-1]], dim=1) if y.shape[1] else y


def _full_raw(
    y: Tensor, raw: Tensor, W_y: Tensor | None, y0: Tensor, options: SweepOptions
) -> Tensor:
    """raw^x + W^y norm(shifted y) for all tokens at once."""
    if W_y is None:
        return raw
    return raw + project_feedback(_shift(y, y0), W_y, options.feedback_norm_eps)


def _remember(
    y: Tensor,
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor,
    y0: Tensor,
    bind_parameters: tuple[Tensor, ...],
    options: SweepOptions,
) -> tuple[Tensor, list[Tensor]]:
    """The last h and every CHUNK-th one, for a known y."""
    full = _full_raw(y, raw, W_y, y0, options)
    h, kept = h0, []
    for t in range(x.shape[1]):
        if t % CHUNK == 0:
            kept.append(h)
        c = options.bind(full[:, t], *bind_parameters)
        decay, s = discretize(c.delta, A, options.input_scale, options.eigenvalues)
        mixed = x[:, t] + apply_complement(y[:, t] - x[:, t], c.e, c.U, c.M)
        h = write_memory(decay * h, s, mixed, c.B)
    return h, kept


def _reverse_sweep(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor,  # (b, d, n)
    y: Tensor,
    checkpoints: Tensor,  # (b, ceil(t / CHUNK), d, n)
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    y0: Tensor,
    bind_parameters: Sequence[Tensor],
    options: SweepOptions,
    report: ReportBackward | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, raw, W_y, A, h0, y0 and the bind parameters."""
    t_end = x.shape[1]
    full = _full_raw(y, raw, W_y, y0, options)
    y_before = _shift(y, y0)
    H, grad_feedback = grad_h, torch.zeros_like(y0)
    grad_A = torch.zeros_like(A)
    grad_bind = [torch.zeros_like(p) for p in bind_parameters]
    grad_x: list[Tensor] = []
    grad_raw: list[Tensor] = []
    defects: list[Tensor] = []
    scales: list[Tensor] = []
    for start in reversed(range(0, t_end, CHUNK)):
        tokens = range(start, min(start + CHUNK, t_end))
        memory = _replay(checkpoints[:, start // CHUNK], tokens, y, x, full, A, bind_parameters, options)
        for t in reversed(tokens):
            step = _ReverseToken(memory[t - start], x[:, t], y[:, t], A, options)
            H, grad_x_t, grad_coefficients, grad_A_t, defect, scale = step(
                grad_y[:, t] + grad_feedback, H
            )
            _, pull = torch.func.vjp(options.bind, full[:, t], *bind_parameters)
            grad_raw_t, *grad_bind_t = pull(grad_coefficients)
            grad_A = grad_A + grad_A_t
            grad_bind = [total + g for total, g in zip(grad_bind, grad_bind_t, strict=True)]
            if W_y is not None:
                grad_feedback = _feedback_vjp(grad_raw_t, y_before[:, t], W_y, options)
            grad_x.append(grad_x_t)
            grad_raw.append(grad_raw_t)
            defects.append(defect)
            scales.append(scale)
    if not grad_x:
        return (x.new_zeros(x.shape), torch.zeros_like(raw), *_zeros(W_y, A), H, grad_h.new_zeros(y0.shape), *grad_bind)
    if report is not None:
        report(torch.stack(defects, 1), torch.stack(scales, 1))
    grad_raw_all = torch.stack(grad_raw[::-1], 1)
    grad_W_y = _weight_gradient(grad_raw_all, y_before, W_y, options)
    return (
        torch.stack(grad_x[::-1], 1),
        grad_raw_all,
        grad_W_y,
        grad_A,
        H,
        grad_feedback,
        *grad_bind,
    )


def _zeros(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else torch.zeros_like(tensor) for tensor in tensors]


class _Remembered:
    """One token of the forward pass, computed again."""

    def __init__(self, h: Tensor, c: Coefficients, decay: Tensor, s: Tensor) -> None:
        self.h, self.c, self.decay, self.s = h, c, decay, s


def _replay(
    h: Tensor,
    tokens: range,
    y: Tensor,
    x: Tensor,
    full: Tensor,
    A: Tensor,
    bind_parameters: Sequence[Tensor],
    options: SweepOptions,
) -> list[_Remembered]:
    """h_{t-1}, coefficients, decay and input scale of the tokens of one chunk."""
    memory = []
    for t in tokens:
        c = options.bind(full[:, t], *bind_parameters)
        decay, s = discretize(c.delta, A, options.input_scale, options.eigenvalues)
        memory.append(_Remembered(h, c, decay, s))
        if t != tokens[-1]:
            mixed = x[:, t] + apply_complement(y[:, t] - x[:, t], c.e, c.U, c.M)
            h = write_memory(decay * h, s, mixed, c.B)
    return memory


class _ReverseToken:
    """The adjoint of one token's step at its known y_t."""

    def __init__(
        self, memory: _Remembered, x: Tensor, y: Tensor, A: Tensor, options: SweepOptions
    ) -> None:
        self.memory, self.x, self.y, self.A, self.options = memory, x, y, A, options

    def __call__(
        self, g: Tensor, H: Tensor
    ) -> tuple[Tensor, Tensor, Coefficients, Tensor, Tensor, Tensor]:
        """From the cotangents of y_t and h_t: those of h_{t-1}, x_t, the coefficients and A,
        and defect and scale of the local adjoint equation."""
        c, decay, s, h = self.memory.c, self.memory.decay, self.memory.s, self.memory.h
        sigma = input_gain(s, c.B, c.C)
        coupled = s.shape[-1] > 1
        from_memory = contract(s * H, c.B) if coupled else s.squeeze(-1) * contract(H, c.B)
        rhs = g + apply_complement_transposed(from_memory, c.e, c.U, c.M)
        w = solve_local_transposed(rhs, factor_local(sigma, c.e, c.U, c.M))
        applied = rhs + apply_complement_transposed(sigma * w, c.e, c.U, c.M)
        defect, scale = (applied - w).abs().amax(-1), applied.abs().amax(-1)

        H = H + w.unsqueeze(-1) * c.C.unsqueeze(-2)
        grad_mixed = from_memory + sigma * w
        v = self.y - self.x
        mixed = self.x + apply_complement(v, c.e, c.U, c.M)
        h_new = write_memory(decay * h, s, mixed, c.B)
        grad_C = contract(h_new.mT, w)
        if coupled:
            outer = H * mixed.unsqueeze(-1)
            grad_B = (outer * s).sum(-2)
            grad_s = outer * c.B.unsqueeze(-2)
        else:
            grad_B = contract(H.mT, s.squeeze(-1) * mixed)
            grad_s = (contract(H, c.B) * mixed).unsqueeze(-1)
        grad_delta, grad_A = discretize_vjp(
            H * h, grad_s, decay, c.delta, self.A, self.options.input_scale, self.options.eigenvalues
        )
        grad_x = grad_mixed - apply_complement_transposed(grad_mixed, c.e, c.U, c.M)
        grad_mix = _complement_vjp(grad_mixed, v, c)
        grads = Coefficients(grad_delta, grad_B, grad_C, *grad_mix)
        return decay * H, grad_x, grads, grad_A, defect, scale


def _complement_vjp(g: Tensor, v: Tensor, c: Coefficients) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of e, U, M from g, that of (I - Q) v = e * v + U^T M U v."""
    U_v, U_g = c.U @ v.unsqueeze(-1), c.U @ g.unsqueeze(-1)
    grad_U = (c.M @ U_v) * g.unsqueeze(-2) + (c.M.mT @ U_g) * v.unsqueeze(-2)
    grad_e = (g * v).sum_to_size(c.e.shape) if c.e.shape != g.shape else g * v
    return grad_e, grad_U, U_g @ U_v.mT


def _feedback_vjp(grad_raw: Tensor, y: Tensor, W_y: Tensor, options: SweepOptions) -> Tensor:
    """Cotangent of y_{t-1} (b, d) from that of raw_t (b, r)."""
    grad = (grad_raw.to(W_y.dtype) @ W_y).to(y.dtype)
    eps = options.feedback_norm_eps
    if eps is None:
        return grad
    rms = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return rms * (grad - y * rms.square() * (grad * y).mean(-1, keepdim=True))


def _weight_gradient(
    grad_raw: Tensor,  # (b, t, r)
    y_before: Tensor,  # (b, t, d)
    W_y: Tensor | None,
    options: SweepOptions,
) -> Tensor | None:
    if W_y is None:
        return None
    inputs = normalize_feedback(y_before, options.feedback_norm_eps).to(W_y.dtype)
    return grad_raw.to(W_y.dtype).flatten(0, 1).mT @ inputs.flatten(0, 1)

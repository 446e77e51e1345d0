"""The reverse sweep: the exact adjoint of a fixed point y, backward in time.

With w_t the cotangent of F(y)_t, H_t that of h_t from the future, g_t that of y_t (from the loss
and the feedback of token t+1), the adjoint equation w = g + (dF/dy)^T w is block upper-triangular:

    (I - (I - Q_t)^T diag(sigma_t)) w_t = g_t + (I - Q_t)^T sum_n s_t H_t B_t

Given w_t, all other cotangents are those that autograd takes back through token t, for the y that
is known: a solver's y is differentiated where it is, and not where the sweep would find it. The
memories are computed again for a chunk of tokens at once, so that no graph is longer than that.

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import is_transformed
from bedouin.kernels.direct.limits import CHUNK
from bedouin.kernels.direct.local import solve_local_transposed
from bedouin.kernels.direct.reference import LocalEquation
from bedouin.kernels.feedback import (
    feedback_weight_gradient,
    normalize_feedback,
    project_feedback_vjp,
    shifted,
    with_feedback,
)
from bedouin.kernels.householder import apply_complement_transposed
from bedouin.kernels.operands import Bind, Operands, Parameterization
from bedouin.kernels.scan import contract

ReportBackward = Callable[[Tensor, Tensor], None]
"""Receives defect (b, t) and scale (b, t) of the adjoint equation."""


def _vjp(
    function: Callable[..., Any],
    *operands: Tensor,  # any shapes
) -> tuple[Any, Callable[[Any], tuple[Tensor, ...]]]:
    """`torch.func.vjp`, outside of transforms by plain autograd: it raises under hooks on saved
    tensors such as those of save_on_cpu, which are never active under a transform."""
    if is_transformed():
        found: Any = torch.func.vjp(function, *operands)
        return found[0], found[1]
    leaves = [v.detach().requires_grad_() for v in operands]
    with torch.enable_grad():
        outputs = function(*leaves)

    def pullback(cotangents: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            outputs, leaves, cotangents, allow_unused=True, materialize_grads=True
        )

    return outputs, pullback


def reverse_sweep(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor,  # (b, d, n)
    y: Tensor,  # (b, t, d)
    kept: Tensor,  # (b, ceil(t / CHUNK), n, d)
    operands: Operands,  # as `Operands.wide` gives them
    options: Parameterization,
    bind: Bind,
    bind_parameters: tuple[Tensor, ...],  # any shapes
    report: ReportBackward | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, raw, W_y, A, h0, y0 and the bind parameters; None without W_y."""
    x, _, W_y, A, _, y0 = operands
    assert y0 is not None
    raw, before = with_feedback(y, operands, options), shifted(y, y0)
    t_end, eps = x.shape[1], options.feedback_norm_eps

    def write(
        x: Tensor,  # (b, d)
        raw: Tensor,  # (b, r)
        h: Tensor,  # (b, d, n)
        y: Tensor,  # (b, d)
        A: Tensor,  # (d, n) or (H, d, n)
        *parameters: Tensor,  # any shapes
    ) -> tuple[Tensor, Tensor]:  # (b, d), (b, d, n)
        token = LocalEquation.of(x, raw, h, A, options, bind, parameters)
        h = token.write(y)[1]
        return contract(h, token.c.C), h

    H, grad_before = grad_h, torch.zeros_like(x.sum(1))
    totals = [torch.zeros_like(v) for v in (A, *bind_parameters)]
    # of each token, from the last to the first: the gradients of x and raw, defect and scale
    found: list[tuple[Tensor, ...]] = []
    for start in reversed(range(0, t_end, CHUNK)):
        h, tokens = kept[:, start // CHUNK].mT, []
        for t in range(start, min(start + CHUNK, t_end)):
            given = x[:, t], raw[:, t], h
            how = options, bind, bind_parameters
            equation = LocalEquation.of(*given, A, *how)
            (_, h), pull = _vjp(write, *given, y[:, t], A, *bind_parameters)
            tokens.append((t, equation, pull))
        for t, equation, pull in reversed(tokens):
            g, c = grad_y[:, t] + grad_before, equation.c
            from_memory = contract(equation.s * H, c.B)
            rhs = g + apply_complement_transposed(from_memory, equation.e, c.U, c.M)
            w = solve_local_transposed(rhs, equation.factors())
            to_x, to_raw, H, moved, *others = pull((w, H))
            totals = [total + grad for total, grad in zip(totals, others, strict=True)]
            # (dF/dy)^T w
            applied = g + moved
            norms = (v.abs().amax(-1) for v in (applied - w, applied))
            found.append((to_x, to_raw, *norms))
            if W_y is not None:
                grad_before = project_feedback_vjp(to_raw, before[:, t], W_y, eps)
    if not found:
        no_W_y = None if W_y is None else torch.zeros_like(W_y)
        zeros = torch.zeros_like(x), torch.zeros_like(raw), no_W_y
        return *zeros, totals[0], H, grad_before, *totals[1:]
    to_x, to_raw, defect, scale = (
        torch.stack(values[::-1], 1) for values in zip(*found, strict=True)
    )
    if report is not None:
        report(defect, scale)
    grad_W_y = None
    if W_y is not None:
        grad_W_y = feedback_weight_gradient(to_raw, normalize_feedback(before, eps), W_y)
    return to_x, to_raw, grad_W_y, totals[0], H, grad_before, *totals[1:]

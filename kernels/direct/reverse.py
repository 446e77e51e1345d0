"""The reverse sweep: the exact adjoint of the direct sweep, backward in time.

With w_t the cotangent of F(y)_t, H_t that of h_t from the future, g_t that of y_t (from the loss
and the feedback of token t+1), the adjoint equation w = g + (dF/dy)^T w is block upper-triangular:

    (I - (I - Q_t)^T diag(sigma_t)) w_t = g_t + (I - Q_t)^T sum_n s_t H_t B_t
    A'_t    = H_t + C_t w_t^T                            the cotangent of h_t, and of a'_t
    A_t     = A'_t (I - beta^e_t B_t B_t^T)              that of a_t = lambda_t * h_{t-1}
    H_{t-1} = lambda_t * A_t

With r = a_t B_t, which is erased, the cotangent of beta^e_t is -sum_d r * (A'_t B_t), and that of
B_t gets -beta^e_t (A'_t^T r + a_t^T A'_t B_t). With feedback of x the cotangent of x_t goes through
W^y to y_{t-1} as those of the raw values do.

Everything that does not depend on the cotangents is computed for a chunk of tokens at once, and the
gradient of W^y in one product after the loop. As in forward.py, h and H are stored as (b, n, d).

Letters: b batch, t time, c tokens of a chunk, d channels, n state per channel, k reflections,
r raw values, f those of them with feedback, H heads (kernels/heads.py).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.backend import is_transformed
from bedouin.kernels.direct.forward import (
    discretize_rows,
    erase_rows_,
    gain_rows,
    gap_rows,
    write_rows_,
)
from bedouin.kernels.direct.layout import bind_vjp, is_covered
from bedouin.kernels.direct.local import LocalFactors, factor_local, solve_local_transposed
from bedouin.kernels.direct.scratch import Scratch
from bedouin.kernels.feedback import (
    fed_cotangent,
    feedback_weight_gradient,
    normalize_feedback,
    normalize_feedback_vjp,
    project_feedback_transposed,
    shifted,
    with_feedback,
)
from bedouin.kernels.heads import sum_samples
from bedouin.kernels.householder import (
    apply_complement_transposed,
    combine_rows,
    mix_channels,
    rows_dot,
    times,
)
from bedouin.kernels.operands import Bind, Coefficients, Operands, Parameterization

ReportBackward = Callable[[Tensor, Tensor], None]
"""Receives defect (b, t) and scale (b, t) of the adjoint equation."""


class SolvedSweep(NamedTuple):
    """A fixed point with all inputs of its solve, as the reverse sweep reads them."""

    y: Tensor  # (b, t, d)
    full_x: Tensor  # (b, t, d), x with its feedback
    full_raw: Tensor  # (b, t, r), raw^x + W^y norm(y_{t-1})
    operands: Operands
    parameterization: Parameterization
    bind: Bind
    bind_parameters: tuple[Tensor, ...]
    memory: tuple[Tensor, ...] = ()
    """What the sweep has left to its adjoint, from `allocate_steps` in loops.py."""
    h: Tensor | None = None  # (b, d, n), the last, if the memory is that of a single chunk

    @staticmethod
    def of(
        y: Tensor,  # (b, t, d)
        operands: Operands,  # as `Operands.wide` gives them
        parameterization: Parameterization,
        bind: Bind,
        bind_parameters: tuple[Tensor, ...],  # any shapes
        memory: tuple[Tensor, ...] = (),
        h: Tensor | None = None,  # (b, d, n)
    ) -> "SolvedSweep":
        """`full_x` and `full_raw` are computed where the memory does not contain them."""
        if memory:
            r, full = operands.raw.shape[-1], memory[0].transpose(0, 1)
            full_x = full[..., r:] if parameterization.feeds_x else operands.x
            full_raw = full[..., :r]
        else:
            full_x, full_raw = with_feedback(y, operands, parameterization)
        known = y, full_x, full_raw, operands, parameterization, bind, bind_parameters
        return SolvedSweep(*known, memory, h)

    @property
    def y_before(self) -> Tensor:  # (b, t, d)
        """y_{t-1} for every t."""
        assert self.operands.y0 is not None
        return shifted(self.y, self.operands.y0)


class _Chunk(NamedTuple):
    """The quantities of a chunk of tokens that do not depend on the cotangents."""

    c: Coefficients  # (b, c, ...)
    sigma: Tensor  # (b, c, d)
    factors: LocalFactors  # (b, c, ...)
    v: Tensor  # (b, c, d), y - x
    mixed: Tensor  # (b, c, d)
    U_v: Tensor  # (b, c, k)
    h: list[Tensor]  # c + 1 of (b, n, d): before each token, and after the last


def _prepare(
    h: Tensor,  # (b, n, d), before the chunk
    tokens: slice,
    solved: SolvedSweep,
    A: Tensor,  # (n, d) or (b, n, d)
    scratch: Scratch,
) -> _Chunk:
    """Recompute the memory of a chunk, and everything else that no cotangent enters."""
    options = solved.parameterization
    x, y = solved.full_x[:, tokens], solved.y[:, tokens]
    c = solved.bind(solved.full_raw[:, tokens], *solved.bind_parameters)
    v, e = y - x, options.diagonal(c.e)
    mixed = mix_channels(x, y, e, c.U, c.M)
    hs, sigmas, gaps = [h], [], []
    for i in range(x.shape[1]):
        decay, s = discretize_rows(scratch, f"h{i}", c.delta[:, i], A, options)
        gaps.append(None if e is None else gap_rows(decay, c.B[:, i], c.C[:, i], options))
        decayed = erase_rows_(scratch, scratch.mul_(decay, hs[-1]), c.B[:, i], c.erase[:, i])
        hs.append(write_rows_(scratch, decayed, s, mixed[:, i], c.B[:, i]))
        sigmas.append(gain_rows(s, c.B[:, i], c.C[:, i]))
    sigma = torch.stack(sigmas, 1)
    known = [gap for gap in gaps if gap is not None]
    factors = factor_local(sigma, e, c.U, c.M, torch.stack(known, 1) if known else None)
    return _Chunk(c, sigma, factors, v, mixed, rows_dot(c.U, v), hs)


def _at(
    values: tuple[Tensor, ...],  # each (b, c, ...)
    i: int,
) -> list[Tensor]:  # each (b, ...)
    return [value[:, i] for value in values]


class _Cotangents(NamedTuple):
    """The cotangents that the adjoint of one token computes."""

    H: Tensor  # (b, n, d), of h_{t-1}
    x: Tensor  # (b, d)
    coefficients: Coefficients
    A: Tensor  # (n, d) or (b, n, d), the latter valid until the next token
    w: Tensor  # (b, d)
    rhs: Tensor  # (b, d)


def _reverse_token(
    chunk: _Chunk,
    i: int,
    g: Tensor,  # (b, d), the cotangent of y_t
    H: Tensor,  # (b, n, d), the cotangent of h_t, overwritten
    A: Tensor,  # (n, d) or (b, n, d)
    options: Parameterization,
    scratch: Scratch,
) -> _Cotangents:
    """The adjoint of token i of the chunk."""
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
    grad_erase = torch.zeros_like(c.erase)
    if c.erase.shape[-1]:
        decayed = decay * chunk.h[i]
        erased, B_H = combine_rows(c.B, decayed), combine_rows(c.B, H)
        grad_erase = -(erased * B_H).sum(-1, keepdim=True)
        grad_erased = -c.erase * B_H
        grad_B = grad_B - c.erase * scratch.rows_dot(H, erased)
        grad_B = grad_B + scratch.rows_dot(decayed, grad_erased)
        H = scratch.add_(H, scratch.product("outer", c.B.unsqueeze(-1), grad_erased.unsqueeze(-2)))
    grad_decay = scratch.product("grad", H, chunk.h[i])
    discretized = decay, s, c.delta, A
    grad_delta, grad_A = _discretize_vjp(grad_decay, grad_s, *discretized, options, scratch)

    U_g = rows_dot(c.U, grad_mixed)
    M_U_v, M_U_g = times(c.M, chunk.U_v[:, i]), times(c.M.mT, U_g)
    v = chunk.v[:, i]
    grad_U = M_U_v.unsqueeze(-1) * grad_mixed.unsqueeze(-2) + M_U_g.unsqueeze(-1) * v.unsqueeze(-2)
    grad_M = U_g.unsqueeze(-1) * chunk.U_v[:, i].unsqueeze(-2)
    taken = combine_rows(M_U_g, c.U)
    if e is None:
        grad_e, grad_x = torch.zeros_like(c.e), grad_mixed - taken
    else:
        grad_e = (grad_mixed * v).sum_to_size(c.e.shape)
        grad_x = (1 - e) * grad_mixed - taken
    coefficients = Coefficients(grad_delta, grad_B, grad_C, grad_e, grad_U, grad_M, grad_erase)
    return _Cotangents(scratch.mul_(H, decay), grad_x, coefficients, grad_A, w, rhs)


def _discretize_vjp(
    grad_decay: Tensor,  # (b, n, d)
    grad_s: Tensor,  # (b, 1, d) or (b, n, d)
    decay: Tensor,  # (b, n, d)
    s: Tensor,  # as grad_s
    delta: Tensor,  # (b, d)
    A: Tensor,  # (n, d) or (b, n, d)
    options: Parameterization,
    scratch: Scratch,
) -> tuple[Tensor, Tensor]:
    """Cotangents of delta (b, d) and of A, for `discretize_rows`; overwrites grad_decay."""
    full = options.eigenvalues == "full"
    reach = decay + 1 if full else decay
    if options.input_scale == "one_minus_decay":
        grad_decay = scratch.sub_(grad_decay, decay.sign() * grad_s if full else grad_s)
        if full:
            # also 2 exp(A delta), but without the cancellation of decay + 1 near -1
            reach = torch.where(decay < 0, s, reach)
    grad_exponent = scratch.mul_(grad_decay, reach)
    grad_delta = scratch.product("outer", grad_exponent, A).sum(-2)
    grad_A = scratch.mul_(grad_exponent, delta.unsqueeze(-2))
    if A.dim() == 2:
        grad_A = grad_A.sum(0)
    if options.input_scale == "delta":
        grad_delta = grad_delta + grad_s.squeeze(-2)
    elif options.input_scale == "bounded_delta":
        grad_delta = grad_delta + grad_s.squeeze(-2) / (1 + delta).square()
    return grad_delta, grad_A


def _bind_adjoint(
    solved: SolvedSweep,
) -> Callable[[int, Coefficients], tuple[Tensor, ...]]:
    """The adjoint of `bind`: a function of t and the cotangents of the coefficients of token t that
    returns the cotangents of its raw values (b, r) and of the bind parameters."""
    raw, parameters = solved.full_raw, solved.bind_parameters
    layout = solved.parameterization.layout
    if layout is not None and is_covered(layout, raw, solved.operands.A, parameters):
        return lambda t, grads: (bind_vjp(layout, raw[:, t], grads),)
    # torch.func.vjp raises under hooks on saved tensors such as those of save_on_cpu. Under a
    # transform no such hooks are active, and `_vjp` cannot build a graph with leaves of its own
    vjp = torch.func.vjp if is_transformed() else _vjp
    return lambda t, grads: vjp(solved.bind, raw[:, t], *parameters)[1](grads)


def _vjp(
    bind: Bind,
    *operands: Tensor,  # raw (b, r) and the bind parameters
) -> tuple[Coefficients, Callable[[Coefficients], tuple[Tensor, ...]]]:
    """`torch.func.vjp` by plain autograd, for use outside of transforms."""
    leaves = [v.detach().requires_grad_() for v in operands]
    with torch.enable_grad():
        found = bind(*leaves)

    def pullback(cotangents: Coefficients) -> tuple[Tensor, ...]:
        pairs = [(c, g) for c, g in zip(found, cotangents, strict=True) if c.requires_grad]
        outputs, grads = zip(*pairs, strict=True)
        return torch.autograd.grad(
            outputs, leaves, grads, allow_unused=True, materialize_grads=True
        )

    return found, pullback


class _Totals:
    """Gradients accumulated over the tokens, from the last to the first."""

    def __init__(self, solved: SolvedSweep) -> None:
        self.x: list[Tensor] = []
        self.raw: list[Tensor] = []
        self.A = torch.zeros_like(solved.operands.A.mT)  # (n, d) or (H, n, d)
        self.bind = [torch.zeros_like(p) for p in solved.bind_parameters]
        self.defect: list[Tensor] = []
        self.scale: list[Tensor] = []

    def add(
        self,
        step: _Cotangents,
        grad_raw: Tensor,  # (b, r)
        grad_bind: Sequence[Tensor],  # of the bind parameters
    ) -> None:
        self.x.append(step.x)
        self.raw.append(grad_raw)
        self.A = self.A + (step.A if self.A.dim() == 2 else sum_samples(step.A, len(self.A)))
        self.bind = [total + g for total, g in zip(self.bind, grad_bind, strict=True)]

    def check(self, chunk: _Chunk, steps: list[_Cotangents], options: Parameterization) -> None:
        """The defect of the adjoint equation, for a chunk at once (`steps`: last token first)."""
        w = torch.stack([step.w for step in reversed(steps)], 1)
        rhs = torch.stack([step.rhs for step in reversed(steps)], 1)
        c, e = chunk.c, options.diagonal(chunk.c.e)
        applied = rhs + apply_complement_transposed(chunk.sigma * w, e, c.U, c.M)
        self.defect.append((applied - w).abs().amax(-1).flip(1))
        self.scale.append(applied.abs().amax(-1).flip(1))


def reverse_sweep(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor,  # (b, d, n)
    kept: Tensor,  # (b, ceil(t / keep_every), n, d)
    keep_every: int,
    solved: SolvedSweep,
    report: ReportBackward | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, raw, W_y, A, h0, y0 and the bind parameters; None without W_y."""
    x, _, W_y, *_ = solved.operands
    options, t_end = solved.parameterization, x.shape[1]
    A = solved.operands.A_rows()
    grad_feedback = torch.zeros_like(x.sum(1))
    H = grad_feedback.unsqueeze(1) + grad_h.mT  # a copy, which the tokens overwrite
    bind_adjoint = _bind_adjoint(solved)
    totals, scratch, before = _Totals(solved), Scratch(x, grad_y, grad_h), solved.y_before
    for start in reversed(range(0, t_end, keep_every)):
        tokens = slice(start, min(start + keep_every, t_end))
        chunk = _prepare(kept[:, start // keep_every], tokens, solved, A, scratch)
        steps = []
        for t in reversed(range(tokens.start, tokens.stop)):
            g = grad_y[:, t] + grad_feedback
            step = _reverse_token(chunk, t - start, g, H, A, options, scratch)
            grad_raw, *grad_bind = bind_adjoint(t, step.coefficients)
            totals.add(step, grad_raw, grad_bind)
            steps.append(step)
            H = step.H
            if W_y is not None:
                grad_fed = fed_cotangent(step.x, grad_raw, W_y.shape[-2], options.feeds_x)
                grad_normed = project_feedback_transposed(grad_fed, W_y, x.shape[-1])
                eps = options.feedback_norm_eps
                grad_feedback = normalize_feedback_vjp(grad_normed, before[:, t], eps)
        totals.check(chunk, steps, options)
    return _finish(totals, H, grad_feedback, solved, report)


def _finish(
    totals: _Totals,
    H: Tensor,  # (b, n, d), the cotangent of h0
    grad_feedback: Tensor,  # (b, d), that of y0
    solved: SolvedSweep,
    report: ReportBackward | None,
) -> tuple[Tensor | None, ...]:
    """The gradients in the order of `reverse_sweep`; reports the defect."""
    x, _, W_y, *_ = solved.operands
    if not totals.x:
        no_W_y = None if W_y is None else torch.zeros_like(W_y)
        zeros = (torch.zeros_like(x), torch.zeros_like(solved.full_raw), no_W_y)
        return (*zeros, totals.A.mT, H.mT, grad_feedback, *totals.bind)
    if report is not None:
        report(torch.cat(totals.defect, 1).flip(1), torch.cat(totals.scale, 1).flip(1))
    grad_x, grad_raw = torch.stack(totals.x[::-1], 1), torch.stack(totals.raw[::-1], 1)
    grad_W_y, options = None, solved.parameterization
    if W_y is not None:
        grad_fed = fed_cotangent(grad_x, grad_raw, W_y.shape[-2], options.feeds_x)
        normed = normalize_feedback(solved.y_before, options.feedback_norm_eps)
        grad_W_y = feedback_weight_gradient(grad_fed, normed, W_y)
    return (grad_x, grad_raw, grad_W_y, totals.A.mT, H.mT, grad_feedback, *totals.bind)

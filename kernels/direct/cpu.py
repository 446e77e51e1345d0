"""The exact sweep and its adjoint in plain torch, for Householder layouts: few calls a token.

Same results as reference.py and reverse.py, which serve every mixer and transform and take 2.4 to
3.3 times as long (forward and backward on one core: 8 samples of 100 tokens, one and four heads of
128 channels, 16 states, two reflections). Of the mixer only k numbers a token are part of the
recurrence: with p = (lambda * h_{t-1}) C, the strict upper triangle R of U U^T and S = U
diag(sigma) U^T, the fixed point of a token is y = p + sigma * x~, x~ = x + U^T e, where

    E e = diag(beta) U (p + (sigma - 1) * x),    E = I + diag(beta) (R - S).

E has the determinant of the matrix I - S T of local.py, whose pivots the statistics report. It and
its inverse are computed in float64, so that in float32 e is as accurate as after an elimination
with pivots. For a y that is known, e = T U (y - x).

The adjoint is taken at a y that is known. With g_t the cotangent of y_t, from the loss and from the
feedback of the next token, H_t that of h_t from the future, w_t that of F(y)_t and m_t that of
x~_t, again k numbers, q, couple the channels:

    m = s * (H B) + sigma * g;    q = E^-T U m;    z = U^T (beta * q)
    w = g + z;    m <- m + sigma * z;    H <- H + w C^T

Then m - z is the cotangent of x, and with f = beta * q and G the strict upper triangle of f e^T

    of U:        e m^T + f (y - x)^T - (G + G^T) U
    of beta:     q * e / beta
    of lambda:   H * h_{t-1}

What x alone determines, and of the adjoint all that cotangents do not enter, is computed for a
chunk of tokens at once. Autograd through these formulas takes about twice as long, because it has
three times as many calls a token. The memory is stored as (b, n, d), so that sums over the n states
run along contiguous channels. Nothing synchronizes with the host: a CUDA graph can capture it all.

Letters: b batch, t time, c tokens of a chunk, i rows (one for each sample of a token, token by
token), d channels, n state per channel, k reflections, r raw values. Vectors have an axis of size
1, so that products of matrices need no views.
"""

import math
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from bedouin.kernels.direct.layout import activate_delta, activation_slope, state_major
from bedouin.kernels.direct.limits import CHUNK
from bedouin.kernels.direct.local import factorize
from bedouin.kernels.feedback import (
    feedback_weight_gradient,
    normalize_feedback,
    project_feedback,
    project_feedback_vjp,
    shifted,
    with_feedback,
)
from bedouin.kernels.heads import count_heads, per_sample, sum_samples
from bedouin.kernels.householder import unit_and_factor, unit_vjp, wy_factor_of
from bedouin.kernels.operands import Operands, Parameterization

LOG2E = 1 / math.log(2)

RowsT = TypeVar("RowsT", bound=tuple[Tensor, ...])


class Rows(NamedTuple):
    """What raw values determine."""

    delta: Tensor  # (i, 1, d)
    s: Tensor  # (i, 1, d), or for "one_minus_decay" (i, n, d)
    decay: Tensor  # (i, n, d), lambda
    slope: Tensor  # (i, n, d), the derivative of lambda by A Delta, without cancellation
    pair: Tensor  # (i, 2, n), B and C
    pair_factor: Tensor  # (i, 2, 1), by which their raw values are multiplied, if they have some
    B: Tensor  # (i, 1, n), a view of the pair, as C
    C: Tensor  # (i, 1, n)
    sigma: Tensor  # (i, 1, d)
    U: Tensor  # (i, k, d)
    u_factor: Tensor  # (i, k, 1)
    gate: Tensor  # (i, 1, k), sigmoid(alpha)
    beta: Tensor  # (i, 1, k)
    R: Tensor  # (i, k, k)
    inverse: Tensor  # (i, k, k), of E, transposed


class Known(NamedTuple):
    """What the adjoint reads of rows whose y is known, beside `Rows`."""

    v: Tensor  # (i, 1, d), y - x
    e: Tensor  # (i, 1, k)
    T: Tensor  # (i, k, k)
    mixed: Tensor  # (i, 1, d), x~
    slope: Tensor  # (i, 1, d), of Delta's activation
    slope_s: Tensor  # (i, 1, d), the derivative of s by the raw value of Delta


class Cotangents(NamedTuple):
    """Those of the rows of a token."""

    w: Tensor  # (i, 1, d), of F(y)
    m: Tensor  # (i, 1, d), of x~
    z: Tensor  # (i, 1, d)
    delta: Tensor  # (i, 1, d), of the raw values, as alpha
    pair: Tensor  # (i, 2, n)
    U: Tensor  # (i, k, d)
    alpha: Tensor  # (i, 1, k)


def split_tokens(
    rows: RowsT,  # of (i, ...)
    b: int,
) -> list[RowsT]:
    """The b rows of each token."""
    make: Any = type(rows)
    return [make(*parts) for parts in zip(*(v.split(b) for v in rows), strict=True)]


def rows_of(
    v: Tensor,  # (b, t, r)
    tokens: slice,
) -> Tensor:  # (i, 1, r)
    """The rows of a chunk of tokens."""
    return v[:, tokens].transpose(0, 1).reshape(-1, 1, v.shape[-1])


def of_samples(
    rows: Tensor,  # (i, 1, r)
    b: int,
) -> Tensor:  # (b, c, r)
    """The inverse of `rows_of`."""
    return rows.view(-1, b, rows.shape[-1]).transpose(0, 1)


def _combine(
    a: Tensor,  # (i, 1, k)
    rows: Tensor,  # (i, k, d)
) -> Tensor:  # (i, 1, d)
    """U^T a. On a CPU a batched product of two columns takes three times as long."""
    return (a.mT * rows).sum(1, keepdim=True)


class Equations:
    """The equations of all rows of a token or of a chunk."""

    def __init__(self, operands: Operands, options: Parameterization, count: int) -> None:
        """`operands` as `Operands.wide` gives them, `count` the most rows at once."""
        self.options, self.layout = options, options.known_layout()
        A = operands.A.mT.contiguous()
        # (b or 1, n, d)
        self.A = per_sample(A, len(operands.x)) if A.dim() == 3 else A.unsqueeze(0)
        self.exponents, self.k = self.A * LOG2E, self.layout.num_householder
        self.n, self.d = A.shape[-2:]
        self.is_full = options.eigenvalues == "full"
        self.coupled = options.input_scale == "one_minus_decay"
        # the largest tensor, whose allocation for every chunk would take longer than its values
        self.power = self.A.new_empty(count, self.n, self.d)
        # filled in where they are: a copy to a GPU cannot be captured
        self.identity = self.A.new_ones(self.k).diag()
        self.above = self.A.new_ones(self.k, self.k).triu(1)

    def rows(self, raw: Tensor) -> Rows:  # raw: (i, 1, r), with its feedback
        """Valid until the next call, which overwrites decay and slope."""
        i, memory = len(raw), 2 * self.n if self.layout.selective else 0
        sizes = [self.d, memory, self.k * self.d, self.k]
        raw_delta, raw_pair, u, alpha = raw.split(sizes, -1)
        delta = activate_delta(self.layout.activation, raw_delta)
        s, *decays = self._discretize(delta)
        pair, pair_factor = raw.new_ones(i, 2, self.n), raw_pair
        if self.layout.selective:
            pair, pair_factor = unit_and_factor(raw_pair.view(i, 2, self.n))
        B, C = pair.split(1, 1)
        sigma = torch.bmm(B * C, s) if self.coupled else s * torch.bmm(B, C.mT)
        of_memory = delta, s, *decays, pair, pair_factor, B, C, sigma
        return Rows(*of_memory, *self._mixer(u.view(i, self.k, self.d), alpha, sigma))

    def _mixer(
        self,
        u: Tensor,  # (i, k, d), raw
        alpha: Tensor,  # (i, 1, k), raw
        sigma: Tensor,  # (i, 1, d)
    ) -> tuple[Tensor, ...]:
        """The fields of `Rows` from U on."""
        if not self.k:
            return u, u[..., :1], alpha, alpha, u[..., :0], u[..., :0]
        gate = torch.sigmoid(alpha)
        beta = gate if self.layout.beta_max == 1 else self.layout.beta_max * gate
        U, factor = unit_and_factor(u)
        R = torch.bmm(U, U.mT) * self.above
        S = torch.bmm((U * sigma).double(), U.double().mT)
        E = self.identity + beta.mT * (R - S)
        inverse = torch.linalg.inv_ex(E)[0].mT if self.k > 1 else 1 / E
        return U, factor, gate, beta, R, inverse.to(U.dtype)

    def _discretize(self, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """s, lambda and its slope of Delta (i, 1, d), with the shapes of `Rows`."""
        power, by_token = self.power[: len(delta)], (-1, len(self.exponents))
        steps = delta.unflatten(0, by_token)
        torch.mul(steps, self.exponents, out=power.unflatten(0, by_token))
        s = (power / LOG2E).expm1_().neg_() if self.coupled else delta
        # torch computes exp by a library that takes three times as long on some processors
        power.exp2_()
        if self.coupled and self.is_full:
            s = torch.minimum(s, power).mul_(2)  # 1 - |lambda|
        elif self.options.input_scale == "bounded_delta":
            s = delta / (1 + delta)
        slope = power.mul_(2) if self.is_full else power
        return s, slope - 1 if self.is_full else slope, slope

    def solve(
        self,
        rows: Rows,  # of a token
        x: Tensor,  # (b, 1, d)
        p: Tensor,  # (b, 1, d)
    ) -> Tensor:  # (b, 1, d)
        """x~, which is x without reflections."""
        if not self.k:
            return x
        right = torch.bmm(torch.addcmul(p, rows.sigma - 1, x), rows.U.mT) * rows.beta
        return x + _combine(torch.bmm(right, rows.inverse), rows.U)

    def statistics(
        self,
        given: tuple[Tensor, ...],  # s, sigma, U, beta, R as in `Rows`
        x: Tensor,  # (i, 1, d)
        p: Tensor,  # (i, 1, d)
        y: Tensor,  # (i, 1, d)
    ) -> Tensor:  # (4, i)
        """Defect, scale, magnitude and pivot, as `Sweep` and `smallest_pivot` define them: F(y) - y
        vanishes for any e, so that x~ is computed anew from y."""
        s, sigma, U, beta, R = given
        mixed, pivot = x, x.new_ones(len(x))
        if self.k:
            T = wy_factor_of(R, beta.squeeze(1))
            mixed = x + _combine(torch.bmm(torch.bmm(y - x, U.mT), T.mT), U)
            S = torch.bmm(U * sigma, U.mT)
            LU, _ = factorize(torch.baddbmm(self.identity, S, T, alpha=-1))
            pivot = torch.fmin(LU.diagonal(dim1=-2, dim2=-1).abs().amin(-1), pivot)
        F = torch.addcmul(p, sigma, mixed)
        size = s.amax(-2, keepdim=True) * (x.abs() + mixed.abs())  # s is not negative
        norms = [v.amax((1, 2)) for v in ((F - y).abs(), F.abs(), size)]
        # NaN after a singular token must not hide its pivot
        return torch.stack([*norms, pivot.nan_to_num(nan=torch.inf)])


def cpu_sweep(
    operands: Operands, parameterization: Parameterization
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (b, t, d), the last h (b, n, d), the h before tokens 0, CHUNK, 2 CHUNK, ...
    (b, ceil(t / CHUNK), n, d), and the statistics (4, b, t): defect, scale, magnitude and pivot."""
    x, raw, W_y, A, h0, y0 = wide = operands.wide()
    assert h0 is not None and y0 is not None
    (b, t_end, d), slots = x.shape, -(-x.shape[1] // CHUNK)
    ys, kept = x.new_empty(b, t_end, d), x.new_empty(b, slots, *A.mT.shape[-2:])
    statistics, h = x.new_empty(4, b, t_end), state_major(h0)
    if not x.numel():
        return ys, h, kept, statistics
    # all tokens of a chunk at once, unless they have feedback
    count = b if W_y is not None else b * min(CHUNK, t_end)
    equations = Equations(wide, parameterization, count)
    y, memories = y0.unsqueeze(1), (h, torch.empty_like(h))
    for start in range(0, t_end, CHUNK):
        kept[:, start // CHUNK] = h
        tokens = slice(start, min(start + CHUNK, t_end))
        x_rows, raw_rows = rows_of(x, tokens), rows_of(raw, tokens)
        each = [] if W_y is not None else split_tokens(equations.rows(raw_rows), b)
        solved = []
        for i, (x_t, raw_t) in enumerate(zip(x_rows.split(b), raw_rows.split(b), strict=True)):
            if W_y is not None:
                raw_t = raw_t + project_feedback(y, W_y, parameterization.feedback_norm_eps)
                each.append(equations.rows(raw_t))
            rows = each[i]
            h = torch.mul(rows.decay, h, out=memories[(start + i + 1) % 2])
            p = torch.bmm(rows.C, h)
            mixed = equations.solve(rows, x_t, p)
            y = torch.addcmul(p, rows.sigma, mixed)
            h.addcmul_(rows.B.mT, rows.s * mixed)
            solved.append((rows.s, rows.sigma, rows.U, rows.beta, rows.R, x_t, p, y))
        *given, x_rows, p, y_rows = (torch.cat(v) for v in zip(*solved, strict=True))
        ys[:, tokens] = of_samples(y_rows, b)
        found = equations.statistics(tuple(given), x_rows, p, y_rows)
        statistics[..., tokens] = found.unflatten(1, (-1, b)).mT
    return ys, h, kept, statistics


class Reverse(Equations):
    """The adjoint of one token after the other; holds what passes from one to the next."""

    def __init__(
        self,
        operands: Operands,
        options: Parameterization,
        H: Tensor,  # (b, n, d), the cotangent of the last h, overwritten
        c: int,
    ) -> None:
        super().__init__(operands, options, c * len(H))
        self.H, self.grad_A, self.product = H, torch.zeros_like(H), torch.empty_like(H)
        self.memories = H.new_empty(c + 1, *H.shape).unbind()

    def known(
        self,
        rows: Rows,
        raw: Tensor,  # (i, 1, r), with its feedback, as x
        x: Tensor,  # (i, 1, d)
        y: Tensor,  # (i, 1, d)
    ) -> Known:
        v, T = y - x, wy_factor_of(rows.R, rows.beta.squeeze(1))
        e = torch.bmm(torch.bmm(v, rows.U.mT), T.mT)
        slope = slope_s = activation_slope(self.layout.activation, raw[..., : self.d])
        if self.options.input_scale == "bounded_delta":
            slope_s = slope / (1 + rows.delta).square()
        return Known(v, e, T, x + _combine(e, rows.U), slope, slope_s)

    def remember(
        self,
        each: list[tuple[Rows, Known]],  # the tokens of a chunk
        h: Tensor,  # (b, n, d), before the first
    ) -> None:
        """Fills `memories`, h before the first token and after each."""
        h = self.memories[0].copy_(h)
        for (rows, known), after in zip(each, self.memories[1:], strict=False):
            h = torch.mul(rows.decay, h, out=after).addcmul_(rows.B.mT, rows.s * known.mixed)

    def token(
        self,
        j: int,  # of the chunk
        rows: Rows,
        known: Known,
        g: Tensor,  # (b, 1, d)
    ) -> Cotangents:
        """Makes H that of the token before."""
        H, before, after = self.H, self.memories[j], self.memories[j + 1]
        m = torch.bmm(rows.B, H * rows.s) if self.coupled else torch.bmm(rows.B, H) * rows.s
        m.addcmul_(rows.sigma, g)
        z, of_mixer = self._through_mixer(rows, known, m)
        w = g + z
        H.addcmul_(rows.C.mT, w)
        grad_C = torch.bmm(w, after.mT)
        if self.coupled:
            grad_B = torch.bmm(known.mixed, (H * rows.s).mT)
        else:
            grad_B = torch.bmm(known.mixed * rows.s, H.mT)
        read = torch.bmm(rows.B, H)
        grad_s = H * (rows.B.mT * known.mixed) if self.coupled else read * known.mixed
        grad_delta = self._through_decay(rows, known, before, grad_s)
        pair = torch.cat([grad_B, grad_C], 1)
        return Cotangents(w, m, z, grad_delta, pair, *of_mixer)

    def _through_mixer(
        self,
        rows: Rows,
        known: Known,
        m: Tensor,  # (b, 1, d), to which sigma * z is added
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # (b, 1, d), and (b, k, d), (b, 1, k)
        """z, and the cotangents of U and of the raw values of alpha."""
        if not self.k:
            return torch.zeros_like(m), (rows.U, rows.gate)
        q = torch.bmm(torch.bmm(m, rows.U.mT), rows.inverse.mT)
        f = q * rows.beta
        z = _combine(f, rows.U)
        m.addcmul_(rows.sigma, z)
        G = f.mT * known.e * self.above
        grad_U = (known.e.mT * m).addcmul_(f.mT, known.v)
        grad_U.baddbmm_(G + G.mT, rows.U, alpha=-1)
        return z, (grad_U, q * known.e * (1 - rows.gate))

    def _through_decay(
        self,
        rows: Rows,
        known: Known,
        before: Tensor,  # (b, n, d)
        grad_s: Tensor,  # (b, 1, d) or (b, n, d)
    ) -> Tensor:  # (b, 1, d)
        """The cotangent of the raw values of Delta; makes H that of h before the token."""
        product = torch.mul(self.H, before, out=self.product)
        if self.coupled:
            # s is 1 - |lambda|
            product.sub_(grad_s.mul_(rows.decay.sign()))
        product.mul_(rows.slope)
        self.H.mul_(rows.decay)
        self.grad_A.addcmul_(product, rows.delta)
        grad = product.mul_(self.A).sum(-2, keepdim=True).mul_(known.slope)
        return grad if self.coupled else grad.addcmul_(grad_s, known.slope_s)

    def raw(self, rows: Rows, grads: Cotangents) -> Tensor:  # (i, 1, r)
        """The cotangent of the raw values."""
        parts = [grads.delta]
        if self.layout.selective:
            parts.append(unit_vjp(grads.pair, rows.pair, rows.pair_factor).flatten(1).unsqueeze(1))
        if self.k:
            parts.append(unit_vjp(grads.U, rows.U, rows.u_factor).flatten(1).unsqueeze(1))
        return torch.cat([*parts, grads.alpha], -1)


def cpu_reverse(
    grad_y: Tensor,  # (b, t, d)
    H: Tensor,  # (b, n, d), the cotangent of the last h, overwritten
    y: Tensor,  # (b, t, d)
    kept: Tensor,  # (b, ceil(t / CHUNK), n, d)
    operands: Operands,
    parameterization: Parameterization,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, raw, W_y, A, h0 and y0, and the statistics (2, b, t) of the adjoint equation:
    defect and scale."""
    x, raw, W_y, A, _, y0 = wide = operands.wide()
    assert y0 is not None
    (b, t_end, _), c = x.shape, min(CHUNK, x.shape[1])
    reverse, before = Reverse(wide, parameterization, H, c), shifted(y, y0)
    given = x, with_feedback(y, wide, parameterization), y, grad_y
    grad_x, grad_raw = x.new_empty(x.shape), raw.new_empty(raw.shape)
    statistics, of_feedback = x.new_empty(2, b, t_end), torch.zeros_like(y0).unsqueeze(1)
    eps = parameterization.feedback_norm_eps
    past = before.unsqueeze(2).unbind(1)
    for start in reversed(range(0, t_end if b else 0, CHUNK)):
        tokens = slice(start, min(start + CHUNK, t_end))
        x_rows, raw_rows, y_rows, g_rows = (rows_of(v, tokens) for v in given)
        rows = reverse.rows(raw_rows)
        known = reverse.known(rows, raw_rows, x_rows, y_rows)
        each = list(zip(split_tokens(rows, b), split_tokens(known, b), strict=True))
        reverse.remember(each, kept[:, start // CHUNK])
        found, gs = [], g_rows.split(b)
        for j in reversed(range(len(each))):
            token = reverse.token(j, *each[j], gs[j] + of_feedback)
            found.append(token)
            if W_y is not None:
                of_raw = reverse.raw(each[j][0], token)
                grad_raw[:, start + j] = of_raw.squeeze(1)
                of_feedback = project_feedback_vjp(of_raw, past[start + j], W_y, eps)
        grads = Cotangents(*(torch.cat(v[::-1]) for v in zip(*found, strict=True)))
        if W_y is None:
            grad_raw[:, tokens] = of_samples(reverse.raw(rows, grads), b)
        grad_x[:, tokens] = of_samples(grads.m - grads.z, b)
        gap = _combine(torch.bmm(torch.bmm(grads.m, rows.U.mT), known.T), rows.U) - grads.z
        norms = gap.abs().amax((1, 2)), (grads.w + gap).abs().amax((1, 2))
        statistics[..., tokens] = torch.stack(norms).unflatten(1, (-1, b)).mT
    grad_W_y = None
    if W_y is not None:
        grad_W_y = feedback_weight_gradient(grad_raw, normalize_feedback(before, eps), W_y)
    grad_A = sum_samples(reverse.grad_A, count_heads(A)).mT.reshape(A.shape)
    return grad_x, grad_raw, grad_W_y, grad_A, H.mT, of_feedback.squeeze(1), statistics

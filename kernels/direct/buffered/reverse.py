"""The adjoint of the sweep in buffers, in the form of rows.py.

With g_t the cotangent of y_t, H_t that of h_t from the future, w_t that of F(y)_t and m_t that of
x~_t, all that couples the channels is again k numbers, q (maps.py):

    m = s * (H B) + sigma * g;    q = E^-T U m;    z = U^T (beta * q)
    w = g + z;    m <- m + sigma * z;    H <- H + C w^T

Everything that does not depend on cotangents is computed for a chunk of tokens at once. As in
forward.py, h and H are stored as (b, n, d).

Letters: b batch, t time, i rows of a chunk (token by token), d channels, n state per channel,
k reflections, r raw values, H heads (kernels/heads.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.direct.buffered.feedback import Feedback
from bedouin.kernels.direct.buffered.maps import fill_maps, map_width
from bedouin.kernels.direct.buffered.rows import RowMaker, Rows, by_token, first_rows, split_tokens
from bedouin.kernels.direct.layout import activation_slope
from bedouin.kernels.direct.reverse import ReportBackward, SolvedSweep, feedback_weight_gradient
from bedouin.kernels.heads import count_heads, sum_samples
from bedouin.kernels.householder import wy_factor


class _Known(NamedTuple):
    """What no cotangent enters, for the rows of a chunk."""

    delta: Tensor  # (i, 1, d), of `Rows`, as all up to U_columns
    B: Tensor  # (i, 1, n)
    B_column: Tensor  # (i, n, 1)
    C_column: Tensor  # (i, n, 1)
    units: Tensor  # (i, 2, n)
    memory_norms: Tensor  # (i, 2, 1)
    BC: Tensor  # (i, 1, 1), or not read
    s: Tensor  # (i, 1, d), or not read
    sigma: Tensor  # (i, 1, d)
    U: Tensor  # (i, k, d)
    U_columns: Tensor  # (i, d, k)
    mixed: Tensor  # (i, 1, d)
    written: Tensor  # (i, 1, d), s * mixed, or for "one_minus_decay" mixed
    maps: Tensor  # (i, k, k')
    constant: Tensor  # (i, 1, k')
    slope: Tensor  # (i, 1, d), of the activation of Delta
    of_reads: Tensor | None  # (i, 1, d), the slope of Delta's raw value for H B
    normed: Tensor | None  # (i, 1, d), norm(y) of the token before; None without norm
    rms: Tensor | None  # (i, 1, 1), its factor
    power: Tensor  # (i, n, d), exp(A delta)
    scale: Tensor | None  # (i, n, d), s for "one_minus_decay"; else None
    before: Tensor  # (i, n, d), h before the token
    after: Tensor  # (i, n, d), h after it
    factor: Tensor  # (i, k + 2, d), U, y - x and m, which the token computes, in one matrix
    m: Tensor  # (i, 1, d)
    z: Tensor  # (i, 1, d), which the token computes
    w: Tensor  # (i, 1, d), likewise

    def first(self, count: int) -> "_Known":
        """Views of the first rows."""
        return _Known(*first_rows(self, count))

    def tokens(self, b: int) -> list["_Known"]:
        """Views of the b rows of each token."""
        if len(self.m) == b:
            return [self]
        return [_Known(*parts) for parts in zip(*split_tokens(self, b), strict=True)]


def _allocate(maker: RowMaker, i: int, b: int) -> tuple[Rows, _Known]:
    d, n, k, eps = maker.d, maker.n, maker.k, maker.options.feedback_norm_eps
    rows, wide = maker.allocate(i, extra=2)
    new = maker.like.new_empty
    h, mixed = new(i + b, n, d), new(i, 1, d)
    known = _Known(
        delta=rows.delta,
        B=rows.B,
        B_column=rows.B_column,
        C_column=rows.C_column,
        units=rows.units,
        memory_norms=rows.memory_norms,
        BC=rows.BC,
        s=rows.s,
        sigma=rows.sigma,
        U=rows.U,
        U_columns=rows.U_columns,
        mixed=mixed,
        written=mixed if maker.coupled else new(i, 1, d),
        maps=new(i, k, map_width(k)),
        constant=new(i, 1, map_width(k)),
        slope=new(i, 1, d),
        of_reads=None if maker.coupled else new(i, 1, d),
        normed=None if eps is None else new(i, 1, d),
        rms=None if eps is None else new(i, 1, 1),
        power=new(i, n, d),
        scale=new(i, n, d) if maker.coupled else None,
        before=h[:i],
        after=h[b:],
        factor=wide[:, k:],
        m=wide[:, 2 * k + 1 :],
        z=new(i, 1, d),
        w=new(i, 1, d),
    )
    return rows, known


def _fill_known(
    maker: RowMaker,
    rows: Rows,  # their raw values are given
    known: _Known,
    given: tuple[Tensor, ...],  # each (i, 1, d): x, y, and the y of the token before
    A: Tensor,  # (n, d) or (b, n, d)
) -> Tensor:  # (i, k, k)
    """Computes `known` except for h, m, z and w, for A delta only with `scale`; returns T."""
    x, y, before = given
    v = known.factor[:, -2:-1]
    maker.fill(rows)
    if known.scale is not None:
        of_rows = A if A.dim() == 2 else A.repeat(len(x) // len(A), 1, 1)
        maker.decay(rows, of_rows, known.power, known.scale)
    torch.sub(y, x, out=v)
    T = wy_factor(rows.U, rows.beta.squeeze(-1))
    e = torch.bmm(v, rows.U_columns) @ T.mT
    torch.baddbmm(x, e, rows.U, out=known.mixed)
    fill_maps(maker, rows, e, known.maps, known.constant)
    known.slope.copy_(activation_slope(maker.layout, rows.raw_delta))
    if known.of_reads is not None:
        torch.mul(known.mixed, rows.s, out=known.written)
        torch.mul(known.mixed, known.slope, out=known.of_reads)
        if maker.options.input_scale == "bounded_delta":
            known.of_reads.div_((1 + rows.delta).square_())
    if known.normed is not None and known.rms is not None:
        norm = torch.linalg.vector_norm(before, 2, -1, True, out=known.rms)
        torch.addcmul(maker.feedback_eps, norm, norm, value=1 / maker.d, out=norm).rsqrt_()
        torch.mul(before, known.rms, out=known.normed)
    return T


class _Step:
    """The adjoint of one token after the other; holds what passes from one to the next."""

    def __init__(
        self,
        maker: RowMaker,
        A: Tensor,  # (n, d) or (b, n, d)
        H: Tensor,  # (b, n, d), the cotangent of the last h, overwritten
    ) -> None:
        (b, n, d), k = H.shape, maker.k
        self.A, self.H, self.other = A, H, torch.empty_like(H)
        self.product, self.grad_A = torch.empty_like(H), torch.zeros_like(H)
        self.is_full, self.coupled = maker.options.eigenvalues == "full", maker.coupled
        new = H.new_empty
        self.reads, self.vector = new(b, 1, d), new(b, 1, d)
        self.numbers, self.sum, self.of_u = new(b, 1, k), new(b, 1, 1), new(b, k, d)
        self.of_B, self.of_C = pair = new(2, b, 1, n)
        self.pair = pair.squeeze(2).transpose(0, 1)
        self.pair_product, self.pair_sum = new(b, 2, n), new(b, 2, 1)
        # what the maps compute, in three parts, and the cotangents of the raw values, in four
        self.found = new(b, 1, map_width(k))
        self.f, self.found_alpha = self.found[..., :k], self.found[..., k : 2 * k].mT
        self.found_u = self.found[:, 0, 2 * k :].unflatten(-1, (k, k + 2))
        self.grad_raw = new(b, 1, maker.layout.size(d, n))
        self.parts = maker.split(self.grad_raw)

    def remember(self, known: _Known) -> None:
        """h after the token from h before it, and the decay between them."""
        if known.scale is None:
            torch.mul(known.delta, self.A, out=known.power).exp_()
        h = torch.mul(known.before, known.power, out=known.after)
        if self.is_full:
            h.mul_(2).sub_(known.before)
        if known.scale is None:
            h.addcmul_(known.B_column, known.written)
        else:
            h.addcmul_(torch.mul(known.scale, known.written, out=self.product), known.B_column)

    def run(
        self,
        known: _Known,
        g: Tensor,  # (b, 1, d)
    ) -> Tensor:  # (b, 1, r), valid until the next call
        """The cotangents of a token's raw values; also makes H that of the token before."""
        H, m, z, w, reads = self.H, known.m, known.z, known.w, self.reads
        scale, product = known.scale, self.product
        _, grad_memory, grad_u, grad_alpha = self.parts
        torch.bmm(known.B, H if scale is None else torch.mul(H, scale, out=product), out=reads)
        m.copy_(reads) if scale is not None else torch.mul(reads, known.s, out=m)
        torch.bmm(m.addcmul_(known.sigma, g), known.U_columns, out=self.numbers)
        torch.baddbmm(known.constant, self.numbers, known.maps, out=self.found)
        torch.bmm(self.f, known.U, out=z)
        torch.add(g, z, out=w)
        m.addcmul_(known.sigma, z)
        H.addcmul_(known.C_column, w)
        if grad_memory is not None:
            scaled = H if scale is None else torch.mul(H, scale, out=product)
            torch.bmm(known.written, scaled.mT, out=self.of_B)
            torch.bmm(w, known.after.mT, out=self.of_C)
            self._through_unit(known, grad_memory)
        self._through_decay(known)
        grad_u.copy_(torch.bmm(self.found_u, known.factor, out=self.of_u))
        grad_alpha.copy_(self.found_alpha)
        return self.grad_raw

    def _through_unit(
        self,
        known: _Known,
        out: Tensor,  # (b, 2, n)
    ) -> None:
        """From the cotangents of B and C to those of their raw values, as in `unit_vjp`."""
        pair, units = self.pair, known.units
        torch.mul(pair, units, out=self.pair_product)
        torch.sum(self.pair_product, -1, keepdim=True, out=self.pair_sum)
        torch.mul(pair.addcmul_(units, self.pair_sum, value=-1), known.memory_norms, out=out)

    def _through_decay(self, known: _Known) -> None:
        """The cotangents of A and of Delta's raw value, and H of the token before."""
        H, grad, product = self.H, self.parts[0], self.product
        moved = torch.mul(H, known.power, out=self.other)
        if self.is_full:
            moved.mul_(2)
        if known.scale is None:
            torch.mul(moved, known.before, out=product)
        else:
            # the scale is 1 - |lambda|
            torch.mul(known.B_column, known.mixed, out=product)
            if self.is_full:
                product.mul_(torch.sub(known.power, 0.5).sign_())
            torch.sub(known.before, product, out=product).mul_(moved)
        if self.is_full:
            torch.sub(moved, H, out=H)
        else:
            self.H, self.other = moved, H
        # `product` is the cotangent of A delta
        self.grad_A.addcmul_(product, known.delta)
        torch.sum(product.mul_(self.A), -2, keepdim=True, out=grad)
        grad.mul_(known.slope)
        if known.of_reads is not None:
            # the sum over n of B H, with the H to which C w^T has been added
            grad.addcmul_(known.of_reads, self.reads.addcmul_(known.BC, known.w))

    def through_feedback(
        self,
        known: _Known,
        grad: Tensor,  # (b, 1, d), of norm(y), overwritten
        grad_y: Tensor,  # (b, 1, d), of the token before
        out: Tensor,  # (b, 1, d)
    ) -> None:
        """g of the token before: grad_y and the cotangent of y as `normalize_feedback_vjp` gives
        it."""
        if known.normed is None or known.rms is None:
            torch.add(grad_y, grad, out=out)
            return
        product = torch.mul(grad, known.normed, out=self.vector)
        torch.sum(product, -1, keepdim=True, out=self.sum)
        grad.addcmul_(known.normed, self.sum, value=-1 / grad.shape[-1])
        torch.addcmul(grad_y, grad, known.rms, out=out)


def _check(
    known: _Known,
    T: Tensor,  # (i, k, k)
) -> Tensor:  # (2, i)
    """Defect and scale of the adjoint equation w = g + (I - Q)^T m."""
    moved = torch.bmm(known.m, known.U_columns) @ T
    gap = torch.baddbmm(known.z, moved, known.U, beta=-1)
    scale = (known.w + gap).abs_().amax(-1)
    return torch.cat([gap.abs_().amax(-1), scale], -1).T


def buffered_reverse(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor,  # (b, d, n)
    kept: Tensor,  # (b, ceil(t / keep_every), n, d)
    keep_every: int,
    solved: SolvedSweep,
    report: ReportBackward | None,
) -> tuple[Tensor | None, ...]:
    """The result of `reverse_sweep` in kernels/direct/reverse.py, where `takes_buffers` says so."""
    x, _, W_y, A, _, _ = solved.operands
    (b, t_end, d), n = x.shape, A.shape[-1]
    options, A_rows = solved.parameterization, solved.operands.A_rows()
    maker = RowMaker((d, n), options, x)
    step = _Step(maker, A_rows, grad_h.mT.clone(memory_format=torch.contiguous_format))
    grad_ys, g = [*grad_y.unsqueeze(2).unbind(1), x.new_zeros(b, 1, d)], x.new_empty(b, 1, d)
    if W_y is not None:
        feedback = Feedback(W_y, options.feedback_norm_eps, g)
        fed = feedback.by_head(step.grad_raw)
    grad_x, grad_raw = torch.empty_like(x), torch.empty_like(solved.full_raw)
    grad_raws = grad_raw.unsqueeze(2).unbind(1)
    statistics = x.new_empty(2, b, t_end)
    every_row, all_known = _allocate(maker, min(keep_every, t_end) * b, b)
    each = all_known.tokens(b)
    g.copy_(grad_ys[t_end - 1])
    for start in reversed(range(0, t_end, keep_every)):
        tokens = slice(start, min(start + keep_every, t_end))
        i = (tokens.stop - start) * b
        rows, known = every_row.first(i), all_known.first(i)
        by_token(rows.raw, b).copy_(solved.full_raw[:, tokens])
        given = (_token_major(v[:, tokens]) for v in (x, solved.y, solved.y_before))
        T = _fill_known(maker, rows, known, tuple(given), A_rows)
        known.before[:b] = kept[:, start // keep_every]
        for token in each[: i // b]:
            step.remember(token)
        for t in reversed(range(start, tokens.stop)):
            token = each[t - start]
            grad_raws[t].copy_(step.run(token, g))
            if W_y is None:
                g.copy_(grad_ys[t - 1])
            else:
                step.through_feedback(token, feedback.transpose(fed), grad_ys[t - 1], g)
        torch.sub(by_token(known.m, b), by_token(known.z, b), out=grad_x[:, tokens])
        statistics[..., tokens] = _check(known, T).unflatten(1, (-1, b)).mT
    if report is not None:
        report(*statistics)
    if W_y is None:
        g.zero_()
    grad_W_y = feedback_weight_gradient(grad_raw, solved)
    grad_A = sum_samples(step.grad_A, count_heads(A)).mT.reshape(A.shape)
    return grad_x, grad_raw, grad_W_y, grad_A, step.H.mT, g.squeeze(1)


def _token_major(
    v: Tensor,  # (b, c, d)
) -> Tensor:  # (i, 1, d)
    return v.transpose(0, 1).reshape(-1, 1, v.shape[-1])

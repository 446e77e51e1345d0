"""The adjoint of the sweep in buffers, in the form of rows.py.

With g_t the cotangent of y_t, H_t that of h_t from the future, w_t that of F(y)_t and m_t that of
x~_t, all that couples the channels is again k numbers, q (maps.py):

    m = s * (H B) + sigma * g;    q = E^-T U m;    z = U^T (beta * q)
    w = g + z;    m <- m + sigma * z;    H <- H + C w^T

With erase, h = a + B (s * x~ - beta^e B a)^T for a = lambda * h_{t-1}. There the last H is the
cotangent of h, and with v = -beta^e B H, which is that of B a, follow those of B and of a:

    H (s * x~ - beta^e B a) + a v;    H <- H + B v^T

What does not depend on cotangents is computed for a chunk of tokens at once; so are the cotangents
of B, C, u, alpha and beta^e, if these have no feedback. h and H are stored as (b, n, d).

Letters: b batch, t time, i rows of a chunk (token by token), d channels, n state per channel,
k reflections, k' values of the maps (maps.py), r raw values, H heads (kernels/heads.py).
"""

import torch
from torch import Tensor

from bedouin.kernels.direct.buffered.feedback import Feedback, NormedTokens
from bedouin.kernels.direct.buffered.known import Known, allocate_known, fill_known
from bedouin.kernels.direct.buffered.rows import (
    LOG2E,
    RowMaker,
    Rows,
    by_token,
    count_fed,
    split_tokens,
)
from bedouin.kernels.direct.buffered.trace import Trace
from bedouin.kernels.direct.reverse import ReportBackward, SolvedSweep
from bedouin.kernels.heads import count_heads, sum_samples


class _Step:
    """The adjoint of one token after the other; holds what passes from one to the next."""

    def __init__(
        self,
        maker: RowMaker,
        A: Tensor,  # (n, d) or (b, n, d)
        H: Tensor,  # (b, n, d), the cotangent of the last h, overwritten
        remembered: int,  # tokens of a chunk whose decay is kept; 0: `run` computes it
    ) -> None:
        (b, _, d), k = H.shape, maker.k
        self.A, self.A_log2, self.H, self.maker = A, A * LOG2E, H, maker
        self.product, count = torch.empty_like(H), max(1, remembered)
        self.remembers = remembered > 0
        self.all_powers = H.new_empty(count * b, *H.shape[1:])
        self.all_scales = torch.empty_like(self.all_powers) if maker.coupled else None
        self.powers, self.scales = split_tokens((self.all_powers, self.all_scales), b)
        self.power: Tensor = self.powers[0]
        self.scale: Tensor | None = self.scales[0]
        self.grad_A = torch.zeros_like(H)
        # for lambda = 2 power - 1, H is read again after it has been multiplied by the power
        self.other = torch.empty_like(H) if maker.options.eigenvalues == "full" else None
        new = H.new_empty
        self.reads, self.spare, self.numbers = new(b, 1, d), new(b, 1, d), new(b, 1, k)
        self.grad_erased = new(b, 1, d)

    def turn_to(self, j: int) -> None:
        """Go to the token j of the chunk."""
        if self.remembers:
            self.power, self.scale = self.powers[j], self.scales[j]

    def fill_decay(
        self,
        rows: Rows,  # of a chunk whose decay is kept
    ) -> None:
        """The decay of "one_minus_decay", and what depends on it in `rows`."""
        if self.all_scales is not None:
            b, i = len(self.H), len(rows.raw)
            A = self.A_log2 if self.A.dim() == 2 else self.A_log2.repeat(i // b, 1, 1)
            self.maker.decay(rows, A, self.all_powers[:i], self.all_scales[:i])

    def remember(
        self,
        known: Known,  # of a token
        before: Tensor,  # (b, n, d), h before the token
        after: Tensor,  # (b, n, d), overwritten
    ) -> None:
        """h after the token."""
        if self.scale is None:
            self.maker.exponentials(known.delta, self.A_log2, self.power, None)
            written = torch.mul(known.mixed, known.s, out=self.spare)
        else:
            written = torch.mul(self.scale, known.mixed, out=self.product)
        self._decay(before, after)
        if self.maker.erases:
            torch.bmm(known.B, after, out=known.erased)
            written.sub_(known.erased.mul_(known.erase))
        after.addcmul_(written, known.B_column)

    def _decay(
        self,
        before: Tensor,  # (b, n, d)
        out: Tensor,  # (b, n, d)
    ) -> None:
        """lambda * before."""
        torch.mul(before, self.power, out=out)
        if self.other is not None:
            out.mul_(2).sub_(before)

    def read(self, known: Known) -> None:
        """B H of the token that is the next to run; for "one_minus_decay" that follows later."""
        if self.scale is None:
            torch.bmm(known.B, self.H, out=self.reads)

    def run(
        self,
        known: Known,
        earlier: Known | None,  # the token that runs next, if there is one in the chunk
        before: Tensor,  # (b, n, d), h before the token
        after: Tensor,  # (b, n, d), h after it
        g: Tensor,  # (b, 1, d)
        grad_delta: Tensor,  # (b, 1, d), the cotangent of Delta's raw value, overwritten
    ) -> None:
        """Computes `grad_delta`, and what `finish_rows` reads; makes H that of the token before."""
        H, m, z, w, reads = self.H, known.m, known.z, known.w, self.reads
        scale, product = self.scale, self.product
        if not self.remembers:
            self.maker.exponentials(known.delta, self.A_log2, self.power, scale)
        if scale is None:
            torch.mul(reads, known.s, out=m)
        else:
            m.copy_(torch.bmm(known.B, torch.mul(H, scale, out=product), out=reads))
        m.addcmul_(known.sigma, g)
        if self.maker.k:
            torch.bmm(m, known.U_columns, out=self.numbers)
            torch.baddbmm(known.constant, self.numbers, known.maps, out=known.found)
            torch.bmm(known.f, known.U, out=z)
            torch.add(g, z, out=w)
            m.addcmul_(known.sigma, z)
        else:
            w.copy_(g)
        H.addcmul_(known.C_column, w)
        if self.maker.layout.selective:
            scaled = H if scale is None else torch.mul(H, scale, out=product)
            # in this order: with the transposed memory the products take up to three times as long
            torch.bmm(scaled, known.written, out=known.grad_B)
            torch.bmm(after, known.w_column, out=known.grad_C)
        if scale is None:
            # B H, with the H to which C w^T has been added
            reads.addcmul_(known.BC, w)
        if self.maker.erases:
            self._through_erase(known, before)
        self._through_decay(known, earlier, before, grad_delta)

    def _through_erase(
        self,
        known: Known,
        before: Tensor,  # (b, n, d)
    ) -> None:
        """The cotangents of beta^e, and of B as a key that is erased; makes H that of a. The scale
        of "one_minus_decay" is overwritten: `_through_decay` corrects what it computes from H."""
        if self.scale is not None:
            torch.bmm(known.B, self.H, out=self.reads)
        torch.bmm(known.erased, self.reads.mT, out=known.grad_log_erase).neg_()
        torch.mul(self.reads, known.erase, out=self.grad_erased).neg_()
        if self.maker.layout.selective:
            if self.scale is not None:
                known.grad_B.baddbmm_(self.H, known.erased.mT, alpha=-1)
            self._decay(before, self.product)
            known.grad_B.baddbmm_(self.product, self.grad_erased.mT)
        if self.scale is None:
            self.H.addcmul_(known.B_column, self.grad_erased)
            return
        lost = torch.mul(known.B_column, self.grad_erased, out=self.scale)
        self.H.add_(lost)
        lost.mul_(self.power if self.other is None else torch.mul(self.power, 2, out=self.other))

    def _through_decay(
        self,
        known: Known,
        earlier: Known | None,
        before: Tensor,  # (b, n, d)
        grad: Tensor,  # (b, 1, d), overwritten
    ) -> None:
        """The cotangents of A and of Delta's raw value, and H of the token before."""
        H, is_plain = self.H, self.other is None and self.scale is None
        # the power is not read again, and in the cache
        product = self.power if is_plain else self.product
        moved = torch.mul(H, self.power, out=H if self.other is None else self.other)
        if self.other is not None:
            moved.mul_(2)
        if self.scale is None:
            torch.mul(moved, before, out=product)
        else:
            # the scale is 1 - |lambda|
            torch.mul(known.B_column, known.mixed, out=product)
            if self.other is not None:
                product.mul_(self.power.sub_(0.5).sign_())
            if self.maker.erases:
                self.scale.mul_(product)
            torch.sub(before, product, out=product).mul_(moved)
            if self.maker.erases:
                product.add_(self.scale)
        if self.other is not None:
            torch.sub(moved, H, out=H)
        reads, self.reads, self.spare = self.reads, self.spare, self.reads
        if earlier is not None:
            # now, while H is in the cache
            self.read(earlier)
        # `product` is the cotangent of A delta
        self.grad_A.addcmul_(product, known.delta)
        torch.sum(product.mul_(self.A), -2, keepdim=True, out=grad)
        grad.mul_(known.slope)
        if known.slope_reads is not None:
            grad.addcmul_(known.slope_reads, reads)


def _finish_rows(
    maker: RowMaker,
    known: Known,
    grad_raw: Tensor,  # (i, 1, r), overwritten except for Delta
) -> None:
    """The cotangents of the raw values of B, C, u, alpha and beta^e, for rows that `_Step.run` has
    seen."""
    _, grad_memory, grad_u, grad_alpha, grad_erase = maker.split(grad_raw)
    if grad_memory is not None:
        # the adjoint of `unit`
        pair, units = known.pair, known.units
        along = (pair * units).sum(-1, keepdim=True)
        torch.mul(pair.addcmul_(units, along, value=-1), known.memory_norms, out=grad_memory)
    if maker.k:
        grad_u.copy_(torch.bmm(known.found_u, known.factor))
        grad_alpha.copy_(known.found_alpha)
    if maker.erases:
        # times 1 - sigmoid(raw)
        torch.mul(known.grad_log_erase, 1 - known.erase / maker.layout.erase, out=grad_erase)


def _check(
    known: Known,
    T: Tensor,  # (i, k, k)
) -> Tensor:  # (2, i)
    """Defect and scale of the adjoint equation w = g + (I - Q)^T m."""
    moved = torch.bmm(known.m, known.U_columns) @ T
    gap = torch.baddbmm(known.z, moved, known.U, beta=-1)
    scale = (known.w + gap).abs_().amax(-1)
    return torch.cat([gap.abs_().amax(-1), scale], -1).T


def buffered_reverse(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor | None,  # (b, d, n); None: zeros
    kept: Tensor,  # (b, ceil(t / keep_every), n, d)
    keep_every: int,
    solved: SolvedSweep,
    report: ReportBackward | None,
) -> tuple[Tensor | None, ...]:
    """The result of `reverse_sweep`, where `takes_buffers` says so; `kept` is not read where the
    memory is that of a single chunk, and `grad_h` None stands for zeros."""
    _, _, W_y, A, _, y0 = solved.operands
    assert y0 is not None
    x = solved.full_x
    (b, t_end, d), n = x.shape, A.shape[-1]
    options, A_rows = solved.parameterization, solved.operands.A_rows()
    maker = RowMaker((d, n), options, x)
    H = x.new_zeros(b, n, d) if grad_h is None else x.new_empty(b, n, d).copy_(grad_h.mT)
    grad_ys, g = [*grad_y.unsqueeze(2).unbind(1), x.new_zeros(b, 1, d)], x.new_empty(b, 1, d)
    # token by token, as the loop computes it
    grad_raw = x.new_empty(t_end, b, solved.full_raw.shape[-1])
    grad_raws = grad_raw.unsqueeze(2).unbind(0)
    grad_deltas = grad_raw[..., :d].unsqueeze(2).unbind(0)
    f = count_fed(solved.operands, options)
    ahead = f <= d
    # the cotangent of what feedback is added to
    grad_fed = x.new_empty(t_end, b, f + d) if options.feeds_x else grad_raw[..., :f]
    grad_feds = grad_fed.unsqueeze(2).unbind(0)
    if W_y is not None:
        feedback = Feedback(W_y, options, g)
        normed = NormedTokens(solved.y, y0, options.feedback_norm_eps)
    grad_x, statistics = torch.empty_like(x), x.new_empty(2, b, t_end)
    count = min(keep_every, t_end)
    given = None if solved.h is None else Trace.of(solved.memory)
    trace = Trace.allocate(maker, count, b, n) if given is None else given
    step = _Step(maker, A_rows, H, count if given is None else 0)
    every_row = maker.rows_of(trace.rows)
    all_known = allocate_known(maker, every_row, trace.mixed.mixed)
    each, hs = all_known.tokens(b), list(trace.h.unbind(0))
    # h after the last token of a chunk
    hs.append(torch.empty_like(hs[0]) if solved.h is None else solved.h.mT)
    g.copy_(grad_ys[t_end - 1])
    for start in reversed(range(0, t_end, keep_every)):
        tokens = slice(start, min(start + keep_every, t_end))
        i = (tokens.stop - start) * b
        rows, known, again = every_row.first(i), all_known.first(i), trace.mixed.first(i)
        v = known.factor[:, -2:-1]
        torch.sub(solved.y[:, tokens], x[:, tokens], out=by_token(v, b))
        if given is None:
            by_token(rows.raw, b).copy_(solved.full_raw[:, tokens])
            by_token(again.mixed, b).copy_(x[:, tokens])
            maker.fill(rows)
            step.fill_decay(rows)
            again.fill(rows, v)
            hs[0] = kept[:, start // keep_every]
            for j in range(i // b):
                step.turn_to(j)
                step.remember(each[j], hs[j], hs[j + 1])
        fill_known(maker, rows, known, again.e)
        step.read(each[i // b - 1])
        for t in reversed(range(start, tokens.stop)):
            j = t - start
            step.turn_to(j)
            earlier = each[j - 1] if j else None
            step.run(each[j], earlier, hs[j], hs[j + 1], g, grad_deltas[t])
            if not ahead:
                _finish_rows(maker, each[j], grad_raws[t])
            if W_y is None:
                g.copy_(grad_ys[t - 1])
            else:
                if options.feeds_x:
                    grad_feds[t][..., :f].copy_(grad_raws[t][..., :f])
                    torch.sub(each[j].m, each[j].z, out=grad_feds[t][..., f:])
                grad = feedback.transpose(feedback.by_head(grad_feds[t]))
                normed.add_cotangent(t, grad, grad_ys[t - 1], g)
        if ahead:
            _finish_rows(maker, known, grad_raw[tokens].view(i, 1, -1))
        torch.sub(by_token(known.m, b), by_token(known.z, b), out=grad_x[:, tokens])
        statistics[..., tokens] = _check(known, again.T).unflatten(1, (-1, b)).mT
    if report is not None:
        report(*statistics)
    if W_y is None:
        g.zero_()
    grad_W_y = None if W_y is None else normed.weight_gradient(grad_fed, W_y)
    grad_A = sum_samples(step.grad_A, count_heads(A)).mT.reshape(A.shape)
    return grad_x, grad_raw.transpose(0, 1), grad_W_y, grad_A, step.H.mT, g.squeeze(1)

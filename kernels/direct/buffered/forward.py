"""The forward sweep in buffers, in the form of rows.py.

Without feedback all that raw values determine is computed for a chunk of tokens at once; where only
Delta has feedback, all but Delta and its products.

The memory h is stored as (b, n, d), so that sums over the n states run along contiguous channels: a
contraction is then one batched product of a row vector, 4 to 8 times faster on a CPU than with
(b, d, n), the public layout.

Letters: b batch, t time, c tokens of a chunk, i rows of a chunk (token by token), d channels, n
state per channel, k reflections, r raw values, f those of them with feedback, H heads
(kernels/heads.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.direct.buffered.feedback import Feedback
from bedouin.kernels.direct.buffered.rows import (
    LOG2E,
    RowMaker,
    Rows,
    by_token,
    count_fed,
    split_tokens,
)
from bedouin.kernels.direct.buffered.trace import Mixed, Trace
from bedouin.kernels.direct.elimination import factorize
from bedouin.kernels.direct.reference import Sweep
from bedouin.kernels.operands import Operands, Parameterization


class _Tokens(NamedTuple):
    """Buffers for tokens that are solved one after the other."""

    rows: Rows
    x: Tensor  # (i, 1, d), with its feedback
    p: Tensor  # (i, 1, d), what memory reads before the token is written
    y: Tensor  # (i, 1, d)

    def first(self, count: int) -> "_Tokens":
        """Views of the first rows."""
        return _Tokens(self.rows.first(count), *(v[:count] for v in self[1:]))

    def tokens(self, b: int, shared: Rows | None) -> list["_Tokens"]:
        """Views of the b rows of each token; `shared` as in `Rows.tokens`."""
        if len(self.x) == b:
            return [self]
        rows, others = self.rows.tokens(b, shared), split_tokens(self[1:], b)
        return [_Tokens(*parts) for parts in zip(rows, *others, strict=True)]


class _Step:
    """Solves tokens; its own buffers hold what nobody reads after the token."""

    def __init__(
        self,
        maker: RowMaker,
        A: Tensor,  # (n, d) or (b, n, d)
        like: Tensor,  # (b, n, d)
    ) -> None:
        self.maker, self.A = maker, A * LOG2E
        (b, n, d), k = like.shape, maker.layout.num_householder
        self.is_full = maker.options.eigenvalues == "full"
        self.power = like.new_empty(b, n, d)
        self.scale = like.new_empty(b, n, d) if maker.coupled else None
        self.vector, self.reads = like.new_empty(b, 1, d), like.new_empty(b, 2, d)
        self.along_B, self.along_C = self.reads[:, :1], self.reads[:, 1:]
        self.numbers, self.e = like.new_empty(b, 1, k), like.new_empty(b, 1, k)

    def solve(
        self,
        token: _Tokens,
        beta: Tensor,  # (b, 1, k)
        h: Tensor,  # (b, n, d)
        memory: Tensor,  # (b, n, d), overwritten
    ) -> None:
        """Writes h after the token to `memory`, and p and y of the token."""
        rows, x, p, y = token
        vector, scale, power = self.vector, self.scale, self.power
        # not in `memory`, which unlike this buffer is not in the cache
        self.maker.decay(rows, self.A, power, scale)
        if self.is_full:
            power.mul_(2).sub_(1)
        torch.mul(power, h, out=memory)
        if self.maker.erases:
            torch.bmm(rows.units, memory, out=self.reads)
            torch.mul(self.along_B, rows.erase, out=rows.erased)
            BC = rows.BC if scale is None else rows.BC.sum(-1, keepdim=True)
            torch.addcmul(self.along_C, rows.erased, BC, value=-1, out=p)
        else:
            torch.bmm(rows.C, memory, out=p)
        if self.maker.k:
            torch.addcmul(p, rows.sigma, x, out=vector).sub_(x)
            right = torch.bmm(vector, rows.U_columns, out=self.numbers).mul_(beta)
            e = torch.bmm(right, rows.inverse_columns, out=self.e)
            mixed = torch.baddbmm(x, e, rows.U, out=vector)
        else:
            mixed = x
        torch.addcmul(p, rows.sigma, mixed, out=y)
        if scale is None:
            written = torch.mul(mixed, rows.s, out=vector)
        else:
            written = scale.mul_(mixed)
        if self.maker.erases:
            written.sub_(rows.erased)
        memory.addcmul_(written, rows.B_column)


class _Judge:
    """Defect, scale, magnitude and pivot of solved rows, as `Sweep` and `smallest_pivot` define
    them: F(y) - y vanishes for any e, so that x~ is computed anew from y."""

    def __init__(self, maker: RowMaker, i: int) -> None:
        self.maker = maker
        self.spare = tuple(maker.like.new_empty(i, 1, maker.d) for _ in range(2))

    def __call__(
        self,
        tokens: _Tokens,  # of i rows at most
        again: Mixed,  # of as many rows, overwritten
    ) -> Tensor:  # (4, i)
        rows, x, p, y = tokens
        F, size = (v[: len(x)] for v in self.spare)
        again.mixed.copy_(x)
        again.fill(rows, torch.sub(y, x, out=size))
        if self.maker.k:
            LU, _ = factorize(torch.baddbmm(self.maker.identity, rows.S, again.T, alpha=-1))
            pivot = LU.diagonal(dim1=-2, dim2=-1).abs().amin(-1)
        else:
            pivot = x.new_ones(len(x))
        # s is not negative
        torch.abs(x, out=F).add_(torch.abs(again.mixed, out=size))
        sizes = F.mul_(rows.s).amax(-1)
        torch.addcmul(p, rows.sigma, again.mixed, out=F)
        scale = torch.abs(F, out=size).amax(-1)
        pivots = torch.fmin(pivot, self.maker.one).unsqueeze(-1)
        return torch.cat([F.sub_(y).abs_().amax(-1), scale, sizes, pivots], -1).T


def allocate_steps(
    operands: Operands,
    parameterization: Parameterization,
    keep_every: int,
) -> tuple[Tensor, ...]:
    """Memory for what the adjoint of `buffered_sweep` reads: for a sequence of a single chunk the
    tensors of a `Trace`; for a longer one the raw values that include the feedback (t, b, r), or
    with feedback of x (t, b, r + d), if there is feedback."""
    (b, t_end, r), (d, n) = operands.raw.shape, operands.A.shape[-2:]
    if t_end <= keep_every:
        maker = RowMaker((d, n), parameterization, operands.x)
        return Trace.allocate(maker, t_end, b, n).tensors()
    width = r + d if parameterization.feeds_x else r
    return () if operands.W_y is None else (operands.raw.new_empty(t_end, b, width),)


def buffered_sweep(
    operands: Operands,
    parameterization: Parameterization,
    keep_every: int,
    memory: tuple[Tensor, ...] = (),
) -> tuple[Sweep, list[Tensor]]:
    """The result of `sweep_tokens`, where `takes_buffers` says so. `operands` must be the result of
    `Operands.wide`. `memory`, a result of `allocate_steps`, is overwritten; with that of a single
    chunk no h is kept."""
    x, raw, W_y, A, h0, y0 = operands
    assert h0 is not None and y0 is not None
    (b, t_end, d), r, n = x.shape, raw.shape[-1], A.shape[-1]
    maker = RowMaker((d, n), parameterization, x)
    count = min(keep_every, t_end)
    new = x.new_empty
    trace = Trace.of(memory) if len(memory) > 1 else None
    full_raw = memory[0] if len(memory) == 1 else None
    row_memory = maker.allocate(count * b) if trace is None else trace.rows
    own_x = row_memory.raw[..., r:] if parameterization.feeds_x else new(count * b, 1, d)
    others = own_x, new(count * b, 1, d), new(count * b, 1, d)
    chunk = _Tokens(maker.rows_of(row_memory), *others)
    f = count_fed(operands, parameterization)
    ahead = f <= d
    shares = trace is None and count > 1 and not ahead
    shared = maker.rows_of(maker.allocate(b)) if shares else None
    tokens, judge = chunk.tokens(b, shared), _Judge(maker, count * b)
    again = Mixed.allocate(maker, count * b) if trace is None else trace.mixed
    betas = [token.rows.beta.mT for token in tokens]
    h, y, kept = h0.mT, y0.unsqueeze(1), []
    if trace is not None:
        memories = [*trace.h.unbind(0), new(b, n, d)]
        h = memories[0].copy_(h)
    else:
        h, memories = h.contiguous(), [new(b, n, d), new(b, n, d)]
    step = _Step(maker, operands.A_rows(), h)
    if W_y is not None:
        feedback = Feedback(W_y, parameterization, y)
        fed = [tuple(map(feedback.by_head, (v.rows.raw[..., :f], v.x))) for v in tokens]
    ys, found = new(b, t_end, d), []
    for start in range(0, t_end, keep_every):
        stop = min(start + keep_every, t_end)
        now = chunk if stop - start == count else chunk.first((stop - start) * b)
        if trace is None:
            # the first h is not in the memory that tokens overwrite
            kept.append(h.clone() if start else h)
        by_token(now.x, b).copy_(x[:, start:stop])
        if ahead:
            by_token(now.rows.raw, b).copy_(raw[:, start:stop])
            maker.fill_directions(now.rows)
            if not f:
                maker.fill_gains(now.rows)
        for i in range(stop - start):
            token = tokens[i]
            if not ahead:
                token.rows.raw.copy_(raw[:, start + i : start + i + 1])
            if W_y is not None:
                feedback.add(y, *fed[i])
                if f:
                    (maker.fill_gains if ahead else maker.fill)(token.rows)
                if full_raw is not None:
                    full_raw[start + i, :, :r].copy_(token.rows.raw.squeeze(1))
            # a trace has memory for each token; otherwise two take turns
            after = memories[i + 1] if trace is not None else memories[(start + i) % 2]
            step.solve(token, betas[i], h, after)
            h, y = after, token.y
        if full_raw is not None and parameterization.feeds_x:
            full_raw[start:stop, :, r:].copy_(now.x.view(-1, b, d))
        ys[:, start:stop] = by_token(now.y, b)
        found.append(judge(now, again.first(len(now.x))).unflatten(1, (stop - start, b)))
    defect, scale, size, pivots = torch.cat(found, 1).mT.contiguous()
    # NaN after a singular token must not hide its pivot
    pivot = pivots.nan_to_num(nan=torch.inf).amin(1)
    return Sweep(ys, h.mT, defect, scale, size, pivot), kept

"""The direct sweep: the exact fixed point of the whole sequence in one pass over time.

Token t is solved from the memory h_{t-1} and the output y_{t-1} alone:

    raw_t = raw^x_t + W^y norm(y_{t-1})              Delta, B, C, (e, U, M) = bind(raw_t)
    p_t   = (lambda_t * h_{t-1}) C_t                 the output before token t is written to memory
    (I - diag(sigma_t)(I - Q_t)) y_t = p_t + sigma_t * Q_t x_t
    h_t   = lambda_t * h_{t-1} + (s_t * (x_t + (I - Q_t)(y_t - x_t))) B_t^T

Letters: b batch, t time, d channels, n state per channel, k reflections, r size of raw.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.direct.layout import bind_by_layout
from bedouin.kernels.direct.limits import CHUNK
from bedouin.kernels.direct.local import LocalFactors, factor_local, smallest_pivot, solve_local
from bedouin.kernels.feedback import project_feedback, with_feedback
from bedouin.kernels.heads import per_sample
from bedouin.kernels.householder import mix_channels
from bedouin.kernels.operands import Bind, Coefficients, Operands, Parameterization
from bedouin.kernels.scan import contract, discretize, selective_scan_reference, triton_scan
from bedouin.kernels.scan.reference import ScanOptions


class Sweep(NamedTuple):
    """Result of a sweep. In the max norm, defect_t = |F(y)_t - y_t| and scale_t = |F(y)_t|.

    magnitude_t = |s_t| (|(1 - e) x_t| + |e y_t| + |x~_t|) bounds the terms whose sum is F(y)_t.
    These cancel where B_t and C_t are nearly orthogonal or (1 - e) x_t and U^T M U x_t nearly
    equal, and the rounding error is relative to the terms, not to their sum.
    """

    y: Tensor  # (b, t, d)
    h: Tensor  # (b, d, n), after the last token
    defect: Tensor  # (b, t), detached
    scale: Tensor  # (b, t), detached
    magnitude: Tensor  # (b, t), detached
    pivot: Tensor  # (b, t) or (b,), smallest pivot of a token's or sample's systems, detached


def input_gain(
    s: Tensor,  # (..., d, 1) or (..., d, n)
    B: Tensor,  # (..., n)
    C: Tensor,  # (..., n)
) -> Tensor:  # (..., d)
    """sigma: the sum over n of s B C, the gain from x~_t to y_t."""
    return contract(s, B * C) if s.shape[-1] > 1 else s.squeeze(-1) * (B * C).sum(-1, keepdim=True)


def gain_gap(
    decay: Tensor,  # (..., d, n), lambda
    B: Tensor,  # (..., n)
    C: Tensor,  # (..., n)
    parameterization: Parameterization,
) -> Tensor | None:  # (..., d)
    """1 - sigma without the cancellation of the difference, for the scale "one_minus_decay".

    There 1 - sigma = (1 - sum over n of B C) + sum over n of B C |lambda|. None for other scales.
    """
    if parameterization.input_scale != "one_minus_decay":
        return None
    return (1 - (B * C).sum(-1, keepdim=True)) + input_gain(decay.abs(), B, C)


class LocalEquation(NamedTuple):
    """What a token's raw values and the memory before it determine: all but its y."""

    x: Tensor  # (b, d)
    c: Coefficients  # (b, ...)
    e: Tensor | None  # (b, 1) or (b, d); None: 0
    decayed: Tensor  # (b, d, n), lambda * h_{t-1}
    s: Tensor  # (b, d, 1) or (b, d, n)
    sigma: Tensor  # (b, d)
    gap: Tensor | None  # (b, d), of `gain_gap`

    @staticmethod
    def of(
        x: Tensor,  # (b, d)
        raw: Tensor,  # (b, r)
        h: Tensor,  # (b, d, n), before the token
        A: Tensor,  # (d, n) or (H, d, n)
        options: Parameterization,
        bind: Bind,
        bind_parameters: tuple[Tensor, ...],  # any shapes
    ) -> "LocalEquation":
        """`raw` contains the feedback."""
        c = bind(raw, *bind_parameters)
        # not len, for which torch.export would take the batch for a constant
        A = A if A.dim() == 2 else per_sample(A, x.shape[0])
        decay, s = discretize(c.delta, A, options.input_scale, options.eigenvalues)
        e, decayed = options.diagonal(c.e), decay * h
        gap = None if e is None else gain_gap(decay, c.B, c.C, options)
        return LocalEquation(x, c, e, decayed, s, input_gain(s, c.B, c.C), gap)

    def factors(self) -> LocalFactors:
        """Of the matrix of this token."""
        return factor_local(self.sigma, self.e, self.c.U, self.c.M, self.gap)

    def write(
        self,
        y: Tensor,  # (b, d)
    ) -> tuple[Tensor, Tensor]:  # (b, d), (b, d, n)
        """x~, and the memory after a token with this y."""
        mixed = mix_channels(self.x, y, self.e, self.c.U, self.c.M)
        # in this order, so that a scale without a state axis costs no product of the size of h
        return mixed, self.decayed + (self.s * mixed.unsqueeze(-1)) * self.c.B.unsqueeze(-2)


def direct_sweep_reference(
    operands: Operands,
    parameterization: Parameterization,
    bind: Bind | None = None,
    bind_parameters: tuple[Tensor, ...] = (),  # any shapes
) -> Sweep:
    """Solve token after token. Back-propagation through this loop also gives the exact gradient.

    `bind` None: the coefficients are computed from the raw values as the layout describes.
    """
    operands.check()
    bind = bind or bind_by_layout(parameterization.known_layout(), operands.A)
    return sweep_tokens(operands.wide(), parameterization, bind, bind_parameters)[0]


def sweep_tokens(
    operands: Operands,  # as `Operands.wide` gives them
    parameterization: Parameterization,
    bind: Bind,
    bind_parameters: tuple[Tensor, ...],  # any shapes
) -> tuple[Sweep, Tensor]:
    """The sweep, and h before tokens 0, CHUNK, 2 CHUNK, and so on, (b, slots, n, d)."""
    x, raw, W_y, A, h, y = operands
    assert h is not None and y is not None
    ys, defects, scales, sizes, kept = [], [], [], [], []
    pivot = x.new_full(x.shape[:1], torch.inf)
    for t in range(x.shape[1]):
        if t % CHUNK == 0:
            kept.append(h.mT)
        x_t, raw_t = x[:, t], raw[:, t]
        if W_y is not None:
            raw_t = raw_t + project_feedback(y, W_y, parameterization.feedback_norm_eps)
        token = LocalEquation.of(x_t, raw_t, h, A, parameterization, bind, bind_parameters)
        factors = token.factors()
        y = solve_local(contract(token.decayed, token.c.C), factors, x_t)
        mixed, h = token.write(y)
        F_t = contract(h, token.c.C).detach()
        ys.append(y)
        defects.append((F_t - y.detach()).abs().amax(-1))
        scales.append(F_t.abs().amax(-1))
        # the largest term of a channel: |s| (|(1 - e) x| + |e y| + |x~|)
        own = x_t.abs() if token.e is None else ((1 - token.e) * x_t).abs() + (token.e * y).abs()
        sizes.append((token.s.abs().amax(-1) * (own + mixed.abs())).amax(-1).detach())
        pivot = torch.fmin(pivot, smallest_pivot(factors))
    if not ys:
        empty = x.new_zeros(x.shape[:2])
        none_kept = h.mT.unsqueeze(1)[:, :0].clone()
        return Sweep(torch.zeros_like(x), h.clone(), empty, empty, empty, pivot), none_kept
    defect, scale, size = (torch.stack(values, 1) for values in (defects, scales, sizes))
    return Sweep(torch.stack(ys, 1), h, defect, scale, size, pivot), torch.stack(kept, 1)


def memory_of(
    y: Tensor,  # (b, t, d), a fixed point found elsewhere
    operands: Operands,  # as `Operands.wide` gives them
    parameterization: Parameterization,
    bind: Bind,
    bind_parameters: tuple[Tensor, ...],  # any shapes
    *,
    by_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """For a known y, the last h (b, d, n), and the memories that `sweep_tokens`
    would keep, (b, slots, n, d); `by_kernel`: from the scan's kernel, which keeps the same ones."""
    x, raw = operands.x, with_feedback(y, operands, parameterization)
    delta, B, C, e, U, M = bind(raw, *bind_parameters)  # of all tokens: (b, t, ...)
    mixed, kept = mix_channels(x, y, parameterization.diagonal(e), U, M), []
    how = ScanOptions(parameterization.input_scale, parameterization.eigenvalues, False)
    A, h = operands.A, operands.start()[0]
    if by_kernel and mixed.numel():
        _, h, of_scan = triton_scan.function(mixed, delta, A, B, C, h, None, *how, True)
        return h, of_scan.mT.contiguous()
    for start in range(0, x.shape[1], CHUNK):
        kept.append(h.mT)
        tokens = slice(start, start + CHUNK)
        part, delta_t, B_t, C_t = (v[:, tokens] for v in (mixed, delta, B, C))
        _, h = selective_scan_reference(part, delta_t, A, B_t, C_t, h, **how._asdict())
    if not kept:
        return h.clone(), h.mT.unsqueeze(1)[:, :0].clone()
    return h, torch.stack(kept, 1)

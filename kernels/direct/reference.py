"""The direct sweep: the exact fixed point of the whole sequence in one pass over time.

Token t is solved from the memory h_{t-1} and the output y_{t-1} alone:

    raw_t = raw^x_t + W^y norm(y_{t-1})              Delta, B, C, (e, U, M), beta^e = bind(raw_t)
    a_t   = lambda_t * h_{t-1}
    a'_t  = a_t (I - beta^e_t B_t B_t^T)             the memory without what it held under the key B
    p_t   = a'_t C_t                                 the output before token t is written to memory
    (I - diag(sigma_t)(I - Q_t)) y_t = p_t + sigma_t * Q_t x_t
    h_t   = a'_t + (s_t * (x_t + (I - Q_t)(y_t - x_t))) B_t^T

a' is known before y_t, so that the local equation is the same with and without erase; so it is with
feedback of x, where x_t + W^y_x norm(y_{t-1}) takes the place of x_t.
Letters: b batch, t time, d channels, n state per channel, k reflections, r size of raw. With
feedback of the first raw values only, the others are raw^x.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.direct.layout import choose_bind
from bedouin.kernels.direct.local import factor_local, smallest_pivot, solve_local
from bedouin.kernels.feedback import add_feedback, project_feedback
from bedouin.kernels.heads import per_sample
from bedouin.kernels.householder import mix_channels
from bedouin.kernels.operands import Bind, Operands, Parameterization
from bedouin.kernels.scan import contract, discretize, erase_memory

ROUNDING = 1e4
"""A sweep has converged at token t if defect_t is at most ROUNDING eps times the largest term in
the sums F(y)_s, s <= t. The Woodbury formula with a pivoted k x k system is backward stable; the
factor allows for the sums over d channels and the growth factor of the elimination."""

MAX_RESIDUAL = 0.1
"""The largest defect_t of a sweep that has converged, relative to the largest scale_s, s <= t. If
the terms cancel, as for Q x near 0 in a head with no more channels than reflections, rounding
errors may be as large as y."""


def is_rounding(
    defect: Tensor,  # (...)
    scale: Tensor,  # (...), the largest so far
    magnitude: Tensor,  # (...), the largest so far
) -> Tensor:  # (...)
    """Whether all values are finite and the defect is within the rounding error of F(y), and small
    relative to F(y) itself."""
    terms = torch.maximum(scale, magnitude)
    explained = defect <= ROUNDING * torch.finfo(terms.dtype).eps * terms
    return torch.isfinite(terms) & explained & (defect <= MAX_RESIDUAL * scale)


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
    pivot: Tensor  # (b,), smallest pivot of the sample's local systems, detached
    residual: Tensor | None = None  # (b,), of SolveStats, where the kernels have reduced it
    converged: Tensor | None = None  # (b,), likewise


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


def term_size(
    s: Tensor,  # (..., d), the largest over n
    x: Tensor,  # (..., d)
    y: Tensor,  # (..., d)
    mixed: Tensor,  # (..., d)
    e: Tensor | None,  # (..., 1) or (..., d); None: 0
) -> Tensor:  # (...)
    """max over channels of |s| (|(1 - e) x| + |e y| + |x~|)."""
    kept = x.abs() if e is None else ((1 - e) * x).abs() + (e * y).abs()
    return (s.abs() * (kept + mixed.abs())).amax(-1)


def direct_sweep_reference(
    operands: Operands,
    parameterization: Parameterization,
    bind: Bind | None = None,
    bind_parameters: tuple[Tensor, ...] = (),  # any shapes
) -> Sweep:
    """Solve token after token. Back-propagation through this loop also gives the exact gradient.

    `bind` None: the coefficients are computed from the raw values as the layout describes.
    """
    operands.check(parameterization.feeds_x)
    x, raw, W_y, A, h, y = operands.wide()
    assert h is not None and y is not None
    bind = choose_bind(bind, parameterization, A)
    A = A if A.dim() == 2 else per_sample(A, x.shape[0])
    ys, defects, scales, sizes = [], [], [], []
    pivot = x.new_full(x.shape[:1], torch.inf)
    for t in range(x.shape[1]):
        x_t, raw_t = x[:, t], raw[:, t]
        if W_y is not None:
            fed = project_feedback(y, W_y, parameterization.feedback_norm_eps)
            x_t, raw_t = add_feedback(x_t, raw_t, fed, parameterization.feeds_x)
        delta, B, C, e, U, M, erase = bind(raw_t, *bind_parameters)
        decay, s = discretize(delta, A, parameterization.input_scale, parameterization.eigenvalues)
        sigma = input_gain(s, B, C)
        decayed = erase_memory(decay * h, B, erase)
        diagonal = parameterization.diagonal(e)
        gap = None if diagonal is None else gain_gap(decay, B, C, parameterization)
        factors = factor_local(sigma, diagonal, U, M, gap)
        y = solve_local(contract(decayed, C), factors, x_t)
        mixed = mix_channels(x_t, y, diagonal, U, M)
        h = _write_memory(decayed, s, mixed, B)
        F_t = contract(h, C).detach()
        ys.append(y)
        defects.append((F_t - y.detach()).abs().amax(-1))
        scales.append(F_t.abs().amax(-1))
        sizes.append(term_size(s.abs().amax(-1), x_t, y, mixed, diagonal).detach())
        pivot = torch.fmin(pivot, smallest_pivot(factors))
    if not ys:
        empty = x.new_zeros(x.shape[:2])
        return Sweep(torch.zeros_like(x), h, empty, empty, empty, pivot)
    defect, scale, size = (torch.stack(values, 1) for values in (defects, scales, sizes))
    return Sweep(torch.stack(ys, 1), h, defect, scale, size, pivot)


def _write_memory(
    decayed: Tensor,  # (..., d, n)
    s: Tensor,  # (..., d, 1) or (..., d, n)
    mixed: Tensor,  # (..., d)
    B: Tensor,  # (..., n)
) -> Tensor:  # (..., d, n)
    """h_t = a' + (s * x~) B^T."""
    if s.shape[-1] > 1:
        return decayed + s * mixed.unsqueeze(-1) * B.unsqueeze(-2)
    return decayed + (s * mixed.unsqueeze(-1)) * B.unsqueeze(-2)

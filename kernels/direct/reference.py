"""The direct sweep: the exact fixed point of the whole sequence in one pass over time.

Token t is solved from the memory h_{t-1} and the output y_{t-1} alone:

    raw_t = raw^x_t + W^y norm(y_{t-1})              Delta, B, C, (e, U, M) = bind(raw_t)
    p_t   = (lambda_t * h_{t-1}) C_t                 what memory reads before token t is written
    (I - diag(sigma_t)(I - Q_t)) y_t = p_t + sigma_t * Q_t x_t
    h_t   = lambda_t * h_{t-1} + (s_t * (x_t + (I - Q_t)(y_t - x_t))) B_t^T

Letters: b batch, t time, d channels, n state per channel, k reflections, r size of raw.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from bedouin.kernels.direct.local import factor_local, smallest_pivot, solve_local
from bedouin.kernels.householder import mix_channels
from bedouin.kernels.scan import Eigenvalues, InputScale, contract, discretize

ROUNDING = 1e4
"""A sweep has converged where defect_t <= ROUNDING eps times the largest of the terms that F(y)_s
sums, s <= t. Woodbury with a pivoted k x k system is backward stable; sums over d channels and the
growth factor of the elimination leave three digits or so."""

Activation = Literal["softplus", "softplus_of_minus", "sigmoid"]


class Coefficients(NamedTuple):
    """What the raw projections of a token determine; leading axes (b,) or (b, t)."""

    delta: Tensor  # (..., d)
    B: Tensor  # (..., n)
    C: Tensor  # (..., n)
    e: Tensor  # (..., 1) or (..., d)
    U: Tensor  # (..., k, d)
    M: Tensor  # (..., k, k)


@dataclass(frozen=True)
class RawLayout:
    """What a bind does, for kernels that do it themselves: Householder form, e = 0.

    Raw values of a token: [Delta d | B n | C n | u_1 .. u_k k d | alpha k], with Delta =
    activation(raw), B, C and u_i made unit, beta = beta_max sigmoid(alpha); without `selective`
    [Delta d | u k d | alpha k] and B = C = 1.
    """

    activation: Activation
    selective: bool
    num_householder: int
    beta_max: float

    def size(self, d: int, n: int) -> int:
        """r: raw values a token."""
        return d + (2 * n if self.selective else 0) + self.num_householder * (d + 1)


@dataclass(frozen=True)
class SweepOptions:
    """The fixed part of a map: how raw values are read, and which parameterization holds."""

    bind: Callable[..., Coefficients]  # bind(raw, *bind_parameters)
    input_scale: InputScale
    eigenvalues: Eigenvalues
    feedback_norm_eps: float | None  # None: the feedback sees y itself
    layout: RawLayout | None = None  # None: `bind` is all that is known

    def diagonal(self, e: Tensor) -> Tensor | None:
        """e, or None where it is known to be 0: nothing is computed for it then."""
        return e if self.layout is None else None


class Sweep(NamedTuple):
    """Result of a sweep, max norms: defect_t = |F(y)_t - y_t|, scale_t = |F(y)_t|.

    magnitude_t = |s_t| (|(1 - e) x_t| + |e y_t| + |x~_t|) bounds the terms whose sum F(y)_t is:
    where B_t and C_t are nearly orthogonal, or (1 - e) x_t and U^T M U x_t nearly the same, they
    cancel, and rounding is relative to them.
    """

    y: Tensor  # (b, t, d)
    h: Tensor  # (b, d, n), after the last token
    defect: Tensor  # (b, t), detached
    scale: Tensor  # (b, t), detached
    magnitude: Tensor  # (b, t), detached
    pivot: Tensor  # (b,), smallest pivot of the sample's local systems, detached
    residual: Tensor | None = None  # (b,), of SolveStats, where the kernels have reduced it
    converged: Tensor | None = None  # (b,), likewise


def start_tensors(
    h0: Tensor | None, y0: Tensor | None, x: Tensor, A: Tensor
) -> tuple[Tensor, Tensor]:
    """h0 (b, d, n) and y0 (b, d), zeros for None, for x (b, t, d) and A (d, n)."""
    b = x.shape[0]
    h0 = A.new_zeros(b, *A.shape) if h0 is None else h0
    return h0, A.new_zeros(b, A.shape[0]) if y0 is None else y0


def normalize_feedback(y: Tensor, eps: float | None) -> Tensor:
    """RMSNorm of y over channels (no weight: W^y absorbs it), or y itself for eps None."""
    return y if eps is None else y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)


def project_feedback(y: Tensor, W_y: Tensor, eps: float | None) -> Tensor:
    """W^y norm(y) (..., r): the product runs in the dtype of W^y, the result has that of y."""
    return linear(normalize_feedback(y, eps).to(W_y.dtype), W_y).to(y.dtype)


def shifted(y: Tensor, y0: Tensor) -> Tensor:
    """y_{t-1} (b, t, d) for every t; the first token sees y0."""
    return torch.cat([y0.unsqueeze(1), y[:, :-1]], dim=1) if y.shape[1] else y


def full_raw(
    y: Tensor, raw: Tensor, W_y: Tensor | None, y0: Tensor, options: SweepOptions
) -> Tensor:
    """raw^x + W^y norm(shifted y) (b, t, r) for all tokens at once."""
    if W_y is None:
        return raw
    return raw + project_feedback(shifted(y, y0), W_y, options.feedback_norm_eps)


def input_gain(s: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """sigma (..., d): sum over n of s B C, the gain from x~_t to y_t."""
    return contract(s, B * C) if s.shape[-1] > 1 else s.squeeze(-1) * (B * C).sum(-1, keepdim=True)


def gain_gap(decay: Tensor, B: Tensor, C: Tensor, options: SweepOptions) -> Tensor | None:
    """1 - sigma (..., d) from lambda (..., d, n), where the difference would round it away.

    1 - sigma = 1 - B C + sum over n of B C |lambda| for the coupled scale; None for the others.
    """
    if options.input_scale != "one_minus_decay":
        return None
    return (1 - (B * C).sum(-1, keepdim=True)) + input_gain(decay.abs(), B, C)


def term_size(s: Tensor, x: Tensor, y: Tensor, mixed: Tensor, e: Tensor | None) -> Tensor:
    """max of |s| (|(1 - e) x| + |e y| + |x~|) (...), s being (..., d), its largest over n."""
    kept = x.abs() if e is None else ((1 - e) * x).abs() + (e * y).abs()
    return (s.abs() * (kept + mixed.abs())).amax(-1)


def direct_sweep_reference(
    x: Tensor,  # (b, t, d)
    raw: Tensor,  # (b, t, r), the part that x determines
    W_y: Tensor | None,  # (r, d); None: no feedback
    A: Tensor,  # (d, n)
    h0: Tensor,  # (b, d, n)
    y0: Tensor,  # (b, d), the output before the first token
    bind_parameters: tuple[Tensor, ...],
    options: SweepOptions,
) -> Sweep:
    """Solve token after token; autograd through this loop is the exact gradient, too."""
    h, y = h0, y0
    ys, defects, scales, sizes = [], [], [], []
    pivot = x.new_full(x.shape[:1], torch.inf)
    for t in range(x.shape[1]):
        x_t, raw_t = x[:, t], raw[:, t]
        if W_y is not None:
            raw_t = raw_t + project_feedback(y, W_y, options.feedback_norm_eps)
        delta, B, C, e, U, M = options.bind(raw_t, *bind_parameters)
        decay, s = discretize(delta, A, options.input_scale, options.eigenvalues)
        sigma = input_gain(s, B, C)
        decayed = decay * h
        diagonal = options.diagonal(e)
        gap = None if diagonal is None else gain_gap(decay, B, C, options)
        factors = factor_local(sigma, diagonal, U, M, gap)
        y = solve_local(contract(decayed, C), factors, x_t)
        mixed = mix_channels(x_t, y, diagonal, U, M)
        h = write_memory(decayed, s, mixed, B)
        F_t = contract(h, C).detach()
        ys.append(y)
        defects.append((F_t - y.detach()).abs().amax(-1))
        scales.append(F_t.abs().amax(-1))
        sizes.append(term_size(s.abs().amax(-1), x_t, y, mixed, diagonal).detach())
        pivot = torch.fmin(pivot, smallest_pivot(factors))
    if not ys:
        empty = x.new_zeros(x.shape[:2])
        return Sweep(torch.zeros_like(x), h0, empty, empty, empty, pivot)
    defect, scale, size = (torch.stack(values, 1) for values in (defects, scales, sizes))
    return Sweep(torch.stack(ys, 1), h, defect, scale, size, pivot)


def write_memory(decayed: Tensor, s: Tensor, mixed: Tensor, B: Tensor) -> Tensor:
    """h_t = decayed + (s * x~) B^T, with s (..., d, 1) or (..., d, n)."""
    if s.shape[-1] > 1:
        return decayed + s * mixed.unsqueeze(-1) * B.unsqueeze(-2)
    return decayed + (s * mixed.unsqueeze(-1)) * B.unsqueeze(-2)

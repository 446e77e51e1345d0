"""The sweep of a layer in which only the first heads have feedback.

The other heads, o, depend on the input alone. They are swept first, without feedback, and what the
heads with feedback, f, read of them is one product for all tokens:

    raw_t = raw^x_t + W^y_o norm(y^o_{t-1}) + W^y_f norm(y^f_{t-1})

Of a single token all outputs that are read are known, so that one product stands before its sweep.

Letters: b samples, all heads' counted; t time, H heads, k of them with feedback, p channels and n
states of a head, r raw values.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.backend import Backend
from bedouin.kernels.branches import beside, join
from bedouin.kernels.direct import Sweep
from bedouin.kernels.feedback import (
    add_feedback,
    apply_feedback_weight,
    bound_x,
    reads_all_heads,
)
from bedouin.kernels.heads import count_heads, fold, unfold
from bedouin.kernels.linear import apply_weight
from bedouin.kernels.operands import Operands, Parameterization
from bedouin.kernels.output import shifted_norm

Stage = Literal["others", "fed"]
SweepOnce = Callable[[Stage, Operands], Sweep]
"""The sweep of the operands of a stage."""


def sweep_in_stages(
    sweep_once: SweepOnce,
    operands: Operands,  # W^y of the heads with feedback
    parameterization: Parameterization,
    fed_heads: int,
    backend: Backend,
) -> Sweep:
    """The sweep of all heads, of which the first `fed_heads` have feedback, fewer than all."""
    first, heads = fed_heads, count_heads(operands.A)
    samples = operands.x.shape[0] // heads
    sizes = [first * samples, (heads - first) * samples]

    def halves(v: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None) if v is None else v.split(sizes)

    (x, x_o), (raw, raw_o) = operands.x.split(sizes), operands.raw.split(sizes)
    (h0, h0_o), (y0, y0_o) = halves(operands.h0), halves(operands.y0)
    A, A_o = (_of_heads(v) for v in operands.A.split([first, heads - first]))
    others = Operands(x_o, raw_o, None, A_o, h0_o, y0_o)
    swept_o = sweep_once("others", others)

    assert operands.W_y is not None
    W_y, p = operands.W_y, operands.A.shape[-2]
    if reads_all_heads(W_y, p):
        W_y, W_o = W_y.split([first * p, (heads - first) * p], -1)
        eps = parameterization.feedback_norm_eps
        normed = shifted_norm(swept_o.y, y0_o, eps, dtype=W_o.dtype, backend=backend)
        # not by apply_feedback_weight, which would take one other head for the head itself
        read = apply_weight(unfold(normed, heads - first), W_o.flatten(0, 1))
        # in the dtype of A, because a sum in low precision would round the input again
        x, raw, added = (v.to(operands.A.dtype) for v in (x, raw, fold(read, first)))
        x, raw = add_feedback(x, raw, added, parameterization.feeds_x)
    fed = Operands(x, raw, _of_heads(W_y).contiguous(), A, h0, y0)
    return _join(sweep_once("fed", fed), swept_o)


def with_known_feedback(
    operands: Operands,  # of at most one token and several heads, W^y of those with feedback
    parameterization: Parameterization,
    fed_heads: int | None,
    backend: Backend,
) -> Operands:
    """The operands with W^y norm(y_0) added, x bounded where it is, and without W^y: all that the
    feedback of a single token reads is known before it."""
    x, raw, W_y, A, _, y0 = operands
    if W_y is None:
        return operands
    if parameterization.bounded_heads:
        x = x.to(A.dtype)  # as sweeps compute the tanh
    if y0 is None:
        x = bound_x(x, count_heads(A), parameterization)
        return operands._replace(x=x, W_y=None)
    heads, p, r = count_heads(A), A.shape[-2], raw.shape[-1]
    first = heads if fed_heads is None else fed_heads
    samples = x.shape[0] // heads
    with beside("feedback", W_y, y0):
        past = y0 if reads_all_heads(W_y, p) else y0[: first * samples]
        past = past.unsqueeze(1)
        eps = parameterization.feedback_norm_eps
        normed = shifted_norm(past, past[:, 0], eps, dtype=W_y.dtype, backend=backend)
        fed = apply_feedback_weight(normed, W_y, heads).to(A.dtype)
        f = fed.shape[-1] - p if parameterization.feeds_x else fed.shape[-1]
        rows = (0, 0, 0, (heads - first) * samples)
        of_raw = F.pad(fed[..., :f], (0, r - f, *rows))
        of_x = F.pad(fed[..., f:], (0, 0, *rows)) if parameterization.feeds_x else None
    join("feedback", of_raw, of_x)
    x = bound_x(x if of_x is None else x + of_x, heads, parameterization)
    return operands._replace(x=x, raw=raw + of_raw, W_y=None)


def _of_heads(
    v: Tensor,  # (H, ...)
) -> Tensor:  # (H, ...), or (...) of one head
    return v.squeeze(0)  # which changes nothing of several


def _join(fed: Sweep, others: Sweep) -> Sweep:
    """The sweep of all samples."""
    values: list[Any] = [
        None if of_fed is None or of_others is None else torch.cat([of_fed, of_others])
        for of_fed, of_others in zip(fed, others, strict=True)
    ]
    return Sweep(*values)

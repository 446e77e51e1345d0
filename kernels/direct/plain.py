"""The eager implementation of the registered operations, with their shapes and strides.

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.direct.buffered import buffered_reverse, buffered_sweep
from bedouin.kernels.direct.buffers import state_major
from bedouin.kernels.direct.layout import choose_bind
from bedouin.kernels.direct.reference import memory_of, sweep_tokens
from bedouin.kernels.direct.reverse import SolvedSweep
from bedouin.kernels.linear import padding
from bedouin.kernels.operands import Operands, Parameterization


def plain_sweep(
    operands: Operands, parameterization: Parameterization, keep_every: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (b, t, d), the last h (b, d, n), the kept h (b, slots, n, d) and the statistics (4, b, t):
    defect, scale, magnitude and pivot, where each token has the smallest pivot of its sample.

    Unlike in the kernels, the kept h begin with the one before the first token.
    """
    operands = operands.wide()
    if operands.x.numel():
        sweep, kept = buffered_sweep(operands, parameterization, keep_every)
    else:
        bind = choose_bind(None, parameterization, operands.A)
        sweep, kept = sweep_tokens(operands, parameterization, bind, (), keep_every)
    pivot = sweep.pivot.unsqueeze(1).expand(operands.x.shape[:2])
    statistics = torch.stack([sweep.defect, sweep.scale, sweep.magnitude, pivot])
    return sweep.y.contiguous(), state_major(sweep.h).mT, _stack_kept(kept, operands), statistics


def plain_memory(
    y: Tensor,  # (b, t, d), a fixed point found elsewhere
    operands: Operands,
    parameterization: Parameterization,
    keep_every: int,
) -> tuple[Tensor, Tensor]:
    """The last h (b, d, n) and the kept h (b, slots, n, d), as `plain_sweep` returns them."""
    bind = choose_bind(None, parameterization, operands.A)
    h, kept = memory_of(y, operands.wide(), parameterization, bind, (), keep_every)
    return state_major(h).mT, _stack_kept(kept, operands)


def plain_reverse(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor | None,  # (b, d, n); None: zeros
    y: Tensor,  # (b, t, d)
    kept: Tensor,  # (b, ceil(t / keep_every), n, d)
    operands: Operands,
    parameterization: Parameterization,
    keep_every: int,
    *,
    wants_y0: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, raw, W_y (empty without feedback), A, h0 and y0 (empty if not wanted), and
    the statistics (2, b, t) of the adjoint equation: defect and scale."""
    x, raw, W_y, A, _, _ = operands
    wide, bind = operands.wide(), choose_bind(None, parameterization, A)
    statistics = A.new_zeros(2, *x.shape[:2])

    def report(
        defect: Tensor,  # (b, t)
        scale: Tensor,  # (b, t)
    ) -> None:
        statistics[0], statistics[1] = defect, scale

    if x.numel():
        solved = SolvedSweep.of(y, wide, parameterization, bind, ())
        grads = buffered_reverse(grad_y, grad_h, kept, keep_every, solved, report)
    else:
        h0, y0 = (torch.zeros_like(v) for v in wide.start())
        zeros = [None if v is None else torch.zeros_like(v) for v in (wide.x, wide.raw, W_y, A)]
        grads = *zeros, h0 if grad_h is None else grad_h, y0
    grad_x, grad_raw, grad_W_y, grad_A, grad_h0, grad_y0 = grads
    assert grad_x is not None and grad_raw is not None and grad_A is not None
    assert grad_h0 is not None and grad_y0 is not None
    # the same strides as in the fake implementation of the operation
    r = raw.shape[2]
    rows = F.pad(grad_raw.to(raw.dtype).contiguous(), (0, padding(r)))[..., :r]
    if grad_W_y is None:
        grad_W_y = A.new_empty(0)
    elif grad_W_y.dim() == 3:
        f = grad_W_y.shape[1]
        grad_W_y = F.pad(grad_W_y, (0, 0, 0, padding(f)))[:, :f]
    first = grad_x.to(x.dtype), rows, grad_W_y
    then = state_major(grad_A).mT, state_major(grad_h0).mT, grad_y0[: None if wants_y0 else 0]
    return *first, *then, statistics


def _stack_kept(
    kept: list[Tensor],  # slots of (b, n, d)
    operands: Operands,
) -> Tensor:  # (b, slots, n, d)
    empty = operands.A.new_empty(len(operands.x), 0, *operands.A.mT.shape[-2:])
    return torch.stack(kept, 1) if kept else empty

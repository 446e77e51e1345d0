"""The output stage of one head with feedback as one function of autograd: few passes on a CPU.

    n_t   = norm(y_{t-1}),   a_t = gate_t + W n_t,   out_t = SiLU(a_t) * rms_norm(y_t + D * x_t)

On a CPU the time of an elementwise operation is that of reading and writing memory. Autograd of the
plain version (reference.py) reads and writes more of it, and has a node for each operation.

Letters: b batch, t time, d channels, i = b t rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.backend import is_transformed, without_autocast
from bedouin.kernels.double_backward import refuse_second_derivative
from bedouin.kernels.norms import overflow_to_nan_


class FedOutput(NamedTuple):
    """The tensors of the stage."""

    y: Tensor  # (b, t, d)
    y0: Tensor | None  # (b, d); None: zeros
    x: Tensor  # (b, t, d)
    D: Tensor  # (d,)
    gate: Tensor  # (b, t, d), with z
    W: Tensor  # (d, d), the gate's part of W^y
    weight: Tensor  # (d,), of the norm


def takes_one_function(operands: FedOutput) -> bool:
    """Whether `fed_output` can compute the stage: on a CPU, of tensors of one dtype, eagerly and
    outside of transforms."""
    y = operands.y
    if y.device.type != "cpu" or not y.numel() or torch.compiler.is_compiling() or is_transformed():
        return False
    return operands.D.dim() == 1 and all(v is None or v.dtype == y.dtype for v in operands)


class _FedOutput(torch.autograd.Function):
    """The fields of `FedOutput` are passed one by one, because torch does not find tensors that
    require gradients inside a NamedTuple."""

    @staticmethod
    def forward(
        ctx: Any,
        feedback_eps: float | None,
        eps: float,
        *tensors: Any,  # the fields of `FedOutput`
    ) -> Tensor:  # (b, t, d)
        y, y0, x, D, gate, W, weight = tensors
        d = y.shape[-1]
        normed = y.new_empty(y.shape)
        normed[:, 1:] = y[:, :-1]
        normed[:, 0] = 0 if y0 is None else y0
        inverse_normed = None if feedback_eps is None else _inverse_norm(normed, feedback_eps)
        if inverse_normed is not None:
            normed.mul_(inverse_normed)
        before = torch.addmm(gate.reshape(-1, d), normed.view(-1, d), W.mT).view(y.shape)
        v = torch.addcmul(y, x, D)
        inverse_v = _inverse_norm(v, eps)
        v.mul_(inverse_v)
        active = F.silu(before)
        ctx.save_for_backward(*tensors, normed, inverse_normed, before, active, v, inverse_v)
        out: Tensor = (v * weight).mul_(active)
        return out

    @staticmethod
    def backward(
        ctx: Any,
        grad: Tensor,  # (b, t, d)
    ) -> tuple[Tensor | None, ...]:
        *operands, normed, inverse_normed, before, active, v, inverse_v = ctx.saved_tensors
        _, y0, x, D, _, W, weight = operands
        d = x.shape[-1]
        with torch.no_grad(), without_autocast(x.device):
            grad_active = (grad * v).mul_(weight)
            grad_before = torch.ops.aten.silu_backward(grad_active, before)
            grad_y = grad * active
            products = grad_y * v
            grad_weight = products.sum((0, 1))
            along = (products @ weight).unsqueeze(-1)
            grad_y = _unnormalize(grad_y.mul_(weight), v, along, inverse_v)
            rows = grad_before.reshape(-1, d)
            grad_W = rows.mT @ normed.view(-1, d)
            grad_normed = (rows @ W).view(grad_y.shape)
            if inverse_normed is not None:
                along = (grad_normed * normed).sum(-1, keepdim=True)
                grad_normed = _unnormalize(grad_normed, normed, along, inverse_normed)
            grad_x, grad_D = grad_y * D, (grad_y * x).sum((0, 1))
            grad_y[:, :-1] += grad_normed[:, 1:]
            grad_y0 = None if y0 is None else grad_normed[:, 0]
        grads = grad_y, grad_y0, grad_x, grad_D, grad_before, grad_W, grad_weight
        return None, None, *refuse_second_derivative(grads, [grad, *operands])


def _inverse_norm(
    v: Tensor,  # (b, t, d)
    eps: float,
) -> Tensor:  # (b, t, 1)
    """The factor of RMSNorm."""
    norm: Tensor = torch.linalg.vector_norm(v, 2, -1, True)
    return overflow_to_nan_(norm.square_()).div_(v.shape[-1]).add_(eps).rsqrt_()


def _unnormalize(
    grad: Tensor,  # (b, t, d), of the normed rows, overwritten
    normed: Tensor,  # (b, t, d)
    along: Tensor,  # (b, t, 1), the inner product of both
    inverse: Tensor,  # (b, t, 1), the factor of the rows
) -> Tensor:  # (b, t, d)
    """The cotangent of the rows before their norm, in the memory of `grad`."""
    return grad.addcmul_(normed, along, value=-1 / grad.shape[-1]).mul_(inverse)


def fed_output(operands: FedOutput, feedback_eps: float | None, eps: float) -> Tensor:  # as y
    """The gated output, where `takes_one_function` says so. Once differentiable.

    feedback_eps: that of the norm of y_{t-1}; None: n_t is y_{t-1} itself.
    """
    out: Tensor = _FedOutput.apply(feedback_eps, eps, *operands)  # type: ignore[no-untyped-call]
    return out

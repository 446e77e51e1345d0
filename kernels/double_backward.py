"""Errors for second derivatives and for forward mode, which bedouin does not support.

torch's own `once_differentiable` raises its error in a node that a second `torch.autograd.grad`
with explicit inputs never visits, so that a wrong second derivative is returned silently. Here the
node lies in the graph between the gradients and the tensors that they depend on.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import is_forward_mode

SECOND_DERIVATIVE = (
    "this gradient, which bedouin computes itself, is once differentiable: second derivatives "
    "(double backward, create_graph=True, torch.func.hessian) are not supported; for a small "
    "problem, use finite differences of the gradient"
)

FORWARD_MODE = (
    "bedouin's fixed point has no forward-mode derivative (torch.func.jvp, jacfwd and hessian, "
    "torch.autograd.forward_ad): use reverse mode (torch.func.jacrev, vjp and grad), or "
    "adjoint=UnrolledAdjoint(), through which forward mode passes"
)


def refuse_forward_mode(
    ctx: Any,
    *tangents: Tensor,  # any shapes
) -> Any:
    """A `jvp` for autograd.Functions without forward mode; raises RuntimeError."""
    raise RuntimeError(FORWARD_MODE)


class _Once(torch.autograd.Function):
    """Returns copies of the first `count` tensors, whose differentiation raises RuntimeError."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        count: int,
        *tensors: Tensor,  # any shapes
    ) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def setup_context(
        ctx: Any,
        inputs: tuple[Any, ...],
        output: tuple[Tensor, ...],  # any shapes
    ) -> None:
        pass

    @staticmethod
    def backward(
        ctx: Any,
        *grads: Tensor,  # any shapes
    ) -> Any:
        raise RuntimeError(SECOND_DERIVATIVE)


class _OnceEager(_Once):
    """`_Once` with an error in forward mode, too. A class of its own, because torch.compile cannot
    trace a Function that has a jvp."""

    @staticmethod
    def jvp(
        ctx: Any,
        *tangents: Tensor,  # any shapes
    ) -> Any:
        raise RuntimeError(SECOND_DERIVATIVE)


def refuse_second_derivative(
    grads: Sequence[Tensor | None],  # any shapes
    depends_on: Sequence[Tensor | None],  # any shapes
) -> tuple[Tensor | None, ...]:
    """`grads`, marked so that their derivative with respect to `depends_on` raises RuntimeError.

    Returns `grads` unchanged unless the backward pass itself is recorded or runs in forward mode.
    """
    forward_mode = is_forward_mode()
    if not forward_mode and not torch.is_grad_enabled():
        return tuple(grads)
    sources = [t for t in depends_on if t is not None and (forward_mode or t.requires_grad)]
    if not sources:
        return tuple(grads)
    present = [grad for grad in grads if grad is not None]
    function = _Once if torch.compiler.is_compiling() else _OnceEager
    marked = iter(function.apply(len(present), *present, *sources))  # type: ignore[no-untyped-call]
    return tuple(None if grad is None else next(marked) for grad in grads)

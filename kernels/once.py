"""Gradients that may be taken once.

torch's own `once_differentiable` hangs its error on a node that a second `torch.autograd.grad` with
explicit inputs never visits, so a wrong second derivative comes back without a word. Here the error
is part of the graph between the gradients and what they depend on.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _Once(torch.autograd.Function):
    """Its first `count` tensors, unchanged; differentiating them is an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "the gradient of a fixed point is once differentiable here: second derivatives (double "
            "backward, create_graph=True) are not supported"
        )


def refuse_second_derivative(
    grads: Sequence[Tensor | None], depends_on: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """`grads`, such that a derivative of them with respect to `depends_on` raises RuntimeError.

    Costs nothing unless the backward pass itself is being recorded.
    """
    sources = [t for t in depends_on if t is not None and t.requires_grad]
    if not torch.is_grad_enabled() or not sources:
        return tuple(grads)
    present = [grad for grad in grads if grad is not None]
    marked = iter(_Once.apply(len(present), *present, *sources))  # type: ignore[no-untyped-call]
    return tuple(None if grad is None else next(marked) for grad in grads)

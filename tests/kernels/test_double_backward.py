"""Second derivatives of a once differentiable gradient raise, by every way to request them."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.kernels.double_backward import refuse_second_derivative


class _Square(torch.autograd.Function):
    """x^2, with a gradient that may be taken once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor | None:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            grad = 2 * x * grad_output
        return refuse_second_derivative([grad], [grad_output, x])[0]


def _square(x: Tensor) -> Tensor:
    result: Tensor = _Square.apply(x)  # type: ignore[no-untyped-call]
    return result


@pytest.mark.parametrize("recorded", [False, True])
def test_the_first_derivative_is_unchanged(recorded: bool) -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    (grad,) = torch.autograd.grad(_square(x).sum(), x, create_graph=recorded)
    assert grad.tolist() == [2.0, -4.0] and grad.requires_grad is recorded


def test_every_second_derivative_raises() -> None:
    """By backward, by explicit inputs, and with respect to the incoming gradient."""
    x, weight = (torch.tensor([v], requires_grad=True) for v in (3.0, 2.0))
    (grad,) = torch.autograd.grad((weight * _square(x)).sum(), x, create_graph=True)
    ways: list[Any] = [
        grad.sum().backward,
        *(partial(torch.autograd.grad, grad.sum(), v) for v in (x, weight)),
    ]
    for way in ways:
        with pytest.raises(RuntimeError, match="once differentiable"):
            way(retain_graph=True)


def test_missing_gradients_stay_missing() -> None:
    x = torch.ones(2, requires_grad=True)
    first, second = refuse_second_derivative([None, 3 * torch.ones(2)], [x, None])
    assert first is None
    assert second is not None and second.tolist() == [3.0, 3.0] and second.requires_grad


def test_without_anything_to_depend_on_nothing_is_marked() -> None:
    grad = torch.ones(2)
    assert refuse_second_derivative([grad], [torch.ones(2), None])[0] is grad

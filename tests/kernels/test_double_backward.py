"""Second derivatives of a once differentiable gradient raise, by every way to request them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.kernels.double_backward import refuse_second_derivative

MESSAGE = "once differentiable"


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


def test_the_first_derivative_is_unchanged() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    (grad,) = torch.autograd.grad(_square(x).sum(), x)
    assert grad.tolist() == [2.0, -4.0]
    assert not grad.requires_grad


def test_the_first_derivative_is_unchanged_where_it_is_recorded() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    (grad,) = torch.autograd.grad(_square(x).sum(), x, create_graph=True)
    assert grad.tolist() == [2.0, -4.0]


def test_backward_of_the_gradient_raises() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    (grad,) = torch.autograd.grad(_square(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=MESSAGE):
        grad.sum().backward()


def test_the_gradient_of_the_gradient_with_explicit_inputs_raises() -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    (grad,) = torch.autograd.grad(_square(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=MESSAGE):
        torch.autograd.grad(grad.sum(), x)


def test_the_derivative_with_respect_to_the_incoming_gradient_raises() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    weight = torch.tensor([2.0], requires_grad=True)
    (grad,) = torch.autograd.grad((weight * _square(x)).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=MESSAGE):
        torch.autograd.grad(grad.sum(), weight)


def test_missing_gradients_stay_missing() -> None:
    x = torch.ones(2, requires_grad=True)
    first, second = refuse_second_derivative([None, 3 * torch.ones(2)], [x, None])
    assert first is None
    assert second is not None and second.tolist() == [3.0, 3.0] and second.requires_grad


def test_without_anything_to_depend_on_nothing_is_marked() -> None:
    grad = torch.ones(2)
    assert refuse_second_derivative([grad], [torch.ones(2), None])[0] is grad

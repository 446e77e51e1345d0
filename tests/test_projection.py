"""The padded product against torch's own: values, gradients, and where its rows lie."""

import pytest
import torch
from torch import Tensor

from bedouin.projection import ALIGNMENT, padded_linear


def operands(r: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """rows (5, 3), as a strided view, weight (r, 3) and bias (r,), all with gradients."""
    values = torch.randn(5, 7)[:, 2:5], torch.randn(r, 3), torch.randn(r)
    return [v.to(dtype).requires_grad_() for v in values]


@pytest.mark.parametrize("r", [1, 63, 64, 65])
def test_values_and_gradients_are_those_of_linear(r: int) -> None:
    leaves = operands(r)
    weights = torch.randn(5, r, dtype=torch.float64)
    found = []
    for function in (padded_linear, torch.nn.functional.linear):
        out = function(*leaves)
        found.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.autograd.gradgradcheck(padded_linear, leaves)


def test_rows_are_aligned() -> None:
    out = padded_linear(*operands(65))
    assert out.shape == (5, 65) and out.stride() == (2 * ALIGNMENT, 1)


def test_only_gradients_that_are_wanted_are_made() -> None:
    rows, weight, bias = (v.detach() for v in operands(3))
    out = padded_linear(rows, weight.requires_grad_(), bias)
    out.sum().backward()
    assert weight.grad is not None and rows.grad is bias.grad is None


def test_no_rows() -> None:
    rows, weight, bias = operands(3)
    out = padded_linear(rows[:0], weight, bias)
    grads = torch.autograd.grad(out.sum(), [weight, bias])
    assert out.shape == (0, 3) and all(not grad.any() for grad in grads)


def test_autocast_does_not_cast_again() -> None:
    leaves = operands(3, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = padded_linear(*leaves)
        grads = torch.autograd.grad(out.sum(), leaves)
    assert {v.dtype for v in (out, *grads)} == {torch.float32}

"""The split product against torch's own: values, gradients and strides."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from bedouin.kernels.linear import ALIGNMENT
from bedouin.projection import project_raw, split_linear


def operands(r: int, dtype: torch.dtype = torch.float64, s: int = 4) -> list[Tensor]:
    """rows (5, 3), as a strided view, weight (r + s, 3) and bias (r + s,), all with gradients."""
    values = torch.randn(5, 7)[:, 2:5], torch.randn(r + s, 3), torch.randn(r + s)
    return [v.to(dtype).requires_grad_() for v in values]


@pytest.mark.parametrize("s", [4, 70])
@pytest.mark.parametrize("r", [1, 63, 64, 65])
def test_values_and_gradients_are_those_of_linear(r: int, s: int) -> None:
    leaves = operands(r, s=s)
    weights = torch.randn(5, r + s, dtype=torch.float64)
    found = []
    for out in (torch.cat(split_linear(*leaves, r=r), 1), linear(*leaves)):
        found.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("r", [1, 65])
def test_heads_are_a_loop_over_them(r: int) -> None:
    leaves = [torch.stack(v) for v in zip(*(operands(r) for _ in range(3)), strict=True)]
    out, rest = split_linear(*leaves, r=r)
    assert out.stride(1) % ALIGNMENT == 0
    loss = out.cos().sum() + rest.sin().sum()
    alone = [split_linear(*head, r=r) for head in zip(*leaves, strict=True)]
    expected = torch.stack([o.cos().sum() + s.sin().sum() for o, s in alone]).sum()
    torch.testing.assert_close(loss, expected)
    grads = (torch.autograd.grad(v, leaves) for v in (loss, expected))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("heads", [1, 2])
def test_both_ways_to_project_give_the_same_numbers(heads: int) -> None:
    """One product as plain torch reads it, and two as kernels read them."""
    x, r = torch.randn(2 * heads, 5, 3), 7
    lead = () if heads == 1 else (heads,)
    weight, bias = torch.randn(*lead, r + 3, 3), torch.randn(*lead, r + 3)
    one, two = (project_raw(x, weight, bias, r=r, dtype=v) for v in (None, torch.float32))
    assert one[0].shape == (2 * heads, 5, r) and one[1].shape == x.shape
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_have_gradients() -> None:
    assert torch.autograd.gradgradcheck(
        lambda *leaves: split_linear(*leaves, r=2), operands(2, s=1)
    )


@pytest.mark.parametrize("s", [4, 70])
def test_rows_are_aligned(s: int) -> None:
    out, rest = split_linear(*operands(65, s=s), r=65)
    assert out.shape == (5, 65) and out.stride() == (2 * ALIGNMENT, 1)
    assert rest.shape == (5, s) and rest.is_contiguous()


def test_only_gradients_that_are_wanted_are_made() -> None:
    rows, weight, bias = (v.detach() for v in operands(3))
    out, _ = split_linear(rows, weight.requires_grad_(), bias, r=3)
    out.sum().backward()
    assert weight.grad is not None and rows.grad is bias.grad is None
    assert not weight.grad[3:].any()


def test_no_rows() -> None:
    rows, weight, bias = operands(3)
    out, rest = split_linear(rows[:0], weight, bias, r=3)
    grads = torch.autograd.grad(out.sum() + rest.sum(), [weight, bias])
    assert out.shape == (0, 3) and rest.shape == (0, 4) and all(not grad.any() for grad in grads)


def test_autocast_does_not_cast_again() -> None:
    leaves = operands(3, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, rest = split_linear(*leaves, r=3)
        grads = torch.autograd.grad(out.sum() + rest.sum(), leaves)
    assert {v.dtype for v in (out, rest, *grads)} == {torch.float32}

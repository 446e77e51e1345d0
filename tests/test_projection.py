"""The split product against torch's own: values, gradients and strides. Joined weights."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from bedouin import Bedouin, FixedPointRNN
from bedouin.kernels.linear import ALIGNMENT
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.projection import project_raw, split_linear
from bedouin.solvers import Direct


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


@pytest.mark.parametrize(
    "make",
    [
        partial(Bedouin, 4),
        partial(Bedouin, 4, feedback=("delta",)),
        partial(Bedouin, 4, feedback=()),
        partial(Bedouin.from_paper, 4),
        partial(FixedPointRNN, 4),
        partial(FixedPointRNN, 4, feedback=()),
    ],
)
def test_joined_weights_give_the_same_numbers(
    make: Callable[..., FixedPointLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """(W^x W) u, which more than d m / (d - m) = 8 tokens are worth, and W^x (W u)."""
    layer = make(solver=Direct(), dtype=torch.float64)
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    weights, leaves = torch.randn_like(x), [x, *layer.parameters()]
    found = []
    for joins in (True, False):
        if not joins:
            monkeypatch.setattr(layer, "_joins_weights", lambda u: False)
        assert layer._joins_weights(x) == joins
        output, state = layer(x, return_state=True)
        loss = (output * weights).sum() + state.y.sum() + state.ssm.sin().sum()
        found.append([output, *torch.autograd.grad(loss, leaves, materialize_grads=True)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_weights_are_joined_only_where_it_pays() -> None:
    layer = Bedouin(4, num_heads=1)
    assert layer._joins_weights(torch.zeros(3, 3, 4))
    assert not layer._joins_weights(torch.zeros(2, 4, 4))
    assert not layer._joins_weights(torch.zeros(3, 3, 4, dtype=torch.bfloat16))
    assert not Bedouin(4, num_heads=2)._joins_weights(torch.zeros(3, 3, 4))
    assert not Bedouin(4, num_heads=1, expand=1)._joins_weights(torch.zeros(9, 9, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert not layer._joins_weights(torch.zeros(3, 3, 4))
    seen: list[Tensor] = []
    layer.in_proj.register_forward_hook(lambda module, args, output: seen.append(output))
    assert not layer._joins_weights(torch.zeros(3, 3, 4))
    layer(torch.zeros(3, 3, 4))
    assert len(seen) == 1

"""The output stage as one function of autograd: the numbers of the plain version."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bedouin.kernels.linear import apply_weight
from bedouin.kernels.output import gated_output, shifted_norm
from bedouin.kernels.output.eager import FedOutput, fed_output, takes_one_function

EPS = 1e-3
"""Large enough to matter."""


def draw(b: int, t: int, *, d: int = 5, dtype: torch.dtype = torch.float64) -> FedOutput:
    shapes = [(b, t, d), (b, d), (b, t, d), (d,), (b, t, d), (d, d), (d,)]
    return FedOutput(*(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes))


def plain(operands: FedOutput, feedback_eps: float | None) -> Tensor:
    y, y0, x, D, gate, W, weight = operands
    fed = apply_weight(shifted_norm(y, y0, feedback_eps), W)
    return gated_output(y, x, D, fed, None, gate, weight, eps=EPS)


@pytest.mark.parametrize("feedback_eps", [1e-2, None])
@pytest.mark.parametrize("has_start", [True, False])
@pytest.mark.parametrize(("b", "t"), [(1, 1), (2, 1), (1, 2), (3, 63), (2, 64), (1, 100)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)], ids=["64", "32"]
)
def test_values_and_gradients_are_those_of_the_plain_stage(
    feedback_eps: float | None,
    has_start: bool,
    b: int,
    t: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    operands = draw(b, t, dtype=dtype)
    if not has_start:
        operands = operands._replace(y0=None)
    assert takes_one_function(operands)
    leaves = [v for v in operands if v is not None]
    cotangent = torch.randn_like(operands.y)
    found = []
    for out in (fed_output(operands, feedback_eps, EPS), plain(operands, feedback_eps)):
        found.append([out, *torch.autograd.grad(out, leaves, cotangent)])
    for ours, theirs in zip(*found, strict=True):
        scale = 1 + theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * scale)


def test_operands_need_not_be_contiguous_or_require_gradients() -> None:
    operands = draw(2, 3)
    wide = torch.randn(2, 3, 10, dtype=torch.float64)
    operands = operands._replace(x=wide[..., :5], gate=wide[..., 5:])
    y = operands.y.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    operands = operands._replace(y=y)
    found = []
    for out in (fed_output(operands, EPS, EPS), plain(operands, EPS)):
        found.append([out, *torch.autograd.grad(out.square().sum(), [y, operands.W])])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_batched_cotangents() -> None:
    operands = draw(2, 3)
    leaves = [v for v in operands if v is not None]
    cotangents = torch.randn(4, 2, 3, 5, dtype=torch.float64)
    out = fed_output(operands, EPS, EPS)
    batched = torch.autograd.grad(out, leaves, cotangents, is_grads_batched=True, retain_graph=True)
    for i, cotangent in enumerate(cotangents):
        alone = torch.autograd.grad(out, leaves, cotangent, retain_graph=True)
        for ours, theirs in zip(batched, alone, strict=True):
            torch.testing.assert_close(ours[i], theirs)


@pytest.mark.parametrize("i", range(7))
def test_a_second_derivative_raises(i: int) -> None:
    operands = [v.detach() for v in draw(2, 3) if v is not None]
    leaf = operands[i].requires_grad_()
    out = fed_output(FedOutput(*operands), EPS, EPS)
    (grad,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        torch.autograd.grad(grad.sum(), leaf)


def _in_vmap(operands: FedOutput) -> FedOutput:
    seen: list[bool] = []

    def inside(y: Tensor) -> Tensor:
        seen.append(takes_one_function(operands._replace(y=y)))
        return y

    torch.func.vmap(inside)(operands.y.detach().unsqueeze(0))
    assert seen == [False]
    return operands._replace(y=operands.y[:0])


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v._replace(y=v.y[:, :0]),
        lambda v: v._replace(W=v.W.bfloat16()),
        lambda v: v._replace(D=v.D.unsqueeze(0)),
        lambda v: v._replace(y=v.y.to("meta")),
        _in_vmap,
    ],
    ids=["no tokens", "another dtype", "heads", "another device", "vmap"],
)
def test_what_one_function_does_not_take(change: Callable[[FedOutput], FedOutput]) -> None:
    assert not takes_one_function(change(draw(2, 3)))

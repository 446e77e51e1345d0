"""The gated norm of a memory's heads: plain torch and Triton.

Letters: b batch, t time, h heads, v value channels of a head.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.kernels.output import gated_norm

SIZES = [(2, 3, 2, 16), (1, 1, 1, 3), (2, 70, 3, 40), (1, 5, 1, 300)]
sizes = pytest.mark.parametrize("size", SIZES, ids=str)
EPS = 1e-5


def by_hand(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    o, gate, weight = o.double(), gate.double(), weight.double()
    normed = o / torch.sqrt((o * o).mean(-1, keepdim=True) + EPS) * weight
    return normed.flatten(-2) * gate * torch.sigmoid(gate)


def operands(size: Any, device: str, dtype: torch.dtype) -> list[Tensor]:
    b, t, h, v = size
    drawn = torch.randn(size), torch.randn(b, t, h * v + 5), torch.randn(v)
    o, gate, weight = (value.to(device) for value in drawn)
    return [o.to(dtype), gate.to(dtype)[..., 3:-2], weight]


def results(function: Any, given: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [v.detach().requires_grad_() for v in given]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def assert_agrees(size: Any, device: str, backend: Any, dtype: torch.dtype, rtol: float) -> None:
    given = operands(size, device, dtype)
    grad = torch.randn(given[1].shape, device=device).to(dtype)
    actual = results(lambda o, g, w: gated_norm(o, g, w, EPS, backend=backend), given, grad)
    for ours, theirs in zip(actual, results(by_hand, given, grad), strict=True):
        scale = theirs.detach().double().abs().max().item()
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=rtol, atol=rtol * scale)


@sizes
def test_plain_torch_is_the_definition(size: Any) -> None:
    assert_agrees(size, "cpu", "reference", torch.float64, 1e-12)
    assert_agrees(size, "cpu", "reference", torch.float32, 1e-5)


@sizes
@pytest.mark.interpreter
def test_the_kernels_are_the_definition(size: Any) -> None:
    assert_agrees(size, "cpu", "triton", torch.float32, 1e-5)


@sizes
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernels_are_the_definition(size: Any, dtype: torch.dtype) -> None:
    # results in bfloat16 are rounded to 8 bits
    assert_agrees(size, "cuda", "triton", dtype, 1e-5 if dtype == torch.float32 else 1e-2)


def test_bad_operands_are_named() -> None:
    o, gate, weight = operands(SIZES[0], "cpu", torch.float32)
    with pytest.raises(ValueError, match=r"gate must have shape \(b, t, h v\)"):
        gated_norm(o, gate[:, 1:], weight, EPS)
    with pytest.raises(ValueError, match=r"weight must have shape \(v,\)"):
        gated_norm(o, gate, weight[1:], EPS)

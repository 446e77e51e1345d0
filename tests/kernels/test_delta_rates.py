"""The strength of writes and the decay of the delta rule: plain torch and Triton.

Letters: b batch, t time, k Householder steps a token, h heads, p key channels.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.delta_rule import delta_rates

SIZES = [(2, 3, 1, 2, 16), (1, 1, 1, 1, 3), (3, 70, 2, 3, 40), (1, 5, 1, 2, 300)]
sizes = pytest.mark.parametrize("size", SIZES, ids=str)


def by_hand(b: Tensor, a: Tensor, A_log: Tensor, dt_bias: Tensor, key: Tensor) -> Any:
    b, a, A_log, dt_bias = b.double(), a.double(), A_log.double(), dt_bias.double()
    beta = 2 / (1 + torch.exp(-b)).unflatten(-1, key.shape[2:4])
    excess = key.double().square().sum(-1).clamp(min=1)
    g = -torch.exp(A_log) * torch.log1p(torch.exp(a + dt_bias))
    return beta / (excess if key.dtype == torch.bfloat16 else 1), g


def operands(size: Any, device: str, dtype: torch.dtype) -> list[Tensor]:
    """b and a are parts of wider rows."""
    b, t, k, h, p = size
    rows = torch.randn(b, t, k * h + h + 2, device=device).to(dtype)
    key = F.normalize(torch.randn(b, t, k, h, p, device=device), dim=-1).to(dtype)
    return [rows[..., 2 : 2 + k * h], rows[..., -h:], *torch.randn(2, h, device=device), key]


def results(function: Any, given: list[Tensor], grads: tuple[Tensor, Tensor]) -> list[Tensor]:
    *leaves, key = (v.detach().requires_grad_() for v in given)
    found = function(*leaves, key)
    return [*found, *torch.autograd.grad(found, leaves, [g.to(found[0].dtype) for g in grads])]


def assert_agrees(size: Any, device: str, backend: Any, dtype: torch.dtype, rtol: float) -> None:
    given = operands(size, device, dtype)
    grads = torch.randn(size[:4], device=device), torch.randn(given[1].shape, device=device)

    def ours(b: Tensor, a: Tensor, A_log: Tensor, dt_bias: Tensor, key: Tensor) -> Any:
        return delta_rates(b, key, (a, A_log, dt_bias), 2.0, backend=backend)

    pairs = zip(results(ours, given, grads), results(by_hand, given, grads), strict=True)
    for found, expected in pairs:
        scale = expected.detach().double().abs().max().item()
        torch.testing.assert_close(found.double(), expected.double(), rtol=rtol, atol=rtol * scale)


@sizes
def test_plain_torch_is_the_definition(size: Any) -> None:
    assert_agrees(size, "cpu", "reference", torch.float64, 1e-12)
    assert_agrees(size, "cpu", "reference", torch.bfloat16, 1e-2)


@sizes
@pytest.mark.interpreter
def test_the_kernels_are_the_definition(size: Any) -> None:
    assert_agrees(size, "cpu", "triton", torch.float32, 1e-5)


@sizes
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernels_are_the_definition(size: Any, dtype: torch.dtype) -> None:
    # gradients in bfloat16 are rounded to 8 bits
    assert_agrees(size, "cuda", "triton", dtype, 1e-5 if dtype == torch.float32 else 1e-2)


def test_without_a_decay_there_is_none() -> None:
    b, _, _, _, key = operands(SIZES[0], "cpu", torch.float32)
    beta, decay = delta_rates(b, key, None, 1.0)
    assert decay is None and torch.equal(beta.flatten(-2), torch.sigmoid(b))

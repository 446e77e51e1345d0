"""Products of reflections where rounding matters: small beta, unit vectors, the zero vector.

Layers that are written out and their gradients state what the local equation computes.
"""

import pytest
import torch

from bedouin.kernels.householder import apply_complement, unit, wy_factor

ROUNDING = {torch.float32: 2e-6, torch.float64: 1e-14}


def test_the_complement_of_a_small_beta_does_not_cancel() -> None:
    v, U, beta = torch.randn(2, 64), unit(torch.randn(2, 4, 64)), 1e-6 * torch.rand(2, 4)
    found, expected = (
        apply_complement(v, None, U, wy_factor(U, beta))
        for v, U, beta in ((v, U, beta), (v.double(), U.double(), beta.double()))
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-12)


def test_unit_has_length_one_up_to_its_eps() -> None:
    v = 3 * torch.randn(4, 50, dtype=torch.float64)
    expected = (v.square().sum(-1) / (v.square().sum(-1) + 50e-6)).sqrt()
    torch.testing.assert_close(unit(v).norm(dim=-1), expected)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("length", [1, 7, 512])
def test_unit_at_the_zero_vector_has_a_moderate_gradient(length: int, dtype: torch.dtype) -> None:
    v = torch.zeros(length, dtype=dtype, requires_grad=True)
    out = unit(v)
    assert torch.equal(out, torch.zeros_like(out))
    (grad,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(grad, torch.full_like(grad, (length * 1e-6) ** -0.5))

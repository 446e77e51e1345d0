"""Products of Householder reflections against dense matrices.

Letters: b batch, d channels, k reflections.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bedouin.kernels.householder import (
    apply_complement,
    unit,
    wy_factor,
)

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}
DTYPES = list(TOLERANCE)


def _dense_product(U: Tensor, beta: Tensor) -> Tensor:  # (b, k, d), (b, k) -> (b, d, d)
    """H_1 H_2 ... H_k, matrix by matrix."""
    eye = torch.eye(U.shape[-1], dtype=U.dtype)
    outer = torch.einsum("bkd,bke->bkde", U, U)
    factors = (eye - beta[:, :, None, None] * outer).unbind(1)
    return functools.reduce(torch.matmul, factors)


@settings(max_examples=60)
@given(
    k=st.integers(1, 8),
    d=st.integers(1, 12),
    beta_max=st.sampled_from([0.0, 1.0, 2.0]),
    is_constant=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_the_complement_of_a_householder_product(
    k: int, d: int, beta_max: float, is_constant: bool, dtype: torch.dtype
) -> None:
    U, v = unit(torch.randn(2, k, d, dtype=dtype)), torch.randn(2, d, dtype=dtype)
    beta = beta_max * (torch.ones(2, k) if is_constant else torch.rand(2, k)).to(dtype)
    complement = apply_complement(v, torch.zeros(2, 1, dtype=v.dtype), U, wy_factor(U, beta))
    product = (_dense_product(U, beta) @ v.unsqueeze(-1)).squeeze(-1)
    tolerance = 20 * TOLERANCE[dtype] * (4 if beta_max == 2 else 2) ** k
    torch.testing.assert_close(v - complement, product, rtol=0, atol=min(tolerance, 1e-2))


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 7, 512])
def test_unit_at_the_zero_vector_has_a_moderate_gradient(length: int, dtype: torch.dtype) -> None:
    v = torch.zeros(length, dtype=dtype, requires_grad=True)
    out = unit(v)
    assert torch.equal(out, torch.zeros_like(out))
    (grad,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(grad, torch.full_like(grad, (length * 1e-6) ** -0.5))

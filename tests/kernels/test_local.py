"""The local equation of one token, and products of reflections, against dense matrices.

Letters: b batch, d channels, k reflections.
"""

import functools
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bedouin.kernels.direct import (
    LocalFactors,
    factor_local,
    smallest_pivot,
    solve_local,
    solve_local_transposed,
)
from bedouin.kernels.householder import apply_complement, unit, wy_factor

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-11}
FORMS = ("householder", "low rank", "diagonal")


class Form(NamedTuple):
    """I - Q = diag(e) + U^T M U."""

    e: Tensor
    U: Tensor
    M: Tensor

    @property
    def complement(self) -> Tensor:  # (b, d, d)
        e = self.e.expand(*self.U.shape[:-2], self.U.shape[-1])
        return torch.diag_embed(e) + self.U.mT @ self.M @ self.U


def _form(name: str, b: int, d: int, k: int, dtype: torch.dtype = torch.float64) -> Form:
    U, alpha = unit(torch.randn(b, k, d, dtype=dtype)), torch.rand(b, k, dtype=dtype)
    if name == "householder":
        return Form(torch.zeros(b, 1, dtype=dtype), U, wy_factor(U, alpha))
    if name == "low rank":
        return Form(torch.ones(b, 1, dtype=dtype), U, torch.diag_embed(-alpha))
    return Form(torch.rand(b, d, dtype=dtype), U, torch.randn(b, k, k, dtype=dtype))


def _factor(sigma: Tensor, form: Form) -> LocalFactors:
    return factor_local(sigma, *form)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("k", "d"), [(1, 6), (1, 1), (2, 6), (4, 6), (7, 6)])
@pytest.mark.parametrize("name", FORMS)
def test_both_solves_are_the_dense_ones(name: str, k: int, d: int, dtype: torch.dtype) -> None:
    form = Form(*(v.unflatten(0, (2, 3)) for v in _form(name, 6, d, k, dtype)))
    sigma, rhs = 0.5 * torch.randn(2, 3, d, dtype=dtype), torch.randn(2, 3, d, dtype=dtype)
    eye, factors, tolerance = torch.eye(d, dtype=dtype), _factor(sigma, form), TOLERANCE[dtype]
    expected = torch.linalg.solve(eye - sigma[..., None] * form.complement, rhs)
    torch.testing.assert_close(solve_local(rhs, factors), expected, rtol=tolerance, atol=tolerance)
    expected = torch.linalg.solve(eye - form.complement.mT * sigma[..., None, :], rhs)
    actual = solve_local_transposed(rhs, factors)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_an_exactly_singular_token_is_contained() -> None:
    """Sample 0 has e sigma = 1 in two channels, and Q of rank 1 fills one."""
    form, sigma = _form("low rank", 3, 4, 1), torch.full((3, 4), 0.5, dtype=torch.float64)
    sigma[0, 1:3] = 1.0
    rhs, factors = torch.randn(3, 4, dtype=torch.float64), _factor(sigma, form)
    pivot = smallest_pivot(factors)
    assert pivot[0] == 0 and bool((pivot[1:] > 0.1).all())
    for solve in (solve_local, solve_local_transposed):
        y = solve(rhs, factors)
        assert not bool(y[0].isfinite().all())
        alone = solve(rhs[1:], _factor(sigma[1:], Form(*(v[1:] for v in form))))
        assert torch.equal(y[1:], alone)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("saturated", [1, 2, 3])
@pytest.mark.parametrize("gap", [0.0, 1e-9, 1e-4])
def test_saturated_channels_are_solved_while_the_rank_makes_up_for_them(
    gap: float, saturated: int, dtype: torch.dtype
) -> None:
    """D = 1 - sigma e is 0 or nearly, in up to k channels: a well-conditioned matrix."""
    U = torch.eye(3, 6, dtype=torch.float64) + 0.2 * torch.randn(5, 3, 6, dtype=torch.float64)
    M = torch.diag_embed(-(0.5 + torch.rand(5, 3, dtype=torch.float64)))
    form = Form(torch.ones(5, 1, dtype=torch.float64), unit(U), M)
    gaps = torch.rand(5, 6, dtype=torch.float64)
    gaps[:, :saturated] = gap
    p, x = torch.randn(2, 5, 6, dtype=torch.float64)
    dense = torch.diag_embed(gaps) - (1 - gaps)[..., None] * (form.U.mT @ M @ form.U)
    narrow = Form(*(v.to(dtype) for v in form))
    factors = factor_local((1 - gaps).to(dtype), *narrow, gaps.to(dtype))
    Q_x = x - (form.complement @ x[..., None])[..., 0]
    expected = torch.linalg.solve(dense, p + (1 - gaps) * Q_x)
    actual = solve_local(p.to(dtype), factors, x.to(dtype)).double()
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype])
    actual = solve_local_transposed(p.to(dtype), factors).double()
    expected = torch.linalg.solve(dense.mT, p)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype])
    assert smallest_pivot(factors).min() > 1e-3


@pytest.mark.parametrize("name", FORMS)
def test_gradients_with_x_and_the_gap(name: str) -> None:
    form, sigma = _form(name, 2, 3, 2), 0.3 * torch.rand(2, 3, dtype=torch.float64)
    p, x = torch.randn(2, 2, 3, dtype=torch.float64)

    def solve(p: Tensor, x: Tensor, sigma: Tensor, *rest: Tensor) -> Tensor:
        gap, e, U, M = rest
        return solve_local(p, factor_local(sigma, e, U, M, gap), x)

    operands = [v.clone().requires_grad_() for v in (p, x, sigma, 1 - sigma, *form)]
    assert torch.autograd.gradcheck(solve, operands)


# -- products of Householder reflections

ROUNDING = {torch.float32: 2e-6, torch.float64: 1e-14}


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
    dtype=st.sampled_from(list(ROUNDING)),
)
def test_the_complement_of_a_householder_product(
    k: int, d: int, beta_max: float, is_constant: bool, dtype: torch.dtype
) -> None:
    U, v = unit(torch.randn(2, k, d, dtype=dtype)), torch.randn(2, d, dtype=dtype)
    beta = beta_max * (torch.ones(2, k) if is_constant else torch.rand(2, k)).to(dtype)
    complement = apply_complement(v, torch.zeros(2, 1, dtype=v.dtype), U, wy_factor(U, beta))
    product = (_dense_product(U, beta) @ v.unsqueeze(-1)).squeeze(-1)
    tolerance = 20 * ROUNDING[dtype] * (4 if beta_max == 2 else 2) ** k
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


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("length", [1, 7, 512])
def test_unit_at_the_zero_vector_has_a_moderate_gradient(length: int, dtype: torch.dtype) -> None:
    v = torch.zeros(length, dtype=dtype, requires_grad=True)
    out = unit(v)
    assert torch.equal(out, torch.zeros_like(out))
    (grad,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(grad, torch.full_like(grad, (length * 1e-6) ** -0.5))

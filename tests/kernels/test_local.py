"""The local equation of one token against a dense linear solve.

Letters: b batch, d channels, k reflections.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from bedouin.kernels.direct import (
    LocalFactors,
    factor_local,
    smallest_pivot,
    solve_local,
    solve_local_transposed,
)
from bedouin.kernels.householder import unit, wy_factor

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

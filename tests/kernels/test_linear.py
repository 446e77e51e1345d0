"""Products with weights of heads; padded rows, and parts whose size is a multiple of eight."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear

from bedouin.kernels.feedback import padded_rows
from bedouin.kernels.linear import (
    ALIGNMENT,
    apply_weight,
    padding,
    weight_gradient,
)

sizes = st.integers(0, 300)


@pytest.mark.parametrize("tokens", [(), (5,), (0,)])
@pytest.mark.parametrize("b", [0, 2])
def test_products_with_weights_of_heads_are_a_loop_over_heads(
    b: int, tokens: tuple[int, ...]
) -> None:
    W = torch.randn(3, 7, 4, dtype=torch.float64)
    v = torch.randn(3 * b, *tokens, 4, dtype=torch.float64)
    grad = torch.randn(3 * b, *tokens, 7, dtype=torch.float64)
    heads = list(zip(W, v.tensor_split(3), grad.tensor_split(3), strict=True))
    applied = torch.cat([linear(v_j, W_j) for W_j, v_j, _ in heads])
    torch.testing.assert_close(apply_weight(v, W), applied)
    transposed = torch.cat([g_j @ W_j for W_j, _, g_j in heads])
    torch.testing.assert_close(apply_weight(grad, W.mT), transposed)
    gradients = torch.stack([weight_gradient(g_j, v_j, W_j) for W_j, v_j, g_j in heads])
    torch.testing.assert_close(weight_gradient(grad, v, W), gradients)


@given(sizes)
def test_padding_is_the_least_that_aligns(r: int) -> None:
    assert 0 <= padding(r) < ALIGNMENT and (r + padding(r)) % ALIGNMENT == 0


@given(sizes)
def test_padded_rows_are_zeros_below_the_matrix(r: int) -> None:
    W, rows = torch.ones(r, 2), r + padding(r)
    padded = padded_rows(W, rows)
    assert torch.equal(padded_rows(W.expand(3, r, 2), rows), padded.expand(3, *padded.shape))
    assert padded.shape == (rows, 2)
    assert torch.equal(padded[:r], W) and not padded[r:].any()

"""Products with few samples against torch's.

With TRITON_INTERPRET=1, small shapes run on a CPU; without it, the tests need a CUDA device.
Letters: b samples, r rows of a weight, c its columns, H heads.
"""

import pytest
import torch
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.decode import Product, multiply, takes_products
from bedouin.kernels.decode.products import MAX_SAMPLES
from bedouin.testing import assert_close

DEVICE = "cpu" if interpreter_is_on() else "cuda"
needs_triton = pytest.mark.interpreter if interpreter_is_on() else pytest.mark.gpu


def draw(heads: int, b: int, r: int, c: int, dtype: torch.dtype, weight: torch.dtype) -> Product:
    """W (H, r, c), v (H, b, c) as channels of wider rows, and an empty product."""
    axes = (heads,) if heads > 1 else ()
    W = torch.randn(*axes, r, c, dtype=torch.float64).to(DEVICE, weight)
    v = torch.randn(b, 2, heads, c, dtype=torch.float64).to(DEVICE, dtype)[:, 1].transpose(0, 1)
    out = torch.full((*axes, b, r), torch.nan, dtype=dtype, device=DEVICE)
    return Product(W, v if heads > 1 else v[0], out)


def expected(product: Product, dtype: torch.dtype) -> Tensor:
    W, v = (tensor.to(dtype).to(torch.float64) for tensor in (product.weight, product.v))
    return v @ W.mT


SIZES = [((1, 5, 6), None), ((3, 9, 4), (1, 3, 7)), ((1, 70, 64), (2, 6, 5))]
# the interpreter cuts the digits that bfloat16 has not, of weights and products
LOW = [(torch.float64, torch.float64, 1e-12), (torch.bfloat16, torch.float32, 3e-2)]


@needs_triton
@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("first, second", SIZES)
@pytest.mark.parametrize("dtype, weight, rtol", LOW)
def test_products_are_those_of_torch(
    b: int,
    first: tuple[int, int, int],
    second: tuple[int, int, int] | None,
    dtype: torch.dtype,
    weight: torch.dtype,
    rtol: float,
) -> None:
    torch.manual_seed(0)
    products = [
        draw(heads, b, r, c, dtype, weight) for heads, r, c in filter(None, (first, second))
    ]
    multiply(*products, dtype=dtype)
    for product in products:
        assert_close("product", product.out.to(torch.float64), expected(product, dtype), rtol)


@pytest.mark.gpu
@pytest.mark.parametrize("heads, r, c", [(1, 6180, 1024), (8, 804, 128), (16, 420, 64)])
def test_overlapping_launches_see_the_results_before_them(heads: int, r: int, c: int) -> None:
    """A chain in which each product multiplies what the one before has written."""
    torch.manual_seed(0)
    into = draw(heads, 2, c, c, torch.float32, torch.float32)
    out_of = draw(heads, 2, r, c, torch.float32, torch.float32)
    for _ in range(50):
        into.v.copy_(torch.randn_like(into.v))
        multiply(into, dtype=torch.float32)
        multiply(out_of._replace(v=into.out), dtype=torch.float32, overlaps=True)
        chained = out_of._replace(v=into.out)
        assert_close("chain", out_of.out.double(), expected(chained, torch.float32), 1e-4)


def test_what_is_left_to_torch() -> None:
    weight, dtype = torch.randn(6, 4), torch.float32
    assert not takes_products(1, (weight,), dtype, "auto")  # no device
    if interpreter_is_on():
        assert takes_products(1, (weight,), dtype, "triton")
        assert takes_products(MAX_SAMPLES, (torch.nn.Parameter(weight),), dtype, "triton")
        kind: type[Tensor] = type("Quantized", (Tensor,), {})
        quantized = torch.Tensor._make_subclass(kind, weight)
        for weights in ((weight.mT,), (weight, weight.double()), (quantized,)):
            assert not takes_products(1, weights, dtype, "triton")
        for b in (0, MAX_SAMPLES + 1):
            assert not takes_products(b, (weight,), dtype, "triton")

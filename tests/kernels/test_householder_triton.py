"""Householder products in Triton against their references in float64: values and gradients.

The same checks run on the CPU in the interpreter (small sizes, all branches) and compiled on a GPU.
Letters: b batch, t time, d channels, k reflections.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bedouin.kernels.backend import Backend
from bedouin.kernels.householder import (
    householder_complement,
    householder_factor,
    householder_product,
)
from bedouin.testing import assert_close

# In the max norm; half precision rounds what goes out, float32 sums over up to 4096 channels.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
Operands = tuple[Tensor, ...]


def draw(
    k: int,
    d: int,
    lead: tuple[int, ...] = (2, 3),
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> Operands:
    """v (*lead, d), u (*lead, k, d), beta (*lead, k)."""
    generator = torch.Generator().manual_seed(100 * k + d)
    shapes = (*lead, d), (*lead, k, d), (*lead, k)
    v, u, beta = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return tuple(x.to(device, dtype) for x in (v, u, 2 * beta.sigmoid()))


def product(backend: Backend, *operands: Tensor) -> Tensor:
    return householder_product(*operands, backend=backend)


def complement(backend: Backend, *operands: Tensor) -> Tensor:
    return householder_complement(*operands, backend=backend)


def factor(backend: Backend, v: Tensor, u: Tensor, beta: Tensor) -> Tensor:
    return householder_factor(u, beta, backend=backend)


OPERATIONS: list[Callable[..., Tensor]] = [product, complement, factor]
operations = pytest.mark.parametrize("operation", OPERATIONS)


def results(operation: Callable[..., Tensor], backend: Backend, operands: Operands) -> Operands:
    """The value, and the gradients of a weighted sum of it."""
    leaves = [x.detach().requires_grad_() for x in operands]
    value = operation(backend, *leaves)
    weights = torch.linspace(0, 7, value.numel(), dtype=torch.float64).cos().view(value.shape)
    # The factor does not depend on v, and nothing does where k is 0.
    loss = (value.double() * weights.to(value)).sum() + 0 * sum(x.sum() for x in leaves)
    grads = torch.autograd.grad(loss, leaves)
    return value.detach(), *grads


def check(operation: Callable[..., Tensor], operands: Operands) -> None:
    actual = results(operation, "triton", operands)
    expected = results(operation, "reference", tuple(x.double() for x in operands))
    names = ("value", "grad v", "grad u", "grad beta")
    tolerance = TOLERANCE[operands[1].dtype]
    for name, ours, theirs in zip(names, actual, expected, strict=True):
        # The gradient of a direction of one component is what UNIT_EPS leaves of terms that cancel:
        # their rounding remains, over the direction's length, which is down to 0.04 here.
        cancels = name == "grad u" and operands[1].shape[-1] == 1
        assert_close(name, ours.double(), theirs, tolerance, (10 if cancels else 1) * tolerance)
    if operation is not factor:
        assert actual[0].dtype == operands[0].dtype
    assert [x.dtype for x in actual[1:]] == [x.dtype for x in operands]


@devices
@operations
@pytest.mark.parametrize("k", range(1, 9))
def test_every_number_of_reflections(k: int, operation: Callable[..., Tensor], device: str) -> None:
    check(operation, draw(k, 5, device=device))


@devices
@operations
@pytest.mark.parametrize(("d", "tokens"), [(1, 3), (64, 17), (1025, 2)])
def test_blocks(d: int, tokens: int, operation: Callable[..., Tensor], device: str) -> None:
    check(operation, draw(2, d, (tokens,), device))


@devices
@operations
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_precisions(dtype: torch.dtype, operation: Callable[..., Tensor], device: str) -> None:
    check(operation, draw(3, 40, device=device, dtype=dtype))


@devices
@operations
def test_mixed_precisions(operation: Callable[..., Tensor], device: str) -> None:
    v, u, beta = draw(3, 40, device=device, dtype=torch.float32)
    check(operation, (v, u.bfloat16(), beta))


@devices
@operations
@pytest.mark.parametrize("lead", [(), (4,), (2, 1, 3)])
def test_leading_axes(lead: tuple[int, ...], operation: Callable[..., Tensor], device: str) -> None:
    check(operation, draw(2, 6, lead, device))


@devices
@operations
def test_slices_of_one_projection(operation: Callable[..., Tensor], device: str) -> None:
    v, u, beta = draw(2, 6, device=device)
    raw = torch.cat([beta, u.flatten(-2), v], -1)
    check(operation, (raw[..., 14:], raw[..., 2:14].unflatten(-1, (2, 6)), raw[..., :2]))
    check(operation, (v.mT.contiguous().mT, u.mT.contiguous().mT, beta.mT.contiguous().mT))
    check(operation, (v.transpose(0, 1), u.transpose(0, 1), beta.transpose(0, 1)))


@devices
@operations
@pytest.mark.parametrize(("k", "d", "lead"), [(2, 3, (0, 4)), (0, 3, (2,)), (2, 0, (2,))])
def test_empty_operands(
    k: int, d: int, lead: tuple[int, ...], operation: Callable[..., Tensor], device: str
) -> None:
    operands = draw(k, d, lead, device)
    ours, theirs = (results(operation, b, operands) for b in ("triton", "reference"))
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@devices
@operations
def test_zero_rows(operation: Callable[..., Tensor], device: str) -> None:
    v, u, beta = draw(3, 5, device=device)
    check(operation, (v, u * torch.tensor([1.0, 0.0, 1.0], device=device)[:, None], beta))


@devices
def test_the_complement_of_a_small_beta_does_not_cancel(device: str) -> None:
    v, u, beta = draw(4, 64, device=device, dtype=torch.float32)
    operands = v, u, 1e-6 * beta
    ours = complement("triton", *operands)
    theirs = complement("reference", *(x.double() for x in operands))
    assert_close("(I - Q) v", ours.double(), theirs, 1e-5)


@devices
@operations
def test_gradients_are_once_differentiable(operation: Callable[..., Tensor], device: str) -> None:
    leaves = [x.requires_grad_() for x in draw(2, 4, device=device)]
    value = operation("triton", *leaves)
    (grad,) = torch.autograd.grad(value.square().sum(), leaves[1], create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        torch.autograd.grad(grad.sum(), leaves[2])


@devices
@operations
def test_a_compiled_function_is_one_graph(operation: Callable[..., Tensor], device: str) -> None:
    operands = draw(2, 4, device=device)
    compiled = torch.compile(operation, fullgraph=True, backend="aot_eager")
    ours, theirs = (results(f, "triton", operands) for f in (compiled, operation))
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@devices
@pytest.mark.parametrize("name", ["product", "factor"])
def test_opcheck(name: str, device: str) -> None:
    v, u, beta = (x.requires_grad_() for x in draw(2, 4, device=device))
    flat = [x.detach() for x in (v, u, beta)]
    ops = torch.ops.bedouin
    if name == "product":
        torch.library.opcheck(ops.householder_product, (v, u, beta, True))
        torch.library.opcheck(ops.householder_product_backward, (flat[0], *flat, False))
    else:
        grad = householder_factor(*flat[1:], backend="reference")
        torch.library.opcheck(ops.householder_factor, (u, beta))
        torch.library.opcheck(ops.householder_factor_backward, (grad, *flat[1:]))


@devices
@operations
def test_more_than_eight_reflections_are_left_to_the_reference(
    operation: Callable[..., Tensor], device: str
) -> None:
    operands = draw(9, 12, device=device, dtype=torch.float32)
    assert torch.equal(operation("auto", *operands), operation("reference", *operands))
    with pytest.raises(ValueError, match=r"more than 8 reflections: use backend='auto'"):
        operation("triton", *operands)


def test_shapes_that_do_not_fit() -> None:
    v, u, beta = draw(2, 3)
    with pytest.raises(ValueError, match=r"v must have shape \(..., d\) of this u = \(2, 3, 3\)"):
        householder_product(v[0], u, beta)
    with pytest.raises(ValueError, match=r"beta must have shape .* of this u = \(2, 3, 2\)"):
        householder_factor(u, beta[..., :1])
    with pytest.raises(ValueError, match=r"u must have shape \(..., k, d\)"):
        householder_factor(u[0, 0, 0], beta)


@pytest.mark.gpu
@operations
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("d", [1, 63, 512, 1024, 2048, 4096])
def test_widths_compiled(
    d: int, k: int, dtype: torch.dtype, operation: Callable[..., Tensor]
) -> None:
    check(operation, draw(k, d, (3, 7), "cuda", dtype))

"""The loss of a linear head in chunks: values, gradients, memory, and the kernels of libraries."""

from typing import Any

import pytest
import torch
from tests.kernels.table import kernels
from tests.modes import LiveBytes
from torch import Tensor
from torch.nn import functional as F

from bedouin.integrations import linear_cross_entropy as module
from bedouin.integrations.linear_cross_entropy import choose_kernel, linear_cross_entropy

M, V = 24, 53
TOLERANCES: dict[torch.dtype, Any] = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 7 * V + 5)  # seven tokens


def draw(n: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    """x, weight, bias and labels, of which every fifth is ignored."""
    x = torch.randn(n, M, dtype=dtype, device=device, requires_grad=True)
    weight = (torch.randn(V, M, dtype=dtype, device=device) / M**0.5).requires_grad_()
    bias = torch.randn(V, dtype=dtype, device=device, requires_grad=True)
    labels = torch.randint(V, (n,), device=device)
    labels[::5] = -100
    return x, weight, bias, labels


def plain(x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
    """The loss with all logits, in float64."""
    logits = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return F.cross_entropy(logits, labels, reduction="sum")


def assert_equal(
    found: Tensor, expected: Tensor, given: tuple[Tensor, ...], n: int, tolerance: Any
) -> None:
    """The losses of n tokens and their gradients, relative to the largest of each."""
    torch.testing.assert_close(found.double() / n, expected.double() / n, **tolerance)
    grads = [torch.autograd.grad(3 * loss, given) for loss in (found, expected)]
    for one, two, of in zip(*grads, given, strict=True):
        assert one.dtype == of.dtype
        size = two.abs().amax().clamp_min(1e-9) if two.numel() else 1.0
        torch.testing.assert_close(one / size, two / size, **tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("n", [0, 1, 63, 64, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients(n: int, dtype: torch.dtype, with_bias: bool) -> None:
    x, weight, bias, labels = draw(n, dtype)
    given = (x, weight, bias) if with_bias else (x, weight)
    found = linear_cross_entropy(x, weight, labels, bias if with_bias else None)
    expected = plain(x, weight, labels, bias if with_bias else None)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_equal(found, expected, given, max(n, 1), TOLERANCES[dtype])


def test_rounded_gradients_add_up_in_float32() -> None:
    """In bfloat16 a sum of 200 chunks would stop growing."""
    x, labels = torch.ones(1400, M, dtype=torch.bfloat16), torch.zeros(1400, dtype=torch.long)
    weight = torch.zeros(V, M, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(x, weight, labels).backward()
    expected = 1400 * (1 / V - 1)
    assert weight.grad is not None
    torch.testing.assert_close(
        weight.grad[0].float(), torch.full((M,), expected), rtol=5e-3, atol=0
    )


def test_gradients_of_what_needs_them_for_each_backward_and_their_own() -> None:
    x, weight, _, labels = draw(20, torch.float64)
    frozen = linear_cross_entropy(x, weight.detach(), labels)
    twice = [torch.autograd.grad(frozen, x, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*twice)
    torch.testing.assert_close(twice[0], torch.autograd.grad(plain(x, weight, labels, None), x)[0])
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, labels).requires_grad
    assert torch.autograd.gradgradcheck(lambda v: linear_cross_entropy(v, weight, labels), x)


def test_autocast_takes_products_in_its_dtype() -> None:
    x, weight, bias, labels = draw(30, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(x, weight, labels, bias)
    rounded = [v.bfloat16() for v in (x, weight, bias)]
    expected = linear_cross_entropy(rounded[0], rounded[1], labels, rounded[2])
    assert torch.equal(found, expected)
    pairs = (torch.autograd.grad(loss, (x, weight, bias)) for loss in (found, expected))
    for one, two in zip(*pairs, strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, two)


def test_memory_holds_one_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    n, size, v = 300, 20, 4000
    monkeypatch.setattr(module, "CHUNK", size * v)
    x, weight = torch.randn(n, 2, requires_grad=True), torch.randn(v, 2, requires_grad=True)
    labels = torch.randint(v, (n,))
    with LiveBytes() as live:
        linear_cross_entropy(x, weight, labels).backward()
    # the logarithms of the softmax and two of gradients; the others, sums and indices are small
    assert live.peak < 4 * 3.5 * size * v
    with LiveBytes() as live:
        plain(x, weight, labels, None).backward()
    assert live.peak > 4 * n * v


# dynamo instantiates torch.autograd.Function when it traces a subclass
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_under_compile() -> None:
    x, weight, bias, labels = draw(20, torch.float64)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    found, expected = (f(x, weight, labels, bias) for f in (compiled, linear_cross_entropy))
    assert_equal(found, expected, (x, weight, bias), 1, TOLERANCES[torch.float64])


def test_the_kernel_is_chosen_by_device_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    installed: set[str] = set()
    monkeypatch.setattr(module, "find_spec", lambda name: name if name in installed else None)
    assert choose_kernel("auto", gpu) == "torch"
    with pytest.raises(ImportError, match="needs liger_kernel: pip install liger-kernel"):
        choose_kernel("liger", gpu)
    installed |= {"fla"}
    assert choose_kernel(True, gpu) == choose_kernel("fla", gpu) == "fla"
    installed |= {"liger_kernel"}
    assert choose_kernel("auto", gpu) == "liger"
    assert choose_kernel("auto", cpu) == choose_kernel("torch", gpu) == "torch"
    with pytest.raises(ValueError, match="needs tensors on a GPU, got cpu"):
        choose_kernel("fla", cpu)
    with pytest.raises(ValueError, match="kernel must be one of .* got 'ligre'"):
        choose_kernel("ligre", gpu)


def test_shapes() -> None:
    x, weight, _, labels = draw(4, torch.float32)
    with pytest.raises(ValueError, match=r"shapes \(n, m\).* got \(4, 24\), \(53, 24\) and \(3,\)"):
        linear_cross_entropy(x, weight, labels[:3])


@pytest.mark.filterwarnings("default")
@kernels
@pytest.mark.parametrize("kernel", ["liger", "fla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_libraries_compute_the_same(
    kernel: Any, dtype: torch.dtype, device: str
) -> None:
    pytest.importorskip({"liger": "liger_kernel"}.get(kernel, kernel))
    x, weight, _, labels = draw(100, dtype, device)
    expected = plain(x, weight, labels, None)
    found = linear_cross_entropy(x, weight, labels, kernel=kernel)
    tolerance: Any = {"rtol": 3e-2, "atol": 3e-2}  # the libraries may use TensorFloat32
    assert_equal(found, expected, (x, weight), 100, tolerance)

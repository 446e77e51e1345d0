"""The output stage in Triton against its reference in float64: values and all gradients.

The same checks run on the CPU in the interpreter (small sizes, all branches) and compiled on a GPU.
Letters: b batch, t time, d channels.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.kernels.backend import Backend
from bedouin.kernels.operation import OPERATIONS
from bedouin.kernels.output import gated_output, registered, shifted_norm
from bedouin.testing import assert_close

# In the max norm; half precision rounds operands' gradients and the result, sums stay in float32.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
LOW = [torch.float32, torch.float16, torch.bfloat16]
PRESENT = list(itertools.product([True, False], [True, False]))  # the norm, feedback to the gate
presence = pytest.mark.parametrize(("norm", "fed"), PRESENT)
Operands = dict[str, Any]


def draw(
    b: int,
    t: int,
    d: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    norm: bool = True,
    fed: bool = True,
) -> Operands:
    """Operands of `gated_output` by name; y has at least float32, the others `dtype`."""
    generator = torch.Generator().manual_seed(b + 10 * t + 1000 * d)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(device, dtype)

    names = ["x", "gate", *(["fed"] if fed else []), *(["z"] if norm else [])]
    operands = {"y": normal(b, t, d).to(torch.promote_types(dtype, torch.float32))}
    operands |= {name: normal(b, t, d) for name in names} | {"D": normal(d)}
    return operands | ({"weight": normal(d)} if norm else {})


def draw_shifted(b: int, t: int, d: int, device: str = "cpu") -> Operands:
    y = draw(b, t + 1, d, device)["y"]
    return {"y": y[:, 1:].clone(), "y0": y[:, 0].clone()}


def results(operation: Callable[..., Tensor], operands: Operands, **options: Any) -> list[Tensor]:
    """The value, and the gradients of a weighted sum of it."""
    leaves = {name: v.detach().requires_grad_() for name, v in operands.items()}
    value = operation(**leaves, **options)
    weights = torch.linspace(0, 7, value.numel(), dtype=torch.float64).cos().view(value.shape)
    loss = (value.double() * weights.to(value).double()).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return [value.detach(), *grads]


def check(operation: Callable[..., Tensor], operands: Operands, **options: Any) -> None:
    actual = results(operation, operands, backend="triton", **options)
    exact = {name: v.double() for name, v in operands.items()}
    plain = {name: option for name, option in options.items() if name != "dtype"}
    expected = results(operation, exact, backend="reference", **plain)
    low = options.get("dtype", operands["y"].dtype)
    assert [v.dtype for v in actual] == [low, *(v.dtype for v in operands.values())]
    tolerance = max(TOLERANCE[low], *(TOLERANCE[v.dtype] for v in operands.values()))
    for name, ours, theirs in zip(["out", *operands], actual, expected, strict=True):
        assert_close(name, ours.double(), theirs, tolerance, atol=tolerance)


@devices
@presence
@pytest.mark.parametrize(("b", "t", "d"), [(2, 3, 5), (1, 1, 1), (3, 7, 64), (1, 2, 1025)])
def test_every_branch(b: int, t: int, d: int, norm: bool, fed: bool, device: str) -> None:
    check(gated_output, draw(b, t, d, device, norm=norm, fed=fed))


@devices
@presence
@pytest.mark.parametrize("dtype", LOW)
def test_precisions(dtype: torch.dtype, norm: bool, fed: bool, device: str) -> None:
    check(gated_output, draw(2, 5, 40, device, dtype, norm=norm, fed=fed), dtype=dtype)


@devices
@pytest.mark.parametrize("norm", [True, False])
def test_a_program_takes_many_tokens(
    norm: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums over tokens of few programs, which each take several tiles."""
    monkeypatch.setattr(registered, "PROGRAMS", 3)
    o = draw(3, 67, 65, device, norm=norm)
    names = ("y", "x", "D", "gate", "fed", "z", "weight")
    tensors: list[Any] = [o.get(name) for name in names]
    few = OPERATIONS["bedouin::gated_output_backward"](torch.ones_like(o["y"]), *tensors, 1e-5)
    _, *expected = summed_gradients(o)
    for name, ours, theirs in zip(("y", "x", "gate", "sums"), few, expected, strict=True):
        assert_close(name, ours, theirs, 2e-6, atol=2e-6)


def summed_gradients(operands: Operands) -> list[Tensor]:
    """The reference's value, gradients of y, x and gate, and those of D and weight (2, d)."""
    leaves = {name: v.detach().requires_grad_() for name, v in operands.items()}
    out = gated_output(**leaves, backend="reference")
    grads = dict(zip(leaves, torch.autograd.grad(out.sum(), list(leaves.values())), strict=True))
    sums = [grads[name] for name in ("D", "weight") if name in grads]
    return [out, grads["y"], grads["x"], grads["gate"], torch.stack(sums)]


@devices
def test_slices_of_one_projection(device: str) -> None:
    operands = draw(2, 3, 4, device)
    wide = torch.cat([operands[name] for name in ("x", "z", "gate", "fed", "y")], -1)
    parts = dict(zip(("x", "z", "gate", "fed", "y"), wide.split(4, -1), strict=True))
    check(gated_output, operands | parts)
    scattered = {name: v.mT.contiguous().mT for name, v in operands.items() if v.dim() == 3}
    check(gated_output, operands | scattered)
    swapped = {name: v.transpose(0, 1) for name, v in operands.items() if v.dim() == 3}
    check(gated_output, operands | swapped)


@devices
def test_operands_of_several_dtypes(device: str) -> None:
    operands = draw(2, 3, 8, device, torch.bfloat16)
    check(gated_output, operands | {"gate": operands["gate"].float(), "D": operands["D"].float()})


@devices
def test_large_gates_do_not_overflow(device: str) -> None:
    for norm in (True, False):
        operands = draw(1, 2, 3, device, torch.float32, norm=norm)
        operands |= {"gate": operands["gate"] * 1e4, "y": operands["y"] * 1e4}
        assert all(v.isfinite().all() for v in results(gated_output, operands, backend="triton"))


@devices
@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize(("b", "t", "d"), [(1, 1, 1), (2, 5, 3), (3, 4, 64), (1, 2, 1025)])
def test_the_shifted_norm(b: int, t: int, d: int, eps: float | None, device: str) -> None:
    check(shifted_norm, draw_shifted(b, t, d, device), eps=eps)


@devices
@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize("dtype", LOW)
def test_the_shifted_norm_in_a_lower_dtype(
    dtype: torch.dtype, eps: float | None, device: str
) -> None:
    operands = {name: v.float() for name, v in draw_shifted(2, 5, 40, device).items()}
    check(shifted_norm, operands, eps=eps, dtype=dtype)


@devices
def test_the_shifted_norm_of_scattered_operands(device: str) -> None:
    operands = draw_shifted(2, 5, 4, device)
    for y in (operands["y"].mT.contiguous().mT, operands["y"].transpose(0, 1).contiguous()):
        y = y if y.shape == operands["y"].shape else y.transpose(0, 1)
        check(shifted_norm, {"y": y, "y0": operands["y0"].mT.contiguous().mT}, eps=1e-5)


@devices
@pytest.mark.parametrize(("b", "t", "d"), [(0, 3, 2), (2, 0, 2), (2, 3, 0)])
def test_empty_operands(b: int, t: int, d: int, device: str) -> None:
    for backend in ("triton", "reference"):
        out, *grads = results(gated_output, draw(b, t, d, device), backend=backend)
        assert out.shape == (b, t, d) and all(not grad.any() for grad in grads)
    y, y0 = draw(b, t, d, device)["y"], torch.zeros(b, d, device=device)
    assert shifted_norm(y, y0, 1e-5, backend="triton").shape == (b, t, d)


@devices
def test_too_many_channels_are_left_to_the_reference(device: str) -> None:
    operands = draw(1, 1, 16385, device, torch.float32)
    backends: list[Backend] = ["auto", "reference"]
    assert torch.equal(*(gated_output(**operands, backend=backend) for backend in backends))
    with pytest.raises(ValueError, match=r"does not support 16385 channels \(at most 16384\)"):
        gated_output(**operands, backend="triton")


@pytest.mark.gpu
def test_auto_on_a_gpu_is_triton_and_repeats_bit_for_bit() -> None:
    operands = draw(8, 300, 96, "cuda", torch.bfloat16)
    first, second = (results(gated_output, operands, backend=b) for b in ("auto", "triton"))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("d", [1, 63, 512, 1024, 2048, 4096, 16384])
def test_widths_compiled(d: int, dtype: torch.dtype) -> None:
    check(gated_output, draw(3, 700 if d < 4096 else 7, d, "cuda", dtype), dtype=dtype)
    check(gated_output, draw(3, 7, d, "cuda", dtype, norm=False), dtype=dtype)
    operands = {
        name: v.to(torch.promote_types(dtype, torch.float32))
        for name, v in draw_shifted(3, 7, d, "cuda").items()
    }
    check(shifted_norm, operands, eps=1e-5, dtype=dtype)

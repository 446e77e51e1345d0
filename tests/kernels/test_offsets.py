"""Operations on tensors whose tokens are too far apart for offsets of 32 bits.

The tensors are views of memory of which little is touched, so that they occupy little of a CPU's.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values, H heads.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bedouin import Bedouin
from bedouin.kernels.direct import direct_sweep
from bedouin.kernels.iteration import IterationRule, fuse_iteration
from bedouin.kernels.operands import Operands, Parameterization, RawLayout
from bedouin.kernels.output import gated_output, shifted_norm
from bedouin.kernels.scan import selective_scan

# numpy's, of rows of a program that have no sample
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [INTERPRETED, COMPILED])

T, D, N, K = 4, 6, 3, 2
APART = 2**30
"""Elements between two tokens: offsets have 32 bits before the third and 33 from there on."""

Function = Callable[[dict[str, Tensor]], tuple[Tensor, ...]]


def draw(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


def far_apart(
    v: Tensor,  # (b, t, c)
) -> Tensor:  # (b, t, c)
    """The values of v, their tokens APART. What precedes them is memory of the view, too, so that
    an offset that has overflowed finds other values, and not the end of memory."""
    b, t, width = v.shape
    before = 2 * APART
    size = before + (t - 1) * APART + b * width
    # the rows of a single sample are evenly spaced
    strides = (t * APART if b == 1 else width, APART, 1)
    memory = torch.UntypedStorage(size * v.itemsize, device=v.device)
    empty = torch.empty(0, dtype=v.dtype, device=v.device)
    view = empty.set_(memory, before, v.shape, strides)
    return view.copy_(v)


def check(function: Function, tensors: dict[str, Tensor], *names: str) -> None:
    """The same results if the tokens of one of the named tensors are far apart, up to the order of
    sums, which depends on what the compiler knows of strides."""
    expected = function(tensors)
    for name in names:
        found = function(tensors | {name: far_apart(tensors[name])})
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def of_sweep(device: str, heads: int, feedback: bool) -> tuple[dict[str, Tensor], Parameterization]:
    layout = RawLayout("softplus", True, K, 1.0)
    r, own = layout.size(D, N), () if heads == 1 else (heads,)
    A = -draw(*own, D, N, device=device, dtype=torch.float32).exp()
    tensors = {"x": draw(heads, T, D, device=device), "raw": draw(heads, T, r, device=device)}
    tensors |= {"A": A}
    if feedback:
        tensors["W_y"] = 0.1 * draw(*own, r, D, device=device)
    return tensors, Parameterization(layout, "bounded_delta", "positive", 1e-5)


def operands_of(tensors: dict[str, Tensor]) -> Operands:
    return Operands(tensors["x"], tensors["raw"], tensors.get("W_y"), tensors["A"], None, None)


@devices
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
def test_the_sweep_and_its_adjoint(heads: int, feedback: bool, device: str) -> None:
    tensors, options = of_sweep(device, heads, feedback)

    def function(given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        x, raw = (given[name].detach().requires_grad_() for name in ("x", "raw"))
        sweep = direct_sweep(operands_of(given | {"x": x, "raw": raw}), options, backend="triton")
        grads = torch.autograd.grad(sweep.y.square().sum(), (x, raw))
        return sweep.y, sweep.defect, *grads

    check(function, tensors, "x", "raw")


@devices
def test_the_steps_of_an_iteration(device: str) -> None:
    tensors, options = of_sweep(device, 1, True)
    rule = IterationRule("picard", 1e-4, 1e-8, 1.0, False, False)

    def function(given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        start = torch.zeros(1, T, D, device=device)
        steps = fuse_iteration(operands_of(given), start, options, (), rule, backend="triton")
        assert steps is not None
        steps.advance()
        steps.advance()
        return tuple(v for v in steps.progress if v is not None)

    check(function, tensors, "x", "raw")


@devices
def test_the_scan_and_its_adjoint(device: str) -> None:
    names = {"x": D, "delta": D, "B": N, "C": N}
    tensors = {name: draw(1, T + 4, size, device=device) for name, size in names.items()}
    tensors["delta"] = tensors["delta"].abs()
    A = -draw(D, N, device=device, dtype=torch.float32).exp()

    def function(given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        x, delta, B, C = leaves = [given[name].detach().requires_grad_() for name in names]
        y, h = selective_scan(x, delta, A, B, C, backend="triton", input_scale="bounded_delta")
        return y, h, *torch.autograd.grad(y.float().square().sum(), leaves)

    check(function, tensors, *names)


@devices
def test_the_output_stage(device: str) -> None:
    names = ("y", "x", "gate", "z")
    tensors = {name: draw(1, T, D, device=device) for name in names}
    D_, weight = draw(D, device=device), draw(D, device=device)

    def function(given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        y, x, gate, z = (given[name] for name in names)
        out = gated_output(y, x, D_, gate, None, z, weight, backend="triton")
        return out, shifted_norm(y, None, 1e-5, backend="triton")

    check(function, tensors, *names)


@pytest.mark.gpu
def test_a_memory_of_more_than_32_bits() -> None:
    """2^31 states of all samples: numbers of elements that overflow are negative, and so below
    every size."""
    torch.manual_seed(0)
    options = {"expand": 2, "d_state": 16, "num_heads": 1, "num_householder": 1}
    layer = Bedouin(1024, device="cuda", dtype=torch.bfloat16, backend="triton", **options)  # type: ignore[arg-type]
    few = torch.randn(8, 1, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(few)
        found = layer(few.repeat(2**13 + 1, 1, 1))
    for part in (found[:8], found[-8:]):
        torch.testing.assert_close(part, expected, rtol=0.02, atol=0.02)

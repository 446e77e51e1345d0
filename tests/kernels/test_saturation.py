"""Gates at their ends: the coupled scale 1 - |lambda| keeps its digits where lambda is near 1 or -1.

Plain torch in float32 against float64, and the kernels, interpreted and compiled, against the same.
Letters: b batch, t time, d channels, n state per channel.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from bedouin import Bedouin, FixedPointRNN
from bedouin.kernels.scan import Eigenvalues, InputScale, discretize, discretize_vjp, selective_scan
from bedouin.layer import FixedPointLayer
from bedouin.solvers import Direct, Jacobi, Picard, Solver

BIASES = (-20.0, -17.0, -12.0, -4.0, -0.4, 0.1, 0.4, 4.0, 12.0, 17.0, 20.0)
SCALES: tuple[InputScale, ...] = ("delta", "bounded_delta", "one_minus_decay")
RANGES: tuple[Eigenvalues, ...] = ("positive", "full")
TOLERANCE = 1e-5
PLAIN = pytest.param("reference", "cpu", id="plain")
INTERPRETED = pytest.param("triton", "cpu", marks=pytest.mark.interpreter, id="interpreted")
COMPILED = pytest.param("triton", "cuda", marks=pytest.mark.gpu, id="compiled")
backends = pytest.mark.parametrize(("backend", "device"), [PLAIN, INTERPRETED, COMPILED])


def assert_relative(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Every element to its own size."""
    actual, expected = actual.double().cpu(), expected.cpu()
    off = (actual - expected).abs() > tolerance * expected.abs()
    assert not off.any(), f"{name}: {actual[off][:4]} is not {expected[off][:4]}"


def gates(dtype: torch.dtype) -> Tensor:
    """Delta (11,) from Delta = 4e-9 to 20; the same numbers in every dtype."""
    return softplus(torch.tensor(BIASES, dtype=torch.float64)).float().to(dtype)


@pytest.mark.parametrize("eigenvalues", RANGES)
@pytest.mark.parametrize("input_scale", SCALES)
def test_the_scale_and_its_derivative(input_scale: InputScale, eigenvalues: Eigenvalues) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        delta, A = gates(dtype).requires_grad_(), -torch.ones(len(BIASES), 1, dtype=dtype)
        decay, s = discretize(delta, A, input_scale, eigenvalues)
        (slope,) = torch.autograd.grad(s.sum(), delta)
        zero, one = torch.zeros_like(decay), torch.ones_like(s)
        with torch.no_grad():
            by_hand = discretize_vjp(
                *(zero[None], one[None], decay[None], delta[None], A, input_scale, eigenvalues)
            )
        found.append((s, slope, *by_hand))
    for name, actual, expected in zip(("s", "slope", "vjp", "grad A"), *found, strict=True):
        assert_relative(name, actual, expected, 1e-6)


@backends
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("eigenvalues", RANGES)
@pytest.mark.parametrize("input_scale", SCALES)
def test_the_scan(
    input_scale: InputScale, eigenvalues: Eigenvalues, exclusive: bool, backend: str, device: str
) -> None:
    """One token: y = s x, and what leads to it from x, Delta and B."""
    found = []
    for dtype, where in ((torch.float32, (backend, device)), (torch.float64, ("reference", "cpu"))):
        delta = gates(dtype).to(where[1])[None, None].requires_grad_()
        x = torch.full_like(delta, 0.7, requires_grad=True)
        A, one = -delta.new_ones(len(BIASES), 1), delta.new_ones(1, 1, 1)
        B, h0 = one.clone().requires_grad_(), A.new_zeros(1, *A.shape)
        options = {"input_scale": input_scale, "eigenvalues": eigenvalues, "exclusive": exclusive}
        y, h = selective_scan(x, delta, A, B, one, h0, backend=where[0], **options)  # type: ignore[arg-type]
        found.append((h, *torch.autograd.grad(h.sum(), (x, delta, B))))
    for name, actual, expected in zip(("h", "x", "delta", "B"), *found, strict=True):
        assert_relative(name, actual, expected, TOLERANCE)


def saturated(kind: type[FixedPointLayer], bias: float, dtype: torch.dtype, **options: object):  # type: ignore[no-untyped-def]
    """A layer whose Delta has the raw value `bias` in all channels."""
    torch.manual_seed(0)
    layer = kind(4, on_unconverged="ignore", **options)  # type: ignore[call-arg]
    with torch.no_grad():
        layer.x_proj.weight[: layer.d_inner] = 0
        layer.dt_bias.fill_(bias)
    return layer.to(dtype)


LAYERS = [
    (FixedPointRNN, {"expand": 1}),
    (FixedPointRNN, {"expand": 1, "eigenvalues": "full"}),
    (Bedouin, {"expand": 1, "d_state": 2, "input_scale": "one_minus_decay", "feedback": ("mixer",)}),
    (Bedouin, {"expand": 1, "d_state": 2, "input_scale": "one_minus_decay", "feedback": (),
               "eigenvalues": "full"}),
]  # fmt: skip
SOLVERS = [Direct(), Picard(rtol=1e-6, atol=1e-30), Jacobi(rtol=1e-6, atol=1e-30)]


@backends
@pytest.mark.parametrize("bias", [-20.0, -17.0, -9.0, 9.0, 17.0, 20.0])
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(("kind", "options"), LAYERS, ids=str)
def test_the_state_of_a_layer(
    kind: type[FixedPointLayer], options: dict[str, object], solver: Solver, bias: float,
    backend: str, device: str,
) -> None:  # fmt: skip
    """y, h and the gradient of dt_bias where all gates are at one end."""
    x = torch.randn(2, 3, 4)
    found = []
    for dtype, name in ((torch.float32, backend), (torch.float64, "reference")):
        layer = saturated(kind, bias, dtype, solver=solver, backend=name, **options)
        layer = layer.to(device if name == backend else "cpu")
        here = x.to(layer.D)
        _, state = layer(here, return_state=True)
        loss = state.y.sum() + state.ssm.sum()
        (grad,) = torch.autograd.grad(loss, layer.dt_bias)
        assert layer.stats.converged.all()
        found.append((state.y, state.ssm, grad))
    for name, actual, expected in zip(("y", "h", "dt_bias"), *found, strict=True):
        error = (actual.double().cpu() - expected.cpu()).abs().max() / expected.abs().max()
        assert error <= 1e-4, f"{name}: {error}"

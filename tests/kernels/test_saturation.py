"""Saturated gates: the coupled scale and the local equation keep their relative precision.

Plain PyTorch and the kernels, interpreted and compiled, in float32 against float64.
Letters: b batch, t time, d channels, n state per channel.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from bedouin import Bedouin, FixedPointRNN, HouseholderProduct, LowRank
from bedouin.kernels.backend import Backend
from bedouin.kernels.scan import Eigenvalues, InputScale, discretize, selective_scan
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.layers.mixers import StructuredMixer
from bedouin.solvers import Direct, Jacobi, Picard, Solver
from bedouin.testing import assert_close

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
        _, s = discretize(delta, A, input_scale, eigenvalues)
        (slope,) = torch.autograd.grad(s.sum(), delta)
        found.append((s, slope))
    for name, actual, expected in zip(("s", "slope"), *found, strict=True):
        assert_relative(name, actual, expected, 1e-6)


@backends
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("eigenvalues", RANGES)
@pytest.mark.parametrize("input_scale", SCALES)
def test_the_scan(
    input_scale: InputScale,
    eigenvalues: Eigenvalues,
    exclusive: bool,
    backend: Backend,
    device: str,
) -> None:
    """One token: y = s x, and what leads to it from x, Delta and B."""
    found = []
    where: list[tuple[torch.dtype, Backend, str]] = [
        (torch.float32, backend, device),
        (torch.float64, "reference", "cpu"),
    ]
    for dtype, name, place in where:
        delta = gates(dtype).to(place)[None, None].requires_grad_()
        x = torch.full_like(delta, 0.7, requires_grad=True)
        A, one = -delta.new_ones(len(BIASES), 1), delta.new_ones(1, 1, 1)
        B, h0 = one.clone().requires_grad_(), A.new_zeros(1, *A.shape)
        _, h = selective_scan(
            *(x, delta, A, B, one, h0),
            input_scale=input_scale,
            eigenvalues=eigenvalues,
            exclusive=exclusive,
            backend=name,
        )
        found.append((h, *torch.autograd.grad(h.sum(), (x, delta, B))))
    for name, actual, expected in zip(("h", "x", "delta", "B"), *found, strict=True):
        assert_relative(name, actual, expected, TOLERANCE)


def saturated(kind: Any, bias: float, dtype: torch.dtype, **options: Any) -> FixedPointLayer:
    """A layer whose Delta has the raw value `bias` in all channels."""
    torch.manual_seed(0)
    layer: FixedPointLayer = kind(4, on_unconverged="ignore", **options)
    with torch.no_grad():
        layer.x_proj.weight[: layer.d_inner] = 0
        layer.dt_bias.fill_(bias)
    return layer.to(dtype)


COUPLED = {"expand": 1, "d_state": 2, "input_scale": "one_minus_decay"}
LAYERS: list[tuple[Any, dict[str, Any]]] = [
    (FixedPointRNN, {"expand": 1}),
    (FixedPointRNN, {"expand": 1, "eigenvalues": "full"}),
    (Bedouin, COUPLED | {"feedback": ("mixer",)}),
    (Bedouin, COUPLED | {"feedback": (), "eigenvalues": "full"}),
]
SOLVERS = [Direct(), Picard(rtol=1e-6, atol=1e-30), Jacobi(rtol=1e-6, atol=1e-30)]
solvers = pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)


def compare_with_float64(
    kind: Any, options: dict[str, Any], bias: float, backend: Backend, device: str, t: int
) -> None:
    """y, h and the gradient of dt_bias where all gates are at one end."""
    x, found = torch.randn(2, t, 4), []
    where: list[tuple[torch.dtype, Backend, str]] = [
        (torch.float32, backend, device),
        (torch.float64, "reference", "cpu"),
    ]
    for dtype, name, place in where:
        layer = saturated(kind, bias, dtype, backend=name, **options).to(place)
        _, state = layer(x.to(layer.D), return_state=True)
        (grad,) = torch.autograd.grad(state.y.sum() + state.ssm.sum(), layer.dt_bias)
        assert layer.stats is not None and layer.stats.converged.all()
        found.append((state.y, state.ssm, grad))
    for name, actual, expected in zip(("y", "h", "dt_bias"), *found, strict=True):
        error = (actual.double().cpu() - expected).abs().max() / expected.abs().max()
        assert error <= 1e-4, f"{name}: {error}"


@solvers
@pytest.mark.parametrize("bias", [-20.0, -17.0, -9.0, 9.0, 17.0, 20.0])
@pytest.mark.parametrize(("kind", "options"), LAYERS, ids=str)
def test_the_state_of_a_layer(
    kind: Any, options: dict[str, Any], bias: float, solver: Solver
) -> None:
    compare_with_float64(kind, options | {"solver": solver}, bias, "reference", "cpu", 3)


@pytest.mark.parametrize(("backend", "device"), [INTERPRETED, COMPILED])
@pytest.mark.parametrize(
    ("case", "bias", "solver"),
    [*((0, 17.0, solver) for solver in SOLVERS), (2, -17.0, SOLVERS[0]), (2, 9.0, SOLVERS[2])],
)
def test_the_state_of_a_layer_with_kernels(
    case: int, bias: float, solver: Solver, backend: Backend, device: str
) -> None:
    kind, options = LAYERS[case]
    if kind is Bedouin:
        options = options | {"d_state": 1}  # the kernels couple the scale of one state
    compare_with_float64(kind, options | {"solver": solver}, bias, backend, device, 2)


MIXERS = [LowRank(2), LowRank(8), HouseholderProduct(2), HouseholderProduct(4, 2.0)]
GATES = {
    "one saturated": [2.0] * 7 + [-20.0],
    "two saturated": [2.0] * 6 + [-20.0] * 2,
    "three saturated": [2.0] * 5 + [-20.0] * 3,
    "all saturated": [-20.0] * 8,
    "half saturated": [-10.0] * 8,
    "closed": [20.0] * 8,
    "all kinds": [20.0, 10.0, 5.0, 2.0, -2.0, -5.0, -10.0, -20.0],
}


@pytest.mark.parametrize("alpha", [20.0, 0.0, -10.0, -20.0])
@pytest.mark.parametrize("gates", GATES.values(), ids=GATES.keys())
@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_the_state_of_a_structured_mixer(
    mixer: StructuredMixer, gates: list[float], alpha: float
) -> None:
    """Converged in float32 means the state of float64, wherever gates and mixer are.

    But for products of projections (beta = 1) with a gain of 1: such a system is nearly singular.
    """
    x, found = torch.randn(3, 10, 8), []
    d, k = 8, mixer.raw_size(8) % 8 or 8
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        layer = FixedPointRNN(d, expand=1, mixer=mixer, on_unconverged="ignore")
        with torch.no_grad():
            layer.dt_bias.copy_(torch.tensor(gates))
            layer.x_proj.weight[:d] = 0
            assert layer.raw_bias is not None
            layer.raw_bias[d * k : d * k + k] = alpha
        layer = layer.to(dtype)
        _, state = layer(x.to(dtype), return_state=True)
        assert layer.stats is not None
        found.append((state.y, state.ssm, layer.stats))
    (y, h, stats), (exact_y, exact_h, exact) = found
    assert exact.converged.all() and stats.converged.all()
    assert exact.conditioning is not None
    if isinstance(mixer, HouseholderProduct) and exact.conditioning.min() < 1e-4:
        return
    assert_close("y", y.double(), exact_y, 1e-4)
    assert_close("h", h.double(), exact_h, 1e-4)


def test_a_singular_layer_has_not_converged() -> None:
    """lambda = 0 in every channel: with Q of rank 2 nothing determines the others."""
    layer = FixedPointRNN(8, expand=1, mixer=LowRank(2), on_unconverged="ignore")
    with torch.no_grad():
        layer.dt_bias.fill_(-200.0)
    layer(torch.randn(2, 3, 8))
    assert layer.stats is not None and layer.stats.conditioning is not None
    assert not layer.stats.converged.any() and not layer.stats.conditioning.any()

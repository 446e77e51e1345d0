"""Saturated gates: the coupled scale and the local equation keep their relative precision.

Plain PyTorch and the kernels, interpreted and compiled, in float32 against float64.
Letters: b batch, t time, d channels, n state per channel.
"""

import itertools
from typing import Any, get_args

import pytest
import torch
from tests.kernels.rows import output
from tests.kernels.table import COMPILED, F32, INTERPRETED, implementations
from torch import Tensor
from torch.nn.functional import softplus

from bedouin import Bedouin, FixedPointRNN, HouseholderProduct, LowRank
from bedouin.kernels.backend import Backend
from bedouin.kernels.output import gated_output
from bedouin.kernels.scan import Eigenvalues, InputScale, selective_scan
from bedouin.layers.mixers import StructuredMixer
from bedouin.solvers import Direct, Jacobi, Picard, Solver
from bedouin.testing import assert_close

BIASES = (-20.0, -17.0, -12.0, -4.0, -0.4, 0.1, 0.4, 4.0, 12.0, 17.0, 20.0)
EXACT: tuple[torch.dtype, Backend, str] = torch.float64, "reference", "cpu"
SCALES, RANGES = get_args(InputScale), get_args(Eigenvalues)


def assert_relative(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Every element to its own size."""
    actual, expected = actual.double().cpu(), expected.cpu()
    off = (actual - expected).abs() > tolerance * expected.abs()
    assert not off.any(), f"{name}: {actual[off][:4]} is not {expected[off][:4]}"


def gates(dtype: torch.dtype) -> Tensor:
    """Delta (11,) from Delta = 4e-9 to 20; the same numbers in every dtype."""
    return softplus(torch.tensor(BIASES, dtype=torch.float64)).float().to(dtype)


@implementations
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
    for dtype, name, place in ((F32, backend, device), EXACT):
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
        assert_relative(name, actual, expected, 1e-5)


COUPLED = {"expand": 1, "d_state": 2, "input_scale": "one_minus_decay"}
LAYERS: list[tuple[Any, dict[str, Any]]] = [
    (FixedPointRNN, {"expand": 1}),
    (FixedPointRNN, {"expand": 1, "eigenvalues": "full"}),
    (Bedouin, COUPLED | {"feedback": ("mixer",)}),
    (Bedouin, COUPLED | {"feedback": (), "eigenvalues": "full"}),
]
SOLVERS = [Direct(), Picard(rtol=1e-6, atol=1e-30), Jacobi(rtol=1e-6, atol=1e-30)]
SHARP = (-20.0, -17.0, -9.0, 9.0, 17.0, 20.0)
WITH_KERNELS = [
    *((LAYERS[0], 17.0, solver) for solver in SOLVERS),
    # the kernels couple the scale of one state
    ((Bedouin, LAYERS[2][1] | {"d_state": 1}), -17.0, SOLVERS[0]),
    ((Bedouin, LAYERS[2][1] | {"d_state": 1}), 9.0, SOLVERS[2]),
]


@pytest.mark.parametrize(
    ("layer", "bias", "solver", "backend", "device"),
    [
        *((*case, "reference", "cpu") for case in itertools.product(LAYERS, SHARP, SOLVERS)),
        *(
            pytest.param(*case, *at.values, marks=at.marks)
            for case in WITH_KERNELS
            for at in (INTERPRETED, COMPILED)
        ),
    ],
    ids=str,
)
def test_the_state_of_a_layer(
    layer: tuple[Any, dict[str, Any]], bias: float, solver: Solver, backend: Backend, device: str
) -> None:
    """y, h and the gradient of dt_bias where the raw value of Delta is at one end everywhere."""
    x, found = torch.randn(2, 3, 4), []
    for dtype, name, place in ((F32, backend, device), EXACT):
        torch.manual_seed(0)
        kind, options = layer
        made = kind(4, on_unconverged="ignore", solver=solver, backend=name, **options)
        with torch.no_grad():
            made.x_proj.weight[: made.d_inner] = 0
            made.dt_bias.fill_(bias)
        made = made.to(place, dtype)
        _, state = made(x.to(made.D), return_state=True)
        (grad,) = torch.autograd.grad(state.y.sum() + state.ssm.sum(), made.dt_bias)
        assert made.stats.converged.all()
        found.append((state.y, state.ssm, grad))
    for name, actual, expected in zip(("y", "h", "dt_bias"), *found, strict=True):
        error = (actual.double().cpu() - expected).abs().max() / expected.abs().max()
        assert error <= 1e-4, f"{name}: {error}"


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
        layer: Any = FixedPointRNN(d, expand=1, mixer=mixer, on_unconverged="ignore")
        with torch.no_grad():
            layer.dt_bias.copy_(torch.tensor(gates))
            layer.x_proj.weight[:d] = 0
            layer.raw_bias[d * k : d * k + k] = alpha
        layer = layer.to(dtype)
        _, state = layer(x.to(dtype), return_state=True)
        found.append((state.y, state.ssm, layer.stats))
    (y, h, stats), (exact_y, exact_h, exact) = found
    assert exact.converged.all() and stats.converged.all()
    if isinstance(mixer, HouseholderProduct) and exact.conditioning.min() < 1e-4:
        return
    assert_close("y", y.double(), exact_y, 1e-4)
    assert_close("h", h.double(), exact_h, 1e-4)


@implementations
@pytest.mark.parametrize("norm", [True, False])
def test_large_gates_of_the_output_do_not_overflow(norm: bool, backend: str, device: str) -> None:
    tensors: Any = output(1, 2, 3, norm=norm).given(F32, device)
    large = {name: 1e4 * tensors[name] for name in ("y", "gate")}
    leaves = {k: v if v is None else v.requires_grad_() for k, v in (tensors | large).items()}
    out = gated_output(**leaves, backend=backend)  # type: ignore[arg-type]
    grads = torch.autograd.grad(out.sum(), [v for v in leaves.values() if v is not None])
    assert all(v.isfinite().all() for v in (out, *grads))

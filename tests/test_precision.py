"""Float32 against float64, also where squares overflow, and parameters of another dtype, in plain
torch and with Triton kernels, interpreted on the CPU (small sizes) and compiled on a GPU.
"""

from itertools import product
from typing import Any

import pytest
import torch
from tests.kernels.table import COMPILED, INTERPRETED, kernels
from tests.layer_cases import CPU, make, results
from tests.modes import Watching
from torch import Tensor

from bedouin import Bedouin
from bedouin.decode import Decoder
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.solvers import Direct, Jacobi, Picard, Solver
from bedouin.testing import assert_close, layer_gradients, measure_growth, relative_error

SOLVERS: list[Solver] = [Direct(), Picard(rtol=1e-6), Jacobi(rtol=1e-6)]
SIXTEEN = CPU._replace(m=16)


def pair(name: str, **options: Any) -> tuple[FixedPointLayer, FixedPointLayer]:
    """The same layer in float32 and, from the rounded parameters, in float64."""
    options |= {"on_unconverged": "ignore"}
    layer = make(name, SIXTEEN, dtype=torch.float32, **options)
    reference = make(name, SIXTEEN, **options)
    reference.load_state_dict(layer.state_dict())
    return layer, reference


@pytest.mark.parametrize(
    "name", ["one head", "heads", "coupled", "full", "vector", "vector, heads"]
)
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_float32_against_float64(name: str, solver: Solver) -> None:
    layer, reference = pair(name, solver=solver)
    x = torch.randn(3, 20, 16)
    growth = measure_growth(reference, x.double())
    assert_close("output", layer(x).double(), reference(x.double()), 2e-5 * growth)
    expected = layer_gradients(reference, x.double())
    for name, gradient in layer_gradients(layer, x).items():
        assert gradient.dtype == torch.float32
        assert_close(name, gradient.double(), expected[name], 1e-4 * growth, atol=1e-6)


def test_backward_outside_autocast_is_backward_inside() -> None:
    layer, _ = pair("one head")
    x, weights = torch.randn(2, 6, 16), list(layer.parameters())

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total: Tensor = layer(x).float().square().sum()
        return total

    outside = torch.autograd.grad(loss(), weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(loss(), weights)
    for (name, _), a, b in zip(layer.named_parameters(), outside, inside, strict=True):
        assert_close(name, a, b, 0.02)


def test_the_default_dtype_does_not_leak() -> None:
    """A layer that is made under a float64 default; test_every_layer_in_torch.py has the other."""
    torch.set_default_dtype(torch.float64)
    try:
        double = Bedouin(4)(torch.randn(2, 5, 4))
    finally:
        torch.set_default_dtype(torch.float32)
    assert double.dtype == torch.float64


HUGE: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("one head", "coupled", "vector")),
    *((name, {"feedback_norm": False}) for name in ("heads", "vector, heads")),
    *((name, {"feedback": ()}) for name in ("low rank", "vector")),
]


def assert_right_or_nan(
    output: Tensor,  # (b, ...)
    expected: Tensor,  # (b, ...), in float64
    layer: FixedPointLayer,
) -> None:
    """Each sample is NaN, or right and converged."""
    assert layer.stats is not None
    for i, found in enumerate(output):
        if not found.isnan().any() and expected[i].abs().max() < torch.finfo(found.dtype).max:
            assert relative_error(found, expected[i]) < 1e-3
            assert bool(layer.stats.converged[i])


WITH_KERNELS: list[tuple[str, dict[str, Any], float]] = [
    ("one head", {"num_householder": 4}, 1e25),
    ("heads", {}, 1e25),
    ("no mixing", {"feedback": ("delta",)}, 1e25),
    ("vector", {}, 1e12),
    ("vector", {"feedback": (), "num_heads": 2}, 1e12),
]
SCALES = 1e12, 1e19, 1e25, 3e38


# the interpreter computes with numpy, which warns
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "options", "scale", "solver", "backend", "device"),
    [
        *((*of, *rest, "reference", "cpu") for of in HUGE for rest in product(SCALES, SOLVERS)),
        *(
            pytest.param(*case, SOLVERS[0], *at.values, marks=at.marks)
            for case in WITH_KERNELS
            for at in (INTERPRETED, COMPILED)
        ),
    ],
    ids=lambda v: str(v)[:40],
)
def test_squares_that_overflow_are_no_zeros(
    name: str, options: dict[str, Any], scale: float, solver: Solver, backend: Any, device: str
) -> None:
    """The sum of the squares of a vector is Inf in float32 from about 1e19 on, and of y in
    FixedPointRNN, which grows as the square of the input, from 1e10 on."""
    layer, reference = (v.to(device) for v in pair(name, solver=solver, **options))
    layer.backend = backend
    x = torch.randn(2, 5, 16, device=device).clamp(-1, 1)
    plain = layer(x)
    huge = torch.stack([x[0] * scale, x[1]])
    output, exact = layer(huge), reference(huge.double())
    assert torch.equal(output[1], plain[1])
    assert_right_or_nan(output, exact, layer)
    # below, the solve may have converged to a y that only the output norm cannot take
    assert scale < 1e25 or (layer.stats is not None and not bool(layer.stats.converged[0]))
    step, _ = layer.step(huge[:, 0], layer.init_state(2))
    assert_right_or_nan(step, exact[:, 0], layer)
    assert torch.equal(Decoder(layer, 2)(huge[:, 0]).isnan(), step.isnan())


# compiled, exponentials and quotients are approximations
TOLERANCE = {"cpu": 5e-6, "cuda": 1e-4}


@kernels
@pytest.mark.parametrize("name", ["dt_bias", "raw_bias"])
def test_a_parameter_of_another_dtype(name: str, device: str) -> None:
    """Each gradient has the dtype of its parameter, and is not rounded to that of another one."""
    layers = [Bedouin(6, d_state=3, device=device, backend=b) for b in ("triton", "reference")]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:
        parameter = layer.get_parameter(name)
        parameter.data = parameter.data.bfloat16()
    x = torch.randn(2, 2, 6, device=device)
    ours, theirs = (results(layer, x) for layer in layers)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        # two roundings to bfloat16 may differ by one unit in the last place
        tolerance = 2**-7 if a.dtype == torch.bfloat16 else TOLERANCE[device]
        assert_close("result", a.double(), b.double(), tolerance, atol=TOLERANCE[device] / 10)


@kernels
def test_the_sweep_gets_operands_in_the_dtype_of_the_layer(device: str) -> None:
    """And rows of raw values that begin at multiples of 64."""
    layer, calls = Bedouin(6, device=device, dtype=torch.bfloat16, backend="triton"), []
    with Watching(lambda func, args, results: calls.append((func.name(), args))):
        layer(torch.randn(2, 2, 6).bfloat16().to(device))
    (args,) = [args for name, args in calls if name == "bedouin::direct_sweep"]
    x, raw = (v for v in args if isinstance(v, Tensor) and v.dim() == 3)
    assert (x.dtype, raw.dtype, raw.stride(1) % 64) == (torch.bfloat16, torch.bfloat16, 0)

"""Whole layers with Triton kernels against the same layers in plain torch: values and gradients.

Interpreted on the CPU (small sizes) and compiled on a GPU.
"""

from typing import Any

import pytest
import torch
from tests.layer_cases import assert_all_close, results
from tests.modes import Watching
from torch import Tensor

from bedouin import Bedouin, FixedPointRNN, HouseholderProduct, NoMixing
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.solvers import Direct, OneStepAdjoint, Picard
from bedouin.testing import assert_close

INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [INTERPRETED, COMPILED])


PICARD: dict[str, Any] = {"solver": Picard(rtol=0, atol=0), "max_steps": 2}
VARIANTS: list[tuple[Any, dict[str, Any]]] = [
    (Bedouin, {"num_householder": 4}),
    (FixedPointRNN, {}),
    (Bedouin, {"num_heads": 2, "num_householder": 1}),
    (Bedouin, {"mixer": NoMixing(), "feedback": ("delta",), "num_heads": 2}),
    (Bedouin, PICARD | {"adjoint": OneStepAdjoint()}),
]
# compiled, exponentials and quotients are approximations
TOLERANCE = {"cpu": 5e-6, "cuda": 1e-4}


def pair(kind: Any, device: str, dtype: torch.dtype, **options: Any) -> list[FixedPointLayer]:
    """The same layer with kernels and without."""
    options |= {"device": device, "dtype": dtype, "on_unconverged": "ignore"}
    if kind is Bedouin:
        options = {"d_state": 3, **options}
    layers = [kind(6, backend=backend, **options) for backend in ("triton", "reference")]
    layers[1].load_state_dict(layers[0].state_dict())
    return layers


@devices
@pytest.mark.parametrize("name", ["dt_bias", "raw_bias"])
def test_a_parameter_of_another_dtype(name: str, device: str) -> None:
    """Each gradient has the dtype of its parameter, and is not rounded to that of another one."""
    layers = pair(Bedouin, device, torch.float32)
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


@devices
@pytest.mark.parametrize(
    ("kind", "options", "autocast"),
    [*((*case, False) for case in VARIANTS), (Bedouin, {}, True)],
    ids=str,
)
def test_bfloat16_with_kernels(
    kind: Any, options: dict[str, Any], autocast: bool, device: str
) -> None:
    """Of a layer, or of autocast."""
    layers = pair(kind, device, torch.float32 if autocast else torch.bfloat16, **options)
    x = torch.randn(2, 2, 6).to(device, layers[0].D.dtype)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        ours, theirs = (results(layer, x) for layer in layers)
    assert [v.dtype for v in ours] == [v.dtype for v in theirs]
    # sums over few channels cancel, so the error is that of the rounded terms
    assert_all_close(map(Tensor.double, ours), map(Tensor.double, theirs), 0.05, 0.05)


@devices
def test_the_sweep_gets_operands_in_the_dtype_of_the_layer(device: str) -> None:
    """And rows of raw values that begin at multiples of 64."""
    (layer, _), calls = pair(Bedouin, device, torch.bfloat16), []
    with Watching(lambda func, args, results: calls.append((func.name(), args))):
        layer(torch.randn(2, 2, 6).bfloat16().to(device))
    (args,) = [args for name, args in calls if name == "bedouin::direct_sweep"]
    x, raw = (v for v in args if isinstance(v, Tensor) and v.dim() == 3)
    assert (x.dtype, raw.dtype, raw.stride(1) % 64) == (torch.bfloat16, torch.bfloat16, 0)


class Named(HouseholderProduct):
    """A subclass that changes neither how raw values are read nor what is computed from them."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def extra_repr(self) -> str:
        return f"named, {super().extra_repr()}"


class NamedNoMixing(NoMixing):
    """As `Named`."""

    def extra_repr(self) -> str:
        return "named"


@devices
@pytest.mark.parametrize("solver", [Direct(), Picard(rtol=0, atol=0)], ids=repr)
@pytest.mark.parametrize("kind", [Bedouin, FixedPointRNN])
def test_a_subclass_keeps_the_kernels(kind: Any, device: str, solver: Any) -> None:
    options: dict[str, Any] = {"solver": solver, "max_steps": 2, "on_unconverged": "ignore"}
    options |= {"device": device, "backend": "triton"}
    x = torch.randn(1, 2, 3, device=device)
    for same, mine in ((HouseholderProduct(2, 1.5), Named(2, 1.5)), (NoMixing(), NamedNoMixing())):
        found = []
        for mixer in (same, mine):
            torch.manual_seed(0)
            layer = kind(3, mixer=mixer, **options)
            y = layer(x)
            grads = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
            found.append((y, *grads, layer.step(x[:, 0], layer.init_state(1))[0]))
        assert all(map(torch.equal, *found))

"""Whole layers with Triton kernels against the same layers in plain torch: values and gradients.

Interpreted on the CPU (small sizes) and compiled on a GPU.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bedouin import Bedouin, FixedPointRNN, LowRank, NoMixing
from bedouin.layer import FixedPointLayer
from bedouin.solvers import Jacobi, OneStepAdjoint, Picard
from bedouin.testing import assert_close

INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [INTERPRETED, COMPILED])
VARIANTS: list[tuple[Any, dict[str, Any]]] = [
    (Bedouin, {"num_householder": 4}),
    (Bedouin, {"feedback": ("B", "mixer"), "feedback_norm": False}),
    (Bedouin, {"feedback": (), "decay": "griffin", "input_scale": "one_minus_decay"}),
    (Bedouin, {"output": "paper", "bias": False}),
    (FixedPointRNN, {}),
    (Bedouin, {"num_heads": 2, "num_householder": 1}),
]
# whose kernels get a reflection with beta 0
WITHOUT_MIXING: list[tuple[Any, dict[str, Any]]] = [
    (Bedouin, {"mixer": NoMixing()}),
    (Bedouin, {"mixer": NoMixing(), "feedback": ("delta",), "num_heads": 2}),
    (Bedouin, {"mixer": NoMixing(), "feedback": (), "input_scale": "one_minus_decay"}),
    (FixedPointRNN, {"mixer": NoMixing()}),
    (Bedouin, {"mixer": NoMixing(), "solver": Jacobi(rtol=0, atol=0), "max_steps": 2}),
]
# these never converge, so both take all steps and agree to rounding
STEPS: list[tuple[Any, dict[str, Any]]] = [
    (Bedouin, {"solver": Picard(rtol=0, atol=0), "adjoint": OneStepAdjoint(), "max_steps": 2}),
    (FixedPointRNN, {"solver": Jacobi(rtol=0, atol=0), "max_steps": 2}),
]


def run(layer: FixedPointLayer, x: Tensor) -> list[Tensor]:
    """The output, the state, and the gradients of all parameters and of x."""
    x = x.clone().requires_grad_()
    output, state = layer(x, return_state=True)
    weights = torch.linspace(0, 5, output.numel(), dtype=torch.float64).cos().view(output.shape)
    loss = (output.double() * weights.to(x.device)).sum() + state.ssm.double().sum()
    grads = torch.autograd.grad(loss, [x, *layer.parameters()], materialize_grads=True)
    return [output.detach(), state.ssm.detach(), state.y.detach(), *grads]


def pair(kind: Any, device: str, dtype: torch.dtype, **options: Any) -> list[FixedPointLayer]:
    """The same layer with kernels and without."""
    options |= {"device": device, "dtype": dtype, "on_unconverged": "ignore"}
    if kind is Bedouin:
        options["d_state"] = 3
    layers = [kind(6, backend=backend, **options) for backend in ("triton", "reference")]
    layers[1].load_state_dict(layers[0].state_dict())
    return layers


def names(layer: FixedPointLayer) -> list[str]:
    parameters = [name for name, _ in layer.named_parameters()]
    return ["output", "ssm", "y", "grad x", *(f"grad {name}" for name in parameters)]


@devices
@pytest.mark.parametrize(("kind", "options"), VARIANTS + WITHOUT_MIXING + STEPS, ids=str)
def test_a_layer_with_kernels_in_float64(kind: Any, options: dict[str, Any], device: str) -> None:
    layers = pair(kind, device, torch.float64, **options)
    x = torch.randn(2, 2, 6, dtype=torch.float64).to(device)
    ours, theirs = (run(layer, x) for layer in layers)
    for name, a, b in zip(names(layers[0]), ours, theirs, strict=True):
        assert_close(name, a, b, 1e-9, atol=1e-10)


@devices
@pytest.mark.parametrize(
    ("kind", "options"), [*VARIANTS[::4], VARIANTS[5], WITHOUT_MIXING[1], STEPS[0]], ids=str
)
def test_a_bfloat16_layer_with_kernels(kind: Any, options: dict[str, Any], device: str) -> None:
    layers = pair(kind, device, torch.bfloat16, **options)
    x = torch.randn(2, 2, 6).bfloat16().to(device)
    ours, theirs = (run(layer, x) for layer in layers)
    assert [v.dtype for v in ours] == [v.dtype for v in theirs]
    for name, a, b in zip(names(layers[0]), ours, theirs, strict=True):
        # sums over few channels cancel, so the error is that of the rounded terms
        assert_close(name, a.double(), b.double(), 0.05, atol=0.05)


@devices
def test_autocast_with_kernels(device: str) -> None:
    layers = pair(Bedouin, device, torch.float32)
    x = torch.randn(2, 2, 6).to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        ours, theirs = (run(layer, x) for layer in layers)
    assert [v.dtype for v in ours] == [v.dtype for v in theirs]
    for name, a, b in zip(names(layers[0]), ours, theirs, strict=True):
        assert_close(name, a.double(), b.double(), 0.05, atol=0.05)


class _SweepOperands(TorchDispatchMode):
    """Records dtype and row stride of the operands x and raw of the operation "direct_sweep"."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[torch.dtype, torch.dtype, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.name() == "bedouin::direct_sweep":
            x, raw = (arg for arg in args if isinstance(arg, Tensor) and arg.dim() == 3)
            self.seen.append((x.dtype, raw.dtype, raw.stride(1) % 64))
        return func(*args, **(kwargs or {}))


@devices
def test_the_sweep_gets_operands_in_the_dtype_of_the_layer(device: str) -> None:
    layer, _ = pair(Bedouin, device, torch.bfloat16)
    x = torch.randn(2, 2, 6).bfloat16().to(device)
    with _SweepOperands() as operands:
        layer(x)
    assert operands.seen == [(torch.bfloat16, torch.bfloat16, 0)]


@pytest.mark.gpu
def test_a_mixer_without_kernels_on_a_gpu() -> None:
    layer = Bedouin(6, mixer=LowRank(2), device="cuda", dtype=torch.bfloat16, feedback=())
    reference = Bedouin(6, mixer=LowRank(2), device="cuda", feedback=(), backend="reference")
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 6, device="cuda").bfloat16()
    assert_close("output", layer(x).float(), reference(x.float()), 0.05, atol=0.05)


# the interpreter computes with numpy, which warns
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "options"),
    [*VARIANTS, *STEPS, (FixedPointRNN, {"feedback": (), "num_heads": 2})],
)
@devices
@torch.no_grad()
def test_squares_that_overflow_are_no_zeros(
    kind: Any, options: dict[str, Any], device: str
) -> None:
    """What is not NaN in float32 is what float64 gives."""
    scale = 1e12 if kind is FixedPointRNN else 1e25
    layer, _ = pair(kind, device, torch.float32, **options)
    exact = copy.deepcopy(layer).double()
    x = torch.randn(2, 3, 6).to(device)
    x[0] *= scale
    expected = exact(x.double())
    output = layer(x)
    assert_close("the other sample", output[1].double(), expected[1], 1e-4)
    step, _ = layer.step(x[:, 0], layer.init_state(2))
    exact_step, _ = exact.step(x[:, 0].double(), exact.init_state(2))
    for found, right in ((output[0], expected[0]), (step[0], exact_step[0])):
        if not found.isnan().any() and right.abs().max() < torch.finfo(torch.float32).max:
            assert_close("a huge sample", found.double(), right, 1e-3)

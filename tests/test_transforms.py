"""torch's transforms of whole layers: batched cotangents, vmap, forward mode, saved-tensor hooks.

What is supported equals a loop; what is not raises an error that names bedouin and a remedy.

Letters: b batch, t time, m d_model, e samples or cotangents of a transform.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.layer_cases import CPU, make, random_state
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from bedouin import BedouinState
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.solvers import (
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    PhantomAdjoint,
    Picard,
    UnrolledAdjoint,
)

# torch compiles its formulas for forward mode with TorchScript, which is deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

PICARD, JACOBI = Picard(rtol=1e-13, atol=1e-300), Jacobi(rtol=1e-13, atol=1e-300)

LAYERS = "one head", "coupled", "no feedback", "vector", "heads"
PLAIN = *LAYERS, "low rank"

SOLVES: dict[str, dict[str, Any]] = {
    "direct": {},
    "picard": {"solver": PICARD},
    "jacobi": {"solver": JACOBI},
    "one-step": {"solver": PICARD, "adjoint": OneStepAdjoint()},
    "phantom": {"adjoint": PhantomAdjoint(2, 0.5)},
    "unrolled": {"adjoint": UnrolledAdjoint()},
    "iterative": {"adjoint": ImplicitAdjoint(PICARD)},
}
ONE_BY_ONE = {name: options for name, options in SOLVES.items() if name != "iterative"}

plain_layers = pytest.mark.parametrize("kind", PLAIN)


def layer_of(kind: str = "one head", **options: Any) -> FixedPointLayer:
    """Of the table, with two channels, as a Jacobian has a row for each output."""
    layer: FixedPointLayer = make(kind, CPU._replace(m=2), **options)
    return layer


def with_kernels(kind: str, **options: Any) -> FixedPointLayer:
    """In float32: the kernels take no float64."""
    kept = {"backend": "triton", "on_unconverged": "ignore", "dtype": torch.float32}
    return layer_of(kind, **kept, **options)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def draw_state(layer: FixedPointLayer, b: int) -> BedouinState:
    return random_state(layer, b, 1.0)


def assert_equal_up_to_rounding(actual: Tensor, expected: Tensor) -> None:
    rtol, atol = (1e-9, 1e-14) if expected.dtype == torch.float64 else (2e-6, 1e-7)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def batched_and_looped(layer: FixedPointLayer, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Gradients of input, state and parameters for two cotangents: at once, and in a loop."""
    state = draw_state(layer, len(x))
    inputs = [v.requires_grad_() for v in (x, *state)] + list(layer.parameters())
    output, last = layer(x, state=state, return_state=True)
    outputs = (output, *last)
    cotangents = [draw(2, *v.shape).to(v.dtype) for v in outputs]

    def pull(cotangents: Any, **options: Any) -> tuple[Tensor, ...]:
        options |= {"retain_graph": True, "allow_unused": True}  # without feedback, y of the state
        return torch.autograd.grad(outputs, inputs, cotangents, **options)

    looped = zip(*(pull(some) for some in zip(*cotangents, strict=True)), strict=True)
    pairs = list(zip(pull(cotangents, is_grads_batched=True), looped, strict=True))
    assert all((one is None) == (many[0] is None) for one, many in pairs)
    return [(one, torch.stack(many)) for one, many in pairs if one is not None]


# -- batched cotangents


@pytest.mark.parametrize(
    ("kind", "solve"),
    [*(("one head", solve) for solve in ONE_BY_ONE), *((kind, "direct") for kind in PLAIN[1:])],
)
def test_batched_cotangents_are_a_loop_over_them(kind: str, solve: str) -> None:
    layer = layer_of(kind, **SOLVES[solve])
    for actual, expected in batched_and_looped(layer, draw(2, 3, 2)):
        assert_equal_up_to_rounding(actual, expected)


def test_batched_cotangents_leave_no_statistics_behind() -> None:
    layer = layer_of()
    x = draw(2, 2, 2).requires_grad_()
    output = layer(x)
    torch.autograd.grad(output, x, draw(3, *output.shape), is_grads_batched=True)
    assert layer.stats is not None and layer.stats.backward is None


def test_an_iterative_adjoint_refuses_batched_cotangents() -> None:
    layer, x = layer_of(**SOLVES["iterative"]), draw(1, 2, 2)
    with pytest.raises(RuntimeError, match="takes one cotangent at a time.*use Direct"):
        jacobian(layer, x, vectorize=True)
    with pytest.raises(RuntimeError, match="ImplicitAdjoint with an iterative.*use Direct"):
        jacrev(layer)(x)


# -- vmap


@plain_layers
def test_vmap_over_each_parameter_alone(kind: str) -> None:
    layer, x = layer_of(kind), draw(1, 2, 2)

    for name, parameter in layer.named_parameters():
        stacked = torch.stack([parameter.detach(), parameter.detach() * 0.9])

        def loss(value: Tensor, name: str = name) -> Tensor:
            output: Tensor = functional_call(layer, {name: value}, (x,))
            return output.square().sum()

        expected = torch.stack([grad(loss)(value) for value in stacked])
        assert_equal_up_to_rounding(vmap(grad(loss))(stacked), expected)


def test_statistics_leave_a_transform_by_being_returned() -> None:
    layer, x = layer_of(), draw(2, 3, 2)
    others = {n: torch.stack([p.detach(), 0.9 * p.detach()]) for n, p in layer.named_parameters()}

    def conditioning(own: dict[str, Tensor]) -> Tensor:
        functional_call(layer, own, (x,))
        assert layer.stats is not None and layer.stats.conditioning is not None
        return layer.stats.conditioning

    for i, found in enumerate(vmap(conditioning)(others)):
        expected = conditioning({n: p[i] for n, p in others.items()})
        assert_equal_up_to_rounding(found, expected)


# -- forward mode and second derivatives


def tangent_of(layer: FixedPointLayer, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found: Tensor = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x))).tangent
        return found


FORWARD: dict[str, Callable[..., Any]] = {
    "forward_ad": tangent_of,
    "jvp": lambda layer, x: jvp(layer, (x,), (x,)),
    "jacfwd": lambda layer, x: jacfwd(layer)(x),
    "hessian": lambda layer, x: hessian(lambda x: layer(x).sum())(x),
}


@pytest.mark.parametrize("solve", ["direct", "picard", "jacobi", "iterative"])
def test_forward_mode_is_refused_by_name(solve: str) -> None:
    layer = layer_of(**SOLVES[solve])
    # the reverse pass of the iterative adjoint refuses first what Hessians batch
    for transform in list(FORWARD.values())[: 3 if solve == "iterative" else None]:
        with pytest.raises(RuntimeError, match="bedouin.*forward-mode.*use reverse mode"):
            transform(layer, draw(1, 2, 2))


@pytest.mark.interpreter
def test_the_kernels_refuse_forward_mode_by_name() -> None:
    with pytest.raises(ValueError, match="backend='triton' does not support.*forward-mode"):
        tangent_of(with_kernels("one head"), draw(1, 2, 2).float())


@pytest.mark.parametrize(
    "options", [{}, {"solver": PICARD}, {"solver": JACOBI}], ids=["direct", "picard", "jacobi"]
)
def test_forward_mode_passes_through_an_unrolled_solve(options: dict[str, Any]) -> None:
    layer = layer_of(adjoint=UnrolledAdjoint(), **options)
    x = draw(1, 3, 2)
    expected = (jacobian(layer, x).flatten(3) @ x.flatten()).reshape(x.shape)
    assert_equal_up_to_rounding(jvp(layer, (x,), (x,))[1], expected)
    assert_equal_up_to_rounding(tangent_of(layer, x), expected)
    assert_equal_up_to_rounding(jacfwd(layer)(x), jacobian(layer, x))


SECOND: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "jacrev of jacrev": lambda f, x: jacrev(jacrev(f))(x),
    "grad of grad": lambda f, x: grad(lambda x: grad(f)(x).sum())(x),
    "hessian": lambda f, x: torch.autograd.functional.hessian(f, x),
    "jvp of grad": lambda f, x: jvp(grad(f), (x,), (x,)),
}


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("solve", ["direct", "picard", "one-step", "unrolled"])
def test_second_derivatives_are_refused_by_name(solve: str, second: str) -> None:
    layer = layer_of(**SOLVES[solve])
    message = "bedouin.*(once differentiable|forward-mode)"
    with pytest.raises(RuntimeError, match=message):
        SECOND[second](lambda x: layer(x).square().sum(), draw(1, 2, 2))

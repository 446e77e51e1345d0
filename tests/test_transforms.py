"""torch's transforms of whole layers: batched cotangents, vmap, forward mode; torch.compile: one
graph, the numbers of eager mode, no recompilation, on the plain path and with kernels.

What is supported equals a loop; what is not raises an error that names bedouin and a remedy.

Letters: b batch, t time, m d_model, e samples or cotangents of a transform.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.kernels.table import kernels
from tests.layer_cases import CPU, Place, Whole, assert_all_close, make, random_state
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from bedouin import Bedouin, LowRank, TrackingDeltaNet
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.solvers import (
    Anderson,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    PhantomAdjoint,
    Picard,
    UnrolledAdjoint,
)

# torch compiles its formulas for forward mode with TorchScript, which is deprecated; dynamo
# instantiates torch.autograd.Function when it traces a subclass, and reads .grad of tensors that a
# graph passes to the next one
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

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


def layer_of(kind: str = "one head", **options: Any) -> Any:
    """Of the table, with two channels, as a Jacobian has a row for each output."""
    return make(kind, CPU._replace(m=2), **options)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def assert_equal_up_to_rounding(actual: Tensor, expected: Tensor) -> None:
    rtol, atol = (1e-9, 1e-14) if expected.dtype == torch.float64 else (2e-6, 1e-7)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def batched_and_looped(layer: FixedPointLayer, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Gradients of input, state and parameters for two cotangents: at once, and in a loop."""
    state = random_state(layer, len(x), 1.0)
    inputs = [v.requires_grad_() for v in (x, *state)] + list(layer.parameters())
    output, last = layer(x, state=state, return_state=True)
    outputs = (output, *last)
    cotangents = [draw(2, *v.shape).to(v.dtype) for v in outputs]

    def pull(cotangents: Any, **options: Any) -> tuple[Tensor, ...]:
        options |= {"retain_graph": True, "allow_unused": True}  # without feedback, y of the state
        return torch.autograd.grad(outputs, inputs, cotangents, **options)

    batched = pull(cotangents, is_grads_batched=True)
    assert layer.stats is not None and layer.stats.backward is None, "statistics are left behind"
    looped = zip(*(pull(some) for some in zip(*cotangents, strict=True)), strict=True)
    pairs = list(zip(batched, looped, strict=True))
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


@pytest.mark.parametrize("where", ["mask", "seq_idx"])
@pytest.mark.parametrize("make_layer", [Bedouin, TrackingDeltaNet])
def test_batched_cotangents_of_padded_rows_and_of_documents(make_layer: Any, where: str) -> None:
    layer, x = make_layer(8).double(), draw(2, 5, 8)
    lengths = torch.tensor([[3], [5]])
    given = {"mask": torch.arange(5) < lengths, "seq_idx": (torch.arange(5) >= lengths - 1).int()}

    def call(x: Tensor) -> Tensor:
        output: Tensor = layer(x, **{where: given[where]})
        return output

    looped, batched = (jacobian(call, x, vectorize=v) for v in (False, True))
    assert_equal_up_to_rounding(batched, looped)


def test_an_iterative_adjoint_refuses_batched_cotangents() -> None:
    layer, x = layer_of(**SOLVES["iterative"]), draw(1, 2, 2)
    with pytest.raises(RuntimeError, match="takes one cotangent at a time.*use Direct"):
        jacobian(layer, x, vectorize=True)
    with pytest.raises(RuntimeError, match="ImplicitAdjoint with an iterative.*use Direct"):
        jacrev(layer)(x)


# -- vmap


@pytest.mark.parametrize("kind", PLAIN)
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

    def conditioning(own: dict[str, Tensor]) -> Any:
        functional_call(layer, own, (x,))
        return layer.stats.conditioning

    for i, found in enumerate(vmap(conditioning)(others)):
        expected = conditioning({n: p[i] for n, p in others.items()})
        assert_equal_up_to_rounding(found, expected)


# -- forward mode and second derivatives


def tangent_of(layer: FixedPointLayer, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x))).tangent


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
        tangent_of(layer_of(backend="triton", dtype=torch.float32), draw(1, 2, 2).float())


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


FLOAT64: dict[str, Any] = {"dtype": torch.float64}


def draw_input(kind: str, b: int = 2, t: int = 3) -> Tensor:
    return torch.randint(5, (b, t)) if kind == "model" else torch.randn(b, t, 3, **FLOAT64)


def results(call: Callable[[Tensor], Any], module: nn.Module, x: Tensor, mode: str) -> list[Any]:
    """The output and the gradients of everything that takes one."""
    contexts: dict[str, Any] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    context = contexts.get(mode, contextlib.nullcontext)
    if x.is_floating_point() and context is contextlib.nullcontext:
        x = x.clone().requires_grad_()
    with context():
        output = call(x)
    if not output.requires_grad:
        return [output]
    inputs = [v for v in (x, *module.parameters()) if v.requires_grad]
    return [output, *torch.autograd.grad(output.square().sum(), inputs)]


def prepared(kind: str, mode: str, options: dict[str, Any]) -> nn.Module:
    module: nn.Module = make(kind, CPU._replace(m=3), **options)
    return module.train(mode == "train").requires_grad_(mode != "frozen")


def whole(backend: str, kind: str, *modes: str, **options: Any) -> list[tuple[Any, ...]]:
    return [(backend, kind, mode, options) for mode in modes]


ONE_STEP: dict[str, Any] = {"adjoint": OneStepAdjoint(), "max_steps": 1, "on_unconverged": "ignore"}
IN_ONE_GRAPH = [
    *whole("eager", "one head", "train"),
    *whole("eager", "vector, heads", "eval", "no_grad"),
    *whole("eager", "model", "no_grad", "inference_mode", "frozen"),
    *whole("eager", "one head", "train", solver=Picard(), **ONE_STEP),
    *whole("eager", "one head", "train", solver=Jacobi(), **ONE_STEP),
]
SLOW = [
    *whole("aot_eager", "one head", "eval", "no_grad", "inference_mode", "frozen"),
    *whole("aot_eager", "model", "train"),
    *whole("inductor", "one head", "train", "no_grad"),
]


@pytest.mark.parametrize(
    ("backend", "kind", "mode", "options"),
    [*IN_ONE_GRAPH, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_one_graph_has_the_numbers_of_eager_mode(
    backend: str, kind: str, mode: str, options: dict[str, Any]
) -> None:
    module, x = prepared(kind, mode, options), draw_input(kind)
    call = torch.compile(module, fullgraph=True, backend=backend)
    assert_all_close(results(call, module, x, mode), results(module, module, x, mode), 1e-10)


EARLY = "where it can stop early: use "


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"solver": Picard(), "adjoint": OneStepAdjoint()}, f"{EARLY}Direct, a smaller max_steps"),
        ({"adjoint": ImplicitAdjoint(Picard(1e-12))}, rf"{EARLY}ImplicitAdjoint\(\)"),
        ({"mixer": LowRank(1)}, "HouseholderProduct"),
        (
            {"solver": Anderson(1e-9), "adjoint": ImplicitAdjoint(Jacobi(1e-12))},
            "use Direct, Jacobi or Picard with few steps",
        ),
    ],
    ids=str,
)
def test_what_runs_outside_of_the_graph(options: dict[str, Any], remedy: str) -> None:
    """The numbers are those of eager mode, and a whole graph is refused with a remedy."""
    layer, x = prepared("one head", "train", options), draw_input("one head")
    call = torch.compile(layer, backend="eager")
    assert_all_close(results(call, layer, x, "train"), results(layer, layer, x, "train"), 1e-10)
    torch.compiler.reset()
    call = torch.compile(layer, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"bedouin.*{remedy}"):
        call(x)


def test_a_state_that_does_not_fit_is_refused_under_the_compiler_too() -> None:
    layer = Bedouin(3, d_state=2, num_heads=2, **FLOAT64).eval()
    call = torch.compile(Whole(layer), dynamic=True, backend="eager")
    with pytest.raises(ValueError, match=r"ssm must have shape \(7, 6, 2\), got \(5, 6, 2\)"):
        call(draw_input("one head", 7, 11), layer.init_state(5), torch.rand(7, 11) < 0.7)


@pytest.mark.parametrize("solve", ["direct", "one-step"])
def test_saved_tensors_of_a_graph_may_be_packed(solve: str) -> None:
    layer = prepared(
        "one head", "train", {"solver": Picard(), **ONE_STEP} if solve == "one-step" else {}
    )
    x = draw_input("one head")
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with save_on_cpu():
        actual = results(call, layer, x, "train")
    assert_all_close(actual, results(layer, layer, x, "train"), 1e-10)


names = pytest.mark.parametrize("name", ["one head", "no feedback", "vector", "heads"])


def with_kernels(name: str, device: str) -> Any:
    place, options = Place(device, torch.float32, 3, 1e-3), {"num_householder": 1}
    return make(name, place, backend="triton", **options).train()


def draw_on(device: str, t: int = 2) -> Tensor:
    return torch.randn(2, t, 3, device=device, requires_grad=True)


def assert_rounded_alike(
    run: Callable[[], list[Tensor]], eager: Callable[[], list[Tensor]]
) -> None:
    """In fused code bfloat16 is rounded at other places, which feedback amplifies: `run` is at most
    five times as far from the values of float32 as `eager` is. On a GPU four times were seen."""
    exact = eager()
    with torch.autocast(exact[0].device.type, torch.bfloat16):
        rounded = [[v.clone() for v in of()] for of in (run, eager)]
    for ours, theirs, value in zip(*rounded, exact, strict=True):
        assert (ours - value).norm() <= 5 * (theirs - value).norm() + 0.01 * value.norm()


@kernels
@names
def test_a_layer_is_one_graph_with_the_same_numbers(name: str, device: str) -> None:
    layer, x = with_kernels(name, device), draw_on(device)
    expected = results(layer, layer, x, "train")
    eager = layer.stats
    call: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, results(call, layer, x, "train"), expected))
    assert layer.stats is not eager and layer.stats.backward is None
    for of in ("num_steps", "residual", "converged", "conditioning"):
        assert torch.equal(getattr(layer.stats, of), getattr(eager, of)), of
    layer(x)  # counts a training call and, on a GPU, leaves a pending outcome
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(call(x), expected[0])
    if name == "one head":  # for any length from the second on
        call(draw_on(device, 3))
        with torch.compiler.set_stance("fail_on_recompile"):
            x = draw_on(device, 4)
            actual, expected = (results(run, layer, x, "train") for run in (call, layer))
            assert all(map(torch.equal, actual, expected))


@pytest.mark.gpu
@names
def test_the_default_compiler_gives_the_same_numbers(name: str) -> None:
    layer = with_kernels(name, "cuda")
    x = torch.randn(2, 20, 3, device="cuda", requires_grad=True)
    call = torch.compile(layer, fullgraph=True)
    assert_rounded_alike(*(partial(results, run, layer, x, "train") for run in (call, layer)))


# code that it does not fuse or capture is not an error
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_the_compiler_may_replay_cuda_graphs() -> None:
    layer = with_kernels("one head", "cuda")
    call = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):  # the first two calls warm up and record
        x = torch.randn(2, 20, 3, device="cuda", requires_grad=True)
        torch.compiler.cudagraph_mark_step_begin()
        assert_rounded_alike(*(partial(results, run, layer, x, "train") for run in (call, layer)))

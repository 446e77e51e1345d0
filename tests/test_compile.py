"""Whole layers under torch.compile: one graph, the numbers of eager mode, no recompilation, or an
error that says what to do; on the plain path and with kernels.

Letters: b batch, t time, m d_model.
"""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.layer_cases import OneToken, Whole
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils._pytree import tree_leaves, tree_structure

from bedouin import Bedouin, FixedPointRNN, LowRank, SequenceModel
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.solvers import Anderson, Direct, ImplicitAdjoint, Jacobi, OneStepAdjoint, Picard

# dynamo instantiates torch.autograd.Function when it traces a subclass
# and it reads .grad of the tensors that one graph passes to the next
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

FLOAT64: dict[str, Any] = {"dtype": torch.float64}

KINDS: dict[str, Callable[..., nn.Module]] = {
    "Bedouin": lambda **k: Bedouin(3, d_state=2, **FLOAT64, **k),
    "FixedPointRNN": lambda **k: FixedPointRNN(3, num_heads=2, **FLOAT64, **k),
    "SequenceModel": lambda **k: SequenceModel(
        5, 3, [Bedouin(3, d_state=2, num_heads=3, **FLOAT64, **k)], **FLOAT64
    ),
}

OUTSIDE: dict[str, dict[str, Any]] = {
    "long iteration": {"solver": Picard(), "adjoint": OneStepAdjoint()},
    "iterative adjoint": {"adjoint": ImplicitAdjoint(Picard(1e-12))},
    "low rank": {"mixer": LowRank(1)},
    "anderson": {"solver": Anderson(1e-9), "adjoint": ImplicitAdjoint(Jacobi(1e-12))},
}
REMEDIES = {
    "long iteration": "where it can stop early: use Direct, a smaller max_steps",
    "iterative adjoint": "where it can stop early: use ImplicitAdjoint\\(\\)",
    "low rank": "HouseholderProduct",
    "anderson": "use Direct, Jacobi or Picard with few steps",
}


def draw(kind: str, b: int = 2, t: int = 3) -> Tensor:
    if kind == "SequenceModel":
        return torch.randint(5, (b, t))
    return torch.randn(b, t, 3, dtype=torch.float64)


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
    module = KINDS[kind](**options)
    return module.train(mode == "train").requires_grad_(mode != "frozen")


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def whole(backend: str, kind: str, *modes: str, **options: Any) -> list[tuple[Any, ...]]:
    return [(backend, kind, mode, options) for mode in modes]


ONE_STEP: dict[str, Any] = {"adjoint": OneStepAdjoint(), "max_steps": 1, "on_unconverged": "ignore"}
IN_ONE_GRAPH = [
    *whole("eager", "Bedouin", "train"),
    *whole("eager", "FixedPointRNN", "eval", "no_grad"),
    *whole("eager", "SequenceModel", "no_grad", "inference_mode", "frozen"),
    *whole("eager", "Bedouin", "train", solver=Picard(), **ONE_STEP),
    *whole("eager", "Bedouin", "train", solver=Jacobi(), **ONE_STEP),
]
SLOW = [
    *whole("aot_eager", "Bedouin", "eval", "no_grad", "inference_mode", "frozen"),
    *whole("aot_eager", "SequenceModel", "train"),
    *whole("inductor", "Bedouin", "train", "no_grad"),
]


@pytest.mark.parametrize(
    ("backend", "kind", "mode", "options"),
    [*IN_ONE_GRAPH, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_one_graph_has_the_numbers_of_eager_mode(
    backend: str, kind: str, mode: str, options: dict[str, Any]
) -> None:
    module, x = prepared(kind, mode, options), draw(kind)
    call = torch.compile(module, fullgraph=True, backend=backend)
    assert_close(results(call, module, x, mode), results(module, module, x, mode))


@pytest.mark.parametrize("what", OUTSIDE)
def test_what_runs_outside_of_the_graph(what: str) -> None:
    """The numbers are those of eager mode, and a whole graph is refused with a remedy."""
    layer, x = prepared("Bedouin", "train", OUTSIDE[what]), draw("Bedouin")
    call = torch.compile(layer, backend="eager")
    assert_close(results(call, layer, x, "train"), results(layer, layer, x, "train"))
    torch.compiler.reset()
    call = torch.compile(layer, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"bedouin.*{REMEDIES[what]}"):
        call(x)


VARYING: dict[str, Callable[[], nn.Module]] = {
    "heads": lambda: Bedouin(3, d_state=2, num_heads=2, **FLOAT64),
    "SequenceModel": lambda: SequenceModel(
        5, 3, [Bedouin(3, num_heads=2, **FLOAT64), FixedPointRNN(3, **FLOAT64)],
        **FLOAT64,
    ),
}  # fmt: skip
"""Layers for calls with several batch sizes and lengths. (No size is another one by chance: torch
takes sizes that are equal in the first call for the same one.)"""


def varying(kind: str, *sizes: tuple[int, int]) -> tuple[Any, list[tuple[Any, ...]]]:
    """The layer, and for each size (b, t) an input, the state after another call, and a mask."""
    layer, inputs = VARYING[kind]().eval().requires_grad_(False), []
    for b, t in sizes:
        x = draw(kind, b, t)
        _, state = layer(x.flip(1)[:, :4], return_state=True)
        inputs.append((x, state, torch.rand(b, t) < 0.7))
    return layer, inputs


def test_a_token_of_a_model_is_one_graph_for_every_batch_size() -> None:
    layer, inputs = varying("SequenceModel", (7, 11), (13, 9))
    module = OneToken(layer)
    call = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    for i, given in enumerate(inputs):
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            actual = tree_leaves(call(*given))
        assert_close(actual, tree_leaves(module(*given)))


def test_a_state_that_does_not_fit_is_refused_under_the_compiler_too() -> None:
    layer, ((x, state, mask),) = varying("heads", (7, 11))
    call = torch.compile(Whole(layer), dynamic=True, backend="eager")
    with pytest.raises(ValueError, match=r"ssm must have shape \(7, 6, 2\), got \(5, 6, 2\)"):
        call(x, state[:5], mask)


BATCH, LENGTH = torch.export.Dim("b"), torch.export.Dim("t")


def of_any_batch(state: Any) -> Any:
    """The shapes of a state of any number of samples."""
    if isinstance(state, Tensor):
        return {0: BATCH}
    parts = [of_any_batch(part) for part in state]
    return tuple(parts) if type(state) is tuple else parts


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
@pytest.mark.parametrize("make", [Whole, OneToken])
def test_an_exported_model_takes_any_batch_size_and_length(make: type[Whole]) -> None:
    """Also one from a file. torch indexes the fields of named tuples, and an index of a state
    selects samples."""
    layer, inputs = varying("SequenceModel", (3, 5), (2, 7), (1, 1))
    module, rows = make(layer), {0: BATCH, 1: LENGTH}
    shapes = rows, of_any_batch(inputs[0][1]), rows
    program = torch.export.export(module, inputs[0], dynamic_shapes=shapes)
    torch.export.save(program, file := io.BytesIO())
    file.seek(0)
    for run in (program.module(), torch.export.load(file).module()):
        for given in inputs:
            actual, expected = run(*given), module(*given)
            assert tree_structure(actual) == tree_structure(expected)
            assert_close(tree_leaves(actual), tree_leaves(expected))


@pytest.mark.parametrize("shape", [{0: BATCH}, {1: LENGTH}], ids=["batch", "length"])
def test_an_exported_layer_of_several_heads_takes_one_size_that_varies(shape: Any) -> None:
    layer, ((x, *_), *_) = varying("heads", (4, 5))
    program = torch.export.export(layer, (x,), dynamic_shapes={"x": shape}).module()
    for size in (1, 3):
        part = x[:size] if 0 in shape else x[:, :size]
        assert_close([program(part)], [layer(part)])


@pytest.mark.parametrize("solve", ["direct", "one-step"])
def test_saved_tensors_of_a_graph_may_be_packed(solve: str) -> None:
    layer = prepared(
        "Bedouin", "train", {"solver": Picard(), **ONE_STEP} if solve == "one-step" else {}
    )
    x = draw("Bedouin")
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with save_on_cpu():
        actual = results(call, layer, x, "train")
    assert_close(actual, results(layer, layer, x, "train"))


def test_low_precision_is_that_of_eager_mode() -> None:
    layer, x = Bedouin(3, d_state=2), torch.randn(2, 3, 3)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = (results(run, layer, x, "train") for run in (call, layer))
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * theirs.abs().max().item())


INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [INTERPRETED, COMPILED])

WITH_KERNELS: list[tuple[type[FixedPointLayer], dict[str, Any]]] = [
    (Bedouin, {}),
    (Bedouin, {"decay": "griffin", "feedback": (), "input_scale": "delta"}),
    (FixedPointRNN, {}),
    (Bedouin, {"num_heads": 2, "d_state": 2}),
]
kinds = pytest.mark.parametrize(("kind", "options"), WITH_KERNELS)


def make_with_kernels(kind: type[Any], device: str, **options: Any) -> Any:
    settings = {"device": device, "num_householder": 1} | options
    return kind(3, backend="triton", solver=Direct(), **settings)


def draw_on(device: str, t: int = 2) -> Tensor:
    return torch.randn(2, t, 3, device=device, requires_grad=True)


def compiled_once(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def results_of(layer: Any, call: Any, x: Tensor) -> list[Tensor]:
    """Output, then the gradients of x and the parameters."""
    y = call(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


def assert_close_in_bfloat16(actual: list[Tensor], expected: list[Tensor]) -> None:
    """In fused code bfloat16 is rounded at other places."""
    for ours, theirs in zip(actual, expected, strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * scale)


@devices
@kinds
def test_a_layer_is_one_graph_with_the_same_numbers(
    kind: type[FixedPointLayer], options: dict[str, Any], device: str
) -> None:
    layer, x = make_with_kernels(kind, device, **options), draw_on(device)
    expected = results_of(layer, layer, x)
    eager = layer.stats
    call = compiled_once(layer)
    for ours, theirs in zip(results_of(layer, call, x), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert layer.stats is not eager and layer.stats.backward is None
    for name in ("num_steps", "residual", "converged", "conditioning"):
        assert torch.equal(getattr(layer.stats, name), getattr(eager, name)), name
    layer(x)  # counts a training call and, on a GPU, leaves a pending outcome
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(call(x), expected[0])


@devices
def test_one_graph_for_every_length(device: str) -> None:
    layer = make_with_kernels(Bedouin, device)
    call = compiled_once(layer)
    for t in (2, 3):
        call(draw_on(device, t))
    with torch.compiler.set_stance("fail_on_recompile"):
        x = draw_on(device, 4)
        pairs = zip(results_of(layer, call, x), results_of(layer, layer, x), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.gpu
@kinds
def test_the_default_compiler_gives_the_same_numbers(
    kind: type[FixedPointLayer], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    layer = make_with_kernels(kind, "cuda", **options)
    x = torch.randn(2, 20, 3, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        expected = results_of(layer, layer, x)
        actual = results_of(layer, torch.compile(layer, fullgraph=True), x)
    assert_close_in_bfloat16(actual, expected)


# code that it does not fuse or capture is not an error
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_the_compiler_may_replay_cuda_graphs() -> None:
    torch.manual_seed(0)
    layer = make_with_kernels(Bedouin, "cuda")
    call = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):  # the first two calls warm up and record
        x = torch.randn(2, 20, 3, device="cuda", requires_grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            torch.compiler.cudagraph_mark_step_begin()
            actual = [v.clone() for v in results_of(layer, call, x)]
            expected = results_of(layer, layer, x)
    assert_close_in_bfloat16(actual, expected)

"""torch.compile on the plain path: the numbers of eager mode, or an error that says what to do.

Letters: b batch, t time, m d_model.
"""

import contextlib
import io
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils._pytree import tree_leaves, tree_structure

from bedouin import (
    Bedouin,
    BedouinState,
    FixedPointRNN,
    LowRank,
    SequenceModel,
)
from bedouin.kernels.direct import elimination
from bedouin.kernels.operands import RawLayout
from bedouin.kernels.scan import Eigenvalues, InputScale
from bedouin.solvers import Anderson, ImplicitAdjoint, Jacobi, OneStepAdjoint, Picard, Solver

# dynamo instantiates torch.autograd.Function when it traces a subclass
# and it reads .grad of the tensors that one graph passes to the next
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

FLOAT64: dict[str, Any] = {"dtype": torch.float64}
MODES = ["train", "eval", "no_grad", "inference_mode", "frozen"]

KINDS: dict[str, Callable[..., nn.Module]] = {
    "Bedouin": lambda **k: Bedouin(3, d_state=2, **FLOAT64, **k),
    "FixedPointRNN": lambda **k: FixedPointRNN(3, num_heads=2, **FLOAT64, **k),
    "SequenceModel": lambda **k: SequenceModel(
        5, 3, [Bedouin(3, d_state=2, num_heads=3, **FLOAT64, **k)], **FLOAT64
    ),
}

SHORT: dict[str, Any] = {"max_steps": 1, "on_unconverged": "ignore"}

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


def assert_as_eager(
    module: nn.Module, x: Tensor, mode: str, *, fullgraph: bool, backend: str
) -> None:
    expected = results(module, module, x, mode)
    call = torch.compile(module, fullgraph=fullgraph, backend=backend)
    assert_close(results(call, module, x, mode), expected)


@pytest.mark.parametrize(
    ("kind", "mode"),
    # the others below autograd
    [
        ("Bedouin", "train"),
        *(("FixedPointRNN", mode) for mode in ("eval", "no_grad")),
        *(("SequenceModel", mode) for mode in ("no_grad", "inference_mode", "frozen")),
    ],
)
def test_direct_is_one_graph_in_every_mode(kind: str, mode: str) -> None:
    module = prepared(kind, mode, {})
    assert_as_eager(module, draw(kind), mode, fullgraph=True, backend="eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("Bedouin", mode) for mode in MODES),
        ("FixedPointRNN", "train"),
        ("SequenceModel", "train"),
    ],
)
def test_direct_below_autograd_in_every_mode(kind: str, mode: str) -> None:
    module = prepared(kind, mode, {})
    assert_as_eager(module, draw(kind), mode, fullgraph=True, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "no_grad"])
def test_the_default_compiler(mode: str) -> None:
    module = prepared("Bedouin", mode, {})
    x = draw("Bedouin")
    assert_as_eager(module, x, mode, fullgraph=True, backend="inductor")


@pytest.mark.parametrize("mode", ["train", "no_grad"])
@pytest.mark.parametrize("solver", [Picard(), Jacobi()], ids=["picard", "jacobi"])
def test_a_short_iteration_is_one_graph(solver: Solver, mode: str) -> None:
    options: dict[str, Any] = {"solver": solver, "adjoint": OneStepAdjoint()}
    layer = prepared("Bedouin", mode, options | SHORT)
    backend = "eager" if mode == "train" else "aot_eager"
    assert_as_eager(layer, draw("Bedouin"), mode, fullgraph=True, backend=backend)


@pytest.mark.parametrize("what", OUTSIDE)
def test_what_runs_outside_of_the_graph(what: str) -> None:
    layer: Any = prepared("Bedouin", "train", OUTSIDE[what])
    assert_as_eager(layer, draw("Bedouin"), "train", fullgraph=False, backend="eager")


@pytest.mark.parametrize("what", OUTSIDE)
def test_a_whole_graph_is_refused_with_a_remedy(what: str) -> None:
    layer = prepared("Bedouin", "train", OUTSIDE[what])
    call = torch.compile(layer, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"bedouin.*{REMEDIES[what]}"):
        call(draw("Bedouin"))


def test_one_graph_for_every_length() -> None:
    layer = prepared("Bedouin", "train", {})
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for t in (2, 3):
        results(call, layer, draw("Bedouin", t=t), "train")
    x = draw("Bedouin", t=40)
    with torch.compiler.set_stance("fail_on_recompile"):
        actual = results(call, layer, x, "train")
    assert_close(actual, results(layer, layer, x, "train"))


def test_one_graph_for_every_length_without_gradients() -> None:
    layer = prepared("Bedouin", "no_grad", {})
    call = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        for t in (3, 4):
            call(draw("Bedouin", t=t))
        with torch.compiler.set_stance("fail_on_recompile"):
            for t in (2, *range(5, 15)):
                x = draw("Bedouin", t=t)
                assert_close([call(x)], [layer(x)])


class StepOnState(nn.Module):
    """One token, with the state as it is."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, state: Any) -> Any:
        return self.layer.step(x, state)


def token(layer: Any) -> tuple[Tensor, BedouinState]:
    """x_t and a state that is not zero."""
    _, state = layer(draw("Bedouin"), return_state=True)
    return draw("Bedouin", t=1)[:, 0], state.detach()


@pytest.mark.parametrize("mode", ["train", "no_grad"])
@pytest.mark.parametrize("kind", ["Bedouin", "FixedPointRNN"])
def test_a_step_is_one_graph(kind: str, mode: str) -> None:
    step = StepOnState(prepared(kind, mode, {}))
    inputs = token(step.layer)
    with torch.set_grad_enabled(mode == "train"):
        call = torch.compile(step, fullgraph=True, backend="aot_eager")
        assert_close(tree_leaves(call(*inputs)), tree_leaves(step(*inputs)))


class InChunks(StepOnState):
    """A chunk of a sequence, from a state to a state."""

    def forward(self, x: Tensor, state: Any) -> Any:
        return self.layer(x, state, True)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_an_exported_model_takes_and_returns_states() -> None:
    """Also one from a file. torch indexes the fields of named tuples, and an index of a state
    selects samples."""
    model = KINDS["SequenceModel"]().eval()
    _, before = model(draw("SequenceModel"), return_state=True)
    lengths = {"x": {1: torch.export.Dim.DYNAMIC}, "state": ([None, None],)}
    for module, x, longer, shapes in (
        (StepOnState(model), draw("SequenceModel")[:, 0], draw("SequenceModel")[:, 0], None),
        (InChunks(model), draw("SequenceModel", t=5), draw("SequenceModel", t=9), lengths),
    ):
        program = torch.export.export(module, (x, before), dynamic_shapes=shapes)
        torch.export.save(program, file := io.BytesIO())
        file.seek(0)
        expected, after = module(longer, before)
        for run in (program.module(), torch.export.load(file).module()):
            output, state = run(longer, before)
            assert tree_structure(state) == tree_structure(after)
            assert_close([output, *tree_leaves(state)], [expected, *tree_leaves(after)])


class Padded(StepOnState):
    """A chunk with padding, from a state to a state."""

    def forward(self, x: Tensor, state: Any, mask: Tensor | None = None) -> Any:
        return self.layer(x, state, True, mask=mask)


VARYING: dict[str, Callable[[], nn.Module]] = {
    "heads": lambda: Bedouin(3, d_state=2, num_heads=2, **FLOAT64),
    "picard": lambda: Bedouin(3, num_heads=3, solver=Picard(), **SHORT, **FLOAT64),
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


def arguments(module: nn.Module, x: Tensor, state: Any, mask: Tensor) -> tuple[Any, ...]:
    """What `module`, a layer or one of the classes above, takes of them."""
    if isinstance(module, Padded):
        return x, state, mask
    if isinstance(module, InChunks):
        return x, state
    return (x[:, 0], state) if isinstance(module, StepOnState) else (x,)


@pytest.mark.parametrize(("kind", "make"), [("picard", InChunks), ("SequenceModel", StepOnState)])
def test_one_graph_for_every_batch_size_and_length(kind: str, make: type[StepOnState]) -> None:
    layer, inputs = varying(kind, (7, 11), (13, 9))
    module = make(layer)
    call = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    for i, of_size in enumerate(inputs):
        given = arguments(module, *of_size)
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            actual = tree_leaves(call(*given))
        assert_close(actual, tree_leaves(module(*given)))


def test_a_state_that_does_not_fit_is_refused_under_the_compiler_too() -> None:
    layer, ((x, state, _),) = varying("heads", (7, 11))
    call = torch.compile(InChunks(layer), dynamic=True, backend="eager")
    with pytest.raises(ValueError, match=r"ssm must have shape \(7, 6, 2\), got \(5, 6, 2\)"):
        call(x, state[:5])


BATCH, LENGTH = torch.export.Dim("b"), torch.export.Dim("t")


def of_any_batch(state: Any) -> Any:
    """The shapes of a state of any number of samples."""
    if isinstance(state, Tensor):
        return {0: BATCH}
    parts = [of_any_batch(part) for part in state]
    return tuple(parts) if type(state) is tuple else parts


@pytest.mark.parametrize(("kind", "make"), [("picard", Padded), ("SequenceModel", InChunks)])
def test_an_exported_layer_takes_any_batch_size_and_length(
    kind: str, make: type[StepOnState]
) -> None:
    layer, inputs = varying(kind, (3, 5), (2, 7), (1, 1))
    module, rows = make(layer), {0: BATCH, 1: LENGTH}
    shapes = rows, of_any_batch(inputs[0][1]), rows
    first = arguments(module, *inputs[0])
    program = torch.export.export(module, first, dynamic_shapes=shapes[: len(first)]).module()
    for of_size in inputs:
        given = arguments(module, *of_size)
        assert_close(tree_leaves(program(*given)), tree_leaves(module(*given)))


@pytest.mark.parametrize("shape", [{0: BATCH}, {1: LENGTH}], ids=["batch", "length"])
def test_an_exported_layer_of_several_heads_takes_one_size_that_varies(shape: Any) -> None:
    layer, ((x, *_), *_) = varying("heads", (4, 5))
    program = torch.export.export(layer, (x,), dynamic_shapes={"x": shape}).module()
    for size in (1, 3):
        part = x[:size] if 0 in shape else x[:, :size]
        assert_close([program(part)], [layer(part)])


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_elimination_that_is_written_out(k: int) -> None:
    matrix, right = torch.randn(20, k, k, dtype=torch.float64), torch.randn(20, k).double()
    LU, order = elimination._factorize(matrix)
    theirs, _ = torch.linalg.lu_factor(matrix)
    assert_close([LU], [theirs])
    solved = elimination._substitute(LU, order, right)
    assert_close([solved], [torch.linalg.solve(matrix, right)])


def test_a_state_goes_in_and_comes_out() -> None:
    layer = prepared("Bedouin", "train", {})

    def in_two_chunks(x: Tensor) -> Tensor:
        first, state = layer(x[:, :1], return_state=True)
        second, state = layer(x[:, 1:], state=state, return_state=True)
        return torch.cat([first.flatten(), second.flatten(), state.ssm.flatten()])

    x = draw("Bedouin")
    call = torch.compile(in_two_chunks, fullgraph=True, backend="aot_eager")
    expected = results(in_two_chunks, layer, x, "train")
    assert_close(results(call, layer, x, "train"), expected)


@pytest.mark.parametrize("solve", ["direct", "one-step"])
def test_saved_tensors_of_a_graph_may_be_packed(solve: str) -> None:
    one_step = {"solver": Picard(), "adjoint": OneStepAdjoint()}
    layer = prepared("Bedouin", "train", SHORT | (one_step if solve == "one-step" else {}))
    x = draw("Bedouin")
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with save_on_cpu():
        actual = results(call, layer, x, "train")
    assert_close(actual, results(layer, layer, x, "train"))


def test_low_precision_is_that_of_eager_mode() -> None:
    layer = Bedouin(3, d_state=2)
    x = torch.randn(2, 3, 3)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(layer, layer, x, "train")
        actual = results(call, layer, x, "train")
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * theirs.abs().max().item())


# -- the operations themselves

LAYOUT = RawLayout("softplus", True, 2, 1.0)
FIELDS = ("softplus", True, 2, 1.0, 0.0, "one_minus_decay", "full", 1e-5, False, True, 2)
"""LAYOUT, input scale, eigenvalues, norm eps, feeds_x, plain, keep_every of an operation."""


def operands(t: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, raw, W_y, A, h0 and y0 with b = d = n = 2; the first three in `dtype`."""
    r = LAYOUT.size(2, 2)
    shapes = [(2, t, 2), (2, t, r), (r, 2), (2, 2), (2, 2, 2), (2, 2)]
    values = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    values[3] = -values[3].exp()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [v.to(dtype) for v in values[:3]] + [v.to(wide) for v in values[3:]]


CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("eigenvalues", get_args(Eigenvalues))
@pytest.mark.parametrize("input_scale", get_args(InputScale))
def test_opcheck_of_the_scan(input_scale: str, eigenvalues: str, exclusive: bool) -> None:
    shapes = [(2, 3, 2), (2, 3, 2), (2, 4), (2, 3, 4), (2, 3, 4), (2, 2, 4)]
    values = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    values[1], values[2] = values[1].exp(), -values[2].exp()
    inputs = [v.requires_grad_() for v in values]
    options = (input_scale, eigenvalues, exclusive)
    torch.library.opcheck(torch.ops.bedouin.plain_scan, (*inputs, *options), test_utils=CHECKS)
    scan = torch.ops.bedouin.plain_scan
    assert torch.autograd.gradcheck(lambda *v: scan(*v, *options), inputs)

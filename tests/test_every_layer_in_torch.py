"""What torch does with every layer: compile, export, transform, checkpoint, cast, copy.

Letters: b batch, t time, m d_model.
"""

import copy
import io
import pickle
from collections.abc import Callable
from operator import is_
from typing import Any

import pytest
import torch
from tests.kernels.table import COMPILED, INTERPRETED
from tests.layer_cases import (
    BASELINES,
    FIXED_POINTS,
    GPU,
    ITERATED,
    LAYERS,
    ON_GPU,
    SOLVES,
    WITH_KERNELS,
    LoRA,
    OneToken,
    Whole,
    assert_all_close,
    draw,
    earlier_state,
    floats,
    gradients,
    layers,
    layers_and_solves,
    make,
    marks,
    merge,
    results,
    saved,
    total,
    wrap,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call, stack_module_state, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_structure, tree_unflatten
from torch.utils.checkpoint import checkpoint

from bedouin import Decoder, SequenceModel
from bedouin.solvers import Jacobi, Picard

# dynamo instantiates torch.autograd.Function when it traces a subclass
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

# a compilation takes seconds: a layer of every class
IN_ONE_GRAPH = "heads", "vector, heads", "tracking", "memory", "mamba", "attention"
EXPORTED = (
    *("heads", "full", "no mixing", "convolution", "paper", "vector, heads"),
    *("tracking", "two trackers", "memory"),
)


def arguments(layer: Any, b: int, t: int) -> tuple[Tensor, Any, Tensor]:
    mask = torch.arange(t) < torch.arange(1, b + 1).unsqueeze(1)
    if isinstance(layer, SequenceModel):
        tokens = torch.randint(5, (b, t))
        with torch.no_grad():
            return tokens, layer(tokens.flip(1), return_state=True)[1], mask
    return draw(b, t), earlier_state(layer, b), mask


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("name", "make_module"),
    [(n, Whole) for n in IN_ONE_GRAPH]
    + [(n, OneToken) for n in ("one head", "vector, heads", "model")],
)
def test_one_graph_for_all_batch_sizes_and_lengths(name: str, make_module: type[Whole]) -> None:
    """Values, states and gradients, also those of a state that comes in, are those of eager calls,
    which may come in between."""
    layer = make(name)
    module = make_module(layer)
    call = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for i, (b, t) in enumerate(((5, 7), (7, 11))):
        given = arguments(layer, b, t)
        before = [v.requires_grad_() for v in floats(tree_leaves(given[1]))]
        expected = tree_leaves(module(*given))
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            actual = tree_leaves(call(*given))
            inputs = [*before, *layer.parameters()]
            # not `gradients`, which keeps the graph for a second backward pass
            found = torch.autograd.grad(total(actual), inputs, materialize_grads=True)
        assert_all_close(actual, expected, 1e-10)
        assert_all_close(found, gradients(expected, inputs), 1e-9)


BATCH, LENGTH = torch.export.Dim("b"), torch.export.Dim("t")


def of_any_batch(state: Any) -> Any:
    if type(state) is tuple:
        return tuple(map(of_any_batch, state))
    return [{0: BATCH}] * len(state.tensors)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
@pytest.mark.parametrize(
    ("name", "make_module"),
    [(name, Whole) for name in (*EXPORTED, "one picard step", "model")]
    + [(name, OneToken) for name in ("low rank", "full", "no mixing", "convolution", "vector")]
    + [(name, OneToken) for name in ("tracking", "model")],
)
def test_an_exported_layer_takes_any_batch_size_and_length(
    name: str, make_module: type[Whole]
) -> None:
    """And any state. A token consists of elementary operations alone."""
    layer = make(name).requires_grad_(False)
    module = make_module(layer)
    given = arguments(layer, 3, 5)
    rows = {0: BATCH, 1: LENGTH}
    shapes = rows, of_any_batch(given[1]), rows
    stats = tree_leaves(getattr(layer, "stats", None))
    program = torch.export.export(module, given, dynamic_shapes=shapes)
    assert all(map(is_, tree_leaves(getattr(layer, "stats", None)), stats))
    torch.export.save(program, file := io.BytesIO())
    file.seek(0)
    for run in (program.module(), torch.export.load(file).module()):
        for b, t in ((3, 5), (2, 7), (1, 1)):
            given = arguments(layer, b, t)
            expected, actual = module(*given), run(*given)
            assert tree_structure(actual) == tree_structure(expected)
            assert_all_close(tree_leaves(actual), tree_leaves(expected), 1e-10)
    if make_module is OneToken and name in FIXED_POINTS:
        code = str(program.graph_module.print_readable(print_output=False))
        assert "aten" in code and "bedouin." not in code and "linalg" not in code


def loss_of(layer: Any) -> Callable[..., Tensor]:
    """Of parameters, an input, a state and a mask, which functional calls take."""

    def loss(parameters: dict[str, Tensor], x: Tensor, state: Any, mask: Tensor) -> Any:
        output, after = functional_call(layer, parameters, (x, state, True), {"mask": mask})
        return output.square().sum() + sum(v.square().sum() for v in after.tensors)

    return loss


@pytest.mark.parametrize(
    "name", [*(n for n in LAYERS if n not in BASELINES), "one picard step", "unrolled"]
)
@pytest.mark.parametrize("over", ["models", "samples", "first", "others"])
def test_vmap_is_a_loop(name: str, over: str) -> None:
    """Over the parameters of several models; over inputs with their masks; over the first part of
    the state alone, or the others: of values, and of gradients."""
    layer = make(name)
    models = [layer, make(name)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(0.9)
    parameters, _ = stack_module_state(models)
    parameters = {n: p.detach() for n, p in parameters.items()}
    states = [earlier_state(layer, 1) for _ in models]
    state = states[0]._make(torch.stack(v) for v in zip(*states, strict=True))
    mask = torch.tensor([[[1, 0, 1]], [[1, 1, 0]]]).bool()
    leaves, tree = tree_flatten((parameters, draw(2, 3).unsqueeze(1), state, mask))
    batched = [over == "models"] * len(parameters) + [over == "samples"]
    batched += [over in ("samples", part) for part in ("first", *["others"] * (len(state) - 1))]
    batched += [over == "samples"]
    given = [v if yes else v[0] for v, yes in zip(leaves, batched, strict=True)]
    loss = loss_of(layer)
    for function in (loss, torch.func.grad(loss, (0, 1))):

        def call(*leaves: Tensor, function: Any = function) -> Any:
            return function(*tree_unflatten(leaves, tree))

        found = tree_leaves(vmap(call, tuple(0 if yes else None for yes in batched))(*given))
        for i in range(2):
            own = [v[i] if yes else v for v, yes in zip(given, batched, strict=True)]
            assert_all_close([v[i] for v in found], tree_leaves(call(*own)), 1e-9)


@layers_and_solves
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_and_saved_tensors_change_nothing(name: str, use_reentrant: bool) -> None:
    layer, x = make(name), draw(2, 5).requires_grad_()
    inputs = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x).square().sum(), inputs)
    checkpoint(layer, x, use_reentrant=use_reentrant).square().sum().backward()
    assert_all_close([v.grad for v in inputs if v.grad is not None], expected, 1e-12)
    with save_on_cpu():
        output = layer(x)
    assert all(map(torch.equal, torch.autograd.grad(output.square().sum(), inputs), expected))


@layers_and_solves
def test_copies_compute_the_same(name: str) -> None:
    """Also after a backward pass, a token and a transform."""
    layer, x = make(name), draw(2, 4)
    output, state = layer(x, return_state=True)
    output.sum().backward()
    layer.step(x[:, 0], state.detach())
    if name in LAYERS and name not in BASELINES:
        vmap(layer)(x.unsqueeze(1))
    loaded = make(name)
    loaded.reset_parameters()
    loaded.load_state_dict(layer.state_dict(), strict=True)
    emptied = make(name, device="meta").to_empty(device="cpu")
    for parameter in emptied.parameters():
        parameter.data.fill_(torch.nan)
    emptied.reset_parameters()
    assert emptied.eval()(x).isfinite().all()
    emptied.load_state_dict(layer.state_dict(), assign=True)
    copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), saved(layer)
    for other in (*copies, loaded, emptied):
        assert repr(other) == repr(layer) and marks(other) == marks(layer)
        assert torch.equal(other(x), output)


WITHOUT_VALUES = [n for n in LAYERS | SOLVES if n not in ("phantom", "solver of the adjoint")]
"""Layers whose solves read no values."""
OF_KERNELS = [pytest.param(n, "triton", marks=pytest.mark.interpreter) for n in WITH_KERNELS]
OF_KERNELS += [pytest.param("picard", "triton", marks=pytest.mark.interpreter)]


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "auto") for name in WITHOUT_VALUES), *OF_KERNELS]
)
def test_shapes_of_fake_tensors_and_on_the_meta_device(name: str, backend: str) -> None:
    """Which have no values that the host could read: of a mask, torch's LSTM reads the lengths."""

    def run(device: str) -> list[Tensor]:
        options: dict[str, Any] = {"device": device}
        if name in FIXED_POINTS | SOLVES:
            told = "raise" if device == "meta" else "ignore"
            options |= {"backend": backend, "max_steps": 2, "on_unconverged": told}
        if backend == "triton":
            options["dtype"] = torch.float32
        layer = make(name, **options)
        x = draw(2, 3).to(device, next(layer.parameters()).dtype)
        mask = torch.ones(2, 3, dtype=torch.bool, device=device)
        padding = {} if name.startswith("lstm") else {"mask": mask}
        found = results(layer, x, layer.init_state(2), **padding)
        if device == "cpu" and name not in BASELINES:
            with torch.no_grad():
                found.append(Decoder(layer, 2)(x[:, 0]))
        return found

    expected = run("cpu")
    with FakeTensorMode():
        fake = run("cpu")
    assert [v.shape for v in fake] == [v.shape for v in expected]
    if backend == "auto":
        on_meta = run("meta")
        assert all(v.is_meta for v in on_meta)
        assert [v.shape for v in on_meta] == [v.shape for v in expected[: len(on_meta)]]


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "auto") for name in (*LAYERS, "one step"))]
    + [pytest.param(n, "triton", marks=pytest.mark.interpreter) for n in ("heads", "vector")],
)
def test_adapters_of_every_projection_train_and_merge(name: str, backend: str) -> None:
    options: dict[str, Any] = {}
    if backend == "triton":
        options = {"backend": backend, "dtype": torch.float32}
    layer = make(name, **options)
    x, rtol = draw(2, 4).to(next(layer.parameters())), 1e-4 if options else 1e-11
    before = layer(x)
    wrap(layer)
    merged = merge(layer)
    (output, state), (expected, after) = (one(x, return_state=True) for one in (layer, merged))
    assert (output - before).abs().max() > 1e-3
    assert_all_close([output, *state.tensors], [expected, *after.tensors], rtol)
    assert_all_close([layer.step(x[:, 0], state)[0]], [merged.step(x[:, 0], after)[0]], rtol)
    if name not in BASELINES:
        if backend == "auto":
            assert_all_close([vmap(layer)(x.unsqueeze(1)).squeeze(1)], [output], rtol)
        with torch.no_grad():
            decoded = [Decoder(one, 2, state=state)(x[:, 0]) for one in (layer, merged)]
        assert_all_close(decoded[:1], decoded[1:], rtol)
    output.square().sum().backward()
    expected.square().sum().backward()
    for path, module in layer.named_modules():
        if isinstance(module, LoRA):
            A, B, grad = module.A, module.B, merged.get_submodule(path).weight.grad
            assert A.grad is not None and B.grad is not None
            assert_all_close([A.grad, B.grad], [B.mT @ grad, grad @ A.mT], 1e3 * rtol)


@pytest.mark.parametrize(
    ("name", "backend", "device"),
    [*((name, "auto", "cpu") for name in LAYERS)]
    + [
        pytest.param(name, *at.values, marks=at.marks)
        for name in ("one head", "heads", "vector", "no mixing", "one picard step")
        for at in (INTERPRETED, COMPILED)
    ],
)
@pytest.mark.parametrize(
    ("autocast", "x_dtype"),
    [(False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float32)],
)
def test_low_precision(
    name: str, backend: str, device: str, autocast: bool, x_dtype: torch.dtype
) -> None:
    """A bfloat16 layer, or autocast of a float32 layer: dtypes, and values near float64."""
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if name.startswith("lstm") and autocast and not has_bfloat16:
        pytest.skip("torch.nn.LSTM fails under autocast on a CPU without bfloat16 instructions")
    dtype = torch.float32 if autocast else torch.bfloat16
    options: dict[str, Any] = {"solver": type(make(name).solver)(1e-6)} if name in ITERATED else {}
    exact = make(name, **options)
    if backend == "triton":
        options["backend"] = backend
    layer = make(name, dtype=dtype, device=device, **options)
    exact.load_state_dict(layer.state_dict())
    x = draw(3, 6).to(device, x_dtype)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        output, state = layer(x, return_state=True)
        again, after = layer(x, state, return_state=True)
        step, _ = layer.step(x[:, 0], state)
    assert output.dtype == again.dtype == step.dtype == torch.bfloat16
    kept = {v.dtype for v in layer.init_state(1).tensors}
    assert {v.dtype for v in (*state.tensors, *after.tensors)} == kept
    if hasattr(layer, "stats"):
        assert layer.stats.residual.dtype == torch.float32
        assert layer.stats.conditioning is None or layer.stats.conditioning.dtype == torch.float32
    expected = exact(x.double().cpu())
    assert (output.double().cpu() - expected).norm() < 0.1 * expected.norm()
    output.float().sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None and parameter.grad.dtype == dtype
        assert parameter.grad.isfinite().all()


@layers
def test_float64_is_left_alone_by_autocast_and_the_default_dtype(name: str) -> None:
    """As autocast leaves torch's own layers."""
    layer, x = make(name), draw(2, 5)
    state = earlier_state(layer, 2)

    def run() -> list[Tensor]:
        if name in BASELINES:
            return results(layer, x, state)
        return [*results(layer, x, state), Decoder(layer, 2, state=state)(x[:, 0])]

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run()
    assert all(v.dtype == torch.float64 for v in floats(actual))
    assert all(map(torch.equal, actual, expected))
    if name in ITERATED:  # to a tolerance that float32 cannot reach
        return
    single = layer.float()
    output = single(x.float())
    torch.set_default_dtype(torch.float64)
    try:
        again = single(x.float())
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(again, output)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", [*WITH_KERNELS, *ITERATED])
@pytest.mark.parametrize("padded", [False, True])
def test_interpreted_kernels_give_what_float64_gives(name: str, padded: bool) -> None:
    """In calls, steps and decoders, also with another parameter."""
    kind = {"picard": Picard, "jacobi": Jacobi}.get(name)
    # which never converges, so that both take all steps
    never: dict[str, Any] = {} if kind is None else {"solver": kind(0.0, 0.0), "max_steps": 2}
    never |= {"on_unconverged": "ignore"}
    layer = make(name, dtype=torch.float32, backend="triton", **never)
    exact = make(name, backend="reference", **never)
    exact.load_state_dict(layer.state_dict())
    x, state = draw(3, 3).float(), earlier_state(layer, 3)
    mask = torch.tensor([[1, 1, 1], [0, 1, 0], [0, 0, 0]]).bool()
    padding = {"mask": mask} if padded else {}
    decoder = Decoder(layer, 3, state=state)
    for one in (layer, exact):
        one.D = nn.Parameter(1.1 * one.D.detach())
    found = results(layer, x, state, **padding)
    expected = results(exact, x.double(), state.to(torch.float64), **padding)
    assert {v.dtype for v in found} == {torch.float32}
    assert_all_close(found, expected, 1e-5, 1e-6)
    layer(x, **padding)
    exact(x.double(), **padding)
    ours, theirs = layer.stats, exact.stats
    assert torch.equal(ours.num_steps, theirs.num_steps)
    assert torch.equal(ours.converged, theirs.converged)
    if theirs.conditioning is not None:
        assert_all_close([ours.conditioning], [theirs.conditioning], 1e-4)
    step, _ = exact.step(x[:, 0].double(), state.to(torch.float64))
    with torch.no_grad():
        assert_all_close([decoder(x[:, 0])], [step], 5e-6, 1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("t", [1, 65])
def test_a_gpu_gives_what_float64_gives(name: str, t: int) -> None:
    layer = make(name, GPU)
    exact = copy.deepcopy(layer).double().cpu()
    x = draw(3, t, GPU)
    state = earlier_state(layer, 3)
    expected = results(exact, x.double().cpu(), state.to(torch.float64).cpu())
    for actual in (results(layer, x, state), results(layer, x, state)):
        for ours, theirs in zip(actual, expected, strict=True):
            # gradients of rates are sums in which terms of both signs cancel
            error = (ours.double().cpu() - theirs).norm() / theirs.norm().clamp(min=1e-2)
            assert error < 1e-3, float(error)

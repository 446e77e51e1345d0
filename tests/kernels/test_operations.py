"""What every operation in the table of rows.py keeps to, in plain torch and in Triton.

Values and gradients of its definition, whatever the strides, also of nothing; shapes, types and
gradients as registered; one graph under torch.compile; batches of cotangents; no second derivative
of kernels; equal bits in every run; errors that name the argument.
The checks of the kernels run on the CPU in the interpreter and compiled on a GPU.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.kernels.rows import ROWS, scan
from tests.kernels.table import (
    BF16,
    COMPILED,
    F32,
    F64,
    INTERPRETED,
    PLAIN,
    Call,
    Options,
    Row,
    check,
    far_apart,
    implementations,
    kernels,
    needed,
    outputs_of,
    results,
    uneven,
    with_gradients,
)
from torch import Tensor
from torch.nn.functional import pad

from bedouin.kernels.operation import OPERATIONS, Operation

# dynamo instantiates torch.autograd.Function when it traces a subclass
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

VARIANTS = {
    f"{name} {variant}".strip(): (name, options)
    for name, row in ROWS.items()
    for variant, options in row.variants.items()
}
variants = pytest.mark.parametrize("name", VARIANTS)
UTILS = ("test_schema", "test_faketensor", "test_autograd_registration")


def label(options: Options) -> str:
    shown = {k: tuple(v) if isinstance(v, dict) else v for k, v in options.items()}
    return ",".join(f"{name}={v}" for name, v in shown.items()).replace("torch.", "")


def draw(name: str, **more: Any) -> tuple[Row, Call]:
    torch.manual_seed(0)
    row_name, options = VARIANTS[name]
    return ROWS[row_name], ROWS[row_name].make(**options | more)


PLACES = {
    "cases": (PLAIN, INTERPRETED, COMPILED),
    "kernels": (INTERPRETED, COMPILED),
    "plain": (PLAIN,),
    "compiled": (COMPILED,),
}
"""Where the cases of each kind are tested."""
CASES = [
    pytest.param(name, case, *at.values, id=f"{name}-{label(case)}-{at.id}", marks=at.marks)
    for name, row in ROWS.items()
    for kind, places in PLACES.items()
    for case in getattr(row, kind)
    for at in places
]


@pytest.mark.parametrize(("name", "options", "backend", "device"), CASES)
def test_values_and_gradients(
    name: str, options: Options, backend: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, options = ROWS[name], dict(options)
    dtype, own = options.get("dtype", F32), options.pop("tolerance", None)
    for constant, value in options.pop("patch", {}).items():
        if backend == "triton":
            monkeypatch.setattr(constant, value)
    for kind in (F64, F32) if backend == "reference" and dtype == F32 else (dtype,):
        call = row.make(**options | {"dtype": kind})
        tolerance = own if own and kind == F32 else row.tolerance[kind]
        check(row, call, call.given(kind, device), backend, tolerance)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "scattered": lambda v: v.mT.contiguous().mT if v.dim() > 1 else v.repeat_interleave(2)[::2],
    "slices": lambda v: pad(v, (2, 3), value=torch.nan)[..., 2:-3],
    "tokens first": lambda v: v.transpose(0, 1).contiguous().transpose(0, 1) if v.dim() > 1 else v,
}


@implementations
@variants
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_matter(name: str, layout: str, backend: str, device: str) -> None:
    row, call = draw(name, b=2)
    there = {
        name: v if v is None else LAYOUTS[layout](v) for name, v in call.given(F32, device).items()
    }
    assert not all(v is None or v.is_contiguous() for v in there.values())
    check(row, call, there, backend, row.tolerance[F32])


@kernels
@pytest.mark.parametrize(
    "name", ["scan", "output", "shifted norm", "convolution", "tracker", "sweep"]
)
def test_rows_of_one_token_may_have_any_stride_of_time(name: str, device: str) -> None:
    """torch calls them contiguous all the same."""
    row, call = draw(name, b=2, t=1)
    there = call.given(F32, device)
    for moved, v in there.items():
        if v is not None and v.dim() == 3 and v.shape[1] == 1:
            rows = v.transpose(0, 1).clone(memory_format=torch.contiguous_format)
            there[moved] = rows.transpose(0, 1)
    check(row, call, there, "triton", row.tolerance[F32])


FAR = {
    "scan": ("x", "delta", "B", "C"),
    "output": ("y", "x", "gate", "z"),
    "shifted norm": ("y",),
    "sweep": ("x", "raw"),
    "sweep of heads": ("x", "raw"),
    "sweep without feedback": ("x", "raw"),
}


# numpy's, of rows of a program that have no sample
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@kernels
@pytest.mark.parametrize("name", FAR)
def test_tokens_may_be_too_far_apart_for_offsets_of_32_bits(name: str, device: str) -> None:
    """Up to the order of sums, which depends on what the compiler knows of strides. The tensors are
    views of memory of which little is touched."""
    _, call = draw(name, b=1, t=8 if name == "scan" else 4, dtype=BF16)
    tensors = call.given(BF16, device)
    expected = results(call, lambda *v: call.run(*v, backend="triton"), tensors)
    for moved in FAR[name]:
        given: Any = tensors[moved]
        there = tensors | {moved: far_apart(given)}
        found = results(call, lambda *v: call.run(*v, backend="triton"), there)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@implementations
@variants
def test_nothing_to_compute(name: str, backend: str, device: str) -> None:
    for axis in ROWS[VARIANTS[name][0]].empty:
        row, call = draw(name, **{axis: 0})
        check(row, call, call.given(F32, device), backend, 1e-6)


@implementations
@variants
def test_each_result_has_its_own_gradient(name: str, backend: str, device: str) -> None:
    row, call = draw(name)
    for i in range(len(call.dtypes)):
        check(row, call, call.given(F32, device), backend, row.tolerance[F32], i)


@implementations
@variants
def test_results_without_a_gradient_are_the_same(name: str, backend: str, device: str) -> None:
    row, call = draw(name)
    tensors = call.given(F32, device)
    with recorded() as found:
        expected = outputs_of(
            lambda *v: call.run(*v, backend=backend), with_gradients(call, tensors)
        )
    with recorded() as less:
        ours = outputs_of(lambda *v: call.run(*v, backend=backend), list(tensors.values()))
    assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True))
    if backend == "triton" and row.spares:
        runs = (less, found)
        kept = [sum(v.numel() for _, _, outputs in run for v in outputs) for run in runs]
        assert kept[0] < kept[1], "what only a backward reads is not kept"


@contextmanager
def recorded() -> Iterator[list[tuple[Operation, tuple[Any, ...], tuple[Tensor, ...]]]]:
    """The operations that are called within, with their inputs and outputs."""
    found: list[tuple[Operation, tuple[Any, ...], tuple[Tensor, ...]]] = []
    call = Operation.__call__

    def record(operation: Operation, *inputs: Any) -> Any:
        outputs = call(operation, *inputs)
        many = outputs if isinstance(outputs, tuple | list) else (outputs,)
        found.append((operation, inputs, tuple(many)))
        return outputs

    with patch.object(Operation, "__call__", record):
        yield found


FEW: Options = {"t": 3}
"""Tokens for what does not depend on their number; the interpreter takes long for a token."""


def prepared(
    name: str, device: str, dtype: torch.dtype = F32, backend: str = "triton", **more: Any
) -> tuple[Callable[..., Any], list[Tensor | None]]:
    """A function that takes the kernels, and its arguments."""
    _, call = draw(name, dtype=dtype, **more)
    leaves = with_gradients(call, call.given(dtype, device))

    def run(*tensors: Tensor | None) -> Any:
        return call.run(*tensors, backend=backend)

    return run, leaves


def differentiated(function: Callable[..., Any], leaves: list[Tensor | None]) -> list[Tensor]:
    outputs = [v for v in outputs_of(function, leaves)]
    weights = [uneven(v, v.dtype) for v in outputs]
    grads = torch.autograd.grad(outputs, needed(leaves), weights, materialize_grads=True)
    return [*(v.detach() for v in outputs), *grads]


@implementations
@variants
def test_shapes_types_and_gradients_are_as_registered(name: str, backend: str, device: str) -> None:
    """With low dtypes in kernels. Only sweeps are operations in plain torch, too."""
    dtype = BF16 if backend == "triton" else F32
    function, leaves = prepared(name, device, dtype, backend, **FEW)
    with recorded() as found:
        differentiated(function, leaves)
    if backend == "reference" and not name.startswith("sweep"):
        assert not found
        return
    # a tracker and its output
    count = 2 if name.startswith("tracker") else 1
    assert len(found) == 2 * count, "every operation and its gradient"
    for forward, inputs, _ in found[:count]:
        torch.library.opcheck(forward.overload, inputs, test_utils=UTILS)
    for backward, given, _ in found[count:]:
        # which has no gradient of its own
        still = tuple(v.detach() if isinstance(v, Tensor) else v for v in given)
        torch.library.opcheck(backward.overload, still, test_utils=UTILS)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "triton") for name in VARIANTS),
        *((name, "reference") for name in VARIANTS if name.startswith("sweep")),
    ],
)
def test_a_graph_replays_values_and_gradients(
    name: str, backend: str, no_synchronization: Any
) -> None:
    function, leaves = prepared(name, "cuda", backend=backend)

    def run() -> list[Tensor]:
        outputs = outputs_of(function, leaves)
        loss = torch.stack([v.float().square().sum() for v in outputs]).sum()
        grads = torch.autograd.grad(loss, needed(leaves), materialize_grads=True)
        return [*(v.detach() for v in outputs), *grads]

    run()
    with no_synchronization():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    needed(leaves)[0].detach().mul_(0.5)
    graph.replay()
    torch.testing.assert_close(captured, run(), rtol=1e-4, atol=1e-4)


@kernels
@variants
def test_a_compiled_function_is_one_graph_with_the_same_results(name: str, device: str) -> None:
    torch.compiler.reset()
    function, leaves = prepared(name, device, **FEW)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    pairs = zip(differentiated(compiled, leaves), differentiated(function, leaves), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    with torch.no_grad():
        pairs = zip(outputs_of(compiled, leaves), outputs_of(function, leaves), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


@kernels
@variants
def test_a_batch_of_cotangents_is_a_loop_over_them(name: str, device: str) -> None:
    function, leaves = prepared(name, device, **FEW)
    first = outputs_of(function, leaves)[0]
    weights = torch.randn(2, *first.shape, device=device)
    options: dict[str, Any] = {"retain_graph": True, "materialize_grads": True}
    every = torch.autograd.grad(first, needed(leaves), weights, is_grads_batched=True, **options)
    for i, weight in enumerate(weights):
        single = torch.autograd.grad(first, needed(leaves), weight, **options)
        torch.testing.assert_close([v[i] for v in every], list(single))


@kernels
@variants
def test_a_second_derivative_is_refused(name: str, device: str) -> None:
    function, leaves = prepared(name, device, **FEW)
    first = outputs_of(function, leaves)[0]
    grads = torch.autograd.grad(
        first.square().sum(), needed(leaves), create_graph=True, materialize_grads=True
    )
    with pytest.raises(RuntimeError, match="once differentiable"):
        grads[0].sum().backward()


@kernels
@variants
def test_every_run_has_the_same_bits(name: str, device: str) -> None:
    function, leaves = prepared(name, device)
    first, second = differentiated(function, leaves), differentiated(function, leaves)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.gpu
@variants
def test_auto_takes_the_kernels_on_a_gpu_where_it_can(name: str) -> None:
    _, call = draw(name)
    function, leaves = prepared(name, "cuda")
    ours = differentiated(lambda *v: call.run(*v, backend="auto"), leaves)
    pairs = zip(ours, differentiated(function, leaves), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    _, call = draw(name, dtype=F64)
    with recorded() as found:
        call.run(*call.given(F64, "cuda").values(), backend="auto")
    assert not found or name.startswith("sweep")


@pytest.mark.parametrize(
    ("name", "options", "shapes", "message"),
    [(name, *rest) for name, row in ROWS.items() for rest in row.wrong],
)
def test_a_wrong_shape_is_named(
    name: str, options: Options, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    row = ROWS[name]
    call = row.make(**next(iter(row.variants.values())) | options)
    given = {**call.given(F32, "cpu"), **{k: torch.zeros(shape) for k, shape in shapes.items()}}
    with pytest.raises(ValueError, match=re.escape(message)):
        call.run(*given.values(), backend="auto")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [(name, *rest) for name, row in ROWS.items() for rest in row.refused],
)
def test_options_that_are_unknown_and_calls_without_kernels(
    name: str, options: Options, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    backend = options.get("backend", "auto")
    call = ROWS[name].make(**{k: v for k, v in options.items() if k != "backend"})
    given = call.given(options.get("dtype", F32), "cpu")
    with pytest.raises(ValueError, match=re.escape(message)):
        call.run(*given.values(), backend=backend)
    if backend == "triton":
        call.run(*given.values(), backend="auto")


@pytest.mark.interpreter
def test_no_operation_in_triton_is_missing_here() -> None:
    seen: set[str] = set()
    for name in VARIANTS:
        with recorded() as found:
            differentiated(*prepared(name, "cpu"))
        seen |= {operation.overload.name() for operation, _, _ in found}
    plain = set(OF_GRAPHS)
    plain |= {f"{name}_backward" for name in plain}
    assert {name.removeprefix("bedouin::") for name in OPERATIONS} - plain == {
        name.removeprefix("bedouin::").removesuffix(".default") for name in seen
    }


OF_GRAPHS: dict[str, Callable[[], list[Any]]] = {
    "plain_scan": lambda: [*list(scan().tensors.values())[:6], "delta", "positive", False],
    "plain_delta_rule": lambda: list(ROWS["rule of steps"].make(t=5, k=2).tensors.values()),
    "plain_track": lambda: [*ROWS["tracker"].make(t=5).tensors.values(), 1e-5, 1e-4],
}


@pytest.mark.parametrize("name", OF_GRAPHS)
def test_operations_of_plain_torch_are_as_registered(name: str) -> None:
    inputs = OF_GRAPHS[name]()
    leaves = [v.requires_grad_() if isinstance(v, Tensor) else v for v in inputs]
    with recorded() as found:
        outputs = OPERATIONS[f"bedouin::{name}"](*leaves)
        torch.autograd.grad(
            [v.sum() for v in outputs], [v for v in leaves if isinstance(v, Tensor)]
        )
    assert len(found) == 2
    for operation, given, _ in found:
        torch.library.opcheck(operation.overload, given, test_utils=UTILS)


@pytest.mark.parametrize("tracked", [True, False])
def test_the_profiler_sees_an_operation(tracked: bool) -> None:
    """As a mode does in test_precision.py."""
    name, inputs = "bedouin::plain_scan", OF_GRAPHS["plain_scan"]()
    leaves = [v.requires_grad_(tracked) if isinstance(v, Tensor) else v for v in inputs]
    with torch.profiler.profile() as profile:
        OPERATIONS[name](*leaves)
    assert name in {event.key for event in profile.key_averages()}

"""What every operation in Triton keeps to: shapes, types and gradients as registered, one graph
under torch.compile, batches of cotangents, no second derivative, equal bits in every run.

The same checks run on the CPU in the interpreter and compiled on a GPU.
Letters: b batch, t time, d channels, n states, r raw values, H heads, p and v key and value
channels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from bedouin.kernels.convolution import Groups, short_convolution
from bedouin.kernels.delta_rule import DeltaInputs, delta_rates, delta_rule
from bedouin.kernels.direct import direct_sweep
from bedouin.kernels.operands import Operands, Parameterization, RawLayout
from bedouin.kernels.operation import OPERATIONS, Operation
from bedouin.kernels.output import gated_norm, gated_output, shifted_norm
from bedouin.kernels.scan import selective_scan
from bedouin.kernels.track import TrackInputs, track

# dynamo instantiates torch.autograd.Function when it traces a subclass
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [INTERPRETED, COMPILED])

UTILS = ("test_schema", "test_faketensor", "test_autograd_registration")
TRITON: dict[str, Any] = {"backend": "triton"}

Call = tuple[Callable[..., Any], list[Tensor | None]]
"""A function of tensors that returns tensors, and its arguments."""


def normal(*shape: int) -> Tensor:
    return torch.randn(shape)


def unit(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(normal(*shape), dim=-1)


def sweep(heads: int, k: int, *, feedback: bool = True, known: bool = False) -> Call:
    """Without heads of one head, whose tensors have no axis of heads."""
    t, d, n, b = 18, 5, 2, 2 * max(heads, 1)
    layout = RawLayout("softplus", True, k, 1.0)
    options, r = Parameterization(layout, "bounded_delta", "positive", 1e-5), layout.size(d, n)
    axis = (heads,) if heads else ()
    W_y = 0.1 * normal(*axis, r - 3, d) if feedback else None

    def run(y_star: Tensor | None, *operands: Tensor | None) -> tuple[Tensor, Tensor]:
        found = direct_sweep(Operands(*operands), options, y_star=y_star, **TRITON)  # type: ignore[arg-type]
        return found.y, found.h

    A, state = -normal(*axis, d, n).exp(), (normal(b, d, n), normal(b, d))
    y_star = normal(b, t, d) if known else None
    return run, [y_star, normal(b, t, d), normal(b, t, r), W_y, A, *state]


def scan(heads: int, *, skip: bool) -> Call:
    b, t, d, n = 2, 17, 3, 2
    axis = (heads,) if heads else ()

    def run(*operands: Tensor | None) -> tuple[Tensor, Tensor]:
        return selective_scan(*operands, eigenvalues="full", **TRITON)  # type: ignore[arg-type]

    tokens = [normal(b, t, d), normal(b, t, d).exp(), -normal(*axis, d, n).exp()]
    others = [normal(b, t, n), normal(b, t, n), normal(b, d, n)]
    return run, [*tokens, *others, normal(*axis, d) if skip else None]


def output(heads: int, *, norm: bool = True, fed: bool = True) -> Call:
    b, t, d = 2, 3, 5
    axis = (heads,) if heads else ()
    rows = [normal(b, t, d) for _ in range(5)]
    y, x, gate, of_gate, z = rows
    given = [y, x, normal(*axis, d), gate, of_gate if fed else None]
    more = [z, normal(*axis, d)] if norm else [None, None]
    return lambda *v: gated_output(*v, **TRITON), [*given, *more]


def rule(t: int, k: int, *, gated: bool) -> Call:
    b, h, p, v = 1, 2, 16, 16
    rates = 2 * torch.rand(b, t, k, h), -torch.rand(b, t, h) if gated else None

    def run(*inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        return delta_rule(DeltaInputs(*inputs[:5]), inputs[5], torch.float32, "triton")  # type: ignore[arg-type]

    vectors = [unit(b, t, h, p), unit(b, t, k, h, p), normal(b, t, k, h, v)]
    return run, [*vectors, *rates, normal(b, h, p, v)]


def tracker(*, starts: bool) -> Call:
    b, t, H, c, n = 1, 18, 2, 3, 5
    d = H * c
    rows = [normal(b, t, size) for size in (d, H * n, H * n, d, H, d, d)]
    parameters = [0.3 * normal(d), normal(H), normal(d, n), normal(d), normal(d)]
    state = [normal(b, d, n), normal(b, d)] if starts else [None, None]

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        return track(TrackInputs(*inputs), 1e-5, 1e-4, **TRITON)

    return run, [*rows, *parameters, 0.3 * normal(H, 3 * c, c), *state]


def convolution(groups: Groups | None, *, adds: bool) -> Call:
    b, t, c, w = 2, 9, 24, 4
    given = [normal(b, t, c), normal(c, w), normal(b, w - 1, c), normal(b, t, 8) if adds else None]

    def run(x: Tensor, weight: Tensor, window: Tensor, added: Tensor | None) -> Any:
        return short_convolution(x, weight, window, added, groups, **TRITON)

    return run, given


def rates() -> Call:
    b, t, k, h = 2, 3, 2, 2
    key = unit(b, t, k, h, 16)

    def run(strength: Tensor, *decay: Tensor) -> Any:
        return delta_rates(strength, key.to(strength.device), decay, 2.0, **TRITON)  # type: ignore[arg-type]

    return run, [normal(b, t, k * h), normal(b, t, h), normal(h), normal(h)]


CALLS: dict[str, Callable[[], Call]] = {
    "sweep": lambda: sweep(0, 1),
    "sweep of heads": lambda: sweep(2, 2),
    "sweep without reflections": lambda: sweep(2, 0),
    "sweep without feedback": lambda: sweep(2, 1, feedback=False),
    "sweep of a known y": lambda: sweep(2, 1, known=True),
    "scan": lambda: scan(0, skip=True),
    "scan without a skip": lambda: scan(0, skip=False),
    "scan of heads": lambda: scan(2, skip=True),
    "output": lambda: output(0),
    "output of heads": lambda: output(2),
    "output of the paper": lambda: output(0, norm=False, fed=False),
    "shifted norm": lambda: (
        lambda y, y0: shifted_norm(y, y0, 1e-5, **TRITON),
        [normal(2, 5, 3), normal(2, 3)],
    ),
    "gated norm": lambda: (
        lambda o, gate, weight: gated_norm(o, gate, weight, 1e-5, **TRITON),
        [normal(2, 3, 2, 16), normal(2, 3, 32), normal(16)],
    ),
    "rule in chunks": lambda: rule(20, 1, gated=True),
    "rule in chunks without a decay": lambda: rule(20, 1, gated=False),
    "rule by tokens": lambda: rule(3, 2, gated=True),
    "rates": rates,
    "tracker": lambda: tracker(starts=True),
    "tracker from zeros": lambda: tracker(starts=False),
    "convolution": lambda: convolution(Groups(2, 8, 1e-6), adds=True),
    "convolution alone": lambda: convolution(None, adds=False),
}
calls = pytest.mark.parametrize("name", CALLS)


def draw(name: str, device: str) -> Call:
    """The function and its arguments, which need gradients but for a known y."""
    torch.manual_seed(0)
    function, given = CALLS[name]()
    leaves = [v if v is None else v.to(device).requires_grad_() for v in given]
    if name == "sweep of a known y":
        assert leaves[0] is not None
        leaves[0].requires_grad_(False)
    return function, leaves


def outputs_of(function: Callable[..., Any], leaves: list[Tensor | None]) -> list[Tensor]:
    found = function(*leaves)
    return [found] if isinstance(found, Tensor) else list(found)


def needed(leaves: list[Tensor | None]) -> list[Tensor]:
    return [v for v in leaves if v is not None and v.requires_grad]


def results(function: Callable[..., Any], leaves: list[Tensor | None]) -> list[Tensor]:
    """Outputs, and gradients of an uneven sum of them."""
    outputs = outputs_of(function, leaves)
    weights = [torch.linspace(-1, 2, v.numel(), device=v.device).view_as(v) for v in outputs]
    grads = torch.autograd.grad(outputs, needed(leaves), weights, materialize_grads=True)
    return [*(v.detach() for v in outputs), *grads]


@contextmanager
def recorded() -> Iterator[list[tuple[Operation, tuple[Any, ...]]]]:
    """The operations that are called within, with their inputs."""
    found: list[tuple[Operation, tuple[Any, ...]]] = []
    call = Operation.__call__

    def record(operation: Operation, *inputs: Any) -> Any:
        found.append((operation, inputs))
        return call(operation, *inputs)

    with patch.object(Operation, "__call__", record):
        yield found


@devices
@calls
def test_shapes_types_and_gradients_are_as_registered(name: str, device: str) -> None:
    function, leaves = draw(name, device)
    with recorded() as found:
        results(function, leaves)
    assert len(found) == 2, "an operation and its gradient"
    forward, backward = found
    torch.library.opcheck(forward[0].overload, forward[1], test_utils=UTILS)
    # which has no gradient of its own
    still = tuple(v.detach() if isinstance(v, Tensor) else v for v in backward[1])
    torch.library.opcheck(backward[0].overload, still, test_utils=UTILS)


@devices
@calls
def test_a_compiled_function_is_one_graph_with_the_same_results(name: str, device: str) -> None:
    torch.compiler.reset()
    function, leaves = draw(name, device)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(results(compiled, leaves), results(function, leaves), strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        pairs = zip(outputs_of(compiled, leaves), outputs_of(function, leaves), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


@devices
@calls
def test_a_batch_of_cotangents_is_a_loop_over_them(name: str, device: str) -> None:
    function, leaves = draw(name, device)
    first = outputs_of(function, leaves)[0]
    weights = torch.randn(2, *first.shape, device=device)
    options: dict[str, Any] = {"retain_graph": True, "materialize_grads": True}
    every = torch.autograd.grad(first, needed(leaves), weights, is_grads_batched=True, **options)
    for i, weight in enumerate(weights):
        single = torch.autograd.grad(first, needed(leaves), weight, **options)
        torch.testing.assert_close([v[i] for v in every], list(single))


@devices
@calls
def test_a_second_derivative_is_refused(name: str, device: str) -> None:
    function, leaves = draw(name, device)
    leaf = needed(leaves)[0]
    first = outputs_of(function, leaves)[0]
    (grad,) = torch.autograd.grad(first.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        grad.sum().backward()


@devices
@calls
def test_every_run_has_the_same_bits(name: str, device: str) -> None:
    function, leaves = draw(name, device)
    first = results(function, leaves)
    assert all(torch.equal(*pair) for pair in zip(first, results(function, leaves), strict=True))


@pytest.mark.interpreter
def test_no_operation_in_triton_is_missing_here() -> None:
    seen: set[str] = set()
    for name in CALLS:
        with recorded() as found:
            results(*draw(name, "cpu"))
        seen |= {operation.overload.name() for operation, _ in found}
    plain = {"plain_scan", "plain_delta_rule"}
    plain |= {f"{name}_backward" for name in plain}
    assert {name.removeprefix("bedouin::") for name in OPERATIONS} - plain == {
        name.removeprefix("bedouin::").removesuffix(".default") for name in seen
    }


PLAIN: dict[str, Callable[[], list[Any]]] = {
    "plain_scan": lambda: [*scan(0, skip=False)[1][:6], "delta", "positive", False],
    "plain_delta_rule": lambda: rule(5, 2, gated=True)[1],
}


@pytest.mark.parametrize("name", PLAIN)
def test_operations_of_plain_torch_are_as_registered(name: str) -> None:
    inputs = PLAIN[name]()
    leaves = [v.requires_grad_() if isinstance(v, Tensor) else v for v in inputs]
    with recorded() as found:
        outputs = OPERATIONS[f"bedouin::{name}"](*leaves)
        torch.autograd.grad(
            [v.sum() for v in outputs], [v for v in leaves if isinstance(v, Tensor)]
        )
    assert len(found) == 2
    for operation, given in found:
        torch.library.opcheck(operation.overload, given, test_utils=UTILS)

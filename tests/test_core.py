"""A call as one operation: the values and gradients of the separate operations, and fewer launches.

Letters: b batch, t time, m d_model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import bedouin.core_map
import bedouin.layer
import bedouin.solvers.direct
import bedouin.solvers.reporting
from bedouin import Bedouin, LowRank
from bedouin.core_map import takes_core
from bedouin.kernels.operation import OPERATIONS
from bedouin.kernels.plans import PlannedKernel
from bedouin.solvers import ImplicitAdjoint, Picard, UnrolledAdjoint
from bedouin.state import BedouinState

INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [INTERPRETED, COMPILED])

VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "default": (False, {}),
    "a state": (True, {}),
    "no feedback": (True, {"feedback": ()}),
    "griffin": (False, {"decay": "griffin", "eigenvalues": "full", "bias": False}),
    "paper": (True, {"output": "paper", "feedback_norm": False}),
    # the padding of the raw values' rows is less than d
    "wide": (False, {"expand": 35}),
}
"""Whether a state is given, and options."""


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bedouin.core_map, "ENABLED", True)


@contextmanager
def separately(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(bedouin.layer, "takes_core", lambda *args: False)
        yield


def make(device: str, dtype: torch.dtype = torch.float64, **options: Any) -> Bedouin:
    common = {"d_state": 1, "num_householder": 1, "backend": "triton", "device": device}
    return Bedouin(2, dtype=dtype, **{"expand": 1, **common, **options})


def results(
    layer: Bedouin, x: Tensor, state: BedouinState | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and state, and the gradients of x, the state and the parameters."""
    inputs = [x, *(state or ()), *layer.parameters()]
    out, last = layer(x, state, return_state=True)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for v in (out, *last):
        weights = torch.arange(1, v.numel() + 1, device=v.device).reshape(v.shape)
        total = total + (v.double() * weights).sum()
    return [out, *last], list(torch.autograd.grad(total, inputs))


def check(
    ours: tuple[list[Tensor], list[Tensor]],
    theirs: tuple[list[Tensor], list[Tensor]],
    tolerance: float,
) -> None:
    for one, other in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@devices
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_as_in_separate_operations(
    variant: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_state, options = VARIANTS[variant]
    layer = make(device, **options)
    x = torch.randn(1, 2, 2, dtype=torch.float64, device=device, requires_grad=True)
    state = None
    if with_state:
        state = BedouinState(
            *(torch.randn_like(v, requires_grad=True) for v in layer.init_state(1))
        )
    ours = results(layer, x, state)
    assert layer.stats is not None and layer.stats.backward is not None
    residual = layer.stats.backward.residual
    with separately(monkeypatch):
        theirs = results(layer, x, state)
    check(ours, theirs, 1e-12)
    assert torch.isfinite(residual).all() and bool(layer.stats.converged.all())


@devices
def test_low_precision(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make(device, torch.float32)
    x = torch.randn(1, 2, 2, device=device, requires_grad=True)
    # not bfloat16, to which Triton's interpreter truncates instead of rounding
    with torch.autocast(device, torch.float16):
        ours = results(layer, x)
        with separately(monkeypatch):
            theirs = results(layer, x)
    assert ours[0][0].dtype == torch.float16 and ours[0][1].dtype == torch.float32
    check(ours, theirs, 0.003)


@devices
def test_checkpointing_hooks_and_a_batch_of_cotangents(device: str) -> None:
    layer = make(device)
    x = torch.randn(1, 2, 2, dtype=torch.float64, device=device, requires_grad=True)
    y = layer(x)
    weights = torch.randn(2, *y.shape, dtype=y.dtype, device=device)
    single = [torch.autograd.grad(y, x, w, retain_graph=True)[0] for w in weights]
    (batched,) = torch.autograd.grad(y, x, weights, is_grads_batched=True)
    torch.testing.assert_close(batched, torch.stack(single))
    again = checkpoint(layer, x, use_reentrant=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda v: v.numpy(force=True), torch.from_numpy):
        hooked = layer(x.cpu()) if device == "cpu" else again
    for out in (again, hooked):
        assert torch.equal(torch.autograd.grad(out, x, weights[0], retain_graph=True)[0], single[0])


@devices
def test_a_second_derivative_is_refused(device: str) -> None:
    layer = make(device)
    x = torch.randn(1, 1, 2, dtype=torch.float64, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    for source in (x, layer.x_proj.weight, layer.D):
        with pytest.raises(RuntimeError, match="once differentiable"):
            torch.autograd.grad(grad.sum(), source, retain_graph=True)


@devices
def test_opcheck(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of both operations are those of a call."""
    calls: list[tuple[str, tuple[Any, ...]]] = []
    for name in ("bedouin::core", "bedouin::core_backward"):
        run = OPERATIONS[name]
        seen = partial(_record, calls, name, run.overload)
        monkeypatch.setattr(run, "overload", seen)
    layer = make(device, expand=2)
    layer(torch.randn(1, 1, 2, dtype=torch.float64, device=device)).sum().backward()
    assert len(calls) == 2
    for name, given in calls:
        values = [v.detach() if isinstance(v, Tensor) else v for v in given]
        operation = getattr(torch.ops.bedouin, name.partition("::")[2])
        torch.library.opcheck(
            operation, tuple(values), test_utils=("test_schema", "test_faketensor")
        )


def _record(
    calls: list[tuple[str, tuple[Any, ...]]], name: str, run: Callable[..., Any], *args: Any
) -> Any:
    calls.append((name, args))
    return run(*args)


class Launches(TorchDispatchMode):
    """Counts what would be launched on a GPU: operations that compute, also those within our own,
    and Triton kernels, which do not run."""

    FREE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def launch(
        self, kernel: PlannedKernel, grid: Any, tensors: Any, integers: Any, constants: Any
    ) -> None:
        self.names.append(kernel.kernel.__name__)
        # pointers, then integers, then all else by name, as a plan needs them
        names = kernel.kernel.arg_names
        given = len(tensors) + len(integers)
        assert all(name.endswith("_ptr") for name in names[: len(tensors)])
        assert set(names[given:]) <= set(constants) and not set(names[:given]) & set(constants)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        own, name = OPERATIONS.get(func._schema.name), func.overloadpacket.__name__
        parts = own.function if own is not None else None
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            parts = func.decompose
        if parts is not None:
            with self:
                return parts(*args, **(kwargs or {}))
        if not func.is_view and name not in self.FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.interpreter
@pytest.mark.parametrize("feedback", [True, False])
def test_the_number_of_launches(feedback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For 40 samples of 16 tokens, whose reverse sweep is three launches, as for 128 samples."""
    # it fills uninitialized memory, which costs launches
    torch.use_deterministic_algorithms(False)
    options: dict[str, Any] = {} if feedback else {"feedback": ()}
    layer = Bedouin(32, backend="triton", on_unconverged="ignore", **options)
    x = torch.randn(40, 16, 32, requires_grad=True)
    for module in (bedouin.solvers.direct, bedouin.solvers.reporting):
        monkeypatch.setattr(module, "can_read_device", lambda tensor: False)
    forward, backward = Launches(), Launches()
    monkeypatch.setattr(PlannedKernel, "launch", lambda *args: forward.launch(*args))
    with forward:
        out = layer(x)
    monkeypatch.setattr(PlannedKernel, "launch", lambda *args: backward.launch(*args))
    with backward:
        out.backward(torch.ones_like(out))
    # one of forward is the number of steps of the statistics
    # without feedback the coefficients and the statistics have launches of their own
    assert len(forward.names) <= (10 if feedback else 11), forward.names
    assert len(backward.names) <= 25, backward.names
    kernels = ("sweep_kernel", "reverse_kernel") if feedback else ("walk_kernel", "walk_kernel")
    assert kernels[0] in forward.names and kernels[1] in backward.names


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("takes", "options"),
    [
        (True, {"adjoint": ImplicitAdjoint()}),
        (False, {"adjoint": UnrolledAdjoint()}),
        (False, {"solver": Picard()}),
        (False, {"num_heads": 2}),
        (False, {"feedback": ("B", "C")}),
        (False, {"mixer": LowRank(1), "num_householder": None}),
        (False, {"backend": "reference"}),
    ],
)
def test_which_calls_are_one_operation(takes: bool, options: dict[str, Any]) -> None:
    layer = make("cpu", **options)
    projected = layer.in_proj(torch.randn(1, 1, 2, dtype=torch.float64))
    assert takes_core(layer, projected, layer.solve_options, None) is takes
    layer.x_proj.register_forward_hook(lambda *args: None)
    assert not takes_core(layer, projected, layer.solve_options, None)

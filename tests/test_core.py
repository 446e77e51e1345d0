"""A call as one operation: the values and gradients of the separate operations, and fewer launches.

Letters: b batch, t time, m d_model.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import bedouin.layer
import bedouin.solvers.direct
import bedouin.solvers.reporting
from bedouin import Bedouin, LowRank, NoMixing
from bedouin.core_map import takes_core
from bedouin.kernels.core import products
from bedouin.kernels.core.products import rows_of
from bedouin.kernels.operation import OPERATIONS
from bedouin.kernels.plans import PlannedKernel
from bedouin.solvers import ImplicitAdjoint, Picard, UnrolledAdjoint
from bedouin.state import BedouinState

INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreter)
COMPILED = pytest.param("cuda", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", [INTERPRETED, COMPILED])

NO_MIXING: dict[str, Any] = {"mixer": NoMixing(), "num_householder": None}
# with other input scales feedback of Delta alone is the phases', outside of the core
DELTA: dict[str, Any] = {"feedback": ("delta",), "input_scale": "one_minus_decay"}
VARIANTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "default": (False, {}),
    "a state": (True, {}),
    "no feedback": (True, {"feedback": ()}),
    "griffin": (False, {"decay": "griffin", "eigenvalues": "full", "bias": False}),
    "paper": (True, {"output": "paper", "feedback_norm": False}),
    # the padding of the raw values' rows is less than d
    "wide": (False, {"expand": 35}),
    "heads": (True, {"num_heads": 2}),
    "heads without feedback": (False, {"num_heads": 2, "feedback": (), "decay": "griffin"}),
    "Delta": (True, {"feedback": ("delta",)}),
    "Delta, B": (False, {"feedback": ("delta", "B"), "d_state": 2, "bias": False}),
    "heads, Delta": (True, {"num_heads": 2, "num_householder": 2, **DELTA}),
    "heads, Delta, B, C": (False, {"num_heads": 2, "feedback": ("delta", "B", "C")}),
    "heads, no reflections": (True, {"num_heads": 2, **NO_MIXING}),
    "heads, Delta, no reflections": (
        False,
        {"num_heads": 2, "d_state": 2, **DELTA, **NO_MIXING},
    ),
    "heads, paper": (True, {"num_heads": 3, "output": "paper", "feedback_norm": False}),
}
"""Whether a state is given, and options."""


@contextmanager
def separately(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(bedouin.layer, "takes_core", lambda *args: False)
        yield


def make(device: str, dtype: torch.dtype = torch.float64, **options: Any) -> Bedouin:
    common = {"d_state": 1, "num_householder": 1, "backend": "triton", "device": device}
    return Bedouin(2, dtype=dtype, **{"expand": 1, **common, **options})


def layer_of(variant: str, device: str) -> tuple[Bedouin, bool, torch.dtype]:
    """The layer of a variant, whether it is given a state, and its dtype."""
    with_state, options = VARIANTS[variant]
    dtype = torch.float64
    if "num_heads" in options:
        # the kernels of several heads compute in float32
        dtype, options = torch.float32, {"expand": 3, **options}
    return make(device, dtype, **options), with_state, dtype


def results(
    layer: Bedouin,
    x: Tensor,  # (b, t, m)
    state: BedouinState | None = None,
    mask: Tensor | None = None,  # (b, t)
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and state, and the gradients of x, the state and the parameters."""
    inputs = [x, *(state or ()), *layer.parameters()]
    out, last = layer(x, state, return_state=True, mask=mask)
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
    layer, with_state, dtype = layer_of(variant, device)
    x = torch.randn(1, 2, 2, dtype=dtype, device=device, requires_grad=True)
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
    check(ours, theirs, 1e-12 if dtype == torch.float64 else 1e-5)
    assert torch.isfinite(residual).all() and bool(layer.stats.converged.all())


@devices
@pytest.mark.parametrize(
    "variant",
    [
        "a state",
        "no feedback",
        "paper",
        "heads",
        "heads without feedback",
        "Delta",
        "heads, Delta",
        "heads, Delta, no reflections",
    ],
)
def test_padding_in_one_operation(
    variant: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its values, gradients and statistics are those of the separate operations."""
    layer, with_state, dtype = layer_of(variant, device)
    mask = torch.tensor([[False, True, True], [True, False, False], [False] * 3], device=device)
    x = torch.randn(3, 3, 2, dtype=dtype, device=device)
    x[~mask] = torch.nan
    x.requires_grad_()
    state = layer.init_state(3)
    state = BedouinState(*(torch.randn_like(v, requires_grad=True) for v in state))
    given = x, state if with_state else None, mask
    ours, ran = results(layer, *given), layer.stats
    with separately(monkeypatch):
        theirs, expected = results(layer, *given), layer.stats
    check(ours, theirs, 1e-12 if dtype == torch.float64 else 1e-5)
    assert ran is not None and ran.conditioning is not None and bool(ran.converged.all())
    assert expected is not None and expected.conditioning is not None
    torch.testing.assert_close(ran.conditioning, expected.conditioning)
    assert ran.num_steps.tolist() == [1, 1, 0]
    # rounding of other sums
    assert (ran.residual - expected.residual).abs().max() < 8 * torch.finfo(dtype).eps


@devices
@pytest.mark.parametrize("feedback", [("delta", "B", "C", "mixer"), ("delta",)])
def test_heads_against_the_reference(feedback: tuple[str, ...], device: str) -> None:
    """Values and gradients in float32 against those of plain torch in float64."""
    options: dict[str, Any] = {"expand": 3, "num_heads": 2, "d_state": 3, "num_householder": 2}
    options["feedback"] = feedback
    layer = make(device, torch.float32, **options)
    plain = make(device, **{**options, "backend": "reference"})
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 2, device=device, requires_grad=True)
    actual, expected = results(layer, x), results(plain, x.detach().double().requires_grad_())
    for one, other in zip([*actual[0], *actual[1]], [*expected[0], *expected[1]], strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


@devices
@pytest.mark.parametrize("options", [{}, DELTA], ids=["all", "Delta"])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_low_precision(
    num_heads: int, options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make(device, torch.float32, num_heads=num_heads, **options)
    x = torch.randn(1, 2, 2, device=device, requires_grad=True)
    # not bfloat16, to which Triton's interpreter truncates instead of rounding
    with torch.autocast(device, torch.float16):
        ours = results(layer, x)
        with separately(monkeypatch):
            theirs = results(layer, x)
    assert ours[0][0].dtype == torch.float16 and ours[0][1].dtype == torch.float32
    check(ours, theirs, 0.003)


@devices
@pytest.mark.parametrize("name", ["dt_bias", "raw_bias", "D"])
def test_a_parameter_of_another_dtype(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gradient has the dtype of its parameter, and is not rounded to that of another one."""
    # D has the dtype of x
    layer = make(device, torch.float32 if name == "D" else torch.float64)
    others = {"dt_bias", "raw_bias"} if name == "D" else {name}
    for other in others:
        value = getattr(layer, other)
        value.data = value.data.double() if name == "D" else value.data.float()
    x = torch.randn(1, 2, 2, dtype=layer.D.dtype, device=device, requires_grad=True)
    ours = results(layer, x)
    with separately(monkeypatch):
        theirs = results(layer, x)
    check(ours, theirs, 1e-5)


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


def test_a_product_for_each_head_adds_the_bias_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(torch.randn(2, 5, 24, dtype=torch.float64)[..., :12], 3)
    W, bias = torch.randn(3, 7, 4).double(), torch.randn(3, 7).double()
    batched = products.project(rows, W, bias)
    monkeypatch.setattr(products, "MANY_ROWS", 10)
    torch.testing.assert_close(products.project(rows, W, bias), batched)


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
        # a call takes one of them
        for route in ("function", "overload"):
            seen = partial(_record, calls, name, getattr(run, route))
            monkeypatch.setattr(run, route, seen)
    layer = make(device, expand=2)
    out = layer(torch.randn(1, 1, 2, dtype=torch.float64, device=device))
    out.sum().backward(retain_graph=True)
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


class Inside(TorchDispatchMode):
    """Shows every operation of torch that runs, also those within our own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def saw(self, func: Any, results: Any) -> None:
        """Called after each operation."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        own = OPERATIONS.get(func._schema.name)
        parts = own.function if own is not None else None
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            parts = func.decompose
        if parts is not None:
            with self:
                return parts(*args, **(kwargs or {}))
        results = func(*args, **(kwargs or {}))
        self.saw(func, results)
        return results


class Launches(Inside):
    """Counts what would be launched on a GPU: operations that compute, and Triton kernels, which do
    not run."""

    FREE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view")

    def __init__(self) -> None:
        super().__init__()
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

    def saw(self, func: Any, results: Any) -> None:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in self.FREE:
            self.names.append(name)


class Live(Inside):
    """Bytes of the tensors that are alive, and the most of them at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: int = 0
        self.peak: int = 0
        self.known: set[int] = set()

    def saw(self, func: Any, results: Any) -> None:
        for v in tree_leaves(results):
            if isinstance(v, Tensor) and v.untyped_storage()._cdata not in self.known:
                self._add(v.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        weakref.finalize(storage, self._remove, key, size)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _remove(self, key: int, size: int) -> None:
        self.known.remove(key)
        self.bytes -= size


def launches_of(
    layer: Bedouin,
    x: Tensor,  # (b, t, m)
    monkeypatch: pytest.MonkeyPatch,
    **places: Any,
) -> tuple[Launches, Launches]:
    """Those of forward and backward, on a machine whose device cannot be read."""
    # it fills uninitialized memory, which costs launches
    torch.use_deterministic_algorithms(False)
    for module in (bedouin.solvers.direct, bedouin.solvers.reporting):
        monkeypatch.setattr(module, "can_read_device", lambda tensor: False)
    forward, backward = Launches(), Launches()
    monkeypatch.setattr(PlannedKernel, "launch", lambda *args: forward.launch(*args))
    with forward:
        out = layer(x, **places)
    monkeypatch.setattr(PlannedKernel, "launch", lambda *args: backward.launch(*args))
    with backward:
        out.backward(torch.ones_like(out))
    return forward, backward


@pytest.mark.interpreter
@pytest.mark.parametrize("num_heads", [1, 2])
def test_the_launches_of_documents(num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one length are a batch as it is; others are gathered, in both directions."""
    layer = Bedouin(32 * num_heads, num_heads=num_heads, backend="triton", on_unconverged="ignore")
    x = torch.randn(1, 96, 32 * num_heads, requires_grad=True)
    for bounds, most in (([0, 48, 96], (2, 0)), ([0, 10, 30, 96], (21, 4))):
        # the same number of chunks
        ends = torch.tensor(bounds)
        batch = torch.randn(len(bounds) - 1, int(ends.diff().max()), 32 * num_heads)
        layer.zero_grad()
        plain = launches_of(layer, batch.requires_grad_(), monkeypatch)
        layer.zero_grad()
        x.grad = None
        found = launches_of(layer, x, monkeypatch, cu_seqlens=ends)
        for one, other, more in zip(found, plain, most, strict=True):
            assert len(one.names) <= len(other.names) + more, one.names
        assert not {"index_add", "index_put", "cat"} & {*found[0].names, *found[1].names}


@pytest.mark.interpreter
@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("feedback", [("delta", "B", "C", "mixer"), ()])
def test_padding_and_documents_run_the_kernels_of_a_batch(
    feedback: tuple[str, ...], num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"num_heads": num_heads, "feedback": feedback, "backend": "triton"}
    layer = Bedouin(32 * num_heads, on_unconverged="ignore", **options)

    def kernels(b: int, t: int, **places: Tensor) -> list[list[str]]:
        """Triton's, in their order."""
        layer.zero_grad()
        x = torch.randn(b, t, 32 * num_heads, requires_grad=True)
        both = launches_of(layer, x, monkeypatch, **places)
        return [[name for name in found.names if name.endswith("_kernel")] for found in both]

    batch = kernels(3, 40)
    assert all(batch)
    ends = torch.tensor([0, 40, 50, 80])
    index = torch.searchsorted(ends, torch.arange(80), right=True).unsqueeze(0)
    mask = torch.arange(40) >= torch.tensor([[0], [13], [40]])
    assert kernels(3, 40, mask=mask) == kernels(3, 40, mask=mask.flip(1)) == batch
    assert kernels(1, 80, cu_seqlens=ends) == kernels(1, 80, seq_idx=index) == batch


@pytest.mark.interpreter
@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("feedback", [("delta", "B", "C", "mixer"), ("delta", "B"), ("delta",), ()])
def test_the_number_of_launches(
    feedback: tuple[str, ...], num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 40 samples of 16 tokens."""
    options: dict[str, Any] = {"feedback": feedback}
    options = {"num_heads": num_heads, "backend": "triton", **options}
    layer = Bedouin(32 * num_heads, on_unconverged="ignore", **options)
    x = torch.randn(40, 16, 32 * num_heads, requires_grad=True)
    forward, backward = launches_of(layer, x, monkeypatch)
    # one of forward is the number of steps of the statistics, and four join those of the heads;
    # without feedback the coefficients and the statistics have launches of their own
    most = {1: (10 if feedback else 11, 22), 2: (14 if feedback else 15, 22)}[num_heads]
    if len(feedback) == 2:
        # W^y is padded with rows of zeros, in both directions
        most = most[0] + 2, most[1] + 2
    if num_heads == 1 and feedback:
        # each token of one head is a product and a launch, and the product's rows are padded
        most = most[0] + 33, most[1] + 33
    pairs = {1: ("sweep_kernel", "reverse_kernel"), 2: ("head_sweep_kernel", "reverse_head_kernel")}
    first, last = pairs[num_heads] if feedback else ("walk_kernel", "walk_kernel")
    if feedback == ("delta",):
        # the phases, in operations of their own
        most, (first, last) = {1: (20, 47), 2: (27, 51)}[num_heads], pairs[1]
    assert len(forward.names) <= most[0], forward.names
    assert len(backward.names) <= most[1], backward.names
    assert first in forward.names and last in backward.names


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("options", "most"), [({}, (14, 21)), ({"feedback": ("delta",)}, (30, 47))]
)
def test_the_number_of_launches_without_reflections(
    options: dict[str, Any], most: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of heads, in the core and in the phases."""
    options = {"num_heads": 2, "backend": "triton", **options}
    x = torch.randn(40, 16, 64, requires_grad=True)
    layer = Bedouin(64, mixer=NoMixing(), on_unconverged="ignore", **options)
    forward, backward = launches_of(layer, x, monkeypatch)
    assert len(forward.names) <= most[0], forward.names
    assert len(backward.names) <= most[1], backward.names


@pytest.mark.interpreter
@pytest.mark.parametrize("num_heads", [1, 2])
def test_the_most_memory_at_a_time(num_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than in separate operations; without kernels, whose results have no influence."""
    monkeypatch.setattr(PlannedKernel, "launch", lambda *args: None)
    options: dict[str, Any] = {"num_heads": num_heads, "num_householder": 4, "backend": "triton"}
    layer = Bedouin(64, on_unconverged="ignore", **options)
    x = torch.randn(4, 64, 64, requires_grad=True)

    def peak() -> int:
        live = Live()
        with torch.autocast("cpu", torch.bfloat16), live:
            torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
        return live.peak

    together = peak()
    with separately(monkeypatch):
        assert together <= peak()


@devices
def test_a_backward_pass_that_keeps_the_graph_changes_nothing(device: str) -> None:
    """The last one overwrites what the forward pass has saved."""
    layer = make(device)
    x = torch.randn(1, 2, 2, dtype=torch.float64, device=device, requires_grad=True)
    total = layer(x).square().sum()
    inputs = [x, *layer.parameters()]
    first = torch.autograd.grad(total, inputs, retain_graph=True)
    for retain in (True, False):
        torch.testing.assert_close(torch.autograd.grad(total, inputs, retain_graph=retain), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, inputs)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("takes", "options"),
    [
        (True, {"adjoint": ImplicitAdjoint()}),
        (False, {"adjoint": UnrolledAdjoint()}),
        (False, {"solver": Picard()}),
        (True, {"num_heads": 2, "dtype": torch.float32}),
        # the kernels of several heads compute in float32
        (False, {"num_heads": 2}),
        (True, {"feedback": ("delta", "B", "C")}),
        # the phases take feedback of Delta alone, but not every option
        (False, {"feedback": ("delta",), "dtype": torch.float32}),
        (False, {"feedback": ("delta",), "num_heads": 2, "dtype": torch.float32}),
        (True, {"num_heads": 2, "dtype": torch.float32, **DELTA}),
        (True, {"feedback": ("delta",)}),
        (False, {"feedback": ("B", "C")}),
        (False, {"feedback": ("delta", "C")}),
        (True, {"num_heads": 2, "dtype": torch.float32, **NO_MIXING}),
        # the kernels of one head, and those without feedback, take at least one reflection
        (False, NO_MIXING),
        (False, {"num_heads": 2, "dtype": torch.float32, "feedback": (), **NO_MIXING}),
        (False, {"mixer": LowRank(1), "num_householder": None}),
        (False, {"backend": "reference"}),
    ],
)
def test_which_calls_are_one_operation(takes: bool, options: dict[str, Any]) -> None:
    layer = make("cpu", **options)
    projected = layer.in_proj(torch.randn(1, 1, 2, dtype=layer.D.dtype))
    assert takes_core(layer, projected, layer.solve_options, None) is takes
    layer.x_proj.register_forward_hook(lambda *args: None)
    assert not takes_core(layer, projected, layer.solve_options, None)

"""What a table of operations has, and one comparison of values and gradients for all of them."""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from bedouin.kernels.backend import interpreter_is_on
from bedouin.testing import assert_close

F64 = torch.float64
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
PLAIN = pytest.param("reference", "cpu", id="plain")
INTERPRETED = pytest.param("triton", "cpu", marks=pytest.mark.interpreter, id="interpreted")
COMPILED = pytest.param("triton", "cuda", marks=pytest.mark.gpu, id="compiled")
implementations = pytest.mark.parametrize(("backend", "device"), [PLAIN, INTERPRETED, COMPILED])
kernels = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.interpreter),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
# for tests that differ between the two, of which one process runs one
DEVICE = "cpu" if interpreter_is_on() else "cuda"
needs_triton = pytest.mark.interpreter if interpreter_is_on() else pytest.mark.gpu
Tensors = dict[str, Tensor | None]
Options = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """An operation on tensors in float64, and what it computes, differentiable."""

    run: Callable[..., Any]  # of the tensors and a backend
    exact: Callable[..., Any]  # of the tensors
    tensors: Tensors
    low: Collection[str]  # the tensors that may have less than float32
    dtypes: tuple[torch.dtype, ...]  # of the results
    constant: str = ""  # the tensor that needs no gradient
    slack: dict[str, float] = field(default_factory=dict)  # factors of the tolerance

    def given(self, dtype: torch.dtype, device: str) -> Tensors:
        wide = torch.promote_types(dtype, F32)
        return {
            name: None if v is None else v.to(device, dtype if name in self.low else wide)
            for name, v in self.tensors.items()
        }


def in_max_norm(name: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert_close(name, ours, theirs, tolerance, atol=tolerance)


def in_2_norm(name: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    error = (ours - theirs).norm() / (1e-30 + theirs.norm())
    assert ours.shape == theirs.shape and error <= tolerance, (name, float(error))


@dataclass(frozen=True)
class Row:
    """An operation of the table.

    The options of a call are those of `make`, and may have the dtype of its lower tensors, values
    that constants of a launch take (`patch`), and a tolerance of its own.
    """

    make: Callable[..., Call]
    tolerance: dict[torch.dtype, float]
    variants: dict[str, Options]  # small calls, which keep to all laws
    cases: list[Options] = field(default_factory=list)  # for values and gradients
    plain: list[Options] = field(default_factory=list)  # of plain torch alone
    compiled: list[Options] = field(default_factory=list)  # on a GPU alone
    wrong: list[tuple[Options, dict[str, tuple[int, ...]], str]] = field(default_factory=list)
    refused: list[tuple[Options, str]] = field(default_factory=list)
    empty: tuple[str, ...] = ("b", "t")
    assert_near: Callable[[str, Tensor, Tensor, float], None] = in_max_norm
    spares: bool = False  # keeps less where no gradient is wanted
    kernels: list[Options] = field(default_factory=list)  # cases of kernels alone


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def uniform(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64)


def unit(*shape: int) -> Tensor:
    return normalize(normal(*shape), dim=-1)


def times(*axes: Any) -> list[Options]:
    """All combinations of an option of each axis."""
    return [
        {name: v for part in parts for name, v in part.items()}
        for parts in itertools.product(*axes)
    ]


def each(name: str, *values: Any) -> list[Options]:
    return [{name: v} for v in values]


def sizes(names: Iterable[str], *rows: tuple[int, ...]) -> list[Options]:
    return [dict(zip(names, row, strict=True)) for row in rows]


def with_gradients(call: Call, tensors: Tensors) -> list[Tensor | None]:
    """Leaves of the same strides."""
    return [
        None if v is None else v.detach().requires_grad_(name != call.constant)
        for name, v in tensors.items()
    ]


def outputs_of(function: Callable[..., Any], leaves: list[Tensor | None]) -> list[Tensor]:
    found = function(*leaves)
    return [found] if isinstance(found, Tensor) else list(found)


def needed(leaves: list[Tensor | None]) -> list[Tensor]:
    return [v for v in leaves if v is not None and v.requires_grad]


def uneven(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights of its elements, rounded to a dtype."""
    weights = torch.linspace(0, 7, v.numel(), dtype=F64).cos() + 0.1
    return weights.view(v.shape).to(dtype).to(v)


def results(
    call: Call, function: Callable[..., Any], tensors: Tensors, weighed: int | None = None
) -> dict[str, Tensor]:
    """Outputs, and gradients of an uneven sum of them, or of one of them."""
    leaves = with_gradients(call, tensors)
    outputs = outputs_of(function, leaves)
    weights = [uneven(v, dtype) for v, dtype in zip(outputs, call.dtypes, strict=True)]
    pairs = [
        (v, w)
        for i, (v, w) in enumerate(zip(outputs, weights, strict=True))
        if weighed in (None, i) and v.requires_grad
    ]
    names = [n for n, v in zip(tensors, leaves, strict=True) if v is not None and v.requires_grad]
    grads: Sequence[Tensor] = [torch.zeros_like(v) for v in needed(leaves)]
    if pairs:
        found, given = [list(part) for part in zip(*pairs, strict=True)]
        grads = torch.autograd.grad(found, needed(leaves), given, materialize_grads=True)
    values = {f"result {i}": v.detach() for i, v in enumerate(outputs)}
    return values | {f"gradient of {n}": v for n, v in zip(names, grads, strict=True)}


def check(
    row: Row,
    call: Call,
    tensors: Tensors,
    backend: str,
    tolerance: float,
    weighed: int | None = None,
) -> None:
    """Dtypes as they should be, values and gradients of the definition in float64, from the same
    rounded tensors."""
    exact = {name: None if v is None else v.double() for name, v in tensors.items()}
    found = results(call, lambda *v: call.run(*v, backend=backend), tensors, weighed)
    assert tuple(found[f"result {i}"].dtype for i in range(len(call.dtypes))) == call.dtypes
    for name, theirs in results(call, call.exact, exact, weighed).items():
        allowed = tolerance * call.slack.get(name.removeprefix("gradient of "), 1)
        row.assert_near(name, found[name].double(), theirs, allowed)


APART = 2**30
"""Elements between two tokens: offsets have 32 bits before the third and 33 from there on."""


def far_apart(
    v: Tensor,  # (b, t, c)
) -> Tensor:  # (b, t, c)
    """The values of v, their tokens APART. What precedes them is memory of the view, too, so that
    an offset that has overflowed finds other values, and not the end of memory."""
    b, t, width = v.shape
    before = 2 * APART
    size = before + (t - 1) * APART + b * width
    # the rows of a single sample are evenly spaced
    strides = (t * APART if b == 1 else width, APART, 1)
    memory = torch.UntypedStorage(size * v.itemsize, device=v.device)
    empty = torch.empty(0, dtype=v.dtype, device=v.device)
    view = empty.set_(memory, before, v.shape, strides)
    return view.copy_(v)

"""Operations of torch.library with a cheap call in eager mode.

torch.compile sees an operation with its registered gradient. In eager mode the same operation runs
below autograd, inside an autograd.Function if a gradient is wanted: the dispatcher's route to a
registered gradient costs several times as much on the host.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bedouin.kernels.backend import is_batched, is_transformed
from bedouin.kernels.outside import outside_of_graphs

NAMESPACE = "bedouin"

TENSORS = frozenset([torch.Tensor, torch.nn.Parameter])
"""Types that have no `__torch_dispatch__`."""

PLAIN = TENSORS | {type(None), bool, int, float, str, tuple, torch.dtype}
"""Types of inputs with which an implementation is called without the dispatcher. Tuples are of
numbers."""

OPERATIONS: dict[str, "Operation"] = {}
"""All operations by their qualified names."""

_run_eagerly = outside_of_graphs("an operation runs inside of no graph")


class Operation:
    """One operation of torch.library: its implementation for all devices, and a gradient, if any.

    The implementation must not return its arguments or views of these.
    """

    def __init__(self, name: str, function: Callable[..., Any], schema: str | None = None) -> None:
        self.function = guarded = _guarded(function)
        qualified = f"{NAMESPACE}::{name}"
        schema = schema or torch.library.infer_schema(function, mutates_args=())
        torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(qualified, "default", _run_eagerly(guarded))
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        self._eager: type[torch.autograd.Function] | None = None
        OPERATIONS[qualified] = self

    def register_fake(self, function: Callable[..., Any]) -> None:
        """Decorator: the function returns tensors like those of the operation, uninitialized."""
        torch.library.register_fake(self.overload.name().removesuffix(".default"), function)

    def register_autograd(
        self,
        backward: Callable[..., Any],
        *,
        setup_context: Callable[..., None],
    ) -> None:
        """Give the operation a gradient, as `torch.library.register_autograd` does."""
        name, below = self.overload.name().removesuffix(".default"), self._below_autograd
        torch.library.register_autograd(name, backward, setup_context=setup_context)

        def forward(ctx: Any, *inputs: Any) -> Any:
            output = below(*inputs)
            setup_context(ctx, inputs, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._eager = type(name.partition("::")[2], (torch.autograd.Function,), methods)

    def __call__(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling() or is_transformed():
            return self.overload(*inputs)
        if self._eager is not None and torch.is_grad_enabled():
            for v in inputs:
                # the first does mostly
                if isinstance(v, torch.Tensor) and v.requires_grad:
                    return self._eager.apply(*inputs)
        return self._below_autograd(*inputs)

    def _below_autograd(self, *inputs: Any) -> Any:
        run = self.function if _needs_no_dispatch(inputs) else self.overload
        with torch._C._AutoDispatchBelowAutograd():
            return run(*inputs)


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on the device of its first tensor."""

    def run(*inputs: Any) -> Any:
        for v in inputs:
            if isinstance(v, torch.Tensor):
                with torch.cuda.device_of(v):
                    return function(*inputs)
        return function(*inputs)

    return run


def _needs_no_dispatch(inputs: tuple[Any, ...]) -> bool:
    """Whether the dispatcher would only call the implementation, which takes it 15 microseconds for
    twenty arguments: for plain tensors, unless a mode or the profiler is to see the operation."""
    if torch._C._len_torch_dispatch_stack() or torch._C._autograd._profiler_enabled():
        return False
    if not PLAIN.issuperset(map(type, inputs)):
        return False
    return not is_batched(*[v for v in inputs if type(v) in TENSORS])


def operation(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Operation]:
    """Decorator: register a function as the operation `name`. Its schema is that of its annotations
    unless `schema` is given; it changes none of its arguments."""
    return lambda function: Operation(name, function, schema)


@contextmanager
def recording() -> Iterator[None]:
    """A context in which autograd records within an operation, which torch runs below it."""
    include, exclude = (
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set(),
    )
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield

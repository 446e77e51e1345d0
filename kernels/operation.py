"""Operations of torch.library, of which torch.compile sees the result and not the code.

torch.compile takes the registered gradient. In eager mode an autograd.Function with the same
gradient calls the operation: the dispatcher's route to a registered gradient takes 250 microseconds
on the host for twenty arguments, that of a Function 20.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

NAMESPACE = "bedouin"

OPERATIONS: dict[str, "Operation"] = {}
"""All operations by their qualified names."""


class Operation:
    """One operation of torch.library: its implementation for all devices, and a gradient, if any.

    The implementation must not return its arguments or views of these.
    """

    def __init__(self, name: str, function: Callable[..., Any], schema: str | None = None) -> None:
        self.name, self.function = f"{NAMESPACE}::{name}", _on_device(function)
        schema = schema or torch.library.infer_schema(function, mutates_args=())
        torch.library.define(self.name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(self.name, "default", self.function)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        self._eager: type[torch.autograd.Function] | None = None
        OPERATIONS[self.name] = self

    def register_fake(self, function: FunctionT) -> FunctionT:
        """Decorator: the function returns tensors like those of the operation, uninitialized."""
        torch.library.register_fake(self.name, function)
        return function

    def register_autograd(
        self,
        backward: Callable[..., Any],
        *,
        setup_context: Callable[..., None],
    ) -> None:
        """Give the operation a gradient, as `torch.library.register_autograd` does."""
        torch.library.register_autograd(self.name, backward, setup_context=setup_context)
        methods = {"forward": self.overload, "setup_context": setup_context, "backward": backward}
        static = {name: staticmethod(method) for name, method in methods.items()}
        self._eager = type(self.overload.__name__, (torch.autograd.Function,), static)

    def __call__(self, *inputs: Any) -> Any:
        if self._eager is not None and not torch.compiler.is_compiling():
            if torch.is_grad_enabled() and any([_requires_grad(v) for v in inputs]):
                return self._eager.apply(*inputs)
        return self.overload(*inputs)


def _requires_grad(v: Any) -> bool:
    return isinstance(v, Tensor) and v.requires_grad


def _on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on the device of its first tensor, which is the first argument."""

    def run(first: Tensor, *others: Any) -> Any:
        if not first.is_cuda:
            return function(first, *others)
        with torch.cuda.device_of(first):
            return function(first, *others)

    return run


def operation(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Operation]:
    """Decorator: register a function as the operation `name`. Its schema is that of its annotations
    unless `schema` is given; it changes none of its arguments."""
    return lambda function: Operation(name, function, schema)


@contextmanager
def recording() -> Iterator[None]:
    """A context in which autograd records within an operation, which torch runs below it.

    torch has no public interface for that: torch.func.vjp, which also records there, raises under
    hooks on saved tensors such as those of save_on_cpu.
    """
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield

"""Decorators for functions that torch.compile must not trace."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._compile import _disable_dynamo

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def outside_of_graphs(reason: str) -> Callable[[FunctionT], FunctionT]:
    """Decorator: torch.compile breaks the graph at the function, and with fullgraph=True its error
    message contains `reason`. Equivalent to `torch.compiler.disable`, which would import the
    compiler when this library is imported."""

    def decorate(function: FunctionT) -> FunctionT:
        outside: Any = _disable_dynamo(function)
        # the attributes that torch's own decorator sets
        outside._torchdynamo_disable = True
        outside._torchdynamo_disable_msg = reason
        left_out: FunctionT = outside
        return left_out

    return decorate


def constant_in_graphs(function: FunctionT) -> FunctionT:
    """Decorator: torch.compile calls the function, whose arguments must be constants, and takes its
    result for a constant. Equivalent to `torch.compiler.assume_constant_result`, which would import
    the compiler when this library is imported."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function

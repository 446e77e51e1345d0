"""A decorator for functions that torch.compile must not trace."""

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

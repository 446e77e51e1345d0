"""Functions that torch.compile leaves out of its graphs."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._compile import _disable_dynamo

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def outside_of_graphs(reason: str) -> Callable[[FunctionT], FunctionT]:
    """Decorator: a graph breaks before the function, and with fullgraph=True the error says
    `reason`. As `torch.compiler.disable`, which would import the compiler with this library."""

    def decorate(function: FunctionT) -> FunctionT:
        outside: Any = _disable_dynamo(function)
        # where torch keeps both for its own decorator
        outside._torchdynamo_disable = True
        outside._torchdynamo_disable_msg = reason
        left_out: FunctionT = outside
        return left_out

    return decorate

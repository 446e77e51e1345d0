"""Operations of torch.library: their gradient in eager mode, and what sees their calls."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bedouin.kernels.operation import OPERATIONS, Operation

NAME = "double_for_tests"


class Seen(TorchDispatchMode):
    """Records the names of the operations that are dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def double() -> Iterator[Operation]:
    def function(
        x: Tensor,  # any shape
        factor: float,
    ) -> Tensor:
        return x * factor

    made = Operation(NAME, function, "(Tensor x, float factor) -> Tensor")
    made.register_autograd(lambda ctx, grad: (grad * 2, None), setup_context=lambda *given: None)
    yield made
    del OPERATIONS[f"bedouin::{NAME}"]


def test_a_parameter_gets_the_registered_gradient(double: Operation) -> None:
    x = torch.nn.Parameter(torch.ones(3))
    y = double(x, 2.0)
    y.sum().backward()
    assert y.tolist() == [2, 2, 2] and x.grad is not None and x.grad.tolist() == [2, 2, 2]
    with torch.no_grad():
        assert not double(x, 2.0).requires_grad


def test_modes_and_the_profiler_see_the_operation(double: Operation) -> None:
    x = torch.ones(3, requires_grad=True)
    for context in (torch.no_grad(), torch.enable_grad()):
        with Seen() as seen, context:
            double(x, 2.0)
        assert f"bedouin::{NAME}" in seen.names
        with torch.profiler.profile() as profile, context:
            double(x, 2.0)
        assert f"bedouin::{NAME}" in {event.key for event in profile.key_averages()}

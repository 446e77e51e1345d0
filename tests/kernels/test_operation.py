"""Which calls of an operation reach its implementation through the dispatcher."""

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


def count_dispatched(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls, overload = [], operation.overload

    def dispatched(*inputs: Any) -> Any:
        calls.append(inputs)
        return overload(*inputs)

    monkeypatch.setattr(operation, "overload", dispatched)
    return calls


def test_plain_tensors_need_no_dispatcher(
    double: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_dispatched(double, monkeypatch)
    x = torch.nn.Parameter(torch.ones(3))
    y = double(x, 2.0)
    y.sum().backward()
    assert y.tolist() == [2, 2, 2] and x.grad is not None and x.grad.tolist() == [2, 2, 2]
    with torch.no_grad():
        assert not double(x, 2.0).requires_grad
    assert not calls


def test_modes_and_the_profiler_see_the_operation(double: Operation) -> None:
    with Seen() as seen, torch.no_grad():
        double(torch.ones(3), 2.0)
    assert f"bedouin::{NAME}" in seen.names
    with torch.profiler.profile() as profile, torch.no_grad():
        double(torch.ones(3), 2.0)
    assert f"bedouin::{NAME}" in {event.key for event in profile.key_averages()}


def test_subclasses_are_dispatched(double: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Tensor):
        pass

    calls = count_dispatched(double, monkeypatch)
    with torch.no_grad():
        double(torch.ones(3).as_subclass(Other), 2.0)
    assert len(calls) == 1

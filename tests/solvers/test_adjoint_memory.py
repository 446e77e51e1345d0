"""Memory of a solve with its gradient: that of one step, except for UnrolledAdjoint.

Letters: b batch, c values of a sample.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bedouin.solvers import (
    Adjoint,
    Anderson,
    ImplicitAdjoint,
    OneStepAdjoint,
    PhantomAdjoint,
    Picard,
    Solver,
    UnrolledAdjoint,
    solve,
)

B, C = 4, 64


def _solve(adjoint: Adjoint, solver: Solver, num_steps: int) -> tuple[Tensor, list[Tensor]]:
    """Exactly num_steps iterations of tanh(W y + x); the value, and W and x."""
    W = (0.5 * torch.eye(C, dtype=torch.float64)).requires_grad_()
    x = torch.linspace(-1, 1, B * C, dtype=torch.float64).reshape(B, C).requires_grad_()
    solution = solve(
        lambda y: torch.tanh(y @ W.T + x),
        torch.zeros_like(x),
        solver,
        max_steps=num_steps,
        adjoint=adjoint,
        on_unconverged="ignore",
    )
    return solution.value, [W, x]


class LiveBytes(TorchDispatchMode):
    """The largest number of bytes of tensors made under it that were alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._sizes[StorageWeakRef(storage)] = storage.nbytes()
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._sizes.values()))
        return out


def _peak(adjoint: Adjoint, solver: Solver, num_steps: int) -> int:
    """Bytes alive at once in forward and backward with exactly num_steps iterations."""
    with LiveBytes() as live:
        value, parameters = _solve(adjoint, solver, num_steps)
        torch.autograd.grad(value.square().sum(), parameters)
    return int(live.peak)


@pytest.mark.parametrize("adjoint", [ImplicitAdjoint(), OneStepAdjoint(), PhantomAdjoint()])
@pytest.mark.parametrize("solver", [Picard(0.0, 0.0), Anderson(0.0, 0.0, memory=3)])
def test_memory_is_that_of_one_step_whatever_their_number(adjoint: Adjoint, solver: Solver) -> None:
    assert _peak(adjoint, solver, 32) <= _peak(adjoint, solver, 8)


def test_memory_of_the_unrolled_adjoint_grows() -> None:
    few, many = (_peak(UnrolledAdjoint(), Picard(0.0, 0.0), steps) for steps in (20, 80))
    assert many - few >= 60 * B * C * 8

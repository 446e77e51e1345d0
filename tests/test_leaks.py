"""No memory is kept after a call; the garbage collector cannot see cycles of autograd graphs."""

import gc

import pytest
import torch

from bedouin import Bedouin
from bedouin.solvers import (
    Adjoint,
    Anderson,
    Direct,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    PhantomAdjoint,
    Picard,
    Solver,
    UnrolledAdjoint,
)

PAIRS: list[tuple[Solver, Adjoint | None]] = [
    (Direct(), None),
    (Direct(), UnrolledAdjoint()),
    (Direct(), OneStepAdjoint()),
    (Jacobi(), None),
    (Jacobi(), ImplicitAdjoint(Jacobi())),
    (Picard(), ImplicitAdjoint(Picard())),
    (Picard(), PhantomAdjoint()),
    (Picard(), UnrolledAdjoint()),
    (Anderson(), None),
]


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


@pytest.mark.parametrize(("solver", "adjoint"), PAIRS)
@pytest.mark.parametrize("backward", [True, False])
def test_no_tensor_outlives_a_call(solver: Solver, adjoint: Adjoint | None, backward: bool) -> None:
    layer = Bedouin(6, solver=solver, adjoint=adjoint, on_unconverged="ignore")
    x = torch.randn(2, 5, 6)

    def call() -> None:
        y, state = layer(x, return_state=True)
        if backward:
            (y.sum() + state.ssm.sum()).backward()

    call()
    before = _live_tensors()
    for _ in range(3):
        call()
    assert _live_tensors() <= before

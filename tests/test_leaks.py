"""No memory is kept after a call; the garbage collector cannot see cycles of autograd graphs."""

import gc
from collections.abc import Iterator

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


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Hides from the collector what exists already, of which there is a lot after other tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


@pytest.mark.parametrize(("solver", "adjoint"), PAIRS)
def test_no_tensor_outlives_a_call(solver: Solver, adjoint: Adjoint | None) -> None:
    layer = Bedouin(6, solver=solver, adjoint=adjoint, on_unconverged="ignore")
    x = torch.randn(2, 5, 6)

    def call(backward: bool) -> None:
        y, state = layer(x, return_state=True)
        if backward:
            (y.sum() + state.ssm.sum()).backward()

    call(True)
    before = _live_tensors()
    # a call without a backward follows, because a backward frees what the call before it kept
    for backward in (True, True, False, False):
        call(backward)
    assert _live_tensors() <= before

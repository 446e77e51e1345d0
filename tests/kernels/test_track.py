"""What is special to the tracker: its derivative and hard decays.

`test_operations.py` compares it with the loop. The same checks of the kernels run on the CPU in
the interpreter (small sizes) and compiled on a GPU.
Letters: b batch, t time, H heads, c channels and n states of a head.
"""

import math
from typing import Any

import pytest
import torch
from tests.kernels.rows_memory import tracker
from tests.kernels.table import F32, Call, Tensors, kernels, results
from torch import Tensor

from bedouin.kernels.track import TrackInputs, track_reference
from bedouin.kernels.track.types import ROWS

BY_TOKEN = TrackInputs._fields[:ROWS]


def by_kernels(call: Call, tensors: Tensors, weighed: int | None = None) -> dict[str, Tensor]:
    return results(call, lambda *v: call.run(*v, backend="triton"), tensors, weighed)


def test_the_loop_has_the_derivative_of_finite_differences() -> None:
    given = [v.requires_grad_() for v in tracker(2, 4, c=3, n=2).tensors.values() if v is not None]

    def run(*tensors: Tensor) -> Any:
        return tuple(track_reference(TrackInputs(*tensors), 1e-5, 1e-4))

    assert torch.autograd.gradcheck(run, given)


@kernels
def test_closed_tokens_pass_the_memory(device: str) -> None:
    call = tracker(2, 20, 1)
    tensors: Any = call.given(F32, device)
    for name in ("delta", "erase"):
        tensors[name][:, 7:] = -1e30
    short = {k: v[:, :7] if v is not None and k in BY_TOKEN else v for k, v in tensors.items()}
    found, expected = (by_kernels(call, v, 1) for v in (tensors, short))
    for name, v in expected.items():
        ours = found[name]
        if name.startswith("gradient") and name.removeprefix("gradient of ") in BY_TOKEN:
            assert not ours[:, 7:].any()
        ours = ours[:, :7] if ours.shape[1:2] == (20,) else ours
        torch.testing.assert_close(ours, v, rtol=1e-4, atol=1e-5)


@kernels
@pytest.mark.parametrize("A_log", [-math.inf, -69.0, 9.2])
def test_rates_without_a_decay_and_with_a_strong_one(A_log: float, device: str) -> None:
    call = tracker(t=20, H=1)
    tensors: Any = call.given(F32, device)
    tensors["A_log"][1:] = A_log
    found = by_kernels(call, tensors)
    wide = {k: v if v is None else v.double() for k, v in tensors.items()}
    for name, theirs in results(call, call.exact, wide).items():
        torch.testing.assert_close(found[name].double(), theirs, rtol=1e-4, atol=1e-4)

"""Gradients of maps that are causal in time: Jacobi backward in time, and the reverse sweep.

Letters: b batch, t time, c values of a token.
"""

from typing import Any

import pytest
import torch
from tests.toy_map import ToyMap
from torch import Tensor

from bedouin import Bedouin, FixedPointRNN
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.layers.map import StructuredMap
from bedouin.solvers import (
    Adjoint,
    Anderson,
    Direct,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    Picard,
    Solver,
    SolveStats,
    solve,
)
from bedouin.solvers.base import ReportBackward
from bedouin.testing import assert_close

EXACT, JACOBI = Picard(rtol=1e-14, atol=1e-15), Jacobi(1e-13, 0.0)


def _loss(y: Tensor) -> Tensor:
    return (y * torch.arange(1.0, 1 + y.numel(), dtype=y.dtype).reshape(y.shape).cos()).sum()


class ExactToyMap(ToyMap):
    """The same with a reverse sweep, which reports one step."""

    def attach(self, y_star: Tensor, report: ReportBackward) -> Tensor:
        value, zeros = self.loop(), torch.zeros(y_star.shape[:2])
        value.register_hook(lambda grad: report(zeros, zeros))
        return value


def _toy(kind: type[ToyMap], a: float) -> tuple[ToyMap, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((2, 6, 3), (3,)))
    inputs = [v.requires_grad_() for v in (torch.tensor(a, dtype=torch.float64), w, x)]
    return kind(*inputs), inputs


@pytest.mark.parametrize(
    ("kind", "solver", "adjoint", "a", "steps"),
    [
        # within t + 1 steps, where the map expands
        (ToyMap, JACOBI, None, -2.0, range(2, 8)),
        *(
            (ToyMap, EXACT, ImplicitAdjoint(backward), 0.4, range(2, 101))
            for backward in (EXACT, Anderson(1e-13, 0.0), JACOBI)
        ),
        # a reverse sweep is used after every solver, unless another one is asked for
        *(
            (ExactToyMap, solver, adjoint, 0.4, [1])
            for solver in (JACOBI, Picard(1e-13, 0.0))
            for adjoint in (None, ImplicitAdjoint(), ImplicitAdjoint(Direct()))
        ),
        (ExactToyMap, EXACT, ImplicitAdjoint(EXACT), 0.4, range(2, 101)),
    ],
)
def test_the_gradient_is_that_of_the_loop_over_tokens(
    kind: type[ToyMap], solver: Solver, adjoint: Adjoint | None, a: float, steps: Any
) -> None:
    f, inputs = _toy(kind, a)
    solution = solve(f, torch.zeros_like(f.x), solver, adjoint=adjoint, time_dim=1)
    grads = torch.autograd.grad(_loss(solution.value), inputs)
    reference, leaves = _toy(ToyMap, a)
    expected = torch.autograd.grad(_loss(reference.loop()), leaves)
    torch.testing.assert_close(grads, expected, rtol=1e-8, atol=1e-10)
    backward: SolveStats | None = solution.stats.backward
    assert backward is not None and all(int(n) in steps for n in backward.num_steps)


# -- at the y that three steps have reached, which is no fixed point

LAYERS: dict[str, Any] = {
    "default": (Bedouin, {}),
    "heads": (Bedouin, {"num_heads": 2}),
    "coupled": (Bedouin, {"input_scale": "one_minus_decay", "num_householder": 3}),
    "part of the feedback": (Bedouin, {"feedback": ("B", "mixer"), "feedback_norm": False}),
    "no feedback": (Bedouin, {"feedback": ()}),
    "vector state": (FixedPointRNN, {}),
}
ENDLESS: list[Solver] = [
    Picard(0.0, 0.0),
    Picard(0.0, 0.0, damping=0.6),
    Picard(0.0, stop_rule="paper"),
    Jacobi(0.0, 0.0),
]


@pytest.mark.parametrize("solver", ENDLESS, ids=str)
@pytest.mark.parametrize("exact", [True, False], ids=["implicit", "one step"])
@pytest.mark.parametrize("name", LAYERS)
def test_after_three_steps_the_gradient_is_linearized_at_the_y_that_was_returned(
    name: str, exact: bool, solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(dF/dtheta)^T w with w = (I - J^T)^-1 g, or w = g, from the dense Jacobian of F at that y; no
    token is solved anew for it."""
    torch.manual_seed(0)
    kind, options = LAYERS[name]
    layer: FixedPointLayer = kind(3, d_state=2, **options) if kind is Bedouin else kind(3)
    layer = layer.double()
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    start = torch.zeros(2, 6, layer.d_inner, dtype=torch.float64)
    monkeypatch.setattr(StructuredMap, "sweep", None)
    adjoint = ImplicitAdjoint() if exact else OneStepAdjoint()
    given: dict[str, Any] = {"max_steps": 3, "adjoint": adjoint, "on_unconverged": "ignore"}
    y = solve(layer.map(x), start, solver, time_dim=1, **given).value
    named = {"x": x} | {n: p for n, p in layer.named_parameters() if "out_proj" not in n}
    grads = torch.autograd.grad(_loss(y), list(named.values()), allow_unused=True)

    y_3, f = y.detach().requires_grad_(), layer.map(x)
    f_y = f(y_3)
    assert (f_y - y_3).detach().abs().max() > 1e-9
    w = torch.autograd.grad(_loss(y_3), y_3)[0].flatten()
    if exact:
        jacobian = torch.autograd.functional.jacobian(f, y_3.detach()).reshape(len(w), len(w))
        w = torch.linalg.solve(torch.eye(len(w), dtype=w.dtype) - jacobian.mT, w)
    expected = torch.autograd.grad(f_y, list(named.values()), w.view_as(f_y), allow_unused=True)
    for parameter, ours, theirs in zip(named, grads, expected, strict=True):
        assert (ours is None or not ours.any()) if theirs is None else ours is not None
        if theirs is not None and ours is not None:
            assert_close(parameter, ours, theirs, 1e-9, atol=1e-12)

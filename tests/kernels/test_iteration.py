"""The fused iteration without its kernels: which maps it supports, and how solvers request it.

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.sweeps import Case
from torch import Tensor

from bedouin import Bedouin
from bedouin.kernels.iteration import IterationRule, Progress, fuse_iteration
from bedouin.solvers import ImplicitAdjoint, Jacobi, Picard, UnrolledAdjoint, solve

ONE = Case(heads=1, b=1, t=1, p=4, has_axis=False)
RULE = IterationRule("picard", 1e-4, 1e-8)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (ONE, {"rule": Picard(patience=3).rule()}, "adaptive damping"),
        (replace(ONE, low_rank=True), {}, "this mixer"),
        (ONE, {"parameters": (torch.empty(1),)}, "this mixer"),
        (replace(ONE, k=9), {}, "9 reflections"),
        (replace(ONE, dtype=torch.float64), {}, "x, y and A of torch.float64, torch.float32"),
        (ONE, {"y_dtype": torch.bfloat16}, "x, y and A of torch.float32, torch.bfloat16"),
        (replace(ONE, n=1025), {}, "1025 states"),
        (replace(ONE, p=8193, feedback=False), {}, "2 reflections of 8193 channels"),
    ],
    ids=str,
)
def test_limits_of_the_kernels(
    case: Case, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    y = torch.empty(1, 1, case.p, dtype=changes.get("y_dtype", torch.float32))
    rule, parameters = changes.get("rule", RULE), changes.get("parameters", ())
    given = case.operands(), y, case.options(), parameters, rule
    with pytest.raises(ValueError, match=f"does not support {message}"):
        fuse_iteration(*given, backend="triton")
    assert fuse_iteration(*given) is None


class _Steps:
    """Halves y, converged at the third step."""

    def __init__(self, y: Tensor) -> None:
        self.y, self.count = y, 0
        self.calls: list[str] = []

    def advance(self) -> None:
        self.calls.append("advance")
        self.y, self.count = self.y / 2, self.count + 1

    def certify(self) -> None:
        self.calls.append("certify")

    def finished(self) -> bool:
        return self.count == 3

    @property
    def progress(self) -> Progress:
        frozen = torch.full_like(self.y[..., 0], self.count >= 3, dtype=torch.bool)
        norm = torch.zeros_like(self.y[..., 0])
        steps = torch.full_like(frozen[:, 0], self.count, dtype=torch.int64)
        return Progress(self.y, frozen, frozen[:, 0] & False, steps, norm, norm, None)


class _FusedMap:
    """A map that does whole steps, unless a gradient is wanted."""

    def __init__(self) -> None:
        self.steps: list[_Steps] = []
        self.rules: list[IterationRule] = []

    def __call__(self, y: Tensor) -> Tensor:
        return y / 2

    def block_solve(self, y: Tensor) -> tuple[Tensor, None]:
        return y / 2, None

    def fuse(self, y: Tensor, rule: IterationRule) -> _Steps:
        self.rules.append(rule)
        self.steps.append(_Steps(y))
        return self.steps[-1]


def test_a_solver_leaves_the_steps_to_a_map_that_does_them() -> None:
    f, y0 = _FusedMap(), torch.ones(2, 4, 3)
    solution = solve(f, y0, Picard(0.2, 0.1, damping=0.5), time_dim=1)
    assert f.rules == [IterationRule("picard", 0.2, 0.1, 0.5)]
    assert f.steps[0].calls == ["advance"] * 3
    assert solution.value.unique().tolist() == [0.125]
    assert solution.stats.num_steps.tolist() == [3, 3]


def test_the_cap_is_certified() -> None:
    f = _FusedMap()
    solve(
        f, torch.ones(1, 1, 1), Jacobi(0.2, 0.1), max_steps=2, time_dim=1, on_unconverged="ignore"
    )
    assert f.rules == [IterationRule("jacobi", 0.2, 0.1)]
    assert f.steps[0].calls == ["advance", "advance", "certify"]


@pytest.mark.parametrize("tracked", [True, False])
def test_unrolling_takes_the_plain_loop(tracked: bool) -> None:
    f, adjoint = _FusedMap(), UnrolledAdjoint() if tracked else ImplicitAdjoint()
    y0 = torch.ones(1, 2, 3, requires_grad=tracked)
    solve(f, y0, Picard(0.0, 1e-2), time_dim=1, adjoint=adjoint)
    assert len(f.steps) == (0 if tracked else 1)


def test_a_map_of_another_shape_takes_the_plain_loop() -> None:
    f = _FusedMap()
    solve(f, torch.ones(2, 3), Picard(0.0, 1e-2))
    assert not f.steps


def test_on_a_cpu_auto_is_the_plain_loop() -> None:
    f = Bedouin(4, solver=Picard()).map(torch.randn(1, 2, 4))
    assert f.fuse(torch.zeros(1, 2, 8), RULE) is None

"""The fused iteration without its kernels: which maps it supports, and how solvers request it.

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin import Bedouin
from bedouin.kernels.iteration import IterationRule, Progress, choose_iteration
from bedouin.kernels.operands import Operands, Parameterization, RawLayout
from bedouin.solvers import ImplicitAdjoint, Jacobi, Picard, UnrolledAdjoint, solve

LAYOUT = RawLayout("softplus", True, 2, 1.0)
OPTIONS = Parameterization(LAYOUT, "delta", "positive", None)
RULE = IterationRule("picard", 1e-4, 1e-8)


def _inputs(d: int, n: int, dtype: torch.dtype, layout: RawLayout = LAYOUT) -> Operands:
    x, raw = torch.empty(1, 1, d, dtype=dtype), torch.empty(1, 1, layout.size(d, n), dtype=dtype)
    A = torch.empty(d, n)
    return Operands(x, raw, None, A, A.unsqueeze(0), x[:, 0])


def _choose(backend: Any, d: int = 4, n: int = 3, **changes: Any) -> str:
    layout, rule = changes.get("layout", LAYOUT), changes.get("rule", RULE)
    inputs = _inputs(d, n, changes.get("dtype", torch.float32), layout or LAYOUT)
    y = torch.empty(1, 1, d, dtype=changes.get("y_dtype", torch.float32))
    parameters = changes.get("bind_parameters", ())
    return choose_iteration(backend, inputs, y, replace(OPTIONS, layout=layout), parameters, rule)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": replace(RULE, adaptive=True)}, "adaptive damping"),
        ({"layout": None}, "this mixer"),
        ({"bind_parameters": (torch.empty(1),)}, "this mixer"),
        ({"layout": RawLayout("softplus", True, 9, 1.0)}, "9 reflections"),
        ({"dtype": torch.float64}, "x, y and A of torch.float64, torch.float32"),
        ({"y_dtype": torch.bfloat16}, "x, y and A of torch.float32, torch.bfloat16"),
        ({"n": 1025}, "1025 states"),
        ({"d": 8193}, "2 reflections of 8193 channels"),
    ],
)
def test_limits_of_the_kernels(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=f"does not support {message}"):
        _choose("triton", **changes)
    assert _choose("auto", **changes) == "reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_x_may_have_half_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert _choose("triton", dtype=dtype) == "triton"


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


def test_a_rule_says_what_a_solver_does() -> None:
    assert Picard(stop_rule="paper").rule().whole_sequence
    assert Picard(patience=3).rule().adaptive


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
    layer = Bedouin(4, solver=Picard())
    f, y = layer_map(layer), torch.zeros(1, 2, 8)
    assert f.fuse(y, RULE) is None


def layer_map(layer: Bedouin) -> Any:
    """The map of a layer on a random input (1, 2, m)."""
    return layer.map(torch.randn(1, 2, layer.d_model))

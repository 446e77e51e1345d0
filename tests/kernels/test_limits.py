"""Which sweeps and iterations the kernels cover, what sweeps keep, and the device of launches."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.sweeps import Case, shared_memory
from tests.kernels.table import BF16, F64
from tests.layer_cases import draw, make

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct.limits import choose_sweep
from bedouin.kernels.iteration import IterationRule, fuse_iteration
from bedouin.solvers import Picard

ONE = Case(heads=1, b=1, t=1, p=4, has_axis=False)
H100, A100, L4 = 232448, 166912, 101376
"""Bytes of shared memory that one program can have."""


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(k=5), r"5 reflections in a sweep \(at most 4\)"),
        (Case(p=1025, n=1, feedback=False), "heads of 1025 channels with 1 states in a sweep"),
        (Case(p=513, n=17), r"heads of 513 .* \(at most 1024 with 16, or 256 with 64; set n"),
        (Case(p=64, n=65), "heads of 64 channels with 65 states"),
        (Case(input_scale="one_minus_decay"), "input_scale='one_minus_decay' with 3 states"),
        (Case(eigenvalues="full"), "eigenvalues='full' in a sweep"),
        (Case(dtype=torch.float64), "x, raw and A of torch.float64"),
    ],
    ids=str,
)
def test_limits_of_the_sweep(case: Case, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    operands, options = case.operands(), case.options()
    with pytest.raises(ValueError, match=f"does not support {message}"):
        choose_sweep("triton", operands, options)
    assert choose_sweep("auto", operands, options) == "reference"


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (ONE, {"rule": Picard(patience=3).rule()}, "adaptive damping"),
        (replace(ONE, low_rank=True), {}, "this mixer"),
        (ONE, {"parameters": (torch.zeros(1),)}, "this mixer"),
        (replace(ONE, k=9), {}, "9 reflections"),
        (replace(ONE, dtype=F64), {}, "x, y and A of torch.float64, torch.float32"),
        (replace(ONE, n=1025), {}, "1025 states"),
        (replace(ONE, p=8193, feedback=False), {}, "2 reflections of 8193 channels"),
    ],
    ids=str,
)
def test_limits_of_the_iteration(
    case: Case, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    y = torch.empty(1, 1, case.p)
    rule, parameters = (
        changes.get("rule", IterationRule(1e-4, 1e-8)),
        changes.get("parameters", ()),
    )
    given = case.operands(), y, case.options(), parameters, rule
    with pytest.raises(ValueError, match=f"does not support {message}"):
        fuse_iteration(*given, backend="triton")
    assert fuse_iteration(*given) is None


@pytest.mark.parametrize("low", [None, BF16])
@pytest.mark.parametrize("memory", [L4, A100, H100])
def test_every_head_of_some_channels_has_a_kernel(
    memory: int, low: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On sm_89, sm_80 and sm_90, with its W^y in shared memory, read anew for each token, or in a
    product between launches."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with shared_memory(memory):
        for k in range(5):
            for has_axis in (True, False):
                for p, n in ((128, 64), (256, 64), (1024, 16)):
                    case = Case(heads=1, b=1, t=1, p=p, n=n, k=k, low=low, has_axis=has_axis)
                    assert choose_sweep("triton", case.operands(), case.options()) == "triton"


def test_the_precision_of_products_by_all_names_of_the_setting() -> None:
    """Also by the name whose use makes torch refuse to read the older one."""
    from bedouin.kernels.direct.launch import uses_tf32

    matmul = torch.backends.cuda.matmul
    before, older = matmul.fp32_precision, torch.get_float32_matmul_precision()
    rounds = not interpreter_is_on()
    try:
        assert not uses_tf32()
        torch.set_float32_matmul_precision("high")
        assert uses_tf32() == rounds
        torch.set_float32_matmul_precision("highest")
        for precision in ("tf32", "ieee", "tf32"):
            matmul.fp32_precision = precision
            assert uses_tf32() == (rounds and precision == "tf32")
    finally:
        matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision(older)
        matmul.fp32_precision = before


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["one head", "heads", "no feedback", "vector", "picard", "jacobi"])
def test_every_launch_is_on_the_device_of_its_tensors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import GridExecutor

    launch: Any = GridExecutor.__call__
    launched: list[str] = []
    inside = [0]
    enter: Any = torch.cuda.device_of.__enter__
    leave: Any = torch.cuda.device_of.__exit__

    def entered(self: Any) -> None:
        inside[0] += 1
        assert self.idx == -1  # that of the CPU
        enter(self)

    def left(self: Any, *raised: Any) -> None:
        inside[0] -= 1
        leave(self, *raised)

    def checked(self: Any, *args: Any, **given: Any) -> None:
        # an operation enters the device of its first tensor if that is on a GPU
        names = [frame.frame.f_globals["__name__"] for frame in inspect.stack(0)]
        assert inside[0] or "bedouin.kernels.operation" in names, self.fn.__name__
        launched.append(self.fn.__name__)
        launch(self, *args, **given)

    monkeypatch.setattr(torch.cuda.device_of, "__enter__", entered)
    monkeypatch.setattr(torch.cuda.device_of, "__exit__", left)
    monkeypatch.setattr(GridExecutor, "__call__", checked)
    options: dict[str, Any] = {"max_steps": 2, "on_unconverged": "ignore"}
    layer = make(name, dtype=torch.float32, backend="triton", **options)
    x = draw(2, 2).float()
    with torch.no_grad():
        layer(x)
        layer.step(x[:, 0], layer.init_state(2))
    layer(x).sum().backward()
    assert len(set(launched)) > 4 and not inside[0]

"""The persistent sweeps with several programs that wait for each other, as threads.

Triton's interpreter runs one program after the other, so that the first one that waits would wait
for ever. Here it runs all programs of a launch at once; what they share is memory alone.
Letters: b batch, t time, d channels.
"""

import inspect
import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from bedouin.kernels.backend import interpreter_is_on

if not interpreter_is_on():
    pytest.skip("runs in Triton's interpreter", allow_module_level=True)

from tests.kernels.test_direct_triton import Setting, _assert_like_the_plain_sweep
from triton.runtime import interpreter

from bedouin.kernels.direct import triton_launch, triton_plan

pytestmark = pytest.mark.interpreter

SECONDS = 300
"""After which a program that still waits is taken for a deadlock."""


class AtOnce:
    """A kernel whose programs run in a thread each, and which returns when all have finished."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []
        # what the interpreter reads of a function
        self.__globals__, self.__name__ = kernel.__globals__, kernel.__name__
        self.__signature__ = inspect.signature(kernel)

    def _run(self, index: tuple[int, int, int], args: dict[str, Any]) -> None:
        try:
            interpreter.interpreter_builder.set_grid_idx(*index)
            self.kernel(**args)
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self.errors.append(error)

    def __call__(self, **args: Any) -> None:
        """The interpreter calls this for one program after the other."""
        builder = interpreter.interpreter_builder
        given = builder.grid_idx, args
        self.threads.append(threading.Thread(target=self._run, args=given, daemon=True))
        if len(self.threads) < math.prod(builder.grid_dim):
            return
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join(SECONDS)
            if self.errors:
                raise self.errors[0]
            assert not thread.is_alive(), "programs wait for each other"


@pytest.fixture
def concurrent_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An interpreter that runs all programs of a launch at once."""
    initialize = interpreter.GridExecutor.__init__

    def with_threads(executor: Any, fn: Any, *args: Any, **kwargs: Any) -> None:
        initialize(executor, fn, *args, **kwargs)
        executor.fn = AtOnce(executor.fn)

    monkeypatch.setattr(interpreter.GridExecutor, "__init__", with_threads)
    local = threading.local()
    own_index = property(
        lambda _: getattr(local, "index", None), lambda _, index: setattr(local, "index", index)
    )
    builder = type(interpreter.interpreter_builder)
    monkeypatch.setattr(builder, "grid_idx", own_index, raising=False)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-4)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("concurrent_programs")
@pytest.mark.parametrize(
    ("programs", "b", "t", "d", "keep_every", "separate", "ahead"),
    [
        (2, 2, 3, 6, 2, False, False),  # a tile and a sample, a sample
        (3, 2, 3, 6, 2, True, False),
        (6, 2, 3, 6, 2, True, False),
        (8, 2, 7, 6, 2, True, True),  # four chunks, the last one short
        (10, 2, 3, 40, 2, True, True),
        (8, 2, 2, 6, 2, True, True),
    ],
)
def test_programs_that_wait_for_each_other(
    programs: int,
    b: int,
    t: int,
    d: int,
    keep_every: int,
    separate: bool,
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan_for_one, reverse = triton_plan._plan, triton_launch._reverse
    seen: list[tuple[bool, bool]] = []

    def plan(m: int, v: int, *rest: Any) -> Any:
        made = plan_for_one(m, v, *rest)
        assert made is not None
        tiles = -(-m // made.block_m) * made.splits
        shape = {"one_tile": tiles <= programs, "separate": tiles + b <= programs}
        return replace(made, programs=programs, **shape)

    def spied(*args: Any, **how: Any) -> None:
        plan_of_reverse = next(v for v in args if isinstance(v, triton_plan.Plan))
        seen.append((plan_of_reverse.separate, how["ahead"]))
        reverse(*args, **how)

    monkeypatch.setattr(triton_plan, "_plan", plan)
    monkeypatch.setattr(triton_launch, "_reverse", spied)
    setting = Setting(b=b, t=t, d=d, n=3, dtype=torch.float64)
    _assert_like_the_plain_sweep(setting, triton_plan.LIMITS, keep_every)
    assert set(seen) == {(separate, ahead)}
    assert len(seen) == (1 if ahead else -(-t // keep_every))

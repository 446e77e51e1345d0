"""Compilation without Triton's pass Coalesce, for a GPU that is not there."""
# The kernel is written in the language of Triton, which has no types for mypy.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import threading
from collections.abc import Callable
from typing import Any

import pytest
import triton
import triton.language as tl
from triton import knobs
from triton._C.libtriton import passes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.compilation import NAME, without_coalescing

pytestmark = pytest.mark.skipif(interpreter_is_on(), reason="the interpreter compiles nothing")


@triton.jit
def copy_kernel(from_ptr, to_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(to_ptr + i, tl.load(from_ptr + i))


@pytest.fixture
def compile_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> Callable[[int], tuple[int, bool]]:
    """A function that compiles the kernel for N values: how often the pass was added, and whether
    there is machine code."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    added: list[int] = []
    add = passes.ttgpuir.add_coalesce

    def counted(manager: Any) -> None:
        added.append(1)
        add(manager)

    monkeypatch.setattr(passes.ttgpuir, "add_coalesce", counted)

    def run(N: int) -> tuple[int, bool]:
        added.clear()
        signature = {"from_ptr": "*fp32", "to_ptr": "*fp32", "N": "constexpr"}
        source = ASTSource(copy_kernel, signature, {(2,): N})
        options = {"enable_fp_fusion": True}  # Triton 3.9 warns of its default
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        return len(added), "cubin" in found.asm

    return run


def test_the_pass_is_left_out_inside_only(compile_kernel: Callable[[int], Any]) -> None:
    assert compile_kernel(64) == (1, True)
    with without_coalescing():
        # another entry of the cache, although the kernel is the same
        assert compile_kernel(64) == (0, True)
    assert knobs.runtime.add_stages_inspection_hook is None
    assert compile_kernel(128) == (1, True)


def test_other_threads_keep_the_pass(compile_kernel: Callable[[int], Any]) -> None:
    found: list[Any] = []
    with without_coalescing():
        thread = threading.Thread(target=lambda: found.append(compile_kernel(64)))
        thread.start()
        thread.join()
    assert found == [(1, True)]


def test_a_hook_of_the_caller_is_called(compile_kernel: Callable[[int], Any]) -> None:
    calls: list[int] = []

    def hook(*given: Any) -> tuple[str, str] | None:
        calls.append(len(given))
        return None if given else ("mine", "mine")

    knobs.runtime.add_stages_inspection_hook = hook
    try:
        with without_coalescing():
            key = knobs.runtime.add_stages_inspection_hook()
            assert key == (f"mine{NAME}", f"mine{NAME}")
            assert compile_kernel(64) == (0, True)
        assert knobs.runtime.add_stages_inspection_hook is hook
    finally:
        knobs.runtime.add_stages_inspection_hook = None
    assert 0 in calls and max(calls) > 0


def test_threads_take_turns(compile_kernel: Callable[[int], Any]) -> None:
    """The second thread enters when the first has left, and nothing stays installed."""
    entered, leave = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        with without_coalescing():
            entered.set()
            leave.wait()
            order.append("first")

    def second() -> None:
        with without_coalescing():
            order.append("second")

    threads = [threading.Thread(target=run) for run in (first, second)]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join()
    assert order == ["first", "second"]
    assert knobs.runtime.add_stages_inspection_hook is None
    assert compile_kernel(64) == (1, True)


def test_an_error_restores_the_pass(compile_kernel: Callable[[int], Any]) -> None:
    with pytest.raises(ZeroDivisionError), without_coalescing():
        raise ZeroDivisionError
    assert compile_kernel(64) == (1, True)

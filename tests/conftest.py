"""Setup of all tests: one thread, fixed seeds, NaN in uninitialized memory, skipped GPU tests."""

import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from torch import Tensor

# Deterministic mode requires this before the first cuBLAS call.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class _TorchRandom:
    """torch's global generator as hypothesis seeds and restores it around every example."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


# Assigned to a name because hypothesis keeps only a weak reference.
_TORCH_RANDOM = _TorchRandom()

_Tensors = tuple[Any, ...]  # of triton.language


def _combine(ops: Any, before: _Tensors, after: _Tensors) -> _Tensors:
    found = ops.combine_fn.fn(*before, *after)
    return found if isinstance(found, tuple) else (found,)


def _take(ops: Any, values: _Tensors, axis: int, indices: Sequence[int]) -> _Tensors:
    return tuple(ops.to_tensor(v.handle.data.take(indices, axis), v.dtype) for v in values)


def _reduce_in_a_tree(ops: Any, given: _Tensors) -> list[Any]:
    values, axis = ops.unravel(given, ops.axis)
    while (size := values[0].handle.data.shape[axis]) > 1:
        even, odd = (_take(ops, values, axis, range(first, size, 2)) for first in (0, 1))
        values = _combine(ops, even, odd)
    shape = [
        1 if ops.axis in (None, i) else size
        for i, size in enumerate(given[0].handle.data.shape)
        if ops.keep_dims or ops.axis not in (None, i)
    ]
    return [ops.to_tensor(v.handle.data.reshape(shape), v.dtype) for v in values]


def _scan_slices(ops: Any, values: _Tensors) -> list[Any]:
    size = values[0].handle.data.shape[ops.axis]
    steps = [_take(ops, values, ops.axis, [i]) for i in range(size)]
    for i in range(1, len(steps)):
        steps[i] = _combine(ops, steps[i - 1], steps[i])
    columns = ([v.handle.data for v in column] for column in zip(*steps, strict=True))
    joined = (np.concatenate(column, ops.axis) for column in columns)
    return [ops.to_tensor(v, given.dtype) for v, given in zip(joined, values, strict=True)]


def _spare_the_interpreter() -> None:
    """Spare Triton's interpreter most of its time; it computes the same.

    Where a kernel gives the function of a reduction or scan, the interpreter calls it for single
    elements. Here it takes whole slices, a reduction's in pairs.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    def fill_in(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        setattr(place, name, call)

    interpreter._patch_attr = fill_in
    # Functions of the language are replaced once, not at every launch and again at every call.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    # It computes whether integers overflow; only its debug mode reads that.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    interpreter.ReduceOps.generic_reduce = _reduce_in_a_tree
    interpreter.ScanOps.generic_scan = _scan_slices

    look_up, known = interpreter._get_np_dtype, {}

    def look_up_once(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = look_up(dtype)
        return known[dtype.name]

    describe, known_blocks = tl.block_type.__init__, {}
    scalar = tl.constexpr(1), tl.tuple([])

    # equal types share their attributes, which nothing changes
    def make_block(kind: Any, element: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        of = element.name, getattr(element, "const", None), getattr(element, "address_space", None)
        if (of, sizes) not in known_blocks:
            describe(kind, element, shape)
            kind.sizes = tl.constexpr(kind.numel), tl.tuple([tl.constexpr(size) for size in sizes])
            known_blocks[of, sizes] = kind.__dict__
        kind.__dict__ = known_blocks[of, sizes]

    def make_tensor(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.numel, tensor.shape = kind.sizes if kind.is_block() else scalar

    interpreter._get_np_dtype = look_up_once
    tl.block_type.__init__ = make_block
    tl.tensor.__init__ = make_tensor


def pytest_configure(config: pytest.Config) -> None:
    # One thread: the tensors are small, and the workers share the cores.
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        _spare_the_interpreter()
    hypothesis.register_random(_TORCH_RANDOM)
    # No deadline: the first example includes imports, and the machine may be busy.
    hypothesis.settings.register_profile("bedouin", deadline=None, print_blob=True)
    ci = hypothesis.settings(hypothesis.settings.get_profile("bedouin"), derandomize=True)
    hypothesis.settings.register_profile("bedouin-ci", ci)
    hypothesis.settings.load_profile("bedouin-ci" if os.environ.get("CI") else "bedouin")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # first, so that no process waits for them at the end
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    missing = {
        "gpu": not torch.cuda.is_available(),
        # Read from the environment: Triton decides when it is imported, before any fixture.
        "interpreter": os.environ.get("TRITON_INTERPRET") != "1",
    }
    reason = {"gpu": "needs a CUDA device", "interpreter": "needs TRITON_INTERPRET=1"}
    for item in items:
        for name in (name for name, lacks in missing.items() if lacks):
            if item.get_closest_marker(name) is not None:
                item.add_marker(pytest.mark.skip(reason=reason[name]))


@pytest.fixture(autouse=True)
def default_seeds() -> None:
    """Seed the global generators; a test that cares draws from its own."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nan_in_uninitialized_memory() -> Iterator[None]:
    """Fill what torch.empty and its kin return with NaN, or with the largest integer.

    Deterministic mode does this below Python, for allocations inside torch's operators too, and
    under vmap and torch.compile, where a patched torch.empty would not be seen.
    """
    mode = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.set_deterministic_debug_mode(mode)


@pytest.fixture
def no_synchronization() -> Callable[[], AbstractContextManager[None]]:
    """A context in which waiting for the GPU is an error."""

    @contextmanager
    def context() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return context


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Graphs on a CPU; the outputs of all captures."""
    outputs: list[Tensor] = []

    def rerun(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        output = run()
        outputs.append(output)
        return lambda: output.copy_(run()), output

    monkeypatch.setattr("bedouin.decode.capture", rerun)
    monkeypatch.setattr("bedouin.decode.can_capture", lambda x_t: True)
    monkeypatch.setattr("bedouin.decode.choose_backend", lambda *of: "triton")
    return outputs


@pytest.fixture
def fresh_compiler() -> None:
    """Compilations of the same code by other tests would count as recompilations."""
    torch.compiler.reset()

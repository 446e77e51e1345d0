"""Setup of all tests: one thread, fixed seeds, NaN in uninitialized memory, skipped GPU tests."""

import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor

# Deterministic mode requires this before the first cuBLAS call.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class _TorchRandom:
    """torch's global generator as hypothesis seeds and restores it around every example."""

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def getstate(self) -> Tensor:
        return torch.get_rng_state()

    def setstate(self, state: Tensor) -> None:
        torch.set_rng_state(state)


# Assigned to a name because hypothesis keeps only a weak reference.
_TORCH_RANDOM = _TorchRandom()


def _prepare_language_once_a_launch() -> None:
    """Spare Triton's interpreter about half of its time.

    It replaces the functions of triton.language by its own at a launch, and again at every call of
    a device function. Within a launch, only the first call from a module changes anything.
    """
    from triton.runtime import interpreter

    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[int] = set()

    def prepare_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in prepared:
            return None  # read by a launch alone, whose own call is the first
        prepared.add(module)
        return prepare(function)

    def launch_once(executor: Any, *args: Any, **kwargs: Any) -> None:
        try:
            launch(executor, *args, **kwargs)
        finally:
            prepared.clear()

    interpreter._patch_lang = prepare_once
    interpreter.GridExecutor.__call__ = launch_once


def pytest_configure(config: pytest.Config) -> None:
    # One thread: the tensors are small, and the workers share the cores.
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        _prepare_language_once_a_launch()
    hypothesis.register_random(_TORCH_RANDOM)
    # No deadline: the first example includes imports, and the machine may be busy.
    hypothesis.settings.register_profile("bedouin", deadline=None, print_blob=True)
    ci = hypothesis.settings(hypothesis.settings.get_profile("bedouin"), derandomize=True)
    hypothesis.settings.register_profile("bedouin-ci", ci)
    hypothesis.settings.load_profile("bedouin-ci" if os.environ.get("CI") else "bedouin")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "fuzz" not in config.option.markexpr:
        # left out, not skipped: the default run has a short form of each of these tests
        items[:] = [item for item in items if item.get_closest_marker("fuzz") is None]
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


@contextmanager
def _no_synchronization() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def no_synchronization() -> Callable[[], AbstractContextManager[None]]:
    """A context in which waiting for the GPU is an error."""
    return _no_synchronization

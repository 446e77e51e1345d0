"""Launches of Triton kernels, recorded on a machine without a GPU instead of run.

The library takes meta tensors for tensors on an H100, and Triton a driver that only names it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
H100 = SimpleNamespace(
    multi_processor_count=132, shared_memory_per_block_optin=232448, major=9, minor=0
)
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_cooperative_grid")


class Pointer:
    """A tensor's data as far as Triton specializes on it; allocations are aligned."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._at = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._at

    def ptr_range(self) -> int:
        return 0


class Driver:
    """What Triton asks the driver in order to compile."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


class Device(str):
    """Made from "meta": a string for torch, a GPU for whoever reads `type`."""

    type = "cuda"


class Implementations(TorchDispatchMode):
    """Runs registered operations, of which meta tensors would only get the shapes."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        run = implementation(func._schema.name)
        if run is None:
            return func(*args, **(kwargs or {}))
        with self:
            return run(*args, **(kwargs or {}))


def implementation(name: str) -> Callable[..., Any] | None:
    """The function behind a registered operation. Earlier checkouts have no list of their own."""
    ours = getattr(sys.modules.get("bedouin.kernels.operation"), "OPERATIONS", {})
    if name in ours:
        function: Callable[..., Any] = ours[name].function
        return function
    return OPDEFS[name]._init_fn if name in OPDEFS else None


@dataclass
class Launch:
    """One specialization of a kernel."""

    kernel: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: Any
    cases: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Constants, dtypes of the arguments (":16": divisible by 16) and launch options."""
        names = self.kernel.arg_names
        constants = {names[at[0]]: str(value) for at, value in self.constants.items()}
        arguments = [
            f"{kind}:16" if self.attributes.get((at,)) else str(kind)
            for at, kind in enumerate(self.signature.values())
            if kind != "constexpr"
        ]
        chosen = [f"{name}={getattr(self.options, name)}" for name in OPTIONS]
        settings = [f"{name}={value}" for name, value in sorted(constants.items())]
        return f"({', '.join(arguments)}) {' '.join(settings)} {' '.join(chosen)}"


def capture(cases: Mapping[str, Callable[[], None]]) -> list[Launch]:
    """The launches of all cases, each specialization once."""
    launches: dict[tuple[str, ...], Launch] = {}
    triton.runtime.driver.set_active(Driver())
    for name, case in cases.items():
        with _recording(launches, name):
            case()
        if not any(name in launch.cases for launch in launches.values()):
            raise RuntimeError(f"{name!r} launches no kernel: adapt the call to this checkout")
    return list(launches.values())


@contextmanager
def _recording(launches: dict[tuple[str, ...], Launch], case: str) -> Iterator[None]:
    """Launches go into `launches`; the library takes meta tensors for tensors on an H100."""
    run: Any = JITFunction.run
    device: Any = torch.Tensor.device
    is_cuda: Any = torch.Tensor.is_cuda

    def run_warmup(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        given = [Pointer(v) if isinstance(v, Tensor) else v for v in args]
        named = {k: Pointer(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        return run(self, *given, grid=grid, warmup=True, **named)

    def record(
        self: Any, key: Any, signature: Any, _: int, constants: Any, options: Any, *rest: Any
    ) -> None:
        launch = Launch(self, signature, constants, rest[0], options)
        launch = launches.setdefault((self.fn.__module__, self.fn.__name__, launch.text), launch)
        if case not in launch.cases:
            launch.cases.append(case)

    def device_of(tensor: Tensor) -> Any:
        return Device("meta") if _asked_by_library() else device.__get__(tensor)

    def is_cuda_of(tensor: Tensor) -> bool:
        return _asked_by_library() or bool(is_cuda.__get__(tensor))

    with (
        patch.object(JITFunction, "run", run_warmup),
        patch.object(JITFunction, "_do_compile", record),
        patch.object(torch.Tensor, "device", property(device_of)),
        patch.object(torch.Tensor, "is_cuda", property(is_cuda_of)),
        patch.object(torch.cuda, "get_device_properties", lambda device=None: H100),
        # nothing can be read from a meta tensor, and the library reads nothing within a capture
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
        Implementations(),  # type: ignore[no-untyped-call]
    ):
        yield


def _asked_by_library() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("bedouin")

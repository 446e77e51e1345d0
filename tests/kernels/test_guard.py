"""The device of launches, and what happens where a kernel does not fit the GPU.

Letters: b batch, t time, m d_model, d channels, n state per channel, H heads.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin import Bedouin, FixedPointRNN
from bedouin.kernels import backend as kernels_backend
from bedouin.kernels.backend import Backend, interpreter_is_on
from bedouin.kernels.guard import KernelDoesNotFit, Launching, falls_back
from bedouin.kernels.launch import Device
from bedouin.kernels.output import gated_output, shifted_norm
from bedouin.kernels.scan import selective_scan
from bedouin.solvers import Direct, Jacobi, Picard

M = 16


class Driver:
    """Triton's, of a GPU that is only named."""

    device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class OutOfResources(Exception):
    """Triton's, which is not imported here."""

    required, limit, name = 100352, 65536, "shared memory"


OutOfResources.__module__ = "triton.runtime.errors"


class Elsewhere(Tensor):
    def get_device(self) -> int:
        return 1


def test_launches_are_on_the_device_of_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    def exchange(device: int) -> int:
        before, current[0] = current[0], device if device >= 0 else current[0]
        return before

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    with Launching(torch.zeros(2).as_subclass(Elsewhere)):
        assert current == [1]
    assert current == [0]
    with Launching(torch.zeros(2)):
        assert current == [0]
    with pytest.raises(KernelDoesNotFit), Launching(torch.zeros(2).as_subclass(Elsewhere)):
        raise OutOfResources
    assert current == [0]


class Kernel:
    """Has the name of a function, as Triton's JITFunction has."""

    __name__ = "some_kernel"

    def run(self) -> None:
        raise OutOfResources


def test_the_message_names_the_kernel_and_the_remedy() -> None:
    expected = r"some_kernel needs 100352 of shared memory, .* has 65536: use backend='reference'"
    with pytest.raises(KernelDoesNotFit, match=expected), Launching(torch.zeros(2)):
        Kernel().run()


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError), Launching(torch.zeros(2)):
        raise ZeroDivisionError


def test_auto_falls_back_and_triton_does_not() -> None:
    @falls_back
    def compute(x: Tensor, *, backend: Backend = "auto") -> Backend:
        if backend != "reference":
            with Launching(x):
                Kernel().run()
        return backend

    with pytest.warns(UserWarning, match="some_kernel.*as backend='auto' does"):
        assert compute(torch.zeros(2)) == "reference"
    with pytest.raises(KernelDoesNotFit):
        compute(torch.zeros(2), backend="triton")


# With the real kernels

compiles = pytest.mark.skipif(interpreter_is_on(), reason="the interpreter launches by itself")

Unfit = Callable[..., None]


@pytest.fixture
def unfit(monkeypatch: pytest.MonkeyPatch) -> Unfit:
    """A function that names the kernels that do not fit, by default all; the others do nothing. The
    CPU looks like an H100."""
    triton = pytest.importorskip("triton")
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction

    names: list[str] = []

    def run(self: Any, *args: Any, **options: Any) -> None:
        if not names or self.__name__ in names:
            raise OutOfResources(100352, 65536, "shared memory")

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(kernels_backend, "is_cuda_device", lambda device: True)
    monkeypatch.setattr(Device, "of", staticmethod(lambda device: Device(132, 232448)))
    return lambda *some: names.extend(some)


LAYERS: list[tuple[type[Bedouin] | type[FixedPointRNN], dict[str, Any]]] = [
    (Bedouin, {"num_heads": 1}),
    (Bedouin, {"num_heads": 2}),
    (Bedouin, {"num_heads": 1, "feedback": ()}),
    (FixedPointRNN, {"num_householder": 1}),
    (Bedouin, {"solver": Jacobi()}),
    (Bedouin, {"solver": Picard(), "feedback": ()}),
]


def make(kind: Any, backend: Backend, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(M, backend=backend, **options)


def results(layer: Any) -> list[Tensor]:
    """Output, last state and gradients."""
    x = torch.randn(2, 4, M, generator=torch.Generator().manual_seed(1))
    y, state = layer(x, return_state=True)
    total = y.square().sum() + state.y.sum() + state.ssm.sum()
    return [y, state.y, state.ssm, *torch.autograd.grad(total, list(layer.parameters()))]


@compiles
@pytest.mark.filterwarnings("ignore:the Triton kernel:UserWarning")
@pytest.mark.parametrize("kind, options", LAYERS)
def test_a_layer_falls_back_to_the_reference(
    kind: Any, options: dict[str, Any], unfit: Unfit
) -> None:
    expected = results(make(kind, "reference", **options))
    with pytest.warns(UserWarning, match="the Triton kernel .*_kernel needs 100352 of shared"):
        found = results(make(kind, "auto", **options))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@compiles
@pytest.mark.parametrize("solver", [Direct(), Jacobi()])
def test_triton_raises_what_auto_falls_back_from(solver: Any, unfit: Unfit) -> None:
    layer = make(Bedouin, "triton", solver=solver)
    with torch.no_grad(), pytest.raises(KernelDoesNotFit, match="needs 100352 of shared memory"):
        layer(torch.randn(2, 4, M))


@compiles
@pytest.mark.parametrize("kernel", ["output_backward_kernel", "reverse_head_kernel"])
def test_a_backward_pass_names_the_kernel_and_the_remedy(kernel: str, unfit: Unfit) -> None:
    unfit(kernel)
    output = make(Bedouin, "auto", on_unconverged="ignore")(torch.randn(2, 4, M))
    with pytest.raises(RuntimeError, match=f"{kernel} needs .*: use backend='reference'"):
        output.sum().backward()


@compiles
@pytest.mark.filterwarnings("ignore:the Triton kernel:UserWarning")
@pytest.mark.parametrize("num_heads", [1, 2])
def test_a_decoded_token_falls_back_to_the_reference(num_heads: int, unfit: Unfit) -> None:
    found = []
    for backend in ("reference", "auto"):
        layer = make(Bedouin, backend, num_heads=num_heads)
        x_t = torch.randn(2, M, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            output, state = layer.step(x_t, layer.init_state(2))
        found.append([output, state.y, state.ssm])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@compiles
@pytest.mark.filterwarnings("ignore:the Triton kernel:UserWarning")
def test_operations_fall_back_to_the_reference(unfit: Unfit) -> None:
    v = torch.rand(2, 4, 6)
    D, A = torch.rand(6), -torch.rand(6, 3)
    operations: list[Callable[[Backend], Tensor]] = [
        lambda backend: selective_scan(v, v, A, v[..., :3], v[..., 3:], backend=backend)[0],
        lambda backend: gated_output(v, v, D, v, None, v, D, backend=backend),
        lambda backend: shifted_norm(v, None, 1e-5, backend=backend),
    ]
    for operation in operations:
        assert torch.equal(operation("auto"), operation("reference"))
        with pytest.raises(KernelDoesNotFit):
            operation("triton")


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind, options", LAYERS)
def test_every_launch_is_on_the_device_of_its_tensors(
    kind: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import GridExecutor

    launch: Any = GridExecutor.__call__
    launched: list[str] = []
    inside = [0]
    enter: Any = Launching.__enter__
    leave: Any = Launching.__exit__

    def entered(self: Launching) -> None:
        inside[0] += 1
        assert self.idx == -1  # that of the CPU
        enter(self)

    def left(self: Launching, *raised: Any) -> None:
        inside[0] -= 1
        leave(self, *raised)

    def checked(self: Any, *args: Any, **given: Any) -> None:
        assert inside[0], self.fn.__name__
        launched.append(self.fn.__name__)
        launch(self, *args, **given)

    monkeypatch.setattr(Launching, "__enter__", entered)
    monkeypatch.setattr(Launching, "__exit__", left)
    monkeypatch.setattr(GridExecutor, "__call__", checked)
    layer = make(kind, "triton", max_steps=2, on_unconverged="ignore", **options)
    x = torch.randn(2, 2, M)
    with torch.no_grad():
        layer(x)
        layer.step(x[:, 0], layer.init_state(2))
    layer(x).sum().backward()
    assert len(set(launched)) > 4 and not inside[0]


@pytest.mark.gpu
@pytest.mark.parametrize("solver", [Direct(), Jacobi()])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_a_layer_on_a_gpu_that_is_not_the_current_one(solver: Any, num_heads: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    options = {"num_heads": num_heads, "on_unconverged": "ignore"}
    layer = make(Bedouin, "auto", solver=solver, **options).cuda(0)
    x = torch.randn(2, 5, M, device="cuda:0")
    expected = layer(x)
    expected.sum().backward()
    grads = [v.grad.cpu() for v in layer.parameters()]
    layer.zero_grad()
    layer, x = layer.to("cuda:1"), x.to("cuda:1")
    with torch.cuda.device(0):
        found = layer(x)
        found.sum().backward()
        with torch.no_grad():
            token, _ = layer.step(x[:, 0], layer.init_state(2))
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(token.cpu(), expected[:, 0].cpu(), rtol=1e-3, atol=1e-4)
    for v, grad in zip(layer.parameters(), grads, strict=True):
        torch.testing.assert_close(v.grad.cpu(), grad, rtol=1e-3, atol=1e-4)

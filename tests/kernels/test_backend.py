"""The choice of a backend: "auto" selects one; any other choice is obeyed or refused."""

import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin.kernels import backend as kernels_backend
from bedouin.kernels.backend import Backend, choose_backend

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


LOW = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("backend", "device", "dtypes", "interpreted", "chosen"),
    [
        ("auto", "cuda", LOW, False, "triton"),
        ("triton", "cuda", LOW, False, "triton"),
        ("reference", "cuda", (*LOW, torch.float64), False, "reference"),
        ("auto", "cuda", (torch.float64,), False, "reference"),
        ("triton", "cpu", LOW, True, "triton"),
        *(("auto", "cpu", (*LOW, torch.float64), on, "reference") for on in (True, False)),
        *(("auto", name, LOW, False, "reference") for name in ("mps", "xpu", "meta")),
    ],
)
def test_the_choice_for_a_device_and_a_dtype(
    backend: Backend, device: str, dtypes: Any, interpreted: bool, chosen: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", str(int(interpreted)))
    for dtype in dtypes:
        assert choose_backend(backend, torch.device(device), dtype) == chosen


@pytest.mark.parametrize(
    ("device", "options", "hip", "message"),
    [
        (CPU, {}, None, r"needs tensors on a CUDA device, got cpu: .*'auto'"),
        (CUDA, {}, "7.0", "needs tensors on a CUDA device, got cuda:0 of ROCm"),
        (CUDA, {"dtype": torch.float64}, None, r"not support torch.float64 \(only torch.float32"),
        (CUDA, {"unsupported": "complex"}, None, "does not support complex: use backend='auto'"),
    ],
)
def test_triton_is_refused_with_the_remedy_where_auto_takes_the_reference(
    device: torch.device, options: dict[str, Any], hip: Any, message: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert choose_backend("auto", device, **options) == "reference"
    with pytest.raises(ValueError, match=message):
        choose_backend("triton", device, **options)


def test_auto_takes_the_reference_under_a_transform() -> None:
    seen = []

    def probe(x: Tensor) -> Tensor:
        seen.append(choose_backend("auto", CUDA))
        with pytest.raises(ValueError, match=r"does not support torch\.func transforms"):
            choose_backend("triton", CUDA)
        return x

    torch.func.vmap(probe)(torch.zeros(2, 3))
    assert seen == ["reference"]


def test_an_older_gpu_takes_the_reference_and_is_named_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of compute capability 7.5."""
    monkeypatch.setattr(kernels_backend, "_TOO_OLD", {})
    monkeypatch.setattr(kernels_backend, "_TOLD", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    for device in (CUDA, torch.device("cuda", 1)):
        with pytest.warns(UserWarning, match=f"reference on {device}.* capability 8.0.* has 7.5"):
            assert choose_backend("auto", device) == "reference"
        assert choose_backend("auto", device) == "reference"
    with pytest.raises(ValueError, match=r"capability 8.0 or more, got 7.5 of cuda:0: use backend"):
        choose_backend("triton", CUDA)


def test_a_graph_knows_whether_the_gpu_is_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 1)
    monkeypatch.setattr(kernels_backend, "_TOO_OLD", {CUDA: "7.5", cuda: ""})
    monkeypatch.setattr(kernels_backend, "_TOLD", set())

    def probe(x: Tensor) -> Tensor:
        old, recent = choose_backend("auto", CUDA), choose_backend("auto", cuda)
        return x + (old == "reference") + 2 * (recent == choose_backend("triton", cuda))

    x = torch.zeros(2)
    with pytest.warns(UserWarning, match="takes the reference on cuda:0"):
        assert torch.compile(probe, fullgraph=True, backend="eager")(x).tolist() == [3, 3]


def test_a_graph_warns_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_backend, "_TRITON", "3.6.0")
    monkeypatch.setattr(kernels_backend, "_TOLD", set())

    def probe(x: Tensor) -> Tensor:
        unfit = f"{x.shape[0]} reflections"
        return x + (choose_backend("auto", CUDA, unsupported=unfit, warning=unfit) == "reference")

    compiled = torch.compile(probe, fullgraph=True, backend="eager")
    with pytest.warns(UserWarning, match="on cuda:0.* do not support 2 reflections"):
        assert compiled(torch.zeros(2)).tolist() == [1, 1]
    probe(torch.zeros(2))
    assert torch.func.vmap(probe)(torch.zeros(3, 1)).shape == (3, 1)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_an_old_triton_is_answered_with_the_lowest_version(
    monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "3.1.0")
    found, is_old = kernels_backend._find_triton()
    assert (found, is_old) == ("3.1.0", True)
    monkeypatch.setattr(kernels_backend, "_TRITON", found)
    monkeypatch.setattr(kernels_backend, "_IS_OLD", is_old)
    with pytest.raises(ValueError, match=f"{backend}.*needs triton >= 3.6, got 3.1.0: install"):
        choose_backend(backend, CUDA)
    assert choose_backend("auto", CPU) == choose_backend("reference", CUDA) == "reference"


@pytest.mark.parametrize("version", ["3.6.0", "3.10.1+git1234", "4.0"])
def test_newer_tritons_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert kernels_backend._find_triton() == (version, False)


WITHOUT_TRITON = """
import sys, torch
sys.modules["triton"] = None
import bedouin, bedouin.baselines, bedouin.tasks, bedouin.testing
from bedouin.kernels.backend import choose_backend
from bedouin.solvers import Jacobi, Picard

torch.manual_seed(0)
for layer in (
    bedouin.Bedouin(4), bedouin.Bedouin(4, num_heads=2), bedouin.FixedPointRNN(4),
    bedouin.Bedouin(4, solver=Picard()), bedouin.Bedouin(4, solver=Jacobi()),
):
    optimizer = torch.optim.AdamW(bedouin.param_groups(layer, weight_decay=0.1))
    layer(torch.randn(2, 3, 4)).square().sum().backward()
    optimizer.step()
    layer.step(torch.randn(2, 4), layer.init_state(2))
assert not [name for name in sys.modules if name.startswith("triton.")]
cuda = torch.device("cuda", 0)
assert choose_backend("auto", cuda) == "reference"
try:
    choose_backend("triton", cuda)
except ValueError as error:
    assert "needs the package triton: install it" in str(error)
else:
    raise AssertionError("no error")
"""


def test_the_library_trains_without_triton() -> None:
    command = [sys.executable, "-P", "-W", "error", "-c", WITHOUT_TRITON]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_library_imports_neither_triton_nor_the_compiler_nor_torchdeq() -> None:
    """The sources of torchdeq warn on Python 3.12, and only Anderson and Broyden need it."""
    script = (
        "import sys, bedouin.kernels.direct, bedouin.kernels.scan; "
        "print({'triton', 'torch._dynamo', 'torchdeq'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr

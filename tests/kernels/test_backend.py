"""The choice of a backend: "auto" selects one; any other choice is obeyed or refused."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, check_backend, choose_backend

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_cpu_takes_the_reference(backend: Backend, dtype: torch.dtype) -> None:
    assert choose_backend(backend, CPU, dtype) == "reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_auto_takes_triton_on_a_gpu(dtype: torch.dtype) -> None:
    assert choose_backend("auto", CUDA, dtype) == "triton"
    assert choose_backend("reference", CUDA, dtype) == "reference"


def test_auto_leaves_float64_to_the_reference() -> None:
    assert choose_backend("auto", CUDA, torch.float64) == "reference"
    assert choose_backend("triton", CUDA, torch.float64) == "triton"


def test_auto_takes_the_reference_under_a_transform() -> None:
    seen = []

    def probe(x: Tensor) -> Tensor:
        seen.append(choose_backend("auto", CUDA))
        return x

    torch.func.vmap(probe)(torch.zeros(2, 3))
    assert seen == ["reference"]


def test_triton_on_a_cpu_tensor_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"needs tensors on a CUDA device, got cpu: .*'auto'"):
        choose_backend("triton", CPU)


def test_the_interpreter_takes_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("triton", CPU) == "triton"
    assert choose_backend("auto", CPU) == "reference"


def test_triton_says_what_it_does_not_support() -> None:
    with pytest.raises(ValueError, match=r"does not support complex numbers: use backend='auto'"):
        choose_backend("triton", CUDA, unsupported="complex numbers")
    assert choose_backend("auto", CUDA, unsupported="complex numbers") == "reference"


WITHOUT_TRITON = """
import sys, torch
sys.modules["triton"] = None
from bedouin import Bedouin
from bedouin.kernels.backend import choose_backend
from bedouin.solvers import Picard

Bedouin(4, solver=Picard())(torch.zeros(1, 2, 4))
cuda = torch.device("cuda", 0)
assert choose_backend("auto", cuda) == "reference"
try:
    choose_backend("triton", cuda)
except ValueError as error:
    assert "needs the package triton: install it" in str(error)
else:
    raise AssertionError("no error")
"""


def test_the_library_and_its_references_do_without_triton() -> None:
    command = [sys.executable, "-c", WITHOUT_TRITON]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("backend", ["Triton", "", "cuda"])
def test_an_unknown_backend_is_answered_with_the_valid_names(backend: str) -> None:
    with pytest.raises(ValueError, match=r"backend must be one of \('auto', 'triton', 'reference'"):
        check_backend(backend)

"""The choice of an implementation: only "auto" chooses, everything else is said or refused."""

from collections.abc import Iterator

import pytest
import torch

from bedouin.kernels.backend import check_backend, choose_backend

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether Triton's interpreter is on, whatever the process says: off unless changed."""
    state = [False]
    monkeypatch.setattr("bedouin.kernels.backend.interpreter_is_on", lambda: state[0])
    yield state


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_the_reference_runs_on_every_device(device: torch.device) -> None:
    assert choose_backend("reference", device) == "reference"


def test_auto_takes_the_kernels_on_a_gpu_where_they_can_run(interpreter: list[bool]) -> None:
    assert choose_backend("auto", CUDA) == "triton"
    assert choose_backend("auto", CUDA, "complex numbers") == "reference"
    interpreter[0] = True
    assert choose_backend("auto", CPU) == "reference"


def test_triton_on_a_cpu_tensor_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"needs tensors on a CUDA device, got cpu: .*'auto'"):
        choose_backend("triton", CPU)


def test_the_interpreter_takes_cpu_tensors(interpreter: list[bool]) -> None:
    interpreter[0] = True
    assert choose_backend("triton", CPU) == "triton"


def test_triton_says_what_it_does_not_support() -> None:
    with pytest.raises(ValueError, match=r"does not support complex numbers: use backend='auto'"):
        choose_backend("triton", CUDA, "complex numbers")


@pytest.mark.parametrize("backend", ["Triton", "", "cuda"])
def test_an_unknown_backend_is_answered_with_the_valid_names(backend: str) -> None:
    with pytest.raises(ValueError, match=r"backend must be one of \('auto', 'triton', 'reference'"):
        check_backend(backend)

"""The choice of an implementation: only "auto" chooses, everything else is said or refused."""

import pytest
import torch

from bedouin.kernels.backend import Backend, check_backend, choose_backend

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_the_reference_runs_on_every_device(backend: Backend, device: torch.device) -> None:
    assert choose_backend(backend, device) == "reference"


def test_triton_on_a_cpu_tensor_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"needs tensors on a CUDA device, got cpu: .*'auto'"):
        choose_backend("triton", CPU)


def test_triton_on_a_gpu_says_that_there_are_no_kernels_yet() -> None:
    with pytest.raises(NotImplementedError, match="this version has no Triton kernels; use"):
        choose_backend("triton", CUDA)


@pytest.mark.parametrize("backend", ["Triton", "", "cuda"])
def test_an_unknown_backend_is_answered_with_the_valid_names(backend: str) -> None:
    with pytest.raises(ValueError, match=r"backend must be one of \('auto', 'triton', 'reference'"):
        check_backend(backend)

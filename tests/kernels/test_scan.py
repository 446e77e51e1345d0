"""What is special to the selective scan: its state, its scales and its memory.

`test_operations.py` compares it with the recurrence.
Letters: b batch, t time, d channels, n state per channel.
"""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.rows import scan
from tests.kernels.table import F32, kernels

from bedouin.kernels.scan import Eigenvalues, discretize, selective_scan

eigenvalues = st.sampled_from(get_args(Eigenvalues))


@settings(max_examples=25)
@given(seed=st.integers(0, 999), eig=eigenvalues)
def test_the_coupled_scale_never_gains(seed: int, eig: Eigenvalues) -> None:
    torch.manual_seed(seed)
    _, delta, A, *_ = scan(2, 3).tensors.values()
    assert delta is not None and A is not None
    decay, s = discretize(delta, A, "one_minus_decay", eig)
    assert bool((decay.abs() + s <= 1 + 1e-15).all()) and bool((s >= 0).all())


def test_bounded_delta_stays_below_one_and_full_eigenvalues_reach_minus_one() -> None:
    delta = torch.tensor([0.0, 1.0, 1e6])
    decay, s = discretize(delta, -torch.ones(3, 1), "bounded_delta", "full")
    torch.testing.assert_close(s.flatten(), torch.tensor([0.0, 0.5, 1e6 / (1e6 + 1)]))
    torch.testing.assert_close(decay[[0, 2]].flatten(), torch.tensor([1.0, -1.0]))


@kernels
def test_memory_is_kept_at_every_sixteenth_token_for_a_backward_alone(device: str) -> None:
    tensors = [v if v is None else v.to(device, F32) for v in scan(2, 18).tensors.values()]
    run = torch.ops.bedouin.selective_scan
    for keep in (True, False):
        _, _, kept = run(*tensors, "delta", "positive", False, keep)
        assert kept.shape == (2, 2 if keep else 0, 3, 2)
    leaves = [v if v is None else v.requires_grad_() for v in tensors]
    with pytest.raises(ValueError, match="keep must be True where gradients are recorded"):
        run(*leaves, "delta", "positive", False, False)


@pytest.mark.gpu
def test_peak_memory_is_far_below_one_tensor_of_all_states() -> None:
    tensors = scan(2, 4096, 64, 64).given(F32, "cuda")
    leaves = [v if v is None else v.requires_grad_() for v in tensors.values()]
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y, h = selective_scan(*leaves, backend="triton")  # type: ignore[arg-type]
        torch.autograd.grad(y.sum() + h.sum(), [v for v in leaves if v is not None])
        del y, h
    all_states = 2 * 4096 * 64 * 64 * 4
    assert torch.cuda.max_memory_allocated() - before < all_states / 2

"""What is special to single operations; test_operations.py compares each with its definition.

Products of reflections where rounding matters, the state, scales and memory of the scan, hard
decays of the tracker, hooks on the convolution. The checks of the kernels run on the CPU in the
interpreter and compiled on a GPU.
Letters: b batch, t time, d channels, n states, H heads, c channels of a head.
"""

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.rows import scan
from tests.kernels.rows_memory import tracker
from tests.kernels.table import F32, Call, Tensors, kernels, results
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels.householder import apply_complement, unit, wy_factor
from bedouin.kernels.scan import Eigenvalues, discretize, selective_scan
from bedouin.kernels.track import TrackInputs, track_reference
from bedouin.kernels.track.types import ROWS
from bedouin.layers.convolution import ShortConvolution


def test_the_complement_of_a_small_beta_does_not_cancel() -> None:
    v, U, beta = torch.randn(2, 64), unit(torch.randn(2, 4, 64)), 1e-6 * torch.rand(2, 4)
    found, expected = (
        apply_complement(v, None, U, wy_factor(U, beta))
        for v, U, beta in ((v, U, beta), (v.double(), U.double(), beta.double()))
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 7, 512])
def test_unit_at_the_zero_vector_has_a_moderate_gradient(length: int, dtype: torch.dtype) -> None:
    v = torch.zeros(length, dtype=dtype, requires_grad=True)
    out = unit(v)
    assert torch.equal(out, torch.zeros_like(out))
    (grad,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(grad, torch.full_like(grad, (length * 1e-6) ** -0.5))


eigenvalues = st.sampled_from(get_args(Eigenvalues))


@settings(max_examples=25)
@given(seed=st.integers(0, 999), eig=eigenvalues)
def test_the_coupled_scale_never_gains(seed: int, eig: Eigenvalues) -> None:
    torch.manual_seed(seed)
    _, delta, A, *_ = scan(2, 3).tensors.values()
    assert delta is not None and A is not None
    decay, s = discretize(delta, A, "one_minus_decay", eig)
    assert bool((decay.abs() + s <= 1 + 1e-15).all()) and bool((s >= 0).all())


@pytest.mark.parametrize(
    ("b", "t", "d", "n"),
    [
        *((128, 16, 1024, 16), (8, 4096, 1024, 16), (2, 4096, 64, 64), (1, 4096, 2048, 128)),
        (1, 300, 1024, 1),
    ],
)
def test_workspaces_are_a_sixteenth_of_all_states_or_sixteen_tokens(
    b: int, t: int, d: int, n: int
) -> None:
    from bedouin.kernels.launch import ceil_div, next_power_of_two
    from bedouin.kernels.scan.registered import choose_block

    block = choose_block(torch.empty(b, t, d, device="meta"), n, reverse=True)
    blocks = ceil_div(d, block)
    limit = max(b * t * d * n / 16, b * 16 * d * n)
    assert b * blocks * 16 * block * next_power_of_two(n) <= limit
    assert b * t * blocks * n <= limit, "parts of the gradient of B, and of C"


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


BY_TOKEN = TrackInputs._fields[:ROWS]


def by_kernels(call: Call, tensors: Tensors, weighed: int | None = None) -> dict[str, Tensor]:
    return results(call, lambda *v: call.run(*v, backend="triton"), tensors, weighed)


def test_the_loop_has_the_derivative_of_finite_differences() -> None:
    given = [v.requires_grad_() for v in tracker(2, 4, c=3, n=2).tensors.values() if v is not None]

    def run(*tensors: Tensor) -> Any:
        return tuple(track_reference(TrackInputs(*tensors), 1e-5, 1e-4))

    assert torch.autograd.gradcheck(run, given)


@kernels
def test_closed_tokens_pass_the_memory(device: str) -> None:
    call = tracker(2, 20, 1)
    tensors: Any = call.given(F32, device)
    for name in ("delta", "erase"):
        tensors[name][:, 7:] = -1e30
    short = {k: v[:, :7] if v is not None and k in BY_TOKEN else v for k, v in tensors.items()}
    found, expected = (by_kernels(call, v, 1) for v in (tensors, short))
    for name, v in expected.items():
        ours = found[name]
        if name.startswith("gradient") and name.removeprefix("gradient of ") in BY_TOKEN:
            assert not ours[:, 7:].any()
        ours = ours[:, :7] if ours.shape[1:2] == (20,) else ours
        torch.testing.assert_close(ours, v, rtol=1e-4, atol=1e-5)


@kernels
@pytest.mark.parametrize("A_log", [-math.inf, -69.0, 9.2])
def test_rates_without_a_decay_and_with_a_strong_one(A_log: float, device: str) -> None:
    call = tracker(t=20, H=1)
    tensors: Any = call.given(F32, device)
    tensors["A_log"][1:] = A_log
    found = by_kernels(call, tensors)
    wide = {k: v if v is None else v.double() for k, v in tensors.items()}
    for name, theirs in results(call, call.exact, wide).items():
        torch.testing.assert_close(found[name].double(), theirs, rtol=1e-4, atol=1e-4)


def test_a_hook_on_the_module_acts() -> None:
    conv = ShortConvolution(6, 4, bias=False)
    x, window = torch.randn(2, 7, 6), torch.zeros(2, 3, 6)
    expected = F.silu(2 * conv(x, window)[0])
    conv.register_forward_hook(lambda module, inputs, output: (2 * output[0], output[1]))
    torch.testing.assert_close(conv.activated(x, window)[0], expected)

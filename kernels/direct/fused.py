"""The direct sweep and its reverse sweep with Triton kernels: buffers, plans and launches.

The forward is one launch without feedback, and one persistent launch with it; where that does not
fit (`plan_sweep`), a token is one product with W^y and one launch. The reverse sweep takes a chunk
of tokens at a time. Nothing is read by the host, so that a sweep can be captured in a CUDA graph.
Triton is imported when a sweep runs, not with this module.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, Implementation, choose_backend
from bedouin.kernels.direct.reference import SweepOptions, normalize_feedback
from bedouin.kernels.direct.reverse import feedback_vjp

MAX_STATE = 32768
"""Most elements of a sample's memory, both axes rounded up to a power of two: one program holds it
in registers. 2048 channels with 16 states."""

MAX_REFLECTIONS = 8
ALIGNMENT = 64


def choose_sweep(
    backend: Backend,
    x: Tensor,  # (b, t, d)
    raw: Tensor,  # (b, t, r)
    A: Tensor,  # (d, n)
    bind_parameters: tuple[Tensor, ...],
    options: SweepOptions,
) -> Implementation:
    """The implementation of a sweep; raises as `choose_backend` does."""
    unsupported = _unsupported(x, raw, A, bind_parameters, options)
    return choose_backend(backend, x.device, x.dtype, unsupported)


def _unsupported(
    x: Tensor, raw: Tensor, A: Tensor, bind_parameters: tuple[Tensor, ...], options: SweepOptions
) -> str | None:
    """What the kernels do not cover, in words."""
    layout, (d, n) = options.layout, A.shape
    if layout is None or bind_parameters or raw.shape[-1] != layout.size(d, n):
        return "this mixer (only HouseholderProduct)"
    if not 1 <= layout.num_householder <= MAX_REFLECTIONS:
        return f"{layout.num_householder} reflections (at most {MAX_REFLECTIONS})"
    wide = torch.float64 in (x.dtype, raw.dtype, A.dtype)
    if A.dtype not in (torch.float32, torch.float64) or (
        wide and {x.dtype, raw.dtype} != {A.dtype}
    ):
        return f"x, raw and A of {x.dtype}, {raw.dtype}, {A.dtype} (A float32, or all float64)"
    if d < 1 or n < 1 or _power_of_two(d) * _power_of_two(n) > MAX_STATE:
        return f"{d} channels with {n} states (at most {MAX_STATE} together)"
    if _power_of_two(d) * _power_of_two(layout.num_householder) > MAX_STATE // 2:
        return f"{layout.num_householder} reflections of {d} channels"
    return None


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


class SweepBuffers(NamedTuple):
    """Tensors of a sweep; the last axis of x and raw is contiguous, the others are whole."""

    x: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r)
    W_y: Tensor | None  # (r, d)
    A: Tensor  # (n, d), log2(e) A
    h: Tensor  # (b, n, d), in place
    kept: Tensor  # (b, slots, n, d)
    y: Tensor  # (b, t, d)
    normed: Tensor  # (b, t + 1, d), in the dtype of W^y, the first token's given
    statistics: Tensor  # (4, b, t): defect, scale, magnitude, pivot


class KnownBuffers(NamedTuple):
    """What is known when y is."""

    x: Tensor  # (b, t, d)
    y: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r)
    fed: Tensor | None  # (b, t, r or more), W^y norm(y_{t-1})
    A: Tensor  # (n, d), log2(e) A
    kept: Tensor  # (b, slots, n, d)


class GradBuffers(NamedTuple):
    """Cotangents, given and wanted."""

    y: Tensor  # (b, t, d)
    H: Tensor  # (b, n, d), of the last h, in place that of h0
    x: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r or more), may be the memory of `fed`; zeros from r on
    A: Tensor  # (b, n, d), zeros
    statistics: Tensor  # (2, b, t): defect and scale


def fused_sweep(
    x: Tensor,  # (b, t, d)
    raw: Tensor,  # (b, t, r)
    W_y: Tensor | None,  # (r, d)
    A: Tensor,  # (d, n)
    h0: Tensor,  # (b, d, n)
    y0: Tensor,  # (b, d)
    options: SweepOptions,
    keep_every: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`forward_sweep`: y (b, t, d), the last h (b, d, n), norm(y_{t-1}) (b, t, d), the kept memory
    (b, ceil(t / keep_every), n, d) and the statistics (4, b, t): defect, scale, magnitude, pivot.

    Without feedback norm(y_{t-1}) is (b, 0, d).
    """
    from bedouin.kernels.direct.triton_launch import launch_sweep

    (b, t_end, d), n = x.shape, A.shape[1]
    state: dict[str, Any] = {"dtype": A.dtype, "device": x.device}
    kept = torch.empty(b, -(-t_end // keep_every), n, d, **state)
    statistics = torch.zeros(4, b, t_end, **state)
    h = h0.mT.clone(memory_format=torch.contiguous_format)
    y = torch.empty(b, t_end, d, **state)
    normed = _first_normed(y0, W_y, t_end, options)
    if b and t_end:
        buffers = SweepBuffers(
            _rows(x), _rows(raw), W_y, _exponents(A), h, kept, y, normed, statistics
        )
        launch_sweep(buffers, options, keep_every)
    return y, h.mT, _before(normed, W_y, t_end), kept, statistics


def _first_normed(y0: Tensor, W_y: Tensor | None, t_end: int, options: SweepOptions) -> Tensor:
    """(b, t + 1, d), in the dtype of W^y, with norm(y0) at the first token; (b, 1, d) without."""
    first = normalize_feedback(y0, options.feedback_norm_eps)
    if W_y is None:
        return first.unsqueeze(1)
    normed = W_y.new_empty(y0.shape[0], t_end + 1, y0.shape[1])
    normed[:, 0] = first
    return normed


def _before(normed: Tensor, W_y: Tensor | None, t_end: int) -> Tensor:
    """What the feedback of each token sees: nothing without feedback."""
    return (
        normed.new_empty(normed.shape[0], 0, normed.shape[2]) if W_y is None else normed[:, :t_end]
    )


def padding(r: int) -> int:
    """Values to add to r for a multiple of 64, so that rows of raw values are aligned."""
    return -r % ALIGNMENT


def pad_rows(W: Tensor) -> Tensor:
    """W^y (r, d) with `padding(r)` zero rows."""
    return torch.nn.functional.pad(W, (0, 0, 0, padding(W.shape[0])))


def _exponents(A: Tensor) -> Tensor:
    """log2(e) A (n, d): the decay is 2 to that times Delta."""
    return (A.mT * math.log2(math.e)).contiguous()


def _rows(v: Tensor) -> Tensor:
    """v, in the same memory if its last axis is contiguous."""
    return v if v.stride(-1) == 1 else v.contiguous()


def smallest_pivots(pivots: Tensor) -> Tensor:
    """(b,), of all tokens (b, t)."""
    if not pivots.shape[1]:
        return pivots.new_full(pivots.shape[:1], torch.inf)
    # NaN after a singular token must not hide its pivot
    return pivots.nan_to_num(nan=torch.inf).amin(1)


def fused_memory(
    y: Tensor,  # (b, t, d), a fixed point found elsewhere
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor,
    y0: Tensor,
    options: SweepOptions,
    keep_every: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`remember`: the last h (b, d, n), norm(y_{t-1}) and the kept memory, as `fused_sweep`."""
    from bedouin.kernels.direct.triton_launch import launch_memory

    (b, t_end, d), n = x.shape, A.shape[1]
    kept = A.new_empty(b, -(-t_end // keep_every), n, d)
    h = h0.mT.clone(memory_format=torch.contiguous_format)
    normed = _first_normed(y0, W_y, t_end, options)
    if W_y is not None:
        normed[:, 1:] = normalize_feedback(y, options.feedback_norm_eps)
    normed = _before(normed, W_y, t_end)
    if b and t_end:
        fed = None if W_y is None else normed @ pad_rows(W_y).mT
        known = KnownBuffers(_rows(x), y.contiguous(), _rows(raw), fed, _exponents(A), kept)
        launch_memory(known, h, options, keep_every)
    return h.mT, normed, kept


def fused_reverse(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor,  # (b, d, n)
    kept: Tensor,  # (b, ceil(t / keep_every), n, d)
    normed: Tensor,  # (b, t, d), norm(y_{t-1})
    keep_every: int,
    y: Tensor,  # (b, t, d)
    x: Tensor,  # (b, t, d)
    raw: Tensor,  # (b, t, r)
    W_y: Tensor | None,
    A: Tensor,  # (d, n)
    y0: Tensor,  # (b, d)
    options: SweepOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`reverse_sweep`: gradients of x, raw, W_y (empty without feedback), A, h0 and y0, and the
    statistics (2, b, t) of the adjoint equation: defect and scale.

    A chunk of tokens is replayed from the memory kept before it, into a workspace of keep_every
    memories, then taken back.
    """
    from bedouin.kernels.direct.triton_launch import launch_reverse

    (b, t_end, d), n = x.shape, A.shape[1]
    A_rows = _exponents(A)
    H = (torch.zeros_like(A_rows).expand(b, n, d) + grad_h.mT).contiguous()
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    grad_A = A_rows.new_zeros(b, n, d)
    statistics = A.new_zeros(2, b, t_end)
    fed = None if W_y is None else normed @ pad_rows(W_y).mT
    # a token's feedback is read before its cotangent is written: one memory for both
    if fed is None:
        grad_raw = raw.new_empty(raw.shape)
    else:
        grad_raw = fed if fed.dtype == raw.dtype else torch.zeros_like(fed, dtype=raw.dtype)
    pulled = None
    if b and t_end:
        known = KnownBuffers(_rows(x), y, _rows(raw), fed, A_rows, kept)
        grads = GradBuffers(_rows(grad_y), H, grad_x, grad_raw, grad_A, statistics)
        pulled = launch_reverse(known, grads, W_y, options, keep_every)
    grad_y0 = torch.zeros_like(y0)
    if pulled is not None:
        grad_y0 = feedback_vjp(pulled.sum(0), y0, options)
    grad_W_y = A.new_empty(0)
    if W_y is not None:
        grad_W_y = grad_raw.to(W_y.dtype).flatten(0, 1).mT @ normed.flatten(0, 1)
        grad_raw, grad_W_y = grad_raw[..., : raw.shape[-1]], grad_W_y[: W_y.shape[0]]
    return grad_x, grad_raw, grad_W_y, grad_A.sum(0).mT, H.mT, grad_y0, statistics

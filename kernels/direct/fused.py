"""The direct sweep and its reverse sweep with Triton kernels: buffers, plans and launches.

The forward is one launch without feedback, and one persistent launch with it; where that does not
fit (`plan_product`), a token is one product with W^y and one launch. The reverse sweep takes a
chunk of tokens at a time. Nothing is read by the host, so that a sweep can be captured in a CUDA
graph. Triton is imported when a sweep runs, not with this module.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, Implementation, choose_backend
from bedouin.kernels.direct.reference import SweepOptions, normalize_feedback
from bedouin.kernels.direct.reverse import feedback_vjp
from bedouin.kernels.launch import next_power_of_two
from bedouin.kernels.linear import pad_rows, padding

MAX_STATE = 32768
"""Most elements of a sample's memory, both axes rounded up to a power of two: one program holds it
in registers. 2048 channels with 16 states."""

MAX_REFLECTIONS = 8


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
    if d < 1 or n < 1 or next_power_of_two(d) * next_power_of_two(n) > MAX_STATE:
        return f"{d} channels with {n} states (at most {MAX_STATE} together)"
    if next_power_of_two(d) * next_power_of_two(layout.num_householder) > MAX_STATE // 2:
        return f"{layout.num_householder} reflections of {d} channels"
    return None


class SweepBuffers(NamedTuple):
    """Tensors of a sweep; the last axis of x and raw is contiguous, the others are whole."""

    x: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r)
    W_y: Tensor | None  # (r, d)
    A: Tensor  # (n, d), log2(e) A
    h: Tensor  # (b, n, d), in place
    kept: Tensor  # (b, slots, n, d)
    y: Tensor  # (b, t, d)
    normed: Tensor  # (b, t, d), norm(y_{t-1}) in the dtype of W^y, the first token's given
    statistics: Tensor  # (4, b, t): defect, scale, magnitude, pivot


class KnownBuffers(NamedTuple):
    """What is known when y is."""

    x: Tensor  # (b, t, d)
    y: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r)
    fed: Tensor | None  # (b, t, r or more), W^y norm(y_{t-1})
    A: Tensor  # (n, d), log2(e) A
    h0: Tensor  # (b, n, d), the samples perhaps in one memory
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
    h0: Tensor | None,  # (b, d, n); None: zeros
    y0: Tensor | None,  # (b, d); None: zeros
    options: SweepOptions,
    keep_every: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`forward_sweep`: y (b, t, d), the last h (b, d, n), the kept memory (b, `count_kept`, n, d)
    and the statistics (4, b, t): defect, scale, magnitude, pivot.
    """
    from bedouin.kernels.direct.triton_launch import launch_sweep

    (b, t_end, d), n = x.shape, A.shape[1]
    state: dict[str, Any] = {"dtype": A.dtype, "device": x.device}
    kept = torch.empty(b, count_kept(t_end, keep_every), n, d, **state)
    statistics = torch.empty(4, b, t_end, **state)
    h = _first_memory(h0, b, A)
    y = torch.empty(b, t_end, d, **state)
    normed = _first_normed(y0, W_y, (b, t_end, d), options)
    if b and t_end:
        buffers = SweepBuffers(
            *(_rows(x), _rows(raw), W_y, _exponents(A), h, kept, y),
            *(y if normed is None else normed, statistics),
        )
        launch_sweep(buffers, options, keep_every)
    return y, h.mT, kept, statistics


def count_kept(t_end: int, keep_every: int) -> int:
    """How often h is kept: before tokens keep_every, 2 keep_every, ...; the first one is given."""
    return max(0, (t_end - 1) // keep_every)


def _first_memory(h0: Tensor | None, b: int, A: Tensor) -> Tensor:
    """(b, n, d), fresh memory."""
    if h0 is None:
        return A.new_zeros(b, A.shape[1], A.shape[0])
    return h0.mT.clone(memory_format=torch.contiguous_format)


def _given_memory(h0: Tensor | None, b: int, A: Tensor) -> Tensor:
    """h before the first token (b, n, d), zeros of all samples in one memory."""
    d, n = A.shape
    return A.new_zeros(n, d).expand(b, n, d) if h0 is None else h0.mT.contiguous()


def _first_normed(
    y0: Tensor | None, W_y: Tensor | None, shape: tuple[int, int, int], options: SweepOptions
) -> Tensor | None:
    """(b, t, d), in the dtype of W^y, with norm(y0) at the first token; None without."""
    if W_y is None:
        return None
    b, t_end, d = shape
    normed = W_y.new_empty(b, t_end, d)
    if y0 is None:
        normed[:, :1].zero_()
    else:
        normed[:, :1] = normalize_feedback(y0, options.feedback_norm_eps).unsqueeze(1)
    return normed


def _past(y: Tensor, y0: Tensor | None, W: Tensor, options: SweepOptions) -> Tensor:
    """norm(y_{t-1}) (b t, d) in the dtype of W^y."""
    from bedouin.kernels.output.launch import shifted_norm_forward

    if not y.numel():
        return y.to(W.dtype).flatten(0, 1)
    return shifted_norm_forward(y, y0, options.feedback_norm_eps, W.dtype).flatten(0, 1)


def _fed_back(y: Tensor, y0: Tensor | None, W: Tensor, options: SweepOptions) -> Tensor:
    """W^y norm(y_{t-1}) (b, t, r or more), zeros from r on."""
    fed: Tensor = (_past(y, y0, W, options) @ pad_rows(W).mT).unflatten(0, y.shape[:2])
    return fed


def _exponents(A: Tensor) -> Tensor:
    """log2(e) A (n, d): the decay is 2 to that times Delta."""
    exponents = A.new_empty(A.shape[1], A.shape[0])
    return torch.mul(A.mT, math.log2(math.e), out=exponents)


def _rows(v: Tensor) -> Tensor:
    """v, in the same memory if its last axis is contiguous."""
    return v if v.stride(-1) == 1 else v.contiguous()


def summarize(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Residual and smallest pivot of the samples (2, b), and whether they converged (b,), from the
    statistics (4, b, t) of a sweep; as `relative_residual` and `Direct` define them."""
    _, b, t_end = statistics.shape
    summary = statistics.new_empty(2, b)
    converged = torch.empty(b, dtype=torch.bool, device=statistics.device)
    if not t_end:
        summary[0], summary[1] = 0.0, math.inf
        converged.fill_(True)
    elif b:
        from bedouin.kernels.direct.triton_summary import launch_summary

        launch_summary(statistics, summary, converged)
    return summary, converged


def fused_memory(
    y: Tensor,  # (b, t, d), a fixed point found elsewhere
    x: Tensor,
    raw: Tensor,
    W_y: Tensor | None,
    A: Tensor,
    h0: Tensor | None,
    y0: Tensor | None,
    options: SweepOptions,
    keep_every: int,
) -> tuple[Tensor, Tensor]:
    """`remember`: the last h (b, d, n) and the kept memory, as `fused_sweep`."""
    from bedouin.kernels.direct.triton_launch import launch_memory

    (b, t_end, d), n = x.shape, A.shape[1]
    kept = A.new_empty(b, count_kept(t_end, keep_every), n, d)
    h = _first_memory(h0, b, A)
    if b and t_end:
        y = y.contiguous()
        fed = None if W_y is None else _fed_back(y, y0, W_y, options)
        first = _given_memory(h0, b, A)
        known = KnownBuffers(_rows(x), y, _rows(raw), fed, _exponents(A), first, kept)
        launch_memory(known, h, options, keep_every)
    return h.mT, kept


def fused_reverse(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor | None,  # (b, d, n); None: zeros
    kept: Tensor,  # (b, count_kept(t, keep_every), n, d)
    keep_every: int,
    y: Tensor,  # (b, t, d)
    x: Tensor,  # (b, t, d)
    raw: Tensor,  # (b, t, r)
    W_y: Tensor | None,
    A: Tensor,  # (d, n)
    h0: Tensor | None,  # (b, d, n); None: zeros
    y0: Tensor | None,  # (b, d); None: zeros
    options: SweepOptions,
    *,
    wants_y0: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`reverse_sweep`: gradients of x, raw, W_y (empty without feedback), A, h0 and y0 (empty if
    not wanted), and the statistics (2, b, t) of the adjoint equation: defect and scale.

    A chunk of tokens is replayed from the memory kept before it, into a workspace of keep_every - 1
    memories, then taken back. norm(y_{t-1}) is made again where it is needed, not kept.
    """
    from bedouin.kernels.direct.triton_launch import launch_reverse

    (b, t_end, _), r = x.shape, raw.shape[2]
    H, grad_A = _first_cotangents(grad_h, b, A)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    statistics = A.new_empty(2, b, t_end)
    fed = None
    if W_y is None:
        # rows as far apart as cuBLAS and wide stores like them
        grad_raw = raw.new_empty(b, t_end, r + padding(r))
    else:
        fed = _fed_back(y, y0, W_y, options)
        # a token's feedback is read before its cotangent is written: one memory for both
        grad_raw = fed if fed.dtype == raw.dtype else torch.zeros_like(fed, dtype=raw.dtype)
    pulled = None
    if b and t_end:
        first = _given_memory(h0, b, A)
        known = KnownBuffers(_rows(x), y, _rows(raw), fed, _exponents(A), first, kept)
        grads = GradBuffers(_rows(grad_y), H, grad_x, grad_raw, grad_A, statistics)
        pulled = launch_reverse(known, grads, W_y, options, keep_every)
    grad_y0 = _start_cotangent(pulled, y0 if wants_y0 else None, A, options)
    grad_W_y = A.new_empty(0)
    if W_y is not None:
        rows = grad_raw.to(W_y.dtype).flatten(0, 1)
        grad_W_y = (rows.mT @ _past(y, y0, W_y, options))[:r]
    return grad_x, grad_raw[..., :r], grad_W_y, grad_A.sum(0).mT, H.mT, grad_y0, statistics


def _first_cotangents(grad_h: Tensor | None, b: int, A: Tensor) -> tuple[Tensor, Tensor]:
    """That of the last h, and zeros for the parts of that of A: (b, n, d) each."""
    d, n = A.shape
    if grad_h is None:
        H, grad_A = A.new_zeros(2, b, n, d).unbind()
        return H, grad_A
    return grad_h.mT.clone(memory_format=torch.contiguous_format), A.new_zeros(b, n, d)


def _start_cotangent(
    pulled: Tensor | None, y0: Tensor | None, A: Tensor, options: SweepOptions
) -> Tensor:
    """That of y0 (b, d) from the parts (splits, b, d) of that of norm(y0); (0, d) for None."""
    if y0 is None:
        return A.new_empty(0, A.shape[0])
    return torch.zeros_like(y0) if pulled is None else feedback_vjp(pulled.sum(0), y0, options)

"""The direct sweep and its reverse sweep with Triton kernels: the loops around the launches.

Without feedback the forward is one launch. With feedback a token is one product with W^y and one
launch; all buffers are made before the loop and nothing is read by the host, so that a loop can be
captured in a CUDA graph. Triton is imported when a sweep runs, not with this module.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, Implementation, choose_backend
from bedouin.kernels.direct.reference import Sweep, SweepOptions, normalize_feedback
from bedouin.kernels.direct.reverse import (
    Inputs,
    ReportBackward,
    feedback_vjp,
    weight_gradient,
)

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
    if torch.compiler.is_compiling():
        return "torch.compile"
    if layout is None or bind_parameters or raw.shape[-1] != layout.size(d, n):
        return "this mixer (only HouseholderProduct)"
    if not 1 <= layout.num_householder <= MAX_REFLECTIONS:
        return f"{layout.num_householder} reflections (at most {MAX_REFLECTIONS})"
    if x.dtype not in (torch.float32, torch.float64) or {raw.dtype, A.dtype} != {x.dtype}:
        return f"x, raw and A of {x.dtype}, {raw.dtype}, {A.dtype} (all float32 or all float64)"
    if d < 1 or n < 1 or _power_of_two(d) * _power_of_two(n) > MAX_STATE:
        return f"{d} channels with {n} states (at most {MAX_STATE} together)"
    if _power_of_two(d) * _power_of_two(layout.num_householder) > MAX_STATE // 2:
        return f"{layout.num_householder} reflections of {d} channels"
    return None


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def fused_sweep(
    x: Tensor,  # (b, t, d)
    raw: Tensor,  # (b, t, r)
    W_y: Tensor | None,  # (r, d)
    A: Tensor,  # (d, n)
    h0: Tensor,  # (b, d, n)
    y0: Tensor,  # (b, d)
    options: SweepOptions,
    keep_every: int,
    y_star: Tensor | None,
) -> tuple[Sweep, Tensor]:
    """`forward_sweep`, or with y_star, where raw holds the feedback already, `remember`.

    The kept memory is one tensor (b, ceil(t / keep_every), n, d).
    """
    from bedouin.kernels.direct.triton_kernels import SweepBuffers, sweep_forward

    x, y_star = x.contiguous(), None if y_star is None else y_star.contiguous()
    (b, t_end, d), n, solve = x.shape, A.shape[1], y_star is None
    kept = x.new_empty(b, -(-t_end // keep_every), n, d)
    statistics = x.new_zeros(4, b, t_end)
    h = h0.mT.clone(memory_format=torch.contiguous_format)
    y = torch.empty_like(x) if y_star is None else y_star.clone()
    if b and t_end:
        low = x.dtype if W_y is None else W_y.dtype
        feeds = solve and W_y is not None
        # a copy: the kernel writes the next tokens' here
        normed = normalize_feedback(y0, options.feedback_norm_eps).to(low, copy=True).contiguous()
        fed_back = x.new_empty(b, raw.shape[-1], dtype=low) if feeds else None
        buffers = SweepBuffers(
            x, raw.contiguous(), fed_back, A.mT.contiguous(), h, kept, y, normed,
            statistics,
        )  # fmt: skip
        if W_y is None or fed_back is None:
            every = range(t_end)
            sweep_forward(buffers, every, options, solve=solve, origin=0, keep_every=keep_every)
        else:
            for t in range(t_end):
                torch.mm(normed, W_y.mT, out=fed_back)
                one = range(t, t + 1)
                sweep_forward(buffers, one, options, solve=True, origin=0, keep_every=keep_every)
    return _as_sweep(y, h, statistics), kept


def _as_sweep(y: Tensor, h: Tensor, statistics: Tensor) -> Sweep:
    defect, scale, magnitude, pivots = statistics
    if not y.shape[1]:
        return Sweep(y, h.mT, defect, scale, magnitude, y.new_full(y.shape[:1], torch.inf))
    # NaN after a singular token must not hide its pivot
    pivot = pivots.nan_to_num(nan=torch.inf).amin(1)
    return Sweep(y, h.mT, defect, scale, magnitude, pivot)


def fused_reverse(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor,  # (b, d, n)
    checkpoints: Tensor,  # (b, ceil(t / keep_every), n, d)
    keep_every: int,
    inputs: Inputs,
    options: SweepOptions,
    report: ReportBackward | None,
) -> tuple[Tensor | None, ...]:
    """`reverse_sweep`: gradients of x, raw, W_y, A, h0 and y0.

    A chunk of tokens is replayed from its checkpoint in one launch, into a workspace of keep_every
    memories, then taken back in one launch, or with feedback in one a token.
    """
    from bedouin.kernels.direct.triton_kernels import ReverseBuffers, SweepBuffers, sweep_forward
    from bedouin.kernels.direct.triton_kernels import sweep_reverse as reverse

    x, full, W_y = inputs.x.contiguous(), inputs.full.contiguous(), inputs.W_y
    y, A = inputs.y.contiguous(), inputs.A.mT.contiguous()
    (b, t_end, d), n, r = x.shape, A.shape[0], full.shape[-1]
    H = torch.zeros_like(A).expand(b, n, d) + grad_h.mT
    H = H.contiguous()
    grad_x, grad_raw = torch.empty_like(x), torch.empty_like(full)
    grad_A, statistics = x.new_zeros(b, n, d), x.new_zeros(2, b, t_end)
    low = x.dtype if W_y is None else W_y.dtype
    pulled = None if W_y is None else x.new_zeros(b, d, dtype=low)
    before = x.new_empty(b, min(keep_every, t_end), n, d)
    h, grad_low = x.new_empty(b, n, d), x.new_empty(b, r, dtype=low)
    unused = x.new_empty(1)
    replay = SweepBuffers(x, full, None, A, h, before, y, unused, unused)
    back = ReverseBuffers(
        grad_y.contiguous(), pulled, x, y, full, A, before, H, grad_x, grad_raw, grad_low, grad_A,
        statistics,
    )  # fmt: skip
    for start in reversed(range(0, t_end if b else 0, keep_every)):
        chunk = range(start, min(start + keep_every, t_end))
        h.copy_(checkpoints[:, start // keep_every])
        sweep_forward(replay, chunk, options, solve=False, origin=start, keep_every=1)
        if W_y is None or pulled is None:
            reverse(back, chunk, options, origin=start)
            continue
        for t in reversed(chunk):
            reverse(back, range(t, t + 1), options, origin=start)
            torch.mm(grad_low, W_y, out=pulled)
    if report is not None and t_end:
        # last token first, as the reverse sweep meets them
        report(statistics[0].flip(1), statistics[1].flip(1))
    grad_y0 = x.new_zeros(b, d)
    if pulled is not None and b and t_end:
        grad_y0 = feedback_vjp(pulled.to(x.dtype), inputs.y_before[:, 0], options)
    grad_W_y = weight_gradient(grad_raw, inputs, options)
    return grad_x, grad_raw, grad_W_y, grad_A.sum(0).mT, H.mT, grad_y0

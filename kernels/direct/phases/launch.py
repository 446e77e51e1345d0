"""Launches of the phases, and the memory between them.

Letters: b folded samples, t time, d channels of a head, n state per channel, k reflections, r raw
values, H heads; P and N: d and n rounded up to powers of two.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.branches import beside, join
from bedouin.kernels.direct.buffers import CHUNK, exponents
from bedouin.kernels.direct.phases.limits import Sizes, sizes_of
from bedouin.kernels.direct.phases.spec import (
    FINISH,
    FINISH_REFLECTIONS,
    GRADIENTS,
    PREPARE,
    PREPARE_REFLECTIONS,
    PROGRAMS,
    REVERSE,
    SOLVED_STATISTICS,
    STATES,
    STATISTICS,
    SWEEP,
    TOKENS,
    LaunchSpec,
    phase_constants,
)
from bedouin.kernels.launch import Device, ceil_div, last_axis_contiguous
from bedouin.kernels.linear import padding
from bedouin.kernels.operands import Operands, Parameterization


class _Inputs(NamedTuple):
    """The tensors of a call as the kernels read them."""

    x: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r)
    # (H, d, d), contiguous for each head, for phase S its transpose; any tensor without feedback
    W: Tensor
    A: Tensor  # (H, n, d), log2(e) A
    y0: Tensor  # (b, d), or any tensor
    B: Tensor  # (b, t, N / V), int64
    C: Tensor  # likewise
    scalars: Tensor  # (b, t, `Sizes.scalars`)
    per_head: int  # samples of a head

    @staticmethod
    def of(operands: Operands, sizes: Sizes, spec: LaunchSpec, *, sweeps: bool) -> "_Inputs":
        """Phase P, for phase S (`sweeps`) or R."""
        x, raw, W_y, A, _, y0 = operands
        b, t, d, _ = sizes[:4]
        x, raw = last_axis_contiguous(x), last_axis_contiguous(raw)
        with beside("decay", A):
            A = exponents(A if A.dim() == 3 else A.unsqueeze(0))
        W = A
        if W_y is not None:
            W = W_y if W_y.dim() == 3 else W_y.unsqueeze(0)
            if sweeps:
                with beside("parameters", W):
                    W = W.mT.contiguous()
                join("parameters", W)
            elif W.stride()[1:] != (d, 1):
                W = W.contiguous()
        B, C = A.new_empty(2, b, t, sizes.N * 2 // sizes.V, dtype=torch.int32).unbind()
        scalars = A.new_empty(b, t, sizes.scalars)
        grid, numbers = _by_tokens(sizes), (b * t, t, *raw.stride()[:2])
        PREPARE.launch(grid, (raw, B, C, scalars), numbers, phase_constants(PREPARE, spec))
        if sizes.k:
            constants = phase_constants(PREPARE_REFLECTIONS, spec)
            PREPARE_REFLECTIONS.launch(grid, (raw, scalars), numbers, constants)
        join("decay", A)
        if y0 is None:
            y0 = A.new_zeros(b, d) if spec.starts else A
        y0 = y0.contiguous()
        words = B.view(torch.int64), C.view(torch.int64)
        return _Inputs(x, raw, W, A, y0, *words, scalars, b // len(A))

    @property
    def numbers(self) -> tuple[int, ...]:
        """Those that phases S and R need: samples of a head, tokens of a sample, and the distance
        of the W^y of two heads."""
        return self.per_head, self.x.shape[1], self.W.stride(0)

    @property
    def strides(self) -> tuple[int, ...]:
        """Of x and the raw values, from sample to sample and from token to token."""
        return *self.x.stride()[:2], *self.raw.stride()[:2]


class _Kept(NamedTuple):
    """Views of what phase S keeps."""

    rows: Tensor  # (b t 2 P): Delta and `written`
    factors: Tensor  # (b t factors P): g, read, and what was fed
    states: Tensor  # (b chunks N P)
    inverse: Tensor  # (b t)
    solved: Tensor  # (b t `Sizes.solved`)

    @staticmethod
    def of(
        kept: Tensor,  # (b, `Sizes.kept`)
        sizes: Sizes,
    ) -> "_Kept":
        tokens, dtype = sizes.b * sizes.t, sizes.factor_type
        words = tokens * sizes.factors * sizes.P * dtype.itemsize // 4
        states = sizes.b * sizes.chunks * sizes.N * sizes.P
        sections = tokens * 2 * sizes.P, words, states, tokens, tokens * sizes.solved
        rows, factors, *others = kept.view(-1).split_with_sizes(sections)
        return _Kept(rows, factors.view(dtype), *others)


def launch_phases(
    operands: Operands, options: Parameterization, *, keeps: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Phases P and S: y (b, t, d), the last h (b, n, d), what `launch_reverse_phases` reads
    (b, `Sizes.kept`), empty unless `keeps`, and the statistics (4, b, t): defect, scale, magnitude,
    pivot. No size may be 0."""
    sizes = sizes_of(operands, options)
    spec = LaunchSpec.of(sizes, operands, options, keeps=keeps)
    inputs, (b, t, d, n) = _Inputs.of(operands, sizes, spec, sweeps=True), sizes[:4]
    A, h0 = inputs.A, operands.h0
    first = h = A.new_empty(b, n, d)
    if spec.starts:
        first = A.new_zeros(b, n, d) if h0 is None else h0.mT.contiguous()
    y, kept = A.new_empty(b, t, d), A.new_empty(b, sizes.kept if keeps or sizes.k else 0)
    # where nothing is kept, the kernels write none of these and take any tensor in their place
    parts = _Kept.of(kept, sizes) if len(kept[0]) else _Kept(y, y, y, y, y)
    read = inputs.x, inputs.raw, inputs.scalars, inputs.B, inputs.C, inputs.W, A, inputs.y0
    written = parts.rows, parts.factors, parts.inverse, parts.states, parts.solved
    numbers = *inputs.numbers, *inputs.strides
    tensors = *read, first, h, y, *written
    SWEEP.launch((b,), tensors, numbers, phase_constants(SWEEP, spec))
    statistics = A.new_empty(4, b, t)
    if sizes.k:
        solved = inputs.x, y, inputs.raw, inputs.scalars, parts.solved, parts.rows, statistics
        numbers = b * t, t, *inputs.strides
        constants = phase_constants(SOLVED_STATISTICS, spec)
        with beside("statistics", *solved):
            SOLVED_STATISTICS.launch((b * t,), solved, numbers, constants)
    else:
        constants = phase_constants(STATISTICS, spec)
        with beside("statistics", y, statistics):
            STATISTICS.launch(_by_tokens(sizes), (y, statistics), (b * t,), constants)
    return y, h, kept if keeps else kept[:, :0], statistics


class PhaseGradients(NamedTuple):
    """Cotangents."""

    x: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r + padding)
    delta: Tensor  # (b, t, d), of raw Delta, in the dtype of x
    A: Tensor  # (b, splits, n, d), of each sample, in parts
    h0: Tensor  # (b, n, d)
    y0: Tensor  # (b, d)
    statistics: Tensor  # (2, b, t): defect and scale of the adjoint equation


class _Solved(NamedTuple):
    """What phase R leaves to the other phases."""

    adjoint: Tensor  # (b, t, 2, P), w and the cotangent of `written`
    delta: Tensor  # (b, t, d), the cotangent of raw Delta
    x: Tensor  # (b, t, d), that of x
    f: Tensor  # (b, t, k)
    H: Tensor  # (b, n, d), of h0
    y0: Tensor  # (b, d)


def launch_reverse_phases(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor | None,  # (b, d, n); None: zeros
    y: Tensor,  # (b, t, d)
    kept: Tensor,  # (b, `Sizes.kept`)
    operands: Operands,
    options: Parameterization,
) -> PhaseGradients:
    """Phases P, R and G, and the adjoint of P."""
    sizes = sizes_of(operands, options)
    spec = LaunchSpec.of(sizes, operands, options, keeps=True, ends=grad_h is not None)
    inputs, parts = _Inputs.of(operands, sizes, spec, sweeps=False), _Kept.of(kept, sizes)
    b, t, d = sizes[:3]
    last = None if grad_h is None else grad_h.mT.contiguous()
    # H after the last token of each chunk
    edges = inputs.A.new_empty(b, sizes.chunks, sizes.N * sizes.P)
    solved = _reverse(grad_y.contiguous(), last, y, inputs, parts, edges, sizes, spec)
    grad_B, grad_C, grad_A = _gradients(inputs, parts, solved, edges, sizes, spec)
    del edges  # which is as large as the gradients of the raw values, allocated next
    r = inputs.raw.shape[2]
    grad_raw = inputs.raw.new_empty(b, t, r + padding(r))
    statistics = inputs.A.new_empty(2, b, t)
    given = inputs.raw, solved.delta, grad_B, grad_C, solved.adjoint
    numbers = b * t, t, *inputs.raw.stride()[:2]
    constants = phase_constants(FINISH, spec)
    FINISH.launch(_by_tokens(sizes), (*given, grad_raw, statistics), numbers, constants)
    if sizes.k:
        known = inputs.x, y, inputs.raw, inputs.scalars, solved.f, parts.rows, solved.adjoint
        numbers = b * t, t, *inputs.strides
        constants = phase_constants(FINISH_REFLECTIONS, spec)
        FINISH_REFLECTIONS.launch((b * t,), (*known, grad_raw, statistics), numbers, constants)
    rows = solved.x, grad_raw, solved.delta
    return PhaseGradients(*rows, grad_A, solved.H, solved.y0, statistics)


def _reverse(
    grad_y: Tensor,  # (b, t, d)
    last: Tensor | None,  # (b, n, d), of the last h; None: zeros
    y: Tensor,  # (b, t, d)
    inputs: _Inputs,
    parts: _Kept,
    edges: Tensor,  # (b, chunks, N P), written
    sizes: Sizes,
    spec: LaunchSpec,
) -> _Solved:
    """Phase R."""
    b, t, d, n, P, N, V, _, k = sizes
    A = inputs.A
    adjoint = A.new_empty(b, t, 2, P)
    delta, x = inputs.x.new_empty(b, t, d), inputs.x.new_empty(b, t, d)
    f, H = A.new_empty(b, t, k), A.new_empty(b, n, d)
    solved = _Solved(adjoint, delta, x, f, H, A.new_empty(b, d))
    scratch = A.new_empty(b, CHUNK, N * P // V, dtype=torch.int64)
    known = grad_y, y, inputs.y0, inputs.raw, parts.solved, *parts[:2], parts.inverse
    values = inputs.scalars, inputs.B, inputs.C, inputs.W, A, parts.states
    first = H if last is None else last
    results = scratch, first, H, edges, adjoint, delta, x, f, solved.y0
    numbers = *inputs.numbers, *inputs.raw.stride()[:2]
    REVERSE.launch((b,), (*known, *values, *results), numbers, phase_constants(REVERSE, spec))
    return solved


def _gradients(
    inputs: _Inputs,
    parts: _Kept,
    solved: _Solved,
    edges: Tensor,  # (b, chunks, N P)
    sizes: Sizes,
    spec: LaunchSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Phase G: the gradients of the unit B and C (b, t, N), and of A in parts (b, splits, n, d)."""
    b, t, d, n, P, N = sizes[:6]
    A = inputs.A
    blocks = ceil_div(N, STATES)
    wanted = ceil_div(PROGRAMS * (Device.of(A.device).programs or 1), b * blocks)
    each = ceil_div(sizes.chunks, min(wanted, sizes.chunks))
    splits = ceil_div(sizes.chunks, each)
    programs = b * splits * blocks
    scratch = A.new_empty(programs, CHUNK, min(N, STATES) * P // sizes.V, dtype=torch.int64)
    grad_B, grad_C = A.new_empty(2, b, t, N).unbind()
    grad_A = A.new_empty(b, splits, n, d)
    pairs = parts.rows.view(torch.int64), solved.adjoint.view(torch.int64)
    values = inputs.B.view(torch.int32), inputs.C.view(torch.int32), A
    tensors = *pairs, *values, parts.states, edges, scratch, grad_B, grad_C, grad_A
    numbers = inputs.per_head, t, splits, each
    GRADIENTS.launch((programs,), tensors, numbers, phase_constants(GRADIENTS, spec))
    return grad_B, grad_C, grad_A


def _by_tokens(sizes: Sizes) -> tuple[int]:
    return (ceil_div(sizes.b * sizes.t, TOKENS),)

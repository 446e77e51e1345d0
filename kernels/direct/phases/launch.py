"""Launches of the phases, and the memory between them.

Letters: b folded samples, t time, d channels of a head, n state per channel, r raw values, H heads;
P and N: d and n rounded up to powers of two.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct.buffers import CHUNK, exponents, state_major
from bedouin.kernels.direct.phases.limits import Sizes, fed_vectors, sizes_of
from bedouin.kernels.direct.phases.triton_gradients import gradient_kernel
from bedouin.kernels.direct.phases.triton_prepare import finish_kernel, prepare_kernel
from bedouin.kernels.direct.phases.triton_reverse import reverse_kernel
from bedouin.kernels.direct.phases.triton_sweep import sweep_kernel
from bedouin.kernels.direct.triton_constants import layout_of
from bedouin.kernels.direct.triton_plan import multiprocessors
from bedouin.kernels.householder.reference import UNIT_EPS
from bedouin.kernels.launch import ceil_div, last_axis_contiguous
from bedouin.kernels.linear import padding
from bedouin.kernels.operands import Operands, Parameterization
from bedouin.kernels.plans import AFRESH, KEPT_CONSTANTS, Constants, How, PlannedKernel

LANES = 4
"""Lanes of a warp that share the states of a channel; the rest of a warp's are channels."""

TOKENS = 16
"""Tokens of a program of phase P and of its adjoint."""

PROGRAMS = 2
"""Programs of phase G for each multiprocessor, at least."""

COMPILER = {"num_stages": 1, "enable_fp_fusion": True}
"""Options of every launch; Triton's default for the latter changes with its version."""

PREPARE, SWEEP, REVERSE, GRADIENTS, FINISH = map(
    PlannedKernel, (prepare_kernel, sweep_kernel, reverse_kernel, gradient_kernel, finish_kernel)
)


class _Inputs(NamedTuple):
    """The tensors of a call as the kernels read them."""

    x: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r)
    W: Tensor  # (H, FEEDS d, d); without feedback any tensor
    A: Tensor  # (H, n, d), log2(e) A
    y0: Tensor  # (b, d)
    B: Tensor  # (b, t, N / V), int64
    C: Tensor  # likewise
    scalars: Tensor  # (b, t, 2): B C and beta^e
    per_head: int

    @staticmethod
    def of(operands: Operands, options: Parameterization, sizes: Sizes) -> "_Inputs":
        """Phase P."""
        x, raw, W_y, A, _, y0 = operands
        b, t, d, n = sizes[:4]
        x, raw = last_axis_contiguous(x), last_axis_contiguous(raw)
        A = exponents(A if A.dim() == 3 else A.unsqueeze(0))
        B, C = A.new_empty(2, b, t, sizes.N * 2 // sizes.V, dtype=torch.int32).unbind()
        scalars = A.new_empty(b, t, 2)
        numbers = b * t, t, *raw.stride()[:2]
        how = _grid(b * t), numbers, prepare_constants(sizes[2:6], sizes.V, options)
        AFRESH.launch(PREPARE, None, (raw, B, C, scalars), lambda: how)
        W = A if W_y is None else W_y.contiguous()
        y0 = A.new_zeros(b, d) if y0 is None else y0.contiguous()
        words = B.view(torch.int64), C.view(torch.int64)
        return _Inputs(x, raw, W, A, y0, *words, scalars, b // len(A))


class _Kept(NamedTuple):
    """Views of what phase S keeps."""

    rows: Tensor  # (b t rows P)
    states: Tensor  # (b chunks N P)
    inverse: Tensor  # (b t)

    @staticmethod
    def of(
        kept: Tensor,  # (b, `Sizes.kept`)
        sizes: Sizes,
    ) -> "_Kept":
        tokens = sizes.b * sizes.t
        sections = tokens * sizes.rows * sizes.P, sizes.b * sizes.chunks * sizes.N * sizes.P, tokens
        return _Kept(*kept.view(-1).split(sections))


def launch_sweep(
    operands: Operands, options: Parameterization, *, keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Phases P and S: y (b, t, d), the last h (b, n, d) and what `launch_reverse` reads
    (b, `Sizes.kept`), empty unless `keeps`. No size may be 0."""
    sizes = sizes_of(operands, options)
    b, t, d, n = sizes[:4]
    inputs = _Inputs.of(operands, options, sizes)
    A, h0 = inputs.A, operands.h0
    h = A.new_zeros(b, n, d) if h0 is None else state_major(h0)
    y, kept = A.new_empty(b, t, d), A.new_empty(b, sizes.kept if keeps else 0)
    parts = _Kept.of(kept, sizes) if keeps else _Kept(y, y, y)
    constants = sweep_constants(sizes[2:], fed_vectors(operands, options), options, keeps)
    strides = *inputs.x.stride()[:2], *inputs.raw.stride()[:2]

    def how() -> How:
        return (b,), (inputs.per_head, t, 1, *strides), constants

    first = inputs.x, inputs.raw, inputs.scalars, inputs.B, inputs.C, inputs.W, A, inputs.y0
    tensors = *first, h, y, parts.rows, parts.inverse, parts.states
    AFRESH.launch(SWEEP, None, tensors, how)
    return y, h, kept


class Gradients(NamedTuple):
    """Cotangents."""

    x: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r + padding)
    fed: Tensor  # (b, t, 2 d), of raw Delta and x, in the dtype of W^y
    A: Tensor  # (b, n, d), of each sample
    h0: Tensor  # (b, n, d)
    y0: Tensor  # (b, d)
    scale: Tensor  # (b, t), the largest |w| of each token


class _Solved(NamedTuple):
    """What phase R leaves to the other phases."""

    edges: Tensor  # (b, chunks, N P), H after the last token of each chunk
    adjoint: Tensor  # (b, t, 2, P), w and the cotangent of `written`
    fed: Tensor  # (b, t, 2 d), the cotangents of raw Delta and of x
    H: Tensor  # (b, n, d), of h0
    y0: Tensor  # (b, d)


def launch_reverse(
    grad_y: Tensor,  # (b, t, d)
    grad_h: Tensor | None,  # (b, d, n); None: zeros
    y: Tensor,  # (b, t, d)
    kept: Tensor,  # (b, `Sizes.kept`)
    operands: Operands,
    options: Parameterization,
) -> Gradients:
    """Phases P, R and G, and the adjoint of P."""
    sizes = sizes_of(operands, options)
    inputs, parts = _Inputs.of(operands, options, sizes), _Kept.of(kept, sizes)
    H = inputs.A.new_zeros(sizes.b, sizes.n, sizes.d) if grad_h is None else state_major(grad_h)
    both = fed_vectors(operands, options)
    constants = reverse_constants(sizes[2:7], both, options)
    solved = _reverse(grad_y.contiguous(), H, y, inputs, parts, sizes, constants)
    grad_B, grad_C, grad_A = _gradients(inputs, parts, solved, sizes, options)
    r = inputs.raw.shape[2]
    grad_raw = inputs.raw.new_empty(sizes.b, sizes.t, r + padding(r))
    adjoint, fed, tokens = solved.adjoint, solved.fed, sizes.b * sizes.t
    tensors = inputs.raw, fed, grad_B, grad_C, parts.rows, adjoint, grad_raw
    numbers = tokens, sizes.t, *inputs.raw.stride()[:2]

    def how() -> How:
        return _grid(tokens), numbers, finish_constants(sizes[2:], grad_raw.shape[2], options)

    AFRESH.launch(FINISH, None, tensors, how)
    scale = torch.linalg.vector_norm(adjoint[:, :, 0], math.inf, -1)
    return Gradients(fed[..., sizes.d :], grad_raw, fed, grad_A, solved.H, solved.y0, scale)


def _reverse(
    grad_y: Tensor,  # (b, t, d)
    H: Tensor,  # (b, n, d), of the last h, overwritten by that of h0
    y: Tensor,  # (b, t, d)
    inputs: _Inputs,
    parts: _Kept,
    sizes: Sizes,
    constants: Constants,
) -> _Solved:
    """Phase R."""
    b, t, d, _, P, N, V, _ = sizes
    A, chunks = inputs.A, sizes.chunks
    edges, adjoint = A.new_empty(b, chunks, N * P), A.new_empty(b, t, 2, P)
    solved = _Solved(edges, adjoint, inputs.x.new_empty(b, t, 2 * d), H, A.new_empty(b, d))
    scratch = A.new_empty(b, CHUNK, N * P // V, dtype=torch.int64)
    known = grad_y, y, inputs.y0, parts.rows, parts.inverse, inputs.scalars, inputs.B, inputs.C
    results = scratch, H, edges, adjoint, solved.fed, solved.y0
    tensors = *known, inputs.W, A, parts.states, *results
    AFRESH.launch(REVERSE, None, tensors, lambda: ((b,), (inputs.per_head, t, 1), constants))
    return solved


def _gradients(
    inputs: _Inputs, parts: _Kept, solved: _Solved, sizes: Sizes, options: Parameterization
) -> tuple[Tensor, Tensor, Tensor]:
    """Phase G: the gradients of the unit B and C (b, t, N), and of A for each sample (b, n, d)."""
    b, t, d, n, P, N, V, _ = sizes
    A = inputs.A
    units = 1 if interpreter_is_on() else multiprocessors(A.device)
    each = ceil_div(sizes.chunks, min(ceil_div(PROGRAMS * units, b), sizes.chunks))
    splits = ceil_div(sizes.chunks, each)
    kind = torch.int32 if V == 4 else torch.int64
    scratch = A.new_empty(b, splits, CHUNK, N * P // 2, dtype=kind)
    grad_B, grad_C = A.new_empty(2, b, t, N).unbind()
    grad_A = A.new_empty(b, splits, n, d)
    pairs = parts.rows.view(torch.int64), solved.adjoint.view(torch.int64), inputs.scalars
    values = inputs.B.view(torch.int32), inputs.C.view(torch.int32), A
    tensors = *pairs, *values, parts.states, solved.edges, scratch, grad_B, grad_C, grad_A

    def how() -> How:
        numbers = inputs.per_head, t, 1, each
        return (b, splits), numbers, gradient_constants(sizes[2:], options)

    AFRESH.launch(GRADIENTS, None, tensors, how)
    return grad_B, grad_C, grad_A.sum(1)


def _grid(tokens: int) -> tuple[int]:
    return (ceil_div(tokens, TOKENS),)


def _common(
    sizes: tuple[int, ...],  # d, n, P, N, V
    options: Parameterization,
) -> dict[str, Any]:
    """Constants of phases S and R."""
    d, n, P, N, V = sizes
    layout, lanes = layout_of(options), min(LANES, N // V)
    return {
        **{"d": d, "n": n, "P": P, "N": N, "NL": lanes, "V": V},
        "NORM": options.feedback_norm_eps is not None,
        "ACTIVATION": layout.activation,
        "INPUT_SCALE": options.input_scale,
        "FULL": options.eigenvalues == "full",
        "ERASE": int(layout.erase > 0),
        "FAST": not interpreter_is_on(),
        # a thread has one channel
        "num_warps": max(1, P * lanes // 32),
        **COMPILER,
    }


@lru_cache(maxsize=KEPT_CONSTANTS)
def prepare_constants(
    sizes: tuple[int, ...],  # d, n, P, N
    V: int,
    options: Parameterization,
) -> Constants:
    d, n, _, N = sizes
    erase = layout_of(options).erase
    return Constants(
        d=d,
        n=n,
        N=N,
        LOW=V == 4,
        ERASE_MAX=erase,
        EPS=UNIT_EPS,
        TOKENS=TOKENS,
        num_warps=4,
        **COMPILER,
    )


@lru_cache(maxsize=KEPT_CONSTANTS)
def sweep_constants(
    sizes: tuple[int, ...],  # d, n, P, N, V, rows
    fed: tuple[bool, bool],
    options: Parameterization,
    keeps: bool,
) -> Constants:
    eps = options.feedback_norm_eps
    return Constants(
        KEEP=CHUNK if keeps else 0,
        OF_DELTA=int(fed[0]),
        OF_X=int(fed[1]),
        NORM_EPS=0.0 if eps is None else eps,
        **_common(sizes[:5], options),
    )


@lru_cache(maxsize=KEPT_CONSTANTS)
def reverse_constants(
    sizes: tuple[int, ...],  # d, n, P, N, V
    fed: tuple[bool, bool],
    options: Parameterization,
) -> Constants:
    return Constants(KEEP=CHUNK, OF_DELTA=int(fed[0]), OF_X=int(fed[1]), **_common(sizes, options))


@lru_cache(maxsize=KEPT_CONSTANTS)
def gradient_constants(
    sizes: tuple[int, ...],  # d, n, P, N, V, rows
    options: Parameterization,
) -> Constants:
    common = _common(sizes[:5], options)
    kept = ("d", "n", "P", "N", "NL", "V", "FULL", "ERASE", "FAST", *COMPILER)
    return Constants(
        KEEP=CHUNK,
        ROWS=sizes[5],
        PL=8,
        num_warps=max(1, sizes[3] * 8 // 64),
        **{name: common[name] for name in kept},
    )


@lru_cache(maxsize=KEPT_CONSTANTS)
def finish_constants(
    sizes: tuple[int, ...],  # d, n, P, N, V, rows
    wide: int,
    options: Parameterization,
) -> Constants:
    d, n, P, N, _, rows = sizes
    return Constants(
        **{"d": d, "n": n, "P": P, "N": N, "ROWS": rows, "WIDE": wide, "TOKENS": TOKENS},
        ERASE_MAX=layout_of(options).erase,
        EPS=UNIT_EPS,
        num_warps=4,
        **COMPILER,
    )

"""The parallel iteration: one step of Picard from the projections in a few launches.

The plain version is the map (bedouin.layers.map) in the loop of bedouin.solvers.iterate. A
step of Jacobi is the local solve in plain torch around a scan (bedouin.kernels.scan).

A step goes from the projections to the next iterate on the device alone. It is the product with W^y
(cuBLAS, one launch for all heads) and these launches; nothing is read by the host:

    mix      a program a token: x~ = x + (I - Q)(y - x), Delta, unit B and C
    scan     the forward kernel of bedouin.kernels.scan: F(y)
    judge    a program a token: defect and scale, the next iterate
    decide   a program a sample: running largest scale, converged prefix, failure, step count
    settle   a program a token: what has just frozen goes back to the iterate that was measured;
             norm(y) of the others, one token on, for the next product

The mixing sums over channels within a token, the scan over tokens within a channel, and the freeze
over tokens of a sample. Converged tokens are a prefix, whose length is one number a sample; frozen
tokens are not mixed again, and stay.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values,
H heads (kernels/heads.py).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, Implementation, choose_backend
from bedouin.kernels.direct.layout import is_covered
from bedouin.kernels.feedback import aligned_rows, normalize_feedback
from bedouin.kernels.householder import UNIT_EPS
from bedouin.kernels.launch import evenly_spaced, next_power_of_two
from bedouin.kernels.operands import Operands, Parameterization
from bedouin.kernels.scan import launch_forward
from bedouin.kernels.scan.reference import ScanOptions

__all__ = ["IterationRule", "Progress", "choose_iteration", "fuse_iteration"]

MAX_REFLECTIONS = 8
"""Most reflections, whose k x k algebra is unrolled at compile time."""

MAX_TILE = 16384
"""Most elements of u_1 .. u_k of a token, both axes rounded up to a power of two: one program of
the mixing kernel holds them in registers."""
MAX_STATES = 1024
"""Most states of a channel."""

CHANNELS_A_WARP = 256
"""Of the kernels that take a token a program."""
CHANNELS_AT_ONCE = 4
"""Of them, what a thread loads at a time: of float32 the widest load there is."""
DECIDE_TOKENS = 1024
"""Most tokens that `decide` takes at a time."""
KEPT, FROZEN, FAILED, STEPS = 1, 2, 3, 4
"""Rows of the counters (5, b): tokens whose y stays (the converged prefix, or all tokens of a
failed sample), the converged prefix, 1 if failed, steps. Row 0 is KEPT before the last decision."""


@dataclass(frozen=True)
class IterationRule:
    """How Picard's iteration moves and when a token has converged; see bedouin.solvers.

    whole_sequence: the paper's stop rule, under which a solve returns its last evaluation and not
        the iterate that was measured. adaptive: damping that depends on the defects of all tokens.
    """

    rtol: float
    atol: float
    damping: float = 1.0
    whole_sequence: bool = False
    adaptive: bool = False


class Progress(NamedTuple):
    """The present iterate, and the norms of the last evaluation."""

    y: Tensor  # (b, t, d)
    frozen: Tensor  # (b, t)
    failed: Tensor  # (b,)
    num_steps: Tensor  # (b,)
    defect: Tensor  # (b, t)
    scale: Tensor  # (b, t), |F(y)_t|
    pivot: Tensor | None  # (b,)
    value: Tensor | None = None  # (b, t, d): the last F(y) where that is returned; None: y is


class FusedIteration:
    """The iterates of one solve. No size may be 0."""

    def __init__(
        self,
        operands: Operands,
        y: Tensor,  # (b, t, d), the start
        parameterization: Parameterization,
        rule: IterationRule,
        lengths: Tensor | None = None,  # (b,)
    ) -> None:
        # imports Triton, which the plain loop does without
        from bedouin.kernels.iteration import triton_kernels

        self.kernels = triton_kernels
        x, raw, W_y, A, _, _ = operands
        h0, y0 = operands.start()
        self.rule, self.options = rule, parameterization
        self.layout = parameterization.known_layout()
        (self.b, self.t, self.d), self.n = y.shape, A.shape[-1]
        b, t, d = y.shape
        self.x, self.raw = evenly_spaced(x), evenly_spaced(raw)
        self.y = y.clone(memory_format=torch.contiguous_format)
        self.y_next, self.mixed, self.delta = (torch.empty_like(self.y) for _ in range(3))
        # without feedback the kernel does not read what stands for it
        self.normed, self.fed_back, self.W_y = None, self.raw, W_y
        if W_y is not None:
            self.W_y = aligned_rows(W_y)
            self.normed = torch.empty_like(self.y, dtype=W_y.dtype)
            self.normed[:, 0] = normalize_feedback(y0, parameterization.feedback_norm_eps)
            self.fed_back = self.normed.new_empty(b, t, self.W_y.shape[-2])
        # the states before the channels
        self.A, self.h0 = A.mT.contiguous(), h0.to(y.dtype).mT.contiguous()
        # F(y) of each token where a solve returns it
        self.value = torch.empty_like(self.y) if rule.whole_sequence else None
        # unit B and C, which are ones where no raw values determine them
        self.BC = y.new_ones(b, t, 2, self.n)
        self.norms = y.new_zeros(2, b, t)
        self.last = y.new_empty(b, d, self.n)
        self.counters = torch.zeros(5, b, dtype=torch.int32, device=y.device)
        self.lengths = None if lengths is None else lengths.to(torch.int32)
        if W_y is not None:
            with torch.cuda.device_of(y):
                self._settle(self.y)

    @property
    def kept(self) -> Tensor:
        """(b,): tokens whose y stays."""
        return self.counters[KEPT]

    def advance(self) -> None:
        """Evaluate the map at y, freeze what has converged, move the rest."""
        with torch.cuda.device_of(self.y):
            self._evaluate(count=True)
            self._settle(self.y_next)
        self.y, self.y_next = self.y_next, self.y

    def certify(self) -> None:
        """Evaluate the map at y and judge it; y stays, and the evaluation is not counted."""
        with torch.cuda.device_of(self.y):
            self._evaluate(count=False)

    def finished(self) -> bool:
        """Whether every sample has converged or failed, from the host (synchronizes on a GPU)."""
        return bool((self.kept == self.t).all())

    @property
    def progress(self) -> Progress:
        """Tensors of their own, or which no later step changes."""
        tokens = torch.arange(self.t, device=self.y.device)
        frozen = tokens < self.counters[FROZEN].unsqueeze(1)
        failed, steps = self.counters[FAILED] > 0, self.counters[STEPS].to(torch.int64)
        defect, scale = self.norms
        return Progress(self.y, frozen, failed, steps, defect, scale, None, self.value)

    def _evaluate(self, *, count: bool) -> None:
        if self.W_y is not None and self.normed is not None:
            *heads, r, d = self.W_y.shape
            product = torch.bmm if heads else torch.mm
            normed, fed_back = self.normed.view(*heads, -1, d), self.fed_back.view(*heads, -1, r)
            product(normed, self.W_y.mT, out=fed_back)
        layout, options, rule = self.layout, self.options, self.rule
        distances = tuple(v.stride(1) for v in (self.x, self.raw, self.fed_back))
        memory = 2 * self.n if layout.selective else 0
        self.kernels.mix_kernel[(self.b * self.t,)](
            *(self.x, self.raw, self.fed_back, self.y, self.kept, self.mixed, self.delta, self.BC),
            *(self.b, self.t, distances, self.d, self.n),
            K=layout.num_householder,
            BLOCK_N=next_power_of_two(self.n),
            FEEDBACK=self.W_y is not None,
            SELECTIVE=layout.selective,
            ACTIVATION=layout.activation,
            BETA_MAX=layout.beta_max,
            EPS=UNIT_EPS,
            ALIGN=math.gcd(CHANNELS_AT_ONCE, *distances, self.d, memory),
            **self._of_tokens,
        )
        rows = self.mixed, self.delta, self.BC[:, :, 0], self.BC[:, :, 1]
        scan = ScanOptions(options.input_scale, options.eigenvalues, False)
        launch_forward(rows, self.A, self.h0, None, (self.y_next, self.last, None), scan)
        self.kernels.judge_kernel[(self.b * self.t,)](
            *(self.y, self.y_next, self.value, self.kept, self.norms, self.b, self.t, self.d),
            DAMPING=rule.damping,
            **self._of_tokens,
        )
        self.kernels.decide_kernel[(self.b,)](
            *(self.norms, self.counters, self.lengths, self.b, self.t),
            ATOL=rule.atol,
            RTOL=rule.rtol,
            WHOLE=rule.whole_sequence,
            COUNT=count,
            BLOCK_T=min(next_power_of_two(self.t), DECIDE_TOKENS),
        )

    @property
    def _of_tokens(self) -> dict[str, int]:
        """What kernels with a program a token have: eight channels a thread."""
        block = next_power_of_two(self.d)
        return {"BLOCK_D": block, "num_warps": min(8, max(1, block // CHANNELS_A_WARP))}

    def _settle(
        self,
        y_next: Tensor,  # (b, t, d)
    ) -> None:
        """Undo the last move of tokens that have just frozen; norm(y_next) of the others."""
        self.kernels.settle_kernel[(self.b * self.t,)](
            *(self.y, y_next, self.normed, self.counters, self.b, self.t, self.d),
            NORM_EPS=self.options.feedback_norm_eps,
            **self._of_tokens,
        )


def fuse_iteration(
    operands: Operands,
    y: Tensor,  # (b, t, d), the start
    parameterization: Parameterization,
    bind_parameters: tuple[Tensor, ...],
    rule: IterationRule,
    *,
    lengths: Tensor | None = None,  # (b,)
    backend: Backend = "auto",
) -> FusedIteration | None:
    """An iteration from y with the Triton kernels; None where the plain loop is to be used.

    lengths: the tokens of each sample that are judged, before its padding; None: all.
    Raises ValueError where `backend="triton"` cannot run, or heads, W_y and batch do not fit.
    """
    operands.check()
    chosen = choose_iteration(backend, operands, y, parameterization, bind_parameters, rule)
    if chosen == "reference":
        return None
    return FusedIteration(operands, y, parameterization, rule, lengths=lengths)


def choose_iteration(
    backend: Backend,
    operands: Operands,
    y: Tensor,  # (b, t, d)
    parameterization: Parameterization,
    bind_parameters: tuple[Tensor, ...],
    rule: IterationRule,
) -> Implementation:
    """The implementation of the steps; raises as `choose_backend` does.

    Warns of a mixer without kernels on a GPU, unless it is in float64, for which there are none at
    all.
    """
    unsupported = _unsupported(operands, y, parameterization, bind_parameters, rule)
    has_layout, is_wide = parameterization.layout is not None, y.dtype == torch.float64
    warning = None if has_layout or is_wide else parameterization.without_layout
    return choose_backend(backend, y.device, y.dtype, unsupported, warning=warning)


def _unsupported(
    operands: Operands,
    y: Tensor,  # (b, t, d)
    parameterization: Parameterization,
    bind_parameters: tuple[Tensor, ...],
    rule: IterationRule,
) -> str | None:
    """What the kernels do not cover, as a part of a message; None where they cover everything."""
    x, raw, _, A, _, _ = operands
    layout, (d, n) = parameterization.layout, A.shape[-2:]
    if torch.compiler.is_compiling():
        return "torch.compile"
    if rule.adaptive:
        return "adaptive damping (patience)"
    if layout is None or not is_covered(layout, raw, A, bind_parameters):
        return parameterization.without_layout
    k = layout.num_householder
    if k > MAX_REFLECTIONS:
        return f"{k} reflections (at most {MAX_REFLECTIONS})"
    if (y.dtype, A.dtype) != (torch.float32, torch.float32) or x.dtype == torch.float64:
        found = f"{x.dtype}, {y.dtype}, {A.dtype}"
        return f"x, y and A of {found} (y and A must be float32, x at most that)"
    if not 1 <= n <= MAX_STATES:
        return f"{n} states (at most {MAX_STATES})"
    if next_power_of_two(d) * next_power_of_two(max(k, 1)) > MAX_TILE:
        return f"{k} reflections of {d} channels"
    return None

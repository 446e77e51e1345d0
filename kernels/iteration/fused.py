"""One step of Picard or Jacobi from the projections to the next iterate, on the device alone.

A step is the product with W^y (cuBLAS) and these launches; nothing is read by the host:

    mix      a program a token: x~ = x + (I - Q)(y - x), unit B and C, for Jacobi T
    scan     a program a block of channels, all tokens: memory and read-out. Picard ends here: next
             iterate, and of defect and scale the largest in the block; Jacobi gets p
    finish   Jacobi, a program a token: the local k x k solve, next iterate, defect, scale. Without
             feedback it knows x~ of the next iterate, too, and only the first step mixes
    decide   a program a sample: running largest scale, converged prefix, failure, step count
    settle   a program a token: what has just frozen goes back to the iterate that was measured;
             norm(y) of the others, one token on, for the next product

The mixing sums over channels within a token, the scan over tokens within a channel, and the freeze
over tokens of a sample. One cooperative launch for mix, scan and finish, whose programs share a
sample and exchange their sums, was measured on an H100 at 64 x 256 (d 1024, n 16, k 4, bf16, no
feedback) against separate launches with the same arithmetic: with the best of the shapes tried for
its programs it took 0.300 ms for Picard against 0.292, and 0.485 for Jacobi against 0.454. So there
are separate launches only. Converged tokens are a prefix, so one number a sample says it all;
frozen tokens are not mixed, solved or written again.

Triton is imported when a step runs, not with this module.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, Implementation, choose_backend
from bedouin.kernels.direct.reference import SweepOptions, normalize_feedback
from bedouin.kernels.launch import next_power_of_two
from bedouin.kernels.linear import pad_rows
from bedouin.kernels.scan.reference import accumulator

MAX_REFLECTIONS = 8
MAX_TILE = 16384
"""Most elements of u_1 .. u_k of a token, both axes rounded up to a power of two: one program of
the local solve holds them in registers."""
MAX_STATES = 1024

KEPT_BEFORE, KEPT, FROZEN, FAILED, STEPS = range(5)
"""Rows of the counters (5, b): tokens whose y stays, before and after the last decision (the
converged prefix, or all tokens of a failed sample), the converged prefix, 1 if failed, steps."""


@dataclass(frozen=True)
class IterationRule:
    """How an iteration moves and when a token has converged; see bedouin.solvers.

    whole_sequence: the paper's stop rule, under which a solve returns its last evaluation and not
        the iterate that was measured. adaptive: damping that looks at all defects.
    """

    method: Literal["picard", "jacobi"]
    rtol: float
    atol: float
    damping: float = 1.0
    whole_sequence: bool = False
    adaptive: bool = False


class IterationInputs(NamedTuple):
    """What does not change from step to step."""

    x: Tensor  # (b, t, d)
    raw: Tensor  # (b, t, r), the part that x determines
    W_y: Tensor | None  # (r, d)
    A: Tensor  # (d, n)
    h0: Tensor  # (b, d, n)
    y0: Tensor  # (b, d), the output before the first token


class Progress(NamedTuple):
    """Where an iteration stands, and the norms of its last evaluation."""

    y: Tensor  # (b, t, d)
    frozen: Tensor  # (b, t)
    failed: Tensor  # (b,)
    num_steps: Tensor  # (b,)
    defect: Tensor  # (b, t)
    scale: Tensor  # (b, t), |F(y)_t|
    pivot: Tensor | None  # (b,)
    value: Tensor | None = None  # (b, t, d): the last F(y) where that is returned; None: y is


def choose_iteration(
    backend: Backend,
    inputs: IterationInputs,
    y: Tensor,  # (b, t, d)
    bind_parameters: tuple[Tensor, ...],
    options: SweepOptions,
    rule: IterationRule,
) -> Implementation:
    """Who does the steps; raises as `choose_backend` does."""
    unsupported = _unsupported(inputs, y, bind_parameters, options, rule)
    return choose_backend(backend, y.device, y.dtype, unsupported)


def _unsupported(
    inputs: IterationInputs,
    y: Tensor,
    bind_parameters: tuple[Tensor, ...],
    options: SweepOptions,
    rule: IterationRule,
) -> str | None:
    """What the kernels do not cover, in words."""
    layout, (d, n), x = options.layout, inputs.A.shape, inputs.x
    if torch.compiler.is_compiling():
        return "torch.compile"
    if rule.adaptive:
        return "adaptive damping (patience)"
    if layout is None or bind_parameters or inputs.raw.shape[-1] != layout.size(d, n):
        return "this mixer (only HouseholderProduct)"
    if not 1 <= layout.num_householder <= MAX_REFLECTIONS:
        return f"{layout.num_householder} reflections (at most {MAX_REFLECTIONS})"
    if y.dtype != accumulator(x.dtype) or inputs.A.dtype != y.dtype:
        return f"y and A of {y.dtype}, {inputs.A.dtype} (both {accumulator(x.dtype)} for this x)"
    if not 1 <= n <= MAX_STATES:
        return f"{n} states (at most {MAX_STATES})"
    if next_power_of_two(d) * next_power_of_two(layout.num_householder) > MAX_TILE:
        return f"{layout.num_householder} reflections of {d} channels"
    return None


class FusedIteration:
    """The iterates of one solve. No size may be 0."""

    def __init__(
        self, inputs: IterationInputs, y: Tensor, options: SweepOptions, rule: IterationRule
    ) -> None:
        from bedouin.kernels.iteration.launch import Geometry, mix, settle

        (b, t), acc = y.shape[:2], y.dtype
        self.inputs = inputs._replace(
            x=_rows(inputs.x),
            raw=_rows(inputs.raw),
            W_y=None if inputs.W_y is None else pad_rows(inputs.W_y),
            A=inputs.A.mT.contiguous(),
            h0=inputs.h0.to(acc).mT.contiguous(),
        )
        self.geometry = Geometry.of(self.inputs, options, rule)
        self.y, self.y_next = y.clone(memory_format=torch.contiguous_format), torch.empty_like(y)
        # under the paper's rule the last evaluation of each token, which damping and freezing leave
        self.value = torch.empty_like(self.y) if rule.whole_sequence else None
        self.mixed = torch.empty_like(self.y)
        # the scan reads ahead and does not look where the last token is
        self.BC = y.new_empty(b * t + self.geometry.ahead, 2, inputs.A.shape[1])
        self.gain = torch.empty_like(self.y) if self.geometry.stores_gain else self.mixed
        mixes_ahead, k = self.geometry.mixes_ahead, self.geometry.k
        self.mixed_next = torch.empty_like(self.mixed) if mixes_ahead else self.mixed
        self.WY = y.new_empty(b, t, k * (k + 1) // 2 + k)
        self.parts = y.new_empty(2, b, self.geometry.parts, t)
        self.norms, self.pivots = y.new_zeros(2, b, t), y.new_zeros(b, t)
        self.counters = torch.zeros(5, b, dtype=torch.int32, device=y.device)
        self.normed, self.fed_back = self._feedback_buffers(options)
        if self.inputs.W_y is not None:
            settle(self, self.y)
        if mixes_ahead:
            mix(self)

    def _feedback_buffers(self, options: SweepOptions) -> tuple[Tensor, Tensor]:
        """norm(y_{t-1}) and its product with W^y, (b, t, d) and (b, t, r or more)."""
        W_y = self.inputs.W_y
        if W_y is None:
            return self.y, self.inputs.raw
        normed = torch.empty_like(self.y, dtype=W_y.dtype)
        normed[:, 0] = normalize_feedback(self.inputs.y0, options.feedback_norm_eps)
        fed_back = normed.new_empty(*normed.shape[:2], W_y.shape[0])
        return normed, fed_back

    def advance(self) -> None:
        """Evaluate the map at y, freeze what has converged, move the rest."""
        from bedouin.kernels.iteration.launch import settle

        self._evaluate(count=True)
        settle(self, self.y_next)
        self.y, self.y_next = self.y_next, self.y
        self.mixed, self.mixed_next = self.mixed_next, self.mixed

    def certify(self) -> None:
        """Evaluate the map at y and judge it; y stays, and the evaluation is not counted."""
        self._evaluate(count=False)

    def _evaluate(self, *, count: bool) -> None:
        from bedouin.kernels.iteration.launch import decide, finish, mix, scan

        W_y = self.inputs.W_y
        if W_y is not None:
            r, d = W_y.shape
            torch.mm(self.normed.view(-1, d), W_y.mT, out=self.fed_back.view(-1, r))
        if not self.geometry.mixes_ahead:
            mix(self)
        scan(self)
        if self.geometry.jacobi:
            finish(self)
        decide(self, count=count)

    @property
    def kept(self) -> Tensor:
        """(b,): tokens whose y stays."""
        return self.counters[KEPT]

    def finished(self) -> bool:
        """Whether every sample has converged or failed, from the host (synchronizes on a GPU)."""
        return bool((self.kept == self.y.shape[1]).all())

    @property
    def progress(self) -> Progress:
        """Tensors of their own, or which no later step changes."""
        tokens = torch.arange(self.y.shape[1], device=self.y.device)
        frozen = tokens < self.counters[FROZEN].unsqueeze(1)
        defect, scale = self.norms
        pivot = self.pivots.amin(1) if self.geometry.jacobi else None
        failed, steps = self.counters[FAILED] > 0, self.counters[STEPS].to(torch.int64)
        return Progress(self.y, frozen, failed, steps, defect, scale, pivot, self.value)


def _rows(v: Tensor) -> Tensor:
    """v (b, t, c), copied only where its tokens are not rows at one distance."""
    flat = v.stride(2) == 1 and v.stride(0) == v.shape[1] * v.stride(1)
    return v if flat else v.contiguous()

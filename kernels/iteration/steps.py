"""One step of Picard from the projections to the next iterate, on the device alone.

A step is the product with W^y (cuBLAS, one launch for all heads) and these launches; nothing is
read by the host:

    mix      a program a token: x~ = x + (I - Q)(y - x), Delta, unit B and C
    scan     the forward kernel of bedouin.kernels.scan: F(y)
    judge    a program a token: defect and scale, the next iterate
    decide   a program a sample: running largest scale, converged prefix, failure, step count
    settle   a program a token: what has just frozen goes back to the iterate that was measured;
             norm(y) of the others, one token on, for the next product

The mixing sums over channels within a token, the scan over tokens within a channel, and the freeze
over tokens of a sample. Converged tokens are a prefix, so one number a sample says it all; frozen
tokens are not mixed again, and stay.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values,
H heads (kernels/heads.py).
"""

import math

import torch
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.feedback import aligned_rows, normalize_feedback
from bedouin.kernels.heads import count_heads
from bedouin.kernels.householder import UNIT_EPS
from bedouin.kernels.iteration.triton_kernels import (
    decide_kernel,
    judge_kernel,
    mix_kernel,
    settle_kernel,
)
from bedouin.kernels.iteration.types import IterationRule, Progress
from bedouin.kernels.launch import evenly_spaced, next_power_of_two
from bedouin.kernels.operands import Operands, Parameterization
from bedouin.kernels.scan.registered import launch_forward
from bedouin.kernels.scan.types import ScanOptions

CHANNELS_A_WARP = 256
"""Of the kernels that take a token a program."""
CHANNELS_AT_ONCE = 4
"""Of them, what a thread loads at a time: of float32 the widest load there is."""
DECIDE_TOKENS = 1024
"""Most tokens that `decide` takes at a time."""
KEPT, FROZEN, FAILED, STEPS = 1, 2, 3, 4
"""Rows of the counters (5, b): tokens whose y stays (the converged prefix, or all tokens of a
failed sample), the converged prefix, 1 if failed, steps. Row 0 is KEPT before the last decision."""


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
        x, raw, W_y, A, _, _ = operands
        h0, y0 = operands.start()
        self.rule, self.options = rule, parameterization
        self.layout = parameterization.known_layout()
        (self.b, self.t, self.d), self.n, self.heads = y.shape, A.shape[-1], count_heads(A)
        b, t, d = y.shape
        self.x, self.raw = evenly_spaced(x), evenly_spaced(raw)
        self.y = y.clone(memory_format=torch.contiguous_format)
        self.y_next, self.mixed, self.delta = (torch.empty_like(self.y) for _ in range(3))
        # without feedback the kernels read neither
        self.normed, self.fed_back, self.W_y = self.y, self.raw, W_y
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
        if self.W_y is not None:
            r, d = self.W_y.shape[-2:]
            if self.W_y.dim() == 2:
                torch.mm(self.normed.view(-1, d), self.W_y.mT, out=self.fed_back.view(-1, r))
            else:
                by_head = self.heads, -1
                normed, fed_back = self.normed.view(*by_head, d), self.fed_back.view(*by_head, r)
                torch.bmm(normed, self.W_y.mT, out=fed_back)
        self._mix()
        rows = self.mixed, self.delta, self.BC[:, :, 0], self.BC[:, :, 1]
        scales = self.options.input_scale, self.options.eigenvalues
        outputs = self.y_next, self.last, None
        launch_forward(rows, self.A, self.h0, None, outputs, ScanOptions(*scales, False))
        self._judge(count=count)

    @property
    def _of_tokens(self) -> dict[str, int]:
        """What kernels with a program a token have: eight channels a thread."""
        block = next_power_of_two(self.d)
        return {"BLOCK_D": block, "num_warps": min(8, max(1, block // CHANNELS_A_WARP))}

    def _mix(self) -> None:
        """x~, Delta, and unit B and C of all tokens that still move."""
        memory = 2 * self.n if self.layout.selective else 0
        strides = self.x.stride(1), self.raw.stride(1), self.fed_back.stride(1)
        mix_kernel[(self.b * self.t,)](
            *(self.x, self.raw, self.fed_back, self.y, self.kept, self.mixed, self.delta, self.BC),
            *(self.b, self.t, *strides, self.d, self.n),
            K=self.layout.num_householder,
            BLOCK_N=next_power_of_two(self.n),
            FEEDBACK=self.W_y is not None,
            SELECTIVE=self.layout.selective,
            ACTIVATION=self.layout.activation,
            BETA_MAX=self.layout.beta_max,
            EPS=UNIT_EPS,
            ALIGN=math.gcd(CHANNELS_AT_ONCE, *strides, self.d, memory),
            FAST=not interpreter_is_on(),
            **self._of_tokens,
        )

    def _judge(self, *, count: bool) -> None:
        """Defect, scale and next iterate of every token; converged prefix and failure of every
        sample."""
        judge_kernel[(self.b * self.t,)](
            *(self.y, self.y_next, self.y_next if self.value is None else self.value, self.kept),
            *(self.norms, self.b, self.t, self.d),
            DAMPING=self.rule.damping,
            STORE_VALUE=self.value is not None,
            **self._of_tokens,
        )
        lengths = self.lengths
        decide_kernel[(self.b,)](
            *(self.norms, self.counters, self.counters if lengths is None else lengths),
            *(self.b, self.t),
            ATOL=self.rule.atol,
            RTOL=self.rule.rtol,
            WHOLE=self.rule.whole_sequence,
            COUNT=count,
            PADDED=lengths is not None,
            BLOCK_T=min(next_power_of_two(self.t), DECIDE_TOKENS),
        )

    def _settle(
        self,
        y_next: Tensor,  # (b, t, d)
    ) -> None:
        """Undo the last move of tokens that have just frozen; norm(y_next) of the others."""
        eps = self.options.feedback_norm_eps
        settle_kernel[(self.b * self.t,)](
            *(self.y, y_next, self.normed, self.counters, self.b, self.t, self.d),
            FEEDBACK=self.W_y is not None,
            NORM=eps is not None,
            NORM_EPS=0.0 if eps is None else eps,
            **self._of_tokens,
        )

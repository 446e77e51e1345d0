"""One step of Picard from the projections to the next iterate, on the device alone.

A step is the product with W^y (cuBLAS, one launch for all heads) and these launches; nothing is
read by the host:

    mix      a program a token: x~ = x + (I - Q)(y - x), unit B and C
    scan     a program a block of channels, all tokens: memory and read-out, the next iterate, and
             of defect and scale the largest in the block
    decide   a program a sample: running largest scale, converged prefix, failure, step count
    settle   a program a token: what has just frozen goes back to the iterate that was measured;
             norm(y) of the others, one token on, for the next product

The mixing sums over channels within a token, the scan over tokens within a channel, and the freeze
over tokens of a sample. Converged tokens are a prefix, so one number a sample says it all; frozen
tokens are not mixed or written again.

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values,
H heads (kernels/heads.py).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.feedback import normalize_feedback, padded_rows
from bedouin.kernels.heads import count_heads
from bedouin.kernels.householder import UNIT_EPS
from bedouin.kernels.iteration.triton_kernels import (
    decide_kernel,
    mix_kernel,
    restore_kernel,
    scan_kernel,
    settle_kernel,
)
from bedouin.kernels.iteration.types import IterationRule, Progress
from bedouin.kernels.launch import ceil_div, evenly_spaced, next_power_of_two
from bedouin.kernels.linear import padding
from bedouin.kernels.operands import Operands, Parameterization

FEWEST_STATES = 4
"""Fewest states of a thread of the scan, where programs would otherwise be few."""
FEWEST_CHANNELS = 8
"""Channels of a program of the scan from which on a row is read without waste."""
PROGRAMS = 1024
"""Programs wanted in the scan, of one warp each."""
AHEAD = 2
"""How many tokens the scan loads at once, as many tokens ahead. Fewer do not hide the latency of
memory, more do not stay in registers (64 x 256: 147 microseconds with 2, 156 with 4)."""
REGISTERS = 128
"""Of a thread of the scan in float32: 16 programs a multiprocessor. Without this bound it
takes 140, and the last few programs run alone (274 microseconds instead of 147)."""
CHANNELS_A_WARP = 256
"""Of the kernels that take a token a program."""
CHANNELS_AT_ONCE = 4
"""Of them, what a thread loads at a time: of float32 the widest load there is."""
RESTORERS = 4
"""Programs a sample that undo the moves of tokens that have just frozen, without feedback."""
STATES = 16
"""Most states of a thread of the scan."""
DECIDE_TILE = 8192
"""Elements of `parts` that `decide` takes at a time."""
DECIDE_TOKENS = 32
"""Fewest tokens that `decide` takes at a time."""
KEPT, FROZEN, FAILED, STEPS = 1, 2, 3, 4
"""Rows of the counters (5, b): tokens whose y stays (the converged prefix, or all tokens of a
failed sample), the converged prefix, 1 if failed, steps. Row 0 is KEPT before the last decision."""


@dataclass(frozen=True)
class ScanTile:
    """What one program of the scan holds: groups of states of some channels, a thread each."""

    states: int  # of a thread
    groups: int
    channels: int

    @staticmethod
    def of(b: int, d: int, n: int) -> "ScanTile":
        """All states in one thread where they fit and that makes enough programs."""
        tile = ScanTile._from_states(min(STATES, next_power_of_two(n)), n, d)
        while tile._may_be_halved and b * ceil_div(d, tile.channels) < PROGRAMS:
            tile = ScanTile._from_states(tile.states // 2, n, d)
        return tile

    @staticmethod
    def _from_states(states: int, n: int, d: int) -> "ScanTile":
        groups = next_power_of_two(n) // states
        return ScanTile(states, groups, min(max(1, 32 // groups), next_power_of_two(d)))

    @property
    def _may_be_halved(self) -> bool:
        return self.states > FEWEST_STATES and self.channels > FEWEST_CHANNELS

    @property
    def warps(self) -> int:
        return max(1, min(8, self.groups * self.channels // 32))


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
        self.rule, self.options, self.layout = (
            rule,
            parameterization,
            parameterization.known_layout(),
        )
        (self.b, self.t, self.d), self.n, self.heads = y.shape, A.shape[-1], count_heads(A)
        b, t, d = y.shape
        self.tile = ScanTile.of(b, d, self.n)
        self.x, self.raw = evenly_spaced(x), evenly_spaced(raw)
        self.y = y.clone(memory_format=torch.contiguous_format)
        self.y_next, self.mixed = torch.empty_like(self.y), torch.empty_like(self.y)
        # without feedback the kernels read neither
        self.normed, self.fed_back, self.W_y = self.y, self.raw, W_y
        if W_y is not None:
            r = raw.shape[2]
            self.W_y = padded_rows(W_y, r + padding(r))
            self.normed = torch.empty_like(self.y, dtype=W_y.dtype)
            self.normed[:, 0] = normalize_feedback(y0, parameterization.feedback_norm_eps)
            self.fed_back = self.normed.new_empty(b, t, self.W_y.shape[-2])
        # the states before the channels
        self.A, self.h0 = A.mT.contiguous(), h0.to(y.dtype).mT.contiguous()
        # F(y) of each token where a solve returns it
        self.value = torch.empty_like(self.y) if rule.whole_sequence else None
        # unit B and C; the scan reads some tokens ahead of the last one, without a bounds check
        self.BC = y.new_empty(b * t + AHEAD, 2, self.n)
        # defect and scale, of blocks of channels and of tokens
        self.parts = y.new_empty(2, b, ceil_div(d, self.tile.channels), t)
        self.norms = y.new_zeros(2, b, t)
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
        self._scan()
        self._decide(count=count)

    @property
    def _strides(self) -> tuple[int, int]:
        """Between the rows of raw values and of their feedback."""
        return self.raw.stride(1), self.fed_back.stride(1)

    @property
    def _token_warps(self) -> int:
        """Eight channels a thread."""
        return min(8, max(1, next_power_of_two(self.d) // CHANNELS_A_WARP))

    def _mix(self) -> None:
        """x~ and unit B and C of all tokens that still move."""
        memory = 2 * self.n if self.layout.selective else 0
        mix_kernel[(self.b * self.t,)](
            *(self.x, self.raw, self.fed_back, self.y, self.kept, self.mixed, self.BC),
            *(self.b, self.t, self.x.stride(1), *self._strides, self.d, self.n, 0),
            K=self.layout.num_householder,
            BLOCK_D=next_power_of_two(self.d),
            BLOCK_N=next_power_of_two(self.n),
            FEEDBACK=self.W_y is not None,
            SELECTIVE=self.layout.selective,
            BETA_MAX=self.layout.beta_max,
            EPS=UNIT_EPS,
            ALIGN=math.gcd(CHANNELS_AT_ONCE, *self._strides, self.d, memory),
            num_warps=self._token_warps,
        )

    def _scan(self) -> None:
        """The next iterate and the parts of defect and scale."""
        tile, fast = self.tile, not interpreter_is_on()
        registers: dict[str, Any] = {"maxnreg": REGISTERS} if fast else {}
        scan_kernel[(self.b * self.parts.shape[2],)](
            *(self.mixed, self.raw, self.fed_back, self.BC, self.A, self.h0, self.y, self.kept),
            *(self.y_next, self.y_next if self.value is None else self.value, self.parts),
            *(self.b, self.t, self.b // self.heads, *self._strides, self.d, self.n),
            S=tile.states,
            GROUPS=tile.groups,
            BLOCK_D=tile.channels,
            HEADS=self.heads > 1,
            STORE_VALUE=self.value is not None,
            FEEDBACK=self.W_y is not None,
            SELECTIVE=self.layout.selective,
            ACTIVATION=self.layout.activation,
            INPUT_SCALE=self.options.input_scale,
            FULL=self.options.eigenvalues == "full",
            DAMPING=self.rule.damping,
            EXACT=tile.states * tile.groups == self.n,
            AHEAD=AHEAD,
            EVEN=self.t % AHEAD == 0,
            WIDE=self.d % tile.channels == 0,
            FAST=fast,
            num_warps=tile.warps,
            **registers,
        )

    def _decide(self, *, count: bool) -> None:
        """Defect, scale, converged prefix and failure of every sample."""
        parts, lengths = self.parts.shape[2], self.lengths
        block_p = next_power_of_two(parts)
        fitting = max(DECIDE_TOKENS, DECIDE_TILE // block_p)
        decide_kernel[(self.b,)](
            *(self.parts, self.norms, self.counters, self.counters if lengths is None else lengths),
            *(self.b, self.t, parts),
            ATOL=self.rule.atol,
            RTOL=self.rule.rtol,
            WHOLE=self.rule.whole_sequence,
            COUNT=count,
            PADDED=lengths is not None,
            BLOCK_P=block_p,
            BLOCK_T=min(next_power_of_two(self.t), fitting),
            num_warps=8,
        )

    def _settle(
        self,
        y_next: Tensor,  # (b, t, d)
    ) -> None:
        """Undo the last move of tokens that have just frozen; norm(y_next) of the others."""
        constants = {"BLOCK_D": next_power_of_two(self.d), "num_warps": self._token_warps}
        if self.W_y is None:
            programs = min(self.t, RESTORERS)
            restore_kernel[(self.b * programs,)](
                *(self.y, y_next, self.counters, self.b, self.t, programs, self.d), **constants
            )
            return
        eps = self.options.feedback_norm_eps
        settle_kernel[(self.b * self.t,)](
            *(self.y, y_next, self.normed, self.counters, self.b, self.t, self.d),
            NORM=eps is not None,
            NORM_EPS=0.0 if eps is None else eps,
            **constants,
        )

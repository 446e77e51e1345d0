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

import torch
from torch import Tensor

from bedouin.kernels.feedback import normalize_feedback, padded_rows
from bedouin.kernels.iteration.buffers import FAILED, FROZEN, STEPS, IterationBuffers
from bedouin.kernels.iteration.launch import (
    AHEAD,
    Geometry,
    decide,
    mix,
    scan,
    settle,
)
from bedouin.kernels.iteration.types import IterationRule, Progress
from bedouin.kernels.launch import evenly_spaced
from bedouin.kernels.linear import padding
from bedouin.kernels.operands import Operands, Parameterization


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
        x, raw = evenly_spaced(x), evenly_spaced(raw)
        if W_y is not None:
            r = raw.shape[2]
            W_y = padded_rows(W_y, r + padding(r))
        A = A.mT.contiguous()
        self.geometry = g = Geometry.of(x, raw, W_y, A, parameterization, rule)
        b, t, _ = y.shape
        y = y.clone(memory_format=torch.contiguous_format)
        normed, fed_back = y, raw
        if W_y is not None:
            normed = torch.empty_like(y, dtype=W_y.dtype)
            normed[:, 0] = normalize_feedback(y0, parameterization.feedback_norm_eps)
            fed_back = normed.new_empty(b, t, W_y.shape[-2])
        self.buffers = IterationBuffers(
            x=x,
            raw=raw,
            W_y=W_y,
            A=A,
            h0=h0.to(y.dtype).mT.contiguous(),
            y=y,
            y_next=torch.empty_like(y),
            value=torch.empty_like(y) if rule.whole_sequence else None,
            mixed=torch.empty_like(y),
            # the scan reads some tokens ahead of the last one, without a bounds check
            BC=y.new_empty(b * t + AHEAD, 2, g.n),
            parts=y.new_empty(2, b, g.parts, t),
            norms=y.new_zeros(2, b, t),
            counters=torch.zeros(5, b, dtype=torch.int32, device=y.device),
            normed=normed,
            fed_back=fed_back,
            lengths=None if lengths is None else lengths.to(torch.int32),
        )
        if W_y is not None:
            with torch.cuda.device_of(y):
                settle(g, self.buffers, y)

    def advance(self) -> None:
        """Evaluate the map at y, freeze what has converged, move the rest."""
        v = self.buffers
        with torch.cuda.device_of(v.y):
            self._evaluate(count=True)
            settle(self.geometry, v, v.y_next)
        v.y, v.y_next = v.y_next, v.y

    def certify(self) -> None:
        """Evaluate the map at y and judge it; y stays, and the evaluation is not counted."""
        with torch.cuda.device_of(self.buffers.y):
            self._evaluate(count=False)

    def _evaluate(self, *, count: bool) -> None:
        g, v = self.geometry, self.buffers
        if v.W_y is not None:
            r, d = v.W_y.shape[-2:]
            if v.W_y.dim() == 2:
                torch.mm(v.normed.view(-1, d), v.W_y.mT, out=v.fed_back.view(-1, r))
            else:
                normed, fed_back = v.normed.view(g.heads, -1, d), v.fed_back.view(g.heads, -1, r)
                torch.bmm(normed, v.W_y.mT, out=fed_back)
        mix(g, v)
        scan(g, v)
        decide(g, v, count=count)

    def finished(self) -> bool:
        """Whether every sample has converged or failed, from the host (synchronizes on a GPU)."""
        return bool((self.buffers.kept == self.geometry.t).all())

    @property
    def progress(self) -> Progress:
        """Tensors of their own, or which no later step changes."""
        v = self.buffers
        tokens = torch.arange(self.geometry.t, device=v.y.device)
        frozen = tokens < v.counters[FROZEN].unsqueeze(1)
        defect, scale = v.norms
        failed, steps = v.counters[FAILED] > 0, v.counters[STEPS].to(torch.int64)
        return Progress(v.y, frozen, failed, steps, defect, scale, None, v.value)

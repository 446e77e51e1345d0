"""One step of Picard or Jacobi from the projections to the next iterate, on the device alone.

A step is the product with W^y (cuBLAS, one launch for all heads) and these launches; nothing is
read by the host:

    mix      a program a token: x~ = x + (I - Q)(y - x), unit B and C, for Jacobi T
    scan     a program a block of channels, all tokens: memory and read-out. Picard ends here: next
             iterate, and of defect and scale the largest in the block; Jacobi gets p
    finish   Jacobi, a program a token: the local k x k solve, next iterate, defect, scale. Without
             feedback it also computes x~ of the next iterate, and only the first step mixes
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

Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values,
H heads (kernels/heads.py).
"""

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend
from bedouin.kernels.feedback import normalize_feedback, padded_rows
from bedouin.kernels.guard import Launching
from bedouin.kernels.iteration.buffers import FAILED, FROZEN, STEPS, IterationBuffers
from bedouin.kernels.iteration.launch import (
    Geometry,
    decide,
    finish,
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
        backend: Backend = "auto",
    ) -> None:
        self.backend = backend
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
        mixed = torch.empty_like(y)
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
            mixed=mixed,
            mixed_next=torch.empty_like(mixed) if g.mixes_ahead else mixed,
            # the scan reads some tokens ahead of the last one, without a bounds check
            BC=y.new_empty(b * t + g.ahead, 2, g.n),
            gain=torch.empty_like(y) if g.stores_gain else mixed,
            WY=y.new_empty(b, t, g.k * (g.k + 1) // 2 + g.k),
            parts=y.new_empty(2, b, g.parts, t),
            norms=y.new_zeros(2, b, t),
            pivots=y.new_zeros(b, t),
            counters=torch.zeros(5, b, dtype=torch.int32, device=y.device),
            normed=normed,
            fed_back=fed_back,
            lengths=None if lengths is None else lengths.to(torch.int32),
        )
        with Launching(y, backend):
            if W_y is not None:
                settle(g, self.buffers, y)
            if g.mixes_ahead:
                mix(g, self.buffers)

    def advance(self) -> None:
        """Evaluate the map at y, freeze what has converged, move the rest."""
        v = self.buffers
        with Launching(v.y, self.backend):
            self._evaluate(count=True)
            settle(self.geometry, v, v.y_next)
        v.y, v.y_next = v.y_next, v.y
        v.mixed, v.mixed_next = v.mixed_next, v.mixed

    def certify(self) -> None:
        """Evaluate the map at y and judge it; y stays, and the evaluation is not counted."""
        with Launching(self.buffers.y, self.backend):
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
        if not g.mixes_ahead:
            mix(g, v)
        scan(g, v)
        if g.jacobi:
            finish(g, v)
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
        # the pivots of padding are 1, the largest that a pivot is
        pivot = v.pivots.amin(1) if self.geometry.jacobi else None
        failed, steps = v.counters[FAILED] > 0, v.counters[STEPS].to(torch.int64)
        return Progress(v.y, frozen, failed, steps, defect, scale, pivot, v.value)

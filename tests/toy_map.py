"""`ToyMap`: a map that is causal in time, and `SweptMap`, with a sweep.

Letters: b batch, t time, c values of a token.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor


class ToyMap:
    """F(y)_t = a y_t + sin(y_{t-1}) w + x_t, with the local solve that Jacobi needs, both ways.

    It expands in y_t for |a| > 1.
    """

    def __init__(self, a: Tensor, w: Tensor, x: Tensor) -> None:
        self.a, self.w, self.x = a, w, x

    def _past(self, y: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
        return torch.sin(before) * self.w + self.x

    def __call__(self, y: Tensor) -> Tensor:
        return self.a * y + self._past(y)

    def loop(self) -> Tensor:
        """The fixed point token by token, differentiable."""
        y = self.x[:, 0] / (1 - self.a)
        tokens = [y]
        for x_t in self.x.unbind(1)[1:]:
            y = (torch.sin(y) * self.w + x_t) / (1 - self.a)
            tokens.append(y)
        return torch.stack(tokens, 1)

    def block_solve(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return self._past(y) / (1 - self.a), (1 - self.a).abs().expand(y.shape[0])

    def block_transpose(self, y_star: Tensor) -> tuple[Callable[[Tensor], Tensor], ...]:
        a = self.a.detach()
        return (lambda w: a * w), (lambda r: r / (1 - a))


class SweptMap(ToyMap):
    """The toy map with a sweep, for Direct; `error` is added to what it finds."""

    error = 0.0
    unrolled: bool | None = None

    def sweep(self, unroll: bool, report: object) -> SimpleNamespace:
        """As a map hands it over."""
        self.unrolled = unroll
        y = self.loop() + self.error
        defect, scale = (v.detach().abs().amax(-1) for v in (self(y) - y, self(y)))
        norms = {"defect": defect, "scale": scale, "magnitude": scale}
        return SimpleNamespace(y=y, **norms, pivot=torch.full_like(defect, 0.5))

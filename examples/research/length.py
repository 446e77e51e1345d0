"""Further training from states that begin as zero, as another sequence's last state, or with noise.

A row of a step begins with the state after a row of the step before, as in Understanding and
Improving Length Generalization in Recurrent Models (arXiv 2507.02782). There labels are those of
the row alone; here they go on with the product of the row before, for which its state stands. After
a wrong last label a row begins with zeros, since no label after it could be right. Noise is added
to the state of a row, because noise alone stands for no product.

Letters: s seeds, b batch, t time, v classes.
"""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from bedouin.tasks import WordProblem
from research.stack import Ensemble
from research.study import Start

STEPS, RATE = 500, 0.1
"""Further steps, and their learning rate as a multiple of that of the training."""

RESTARTS, NOISE = 0.02, 0.1
"""The share of rows that begin anew in every step, so that none goes on for ever, and the standard
deviation of noise, relative to the root mean square of a state's tensor."""


class Continued(Ensemble):
    """Copies of trained models, whose rows begin with states of a kind."""

    def __init__(self, trained: Ensemble, kind: Start) -> None:
        task, rate = trained.data.task, RATE * trained.point["lr"]
        if not isinstance(task, WordProblem):
            raise ValueError("--states must be empty for a task other than word")
        config = replace(trained.config, compile=False, concurrent=False)
        point = trained.point | {"states": kind, "steps": STEPS, "lr": rate}
        super().__init__(config, point, trained.data, trained.device)
        for name, parameter in trained.params.items():
            self.params[name].copy_(parameter)
        self.kind, self.table = kind, task.group.table.to(self.device)
        self.states: list[Any] = [None] * len(self.models)
        self.products = torch.zeros(self.tokens.shape[:2], dtype=torch.int64, device=self.device)
        self.goes_on = torch.zeros_like(self.products, dtype=torch.bool)  # (s, b)
        if kind != "zero":
            self.trained = [partial(self._continue, i) for i in range(len(self.models))]

    def refill(self) -> None:
        super().refill()
        if self.kind != "zero":
            self.goes_on &= torch.rand(self.products.shape, device=self.device) >= RESTARTS
            before = self.products * self.goes_on  # 0 is the identity
            self.labels.copy_(self.table[before.unsqueeze(-1), self.labels])
            self.products = self.labels[..., -1].clone()

    def _continue(self, i: int, tokens: Tensor) -> Tensor:  # (b, t) -> (b, t, v)
        state = self.states[i]
        if state is not None:
            state = tuple(self._begun(layer, self.goes_on[i]) for layer in state)
        logits, after = self.models[i](tokens, state, True)
        self.states[i] = tuple(layer.detach() for layer in after)
        self.goes_on[i] = logits[:, -1].argmax(-1) == self.labels[i, :, -1]
        return cast(Tensor, logits)

    def _begun(self, state: Any, goes_on: Tensor) -> Any:  # (b,)
        """A layer's state with noise where it is asked for, and zeros where rows begin anew; the
        window of a convolution has no noise."""
        found = []
        for name, v in state._asdict().items():  # without an absent convolution
            if self.kind == "noise" and not name.endswith("conv"):
                v = v + NOISE * v.square().mean().sqrt() * torch.randn_like(v)
            found.append(torch.where(goes_on.view(-1, *[1] * (v.dim() - 1)), v, 0))
        return type(state)(*found)

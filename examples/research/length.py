"""Further training from states that begin as zero, as another sequence's last state, or with noise.

Each row of a further step begins with the state after a row of the step before, as Understanding
and Improving Length Generalization in Recurrent Models (arXiv 2507.02782) has it. There the labels
are those of the row alone; here, where a state stands for a product, they go on with the product of
the row before, and noise is added to such a state, because after noise alone no product is right.

Letters: b batch, t time.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bedouin.tasks import WordProblem
from research.stack import Ensemble, Params
from research.study import Start

STEPS, RATE = 500, 0.1
"""Further steps, and their learning rate as a multiple of that of the training."""

RESTARTS, NOISE = 0.02, 0.3
"""The share of rows that begin with zeros and the identity in every step, so that none goes on for
ever, and the standard deviation of noise, relative to the root mean square of a state's tensor."""


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

    def _gradient(self, i: int) -> tuple[Params, Tensor, Tensor, Tensor]:
        if self.kind == "zero":
            return super()._gradient(i)
        model, state = self.models[i], self.states[i]
        goes_on = torch.rand(self.products.shape[1], device=self.device) >= RESTARTS
        self.products[i] *= goes_on  # 0 is the identity
        if state is not None:
            state = tuple(self._begun(layer, goes_on) for layer in state)
        with torch.autocast(self.device.type, torch.bfloat16, self.config.autocast == "bf16"):
            logits, after = model(self.tokens[i], state, True)
        self.states[i] = tuple(layer.detach() for layer in after)
        labels = self.table[self.products[i, :, None], self.labels[i]]  # (b, t)
        self.products[i] = labels[:, -1]
        loss, correct, pivot = self._loss(logits.float(), labels, model)
        params = dict(model.named_parameters())
        grads = torch.autograd.grad(loss, list(params.values()))
        return dict(zip(params, grads, strict=True)), loss.detach(), correct, pivot

    def _begun(self, state: Any, goes_on: Tensor) -> Any:  # (b,)
        """A layer's state with noise where it is asked for, and zeros where rows begin anew; the
        window of a convolution has no noise."""
        found = []
        for name, v in zip(state._fields, state, strict=True):
            if self.kind == "noise" and not name.endswith("conv"):
                v = v + NOISE * v.square().mean().sqrt() * torch.randn_like(v)
            found.append(v * goes_on.view(-1, *[1] * (v.dim() - 1)))
        return type(state)(*found)

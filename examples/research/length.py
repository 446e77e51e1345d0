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

from bedouin.model import ModelState
from bedouin.tasks import IGNORE, BoundPermutations, WordProblem
from research.stack import Ensemble
from research.study import Start


class Continued(Ensemble):
    """The models of another stack in steps of their own, whose rows begin with states of a kind."""

    def __init__(self, trained: Ensemble, kind: Start) -> None:
        config, point = trained.config, trained.point
        rate = config.further_rate * point["lr"]
        point = point | {"states": kind, "steps": config.further_steps, "lr": rate}
        config = replace(config, compile=False, concurrent=False)
        super().__init__(config, point, trained.data, trained.device)
        for name, parameter in trained.params.items():
            self.params[name].copy_(parameter)
        task = self.data.task
        if not isinstance(task, WordProblem | BoundPermutations):
            raise ValueError("--states must be empty for a task other than word and bound")
        self.kind, self.task, self.table = kind, task, task.group.table_on(self.device)
        self.states: list[ModelState] = [m.init_state(point["batch_size"]) for m in self.models]
        self.products = torch.zeros(len(self.models), point["batch_size"], dtype=torch.int64)
        self.products = self.products.to(self.device)  # 0 is the identity

    def _gradient(self, i: int) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
        if self.kind == "zero":
            return super()._gradient(i)
        model, tokens = self.models[i], self.tokens[i]
        self._restart(i)
        state = self.states[i]
        if self.kind == "noise":
            state = tuple(with_noise(layer, self.config.state_noise) for layer in state)
        with self._autocast():
            logits, after = model(tokens, state, True)
        labels = self._continued(i, tokens, self.labels[i])
        self.states[i] = tuple(layer.detach() for layer in after)
        loss, (correct, pivot) = self._loss(logits.float(), labels, model)
        params = dict(model.named_parameters())
        grads = torch.autograd.grad(loss, list(params.values()))
        return dict(zip(params, grads, strict=True)), loss.detach(), correct, pivot

    def _restart(self, i: int) -> None:
        """Begin some rows with zeros and the identity, so that none goes on for ever."""
        drawn = torch.rand(self.products.shape[1], device=self.device)
        goes_on = drawn >= self.config.restarts
        self.products[i] *= goes_on

        def kept(v: Tensor) -> Tensor:
            return torch.where(goes_on.view(-1, *[1] * (v.dim() - 1)), v, 0)

        self.states[i] = tuple(type(s)(*map(kept, s.tensors)) for s in self.states[i])

    def _continued(
        self,
        i: int,
        tokens: Tensor,  # (b, t)
        labels: Tensor,  # (b, t)
    ) -> Tensor:  # (b, t)
        """The labels after the products so far, which go on with the rows' own."""
        bound = isinstance(self.task, BoundPermutations)
        own = self.task.products(labels, tokens) if bound else labels
        is_product = own != IGNORE
        after = self.table[self.products[i, :, None], own.clamp(min=0)]
        labels = torch.where(is_product, after, labels)
        last = (is_product * torch.arange(labels.shape[1], device=self.device)).argmax(1, True)
        ended = labels.gather(1, last).squeeze(1)
        self.products[i] = torch.where(is_product.any(1), ended, self.products[i])
        return labels


def with_noise(state: Any, size: float) -> Any:
    """A layer's state plus Gaussian noise, relative to the root mean square of each tensor; the
    window of a convolution stays as it is."""
    found = []
    for name, v in zip(state._fields, state.tensors, strict=True):
        scale = 0.0 if name == "conv" else size * v.square().mean().sqrt()
        found.append(v + scale * torch.randn_like(v))
    return type(state)(*found)

"""A stack of models of several seeds that take their training steps together.

Letters: s seeds, b batch, t time, v classes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import stack_module_state
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bedouin import SequenceModel
from bedouin.tasks import IGNORE, token_accuracy
from benchmarks.timing import capture
from common.options import decay
from common.run import FAILED_SHARE
from research.data import DRAWN_AHEAD, Data, Point, metrics, predictions
from research.study import Config, make_model, model_seeds

Params = dict[str, Tensor]

EVAL_BATCH, EVAL_TOKENS = 256, 2**17
"""Test rows evaluated at once, and their tokens."""

LONG_BATCH, LONG_TOKENS = 8, 2**22
"""Of longer rows so many at once, and only as many as have LONG_TOKENS, or LONG_BATCH."""

PIECE = 2**15
"""Most tokens of a row in one call; cuDNN refuses eight rows of 2**17 tokens."""


class Ensemble:
    """A stack of models, each with an AdamW and clipping of its own, and their schedule."""

    def __init__(self, config: Config, point: dict[str, Any], data: Data, device: torch.device):
        self.config, self.point, self.data, self.device = config, point, data, device
        self.models = [self._model(seed) for seed in model_seeds(config)]
        self.model = self.models[0]
        params, _ = stack_module_state(self.models)
        self.params: Params = {n: p.detach().clone() for n, p in params.items()}
        self.grads: Params = {n: torch.zeros_like(p) for n, p in self.params.items()}
        # each model reads its own slice
        for i, model in enumerate(self.models):
            for n, parameter in model.named_parameters():
                parameter.data = self.params[n][i]
                parameter.grad = self.grads[n][i]
        self.trained: Sequence[Callable[[Tensor], Tensor]] = self.models
        if config.compile:
            self.trained = [torch.compile(model, dynamic=False) for model in self.models]
        warmup, steps = config.warmup, point["steps"]

        def factor(step: int) -> float:
            return decay(point["schedule"], step, warmup, steps)

        undecayed = {
            n for n, p in self.model.named_parameters() if getattr(p, "_no_weight_decay", False)
        }
        groups: list[dict[str, Any]] = []
        for skip in (False, True):
            chosen = [n for n in self.params if (n in undecayed) == skip]
            if chosen:
                decayed = 0.0 if skip else config.weight_decay
                # a captured step reads its rate from the device; the models share it
                lr = torch.tensor(point["lr"], device=device)
                groups.append({"names": chosen, "weight_decay": decayed, "lr": lr})
        self.optimizers = [self._optimizer(model, groups) for model in self.models]
        self.schedule = LambdaLR(self.optimizers[0], factor)
        # lengths may grow at every log entry, at which then none are left that were drawn before
        ahead = math.gcd(DRAWN_AHEAD, config.log_every)
        first = data.batch(point["batch_size"], 0, point["steps"])
        self.tokens, self.labels = (part.clone() for part in first)
        self.batches = data.batches(point["batch_size"], point["steps"], ahead)
        # a stream for each model, if they run side by side
        concurrent = config.concurrent and device.type == "cuda"
        self.streams = [torch.cuda.Stream(device) for _ in self.models] if concurrent else []
        shape = (config.seeds,)
        self.loss_sum = torch.zeros(shape, device=device)
        self.correct_sum = torch.zeros(shape, device=device)
        self.skipped = torch.zeros(shape, dtype=torch.int64, device=device)

    def _model(self, seed: int) -> SequenceModel:
        torch.manual_seed(seed)
        return make_model(self.config, self.point).to(self.device)

    def _optimizer(
        self, model: SequenceModel, groups: Sequence[dict[str, Any]]
    ) -> torch.optim.AdamW:
        """AdamW for one model, whose steps can be skipped without those of the others; `groups`
        name their parameters."""
        named = dict(model.named_parameters())
        return torch.optim.AdamW(
            [{**group, "params": [named[n] for n in group["names"]]} for group in groups],
            betas=self.config.betas,
            capturable=self.device.type == "cuda",
            fused=True,
        )

    def _loss(
        self,
        logits: Tensor,  # (b, t, v), or (b, t, 64, v) of chess
        labels: Tensor,  # (b, t), or (b, t, 64)
    ) -> tuple[Tensor, Tensor]:  # () each
        """Loss and accuracy of one model."""
        loss = cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE)
        return loss, token_accuracy(logits, labels)

    def _logits(
        self,
        model: Callable[[Tensor], Tensor],
        tokens: Tensor,  # (b, t)
    ) -> Tensor:  # (b, t, v)
        enabled = self.config.autocast == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled):
            if tokens.shape[1] <= PIECE:
                logits: Tensor = model(tokens)
            else:
                logits = in_pieces(model, tokens)
        return predictions(self.data.task, logits).float()

    def _gradients(self) -> tuple[Params, Tensor, Tensor]:
        """Gradients, and loss and accuracy (s,), of all models."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        found = []
        for i in range(self.config.seeds):
            with torch.cuda.stream(self.streams[i] if self.streams else None):
                found.append(self._gradient(i))
        for stream in self.streams:
            torch.cuda.current_stream(self.device).wait_stream(stream)
        grads = {name: torch.stack([row[0][name] for row in found]) for name in self.params}
        _, losses, corrects = zip(*found, strict=True)
        return grads, torch.stack(losses), torch.stack(corrects)

    def _gradient(self, i: int) -> tuple[Params, Tensor, Tensor]:
        """Gradients, loss and accuracy of model i."""
        params = dict(self.models[i].named_parameters())
        logits = self._logits(self.trained[i], self.tokens[i])
        loss, correct = self._loss(logits, self.labels[i])
        grads = torch.autograd.grad(loss, list(params.values()))
        return dict(zip(params, grads, strict=True)), loss.detach(), correct

    def step(self) -> None:
        """One update of every model from the batch in `tokens` and `labels`."""
        grads, loss, correct = self._gradients()
        squares = (g.flatten(1).square().sum(1) for g in grads.values())
        square = sum(squares, torch.zeros_like(loss))
        scale = (self.config.clip / (torch.sqrt(square) + 1e-6)).clamp(max=1.0)
        finite = torch.isfinite(square)
        for name, g in grads.items():
            self.grads[name].copy_(g * scale.view(-1, *[1] * (g.dim() - 1)))
        for optimizer, is_finite in zip(self.optimizers, finite.unbind(), strict=True):
            skip_unless(is_finite, optimizer)
            optimizer.step()
        self.loss_sum += loss.detach()
        self.correct_sum += correct
        self.skipped += ~finite

    def refill(self) -> None:
        tokens, labels = next(self.batches)
        self.tokens.copy_(tokens)
        self.labels.copy_(labels)

    def log(self, step: int) -> dict[str, Any]:
        n = self.config.log_every
        row = {
            "step": step,
            "loss": (self.loss_sum / n).tolist(),
            "accuracy": (self.correct_sum / n).tolist(),
            "length": list(self.data.reached),
            "skipped": self.skipped.tolist(),
        }
        self.skipped.zero_()
        self.loss_sum.zero_()
        self.correct_sum.zero_()
        return row

    @torch.no_grad()
    def accuracy(self, point: Point) -> dict[str, list[float]]:
        """The accuracies of `metrics` of each seed, on `eval_rows` test rows or fewer long ones."""
        found = metrics(self.data.task)
        sums = {name: torch.zeros(self.config.seeds, device=self.device) for name in found}
        width = self.data.eval_batch(0, point)[0].shape[-1]
        total = left = min(self.config.eval_rows, max(LONG_BATCH, LONG_TOKENS // width))
        while left > 0:
            rows = min(left, EVAL_BATCH, max(LONG_BATCH, EVAL_TOKENS // width))
            left -= rows
            tokens, labels = self.data.eval_batch(rows, point)
            logits = [self._logits(*pair) for pair in zip(self.models, tokens, strict=True)]
            values = [
                torch.stack([metric(*each) for metric in found.values()])
                for each in zip(logits, labels, tokens, strict=True)
            ]
            for name, value in zip(found, torch.stack(values, dim=1), strict=True):
                sums[name] += rows / total * value
        return {name: value.tolist() for name, value in sums.items()}

    @torch.no_grad()
    def board(self, plies: int) -> dict[str, Any]:
        """The classes (64,) of the squares after so many plies of a test game, and what every model
        says of them."""
        tokens, labels = self.data.eval_batch(1, plies)
        found = [self._logits(model, tokens[0])[0, -1].argmax(-1) for model in self.models]
        return {"labels": labels[0, 0, -1].tolist(), "found": torch.stack(found).tolist()}


def in_pieces(model: Any, tokens: Tensor) -> Tensor:  # (b, t) -> (b, t, v)
    """The logits, by calls of PIECE tokens that each begin with the state after the last one."""
    state, found = None, []
    for piece in tokens.split(PIECE, dim=1):
        logits, state = model(piece, state, True)
        found.append(logits)
    return torch.cat(found, dim=1)


def stepper(ensemble: Ensemble) -> Callable[[], None]:
    """The step itself, or its CUDA graph after a few warm-up steps on a side stream."""
    if not (ensemble.config.graph and ensemble.device.type == "cuda"):
        return ensemble.step
    saved = {n: p.clone() for n, p in ensemble.params.items()}
    graph = capture(ensemble.step)
    _reset(ensemble, saved)
    return graph.replay


def _reset(ensemble: Ensemble, saved: Params) -> None:
    """Undo the warm-up steps in place."""
    for name, p in ensemble.params.items():
        p.copy_(saved[name])
    for optimizer in ensemble.optimizers:
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()
    ensemble.log(0)


def skip_unless(
    finite: Tensor,  # () bool
    optimizer: Optimizer,  # fused
) -> None:
    """Let the next step of `optimizer` keep parameters, moments and step counts unless `finite`.

    torch's fused kernels read the flag on the device, so that nothing synchronizes with the host
    and a CUDA graph can capture the step. Optimizers that are not fused ignore the flag.
    """
    optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]


def has_failed(skipped: int, steps: int) -> bool:
    """Whether so many skipped steps are too many for the result of a run to count."""
    return skipped > FAILED_SHARE * steps

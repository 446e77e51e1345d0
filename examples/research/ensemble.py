"""Train models with several seeds in one process: word problems, copying, parity, arithmetic.

    python examples/research/ensemble.py --out runs/a5-five-seeds        # 5 seeds, A5 at length 16
    python examples/research/ensemble.py --input-scale delta bounded_delta one_minus_decay \\
        --d-state 4 16 --num-householder 2 4 --steps 2000 --out runs/a5-parameterizations
    python examples/research/ensemble.py --preset paper --out runs/a5-paper    # the paper's d_model
    python examples/research/ensemble.py --group S5 --curriculum double --mixer-layer lstm

The models of all seeds run one after the other inside one step, which a GPU captures as a CUDA
graph, because small layers are limited by kernel launches. With --concurrent they run side by side
on CUDA streams, and so do the points of the grid. With --stacked their parameters and data
are stacked and the step is vmapped over them, in plain PyTorch. `--mixer-layer` trains a baseline.
Every combination of the options with several values is trained.
OUT/results.json contains for each of them the number of parameters, the accuracies by length
(`common/data.py`), the history of loss, accuracy, longest training length, smallest pivot of the
local systems (`SolveStats.conditioning`; null for a baseline) and number of steps without an update
because a gradient was not finite, and the step at which each seed first reached an accuracy of
0.99, for all seeds, failed ones included; for copying also where in a string the errors are. A seed
has failed (`failed`) if it had no update in more than 1 % of its steps (`skipped`).
--trackers logs history and accuracies of each model as a run of its own, when its point of the grid
is done and in results.json: several of the trackers hold one run in a process.

Letters: s seeds, b batch, t time, v classes.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from math import isinf
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from bedouin import SequenceModel
from bedouin.tasks import IGNORE, Copying, token_accuracy
from common.device import choose_device
from common.errors import UsageError
from common.folder import refuse_to_replace
from common.layers import count
from common.schedule import decay, slow_at_first
from common.skipping import has_failed, skip_unless
from common.trackers import log_run, tracked_scores
from research.data import DRAWN_AHEAD, Data, Point, eval_points, metrics
from research.positions import by_position
from research.study import GRID, PRESETS, Config, make_model, matched, model_seeds

FED_WEIGHT = "y_proj.weight"
"""W^y, which has a learning rate of its own."""
Params = dict[str, Tensor]


RESULTS = "results.json"
EVAL_BATCH, EVAL_TOKENS = 256, 2**17
"""Test rows evaluated at once, and their tokens."""


class Ensemble:
    """A stack of models, each with an AdamW and clipping of its own, and their schedule."""

    def __init__(self, config: Config, point: dict[str, Any], data: Data, device: torch.device):
        self.config, self.point, self.data, self.device = config, point, data, device
        self.models = [self._model(seed) for seed in model_seeds(config)]
        self.model = self.models[0]
        params, _ = stack_module_state(self.models)
        self.params: Params = {n: p.detach().clone() for n, p in params.items()}
        self.grads: Params = {n: torch.zeros_like(p) for n, p in self.params.items()}
        # without vmap each model reads its own slice, and is called as it is: cuDNN's LSTM does not
        # see parameters that functional_call replaces
        for i, model in enumerate(self.models):
            for n, parameter in model.named_parameters():
                parameter.data = self.params[n][i]
                parameter.grad = self.grads[n][i]
        warmup, steps = config.warmup, point["steps"]

        def factor(step: int) -> float:
            return decay(point["schedule"], step, warmup, steps)

        slow_steps = point["feedback_lr_share"] * steps
        feedback_factor = slow_at_first(factor, point["feedback_lr_scale"], slow_steps)
        undecayed = {
            n for n, p in self.model.named_parameters() if getattr(p, "_no_weight_decay", False)
        }
        groups: list[dict[str, Any]] = []
        factors: list[Callable[[int], float]] = []
        for slow, skip in itertools.product((False, True), repeat=2):
            chosen = [
                n for n in self.params if (n in undecayed, n.endswith(FED_WEIGHT)) == (skip, slow)
            ]
            if chosen:
                decayed = 0.0 if skip else config.weight_decay
                # a captured step reads its rate from the device; the models share it
                lr = torch.tensor(point["lr"], device=device)
                groups.append({"names": chosen, "weight_decay": decayed, "lr": lr})
                factors.append(feedback_factor if slow else factor)
        self.optimizers = [self._optimizer(model, groups) for model in self.models]
        self.schedule = LambdaLR(self.optimizers[0], factors)
        ahead = 1 if config.stacked else DRAWN_AHEAD
        self.batches = data.batches(point["batch_size"], point["steps"], ahead)
        self.tokens, self.labels = (part.clone() for part in next(self.batches))
        # a stream for each model, if they run side by side
        concurrent = config.concurrent and device.type == "cuda"
        self.streams = [torch.cuda.Stream(device) for _ in self.models] if concurrent else []
        shape = (config.seeds,)
        self.loss_sum = torch.zeros(shape, device=device)
        self.correct_sum = torch.zeros(shape, device=device)
        self.skipped = torch.zeros(shape, dtype=torch.int64, device=device)
        self.pivot_min = torch.full(shape, torch.inf, device=device)

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
        logits: Tensor,  # (b, t, v)
        labels: Tensor,  # (b, t)
        model: SequenceModel,
    ) -> tuple[Tensor, Any]:  # ()
        """Loss, and (accuracy, smallest pivot), of one model."""
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        pivot = torch.full_like(loss, torch.inf)
        pivots = [
            stats.conditioning.min() for stats in model.stats if stats.conditioning is not None
        ]
        if pivots:  # a baseline has no statistics, an iterative solver no pivots
            pivot = torch.stack(pivots).amin()
        return loss, (token_accuracy(logits, labels), pivot)

    def _stacked_loss(
        self,
        params: Params,
        tokens: Tensor,  # (b, t)
        labels: Tensor,  # (b, t)
    ) -> tuple[Tensor, Any]:  # ()
        return self._loss(self._stacked_logits(params, tokens), labels, self.model)

    def _stacked_logits(
        self,
        params: Params,
        tokens: Tensor,  # (b, t)
    ) -> Tensor:  # (b, t, v)
        with self._autocast():
            logits: Tensor = functional_call(self.model, params, (tokens,))
        return logits.float()

    def _logits(
        self,
        model: SequenceModel,
        tokens: Tensor,  # (b, t)
    ) -> Tensor:  # (b, t, v)
        with self._autocast():
            logits: Tensor = model(tokens)
        return logits.float()

    def _autocast(self) -> torch.autocast:
        enabled = self.config.autocast == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    def _gradients(self) -> tuple[Params, Tensor, Tensor, Tensor]:
        """Gradients, and loss, accuracy and smallest pivot (s,), of all models."""
        if self.config.stacked:
            differentiate = vmap(grad_and_value(self._stacked_loss, has_aux=True))
            grads, (loss, (correct, pivot)) = differentiate(self.params, self.tokens, self.labels)
            return grads, loss, correct, pivot
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        found = []
        for i in range(self.config.seeds):
            with torch.cuda.stream(self.streams[i] if self.streams else None):
                found.append(self._gradient(i))
        for stream in self.streams:
            torch.cuda.current_stream(self.device).wait_stream(stream)
        grads = {name: torch.stack([row[0][name] for row in found]) for name in self.params}
        _, losses, corrects, pivots = zip(*found, strict=True)
        return grads, torch.stack(losses), torch.stack(corrects), torch.stack(pivots)

    def _gradient(self, i: int) -> tuple[Params, Tensor, Tensor, Tensor]:
        """Gradients, loss, accuracy and smallest pivot of model i, without torch.func."""
        model = self.models[i]
        params = dict(model.named_parameters())
        logits = self._logits(model, self.tokens[i])
        loss, (correct, pivot) = self._loss(logits, self.labels[i], model)
        grads = torch.autograd.grad(loss, list(params.values()))
        return dict(zip(params, grads, strict=True)), loss.detach(), correct, pivot

    def step(self) -> None:
        """One update of every model from the batch in `tokens` and `labels`."""
        grads, loss, correct, pivot = self._gradients()
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
        torch.minimum(self.pivot_min, pivot, out=self.pivot_min)

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
            "conditioning": [None if isinf(v) else v for v in self.pivot_min.tolist()],
            "skipped": self.skipped.tolist(),
        }
        self.skipped.zero_()
        self.loss_sum.zero_()
        self.correct_sum.zero_()
        self.pivot_min.fill_(torch.inf)
        return row

    @torch.no_grad()
    def accuracy(self, point: Point) -> dict[str, list[float]]:
        """The accuracies of `metrics` of each seed, on `eval_rows` test rows."""
        found = metrics(self.data.task)
        sums = {name: torch.zeros(self.config.seeds, device=self.device) for name in found}
        left = self.config.eval_rows
        width = self.data.eval_batch(0, point)[0].shape[-1]
        while left > 0:
            rows = min(left, EVAL_BATCH, max(1, EVAL_TOKENS // width))
            left -= rows
            tokens, labels = self.data.eval_batch(rows, point)
            values = [
                torch.stack([metric(*each) for metric in found.values()])
                for each in zip(self._each(tokens), labels, tokens, strict=True)
            ]
            for name, value in zip(found, torch.stack(values, dim=1), strict=True):
                sums[name] += rows / self.config.eval_rows * value
        return {name: value.tolist() for name, value in sums.items()}

    @torch.no_grad()
    def positions(self, length: int) -> list[dict[str, float | list[float]]]:
        """Where each seed makes its errors when it copies strings of one length."""
        tokens, labels = self.data.eval_batch(min(EVAL_BATCH, self.config.eval_rows), length)
        pairs = zip(self._each(tokens), labels, strict=True)
        return [by_position(*pair) for pair in pairs]

    def _each(
        self,
        rows: Tensor,  # (s, b, t)
    ) -> Iterator[Tensor]:  # (b, t, v)
        """The logits of every model for its rows."""
        if self.config.stacked:
            return iter(vmap(self._stacked_logits)(self.params, rows))
        return (self._logits(m, row) for m, row in zip(self.models, rows, strict=True))


def stepper(ensemble: Ensemble) -> Callable[[], None]:
    """The step itself, or its CUDA graph after a few warm-up steps on a side stream."""
    if not (ensemble.config.graph and ensemble.device.type == "cuda"):
        return ensemble.step
    saved = {n: p.clone() for n, p in ensemble.params.items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            ensemble.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ensemble.step()
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


def train(
    config: Config, points: Sequence[dict[str, Any]], device: torch.device
) -> list[dict[str, Any]]:
    """Train points of the grid at the same time; returns their rows of the JSON file."""
    trainings = [Training(matched(config, point), point, device) for point in points]
    started = time.perf_counter()
    for step in range(max(point["steps"] for point in points)):
        for training in trainings:
            training.advance(step)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return [training.row(seconds) for training in trainings]


class Training:
    """The training of one point of the grid, on a CUDA stream of its own with --concurrent."""

    def __init__(self, config: Config, point: dict[str, Any], device: torch.device):
        self.config, self.point = config, point
        self.data = Data(config, model_seeds(config), device)
        self.ensemble = Ensemble(config, point, self.data, device)
        self.size = count(self.ensemble.model)
        print(f"{point}\n    d_model {config.d_model}, {self.size:,} parameters", flush=True)
        self.history: list[dict[str, Any]] = []
        self.run = stepper(self.ensemble)
        self.stream = None
        if config.concurrent and device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def advance(self, step: int) -> None:
        """A step of all seeds, unless this point has fewer steps."""
        if step >= self.point["steps"]:
            return
        with torch.cuda.stream(self.stream):
            self.ensemble.refill()
            self.run()
            self.ensemble.schedule.step()
            if (step + 1) % self.config.log_every == 0:
                self.history.append(self.ensemble.log(step + 1))
                self.data.advance(self.history[-1]["accuracy"])

    def row(
        self,
        seconds: float,  # includes drawing data and logging, but not capture and evaluation
    ) -> dict[str, Any]:
        """The accuracies and the history."""
        for model in self.ensemble.models:
            model.eval()
        lengths = self.config.eval_lengths
        points = {
            str(point) if isinstance(point, int) else "_".join(map(str, point)): point
            for point in eval_points(self.config, lengths)
        }
        accuracy = {name: self.ensemble.accuracy(point) for name, point in points.items()}
        seeds, history = range(self.config.seeds), self.history
        pivots = [[h["conditioning"][i] for h in history] for i in seeds]
        # the history may end before the last step
        skipped = [
            n + sum(h["skipped"][i] for h in history)
            for i, n in enumerate(self.ensemble.skipped.tolist())
        ]
        row = {
            **{"point": self.point, "accuracy": accuracy, "seconds": seconds, "history": history},
            **{"parameters": self.size, "d_model": self.config.d_model},
            "state_size": state_size(self.ensemble.model),
            "num_heads": getattr(self.ensemble.model.mixers[0], "num_heads", None),
            "ms_per_step": 1e3 * seconds / self.point["steps"],
            "step_at_0.99": [first_at(history, i) for i in seeds],
            "passed": self.data.passed,
            "smallest_conditioning": [min(p) if p and None not in p else None for p in pivots],
            "skipped": skipped,
            "failed": [has_failed(n, self.point["steps"]) for n in skipped],
        }
        if isinstance(self.data.task, Copying):
            row["positions"] = {str(length): self.ensemble.positions(length) for length in lengths}
        return row


def state_size(model: SequenceModel) -> int:
    """The numbers that the layers keep of a sample before its first token."""
    makers = [getattr(mixer, "init_state", None) for mixer in model.mixers]
    return sum(tensor.numel() for make in makers if make for tensor in make(1).tensors)


def first_at(history: list[dict[str, Any]], seed: int, level: float = 0.99) -> int | None:
    """The first logged step at which the training accuracy of a seed reached `level`."""
    return next((h["step"] for h in history if h["accuracy"][seed] >= level), None)


def describe(row: dict[str, Any]) -> str:
    def show(values: list[float | None]) -> str:
        return " ".join("-" if v is None else f"{v:.2f}" for v in values)

    accuracy = "  ".join(f"{n}: {show(a['token'])}" for n, a in row["accuracy"].items())
    return (
        f"    {accuracy}\n    at 0.99: {row['step_at_0.99']}  conditioning: "
        f"{show(row['smallest_conditioning'])}  {row['seconds']:.0f} s, "
        f"{row['ms_per_step']:.2f} ms a step{failures(row)}"
    )


def failures(row: dict[str, Any]) -> str:
    """A warning about the seeds of a row that failed, if any did."""
    if not any(row["failed"]):
        return ""
    found = [f"{n} of model {i}" for i, n in enumerate(row["skipped"]) if row["failed"][i]]
    return (
        f"\n    FAILED: no update in {', '.join(found)} of {row['point']['steps']} steps, whose "
        "gradients were not finite"
    )


def track(config: Config, number: int, row: dict[str, Any], device: torch.device) -> None:
    """Log the models of a row of the JSON file, which is the point of this number of the grid."""
    project = config.group.lower() if config.task == "word" else config.task
    for i, seed in enumerate(model_seeds(config)):
        about = {name: row[name] for name in ("parameters", "d_model", "num_heads")}
        log_run(
            config.trackers,
            project,
            config.out / f"point{number}-seed{seed}",
            {**asdict(config), **row["point"], **about, "seed": seed},
            tracked_entries(row, i),
            device,
        )


def tracked_entries(row: dict[str, Any], i: int) -> list[tuple[int, dict[str, float]]]:
    """What a tracker shows of model i, by step: the history, and the accuracies at the end."""
    entries = [
        (h["step"], {n: v[i] for n, v in h.items() if n != "step" and v[i] is not None})
        for h in row["history"]
    ]
    scores: dict[str, dict[str, float]] = {}
    for length, found in row["accuracy"].items():
        for name, values in found.items():
            scores.setdefault(name, {})[length] = values[i]
    return [*entries, (row["point"]["steps"], tracked_scores(scores))]


def main(config: Config) -> None:
    device = choose_device(config.device)
    label = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    if not config.overwrite:
        refuse_to_replace(config.out, RESULTS)
    config.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    points = [
        dict(zip(GRID, values, strict=True))
        for values in itertools.product(*(getattr(config, axis) for axis in GRID))
    ]
    for group in [points] if config.concurrent else [[point] for point in points]:
        found = train(config, group, device)
        for row in found:
            if config.concurrent:  # all points were printed before the first result
                print(row["point"])
            print(describe(row), flush=True)
        rows += found
        report = {
            "config": asdict(config),
            "device": label,
            "torch": torch.__version__,
            "rows": rows,
        }
        (config.out / RESULTS).write_text(json.dumps(report, default=str))
        for number, row in enumerate(found, len(rows) - len(found)):
            track(config, number, row, device)


def parse(args: Sequence[str] | None = None) -> Config:
    """The command line: the preset gives the defaults, the flags override them."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--preset", default="small")
    # for an unknown name any preset will do, because tyro rejects the name below
    default = PRESETS.get(early.parse_known_args(args)[0].preset, PRESETS["small"])
    return tyro.cli(Config, args=args, default=default, description=__doc__)


if __name__ == "__main__":
    try:
        main(parse())
    except UsageError as error:
        sys.exit(f"error: {error}")

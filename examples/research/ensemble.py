"""Train models with several seeds in one process: word problems, copying, parity, arithmetic.

    python examples/research/ensemble.py --out runs/a5-five-seeds        # 5 seeds, A5 at length 16
    python examples/research/ensemble.py --input-scale delta bounded_delta one_minus_decay \\
        --d-state 4 16 --num-householder 2 4 --steps 2000 --out runs/a5-parameterizations
    python examples/research/ensemble.py --preset paper --out runs/a5-paper    # the paper's d_model
    python examples/research/ensemble.py --group S5 --model lstm_l1 --d-model 256

The models of all seeds run one after the other inside one step, which a GPU captures as a CUDA
graph, because small layers are limited by kernel launches. With --concurrent they run side by side
on CUDA streams, and so do the points of the grid. `--model` trains a layer of `models.py`. Every
combination of the options with several values is trained.
OUT/results.json contains for each of them the number of parameters, the accuracies by length
(`research/data.py`), the history of loss, accuracy, longest training length and number of steps
without an update because a gradient was not finite, and the step at which each seed first reached
an accuracy of 0.99, for all seeds, failed ones included. A seed has failed (`failed`) if it had no
update in more than 1 % of its steps (`skipped`).
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from bedouin import SequenceModel
from flags import UsageError, choose_device
from research.baselines import count
from research.data import Data, eval_points
from research.games import Chess
from research.length import Continued
from research.stack import Ensemble, has_failed, stepper
from research.study import GRID, PRESETS, Config, Start, model_seeds

RESULTS = "results.json"


def train(
    config: Config, points: Sequence[dict[str, Any]], device: torch.device
) -> list[dict[str, Any]]:
    """Train points of the grid at the same time; returns their rows of the JSON file."""
    trainings = [Training(config, point, device) for point in points]
    started = time.perf_counter()
    for step in range(max(point["steps"] for point in points)):
        for training in trainings:
            training.advance(step)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    rows = [training.row(seconds) for training in trainings]
    return rows + [further(training, kind) for training in trainings for kind in config.states]


def further(training: "Training", kind: Start) -> dict[str, Any]:
    """The row of further steps from states of a kind, which leave `training` as it is."""
    other, started = copy(training), time.perf_counter()
    other.ensemble, other.history = Continued(training.ensemble, kind), []
    # on the stream on which the copies were made
    other.run, other.point, other.stream = other.ensemble.step, other.ensemble.point, None
    for step in range(other.point["steps"]):
        other.advance(step)
    return other.row(time.perf_counter() - started)


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
        points = {
            str(point) if isinstance(point, int) else "_".join(map(str, point)): point
            for point in eval_points(self.config, self.config.eval_lengths)
        }
        accuracy = {name: self.ensemble.accuracy(point) for name, point in points.items()}
        seeds, history = range(self.config.seeds), self.history
        is_chess = isinstance(self.data.task, Chess)
        boards = {"boards": {n: self.ensemble.board(int(n)) for n in points}} if is_chess else {}
        # the history may end before the last step
        skipped = [
            n + sum(h["skipped"][i] for h in history)
            for i, n in enumerate(self.ensemble.skipped.tolist())
        ]
        return {
            **{"point": self.point, "accuracy": accuracy, "seconds": seconds, "history": history},
            **{"parameters": self.size, "d_model": self.config.d_model, **boards},
            "state_size": state_size(self.ensemble.model),
            "num_heads": getattr(self.ensemble.model.mixers[0], "num_heads", None),
            "ms_per_step": 1e3 * seconds / self.point["steps"],
            "step_at_0.99": [first_at(history, i) for i in seeds],
            "passed": self.data.passed,
            "skipped": skipped,
            "failed": [has_failed(n, self.point["steps"]) for n in skipped],
        }


def state_size(model: SequenceModel) -> int:
    """The numbers that the layers keep of a sample before its first token."""
    mixers: list[Any] = model.mixers
    states = [mixer.init_state(1).tensors for mixer in mixers if hasattr(mixer, "init_state")]
    size: int = sum(getattr(mixer, "state_size", 0) for mixer in mixers)
    return size + sum(int(v.numel()) for tensors in states for v in tensors)


def first_at(history: list[dict[str, Any]], seed: int, level: float = 0.99) -> int | None:
    """The first logged step at which the training accuracy of a seed reached `level`."""
    return next((h["step"] for h in history if h["accuracy"][seed] >= level), None)


def describe(row: dict[str, Any]) -> str:
    """The accuracies by length, when 0.99 was reached, and the time."""
    measured = ((n, " ".join(f"{v:.2f}" for v in a["token"])) for n, a in row["accuracy"].items())
    accuracy = "  ".join(f"{n}: {values}" for n, values in measured)
    return (
        f"    {accuracy}\n    at 0.99: {row['step_at_0.99']}  {row['seconds']:.0f} s, "
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


def main(config: Config) -> None:
    device = choose_device(config.device)
    label = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    if not config.overwrite and (config.out / RESULTS).exists():
        raise UsageError(
            f"--out must be a folder without an earlier run, got {config.out / RESULTS}: name "
            "another one, or replace that run with --overwrite"
        )
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

"""A training run: devices and processes, the optimizer, progress, checkpoints, results."""

import dataclasses
import json
import math
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import bedouin
from bedouin.tasks import Split, Stream, stream
from common import checkpoint
from common.checkpoint import METRICS, WEIGHTS
from common.options import RunConfig, decay
from common.script import Interrupted, StopRequest
from flags import UsageError

Scores = dict[str, dict[str, float]]  # by metric and length, e.g. scores["accuracy"]["6"]
FAILED_SHARE = 0.01  # a run with a larger share of skipped steps has failed
_COUNTERS = ("step", "seconds", "skipped", "history")


class Run:
    """The state of a training run of the task `name`, which --resume continues.

    same_rows: whether all processes draw the same training rows. options: of the Accelerator.
    Raises UsageError for a folder that cannot be written, a checkpoint of another run, or one
    process where several were to be started, FileNotFoundError where there is nothing to resume.
    """

    def __init__(
        self,
        name: str,
        config: RunConfig,
        model: nn.Module,
        *,
        same_rows: bool = False,
        **options: Any,
    ) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.name, self.config = name, config
        self.folder = config.out or Path(f"runs/{name}-seed{config.seed}")
        if config.resume:
            path, saved = checkpoint.read_options(self.folder)
            checkpoint.check_same_run(path, saved, self.options)
        cpu, precision = config.device == "cpu", config.autocast
        self.accelerator = Accelerator(cpu=cpu, mixed_precision=precision, **options)
        # accelerate's launcher leaves the start of processes on a CPU to MPI, and only sets a port
        launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ
        if launched and "WORLD_SIZE" not in os.environ and self.accelerator.num_processes == 1:
            asked = "accelerate launch must start as many processes as --num_processes says, got 1"
            raise UsageError(f"{asked}, since on a CPU it starts no more: use torchrun")
        replaces, main = config.resume or config.overwrite, self.accelerator.is_main_process
        found = [checkpoint.refusal(self.folder, replaces=replaces) if main else None]
        broadcast_object_list(found)
        if found[0] is not None:
            raise UsageError(f"--out must be a folder {found[0]}")
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        groups = bedouin.param_groups(model.to(self.accelerator.device), config.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
        # not given to accelerate, which would let it take a step for each process
        self.schedule = LambdaLR(optimizer, self._factor)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.rows = self.stream("train", same=same_rows)
        self.losses: list[float] = []  # since the last evaluation, of steps that were not skipped
        self.step, self.seconds, self.skipped = 0, 0.0, 0
        self.history: list[dict[str, Any]] = []
        self.accelerator.register_for_checkpointing(self.schedule, self)
        if config.resume:
            checkpoint.load_checkpoint(self.accelerator, path)

    def _factor(self, step: int) -> float:
        return decay(self.config.schedule, step, self.config.warmup_steps, self.config.steps)

    @property
    def options(self) -> dict[str, Any]:
        """The configuration as JSON values."""
        return dict(json.loads(json.dumps(dataclasses.asdict(self.config), default=str)))

    def stream(self, split: Split, draw: int = 0, *, same: bool = False) -> Stream:
        """The rows of a split: one stream for each process unless `same`, and two (`draw` 0 and 1)
        for each seed."""
        rank = 0 if same else self.accelerator.process_index
        return stream(split, 2 * self.config.seed + draw, self.accelerator.device, rank=rank)

    def due(self, every: int) -> bool:  # a multiple of `every`, or the last step
        return self.step % every == 0 or self.step == self.config.steps

    def steps(self) -> Iterator[int]:
        """The numbers of the steps to take, each of which ends with `update`. Shows the progress
        and writes checkpoints; raises Interrupted between two steps after Ctrl-C or SIGTERM."""
        config, started = self.config, time.perf_counter() - self.seconds
        hidden = None if self.accelerator.is_main_process else True  # None: but on a terminal
        self.bar = tqdm(total=config.steps, initial=self.step, disable=hidden, unit="step")
        stop = StopRequest(self.accelerator)
        try:
            while self.step < config.steps and not stop.agreed(meeting=self.due(config.log_every)):
                yield self.step
                self.bar.update()
                self.seconds = time.perf_counter() - started
                if self.due(config.checkpoint_every):
                    self.save()
            if stop.agreed(meeting=True):
                path = self.save()
                done = f"interrupted after step {self.step} of {config.steps}, saved in {path}"
                raise Interrupted(done, stop.signum or signal.SIGINT)
        finally:
            self.bar.close()
            stop.restore()

    def update(self, loss: Tensor, **shown: Tensor) -> None:
        """The optimizer's step, which gradients that are not finite, as all processes agree on,
        leave out, and the next step's learning rate. The bar gets the rate, the mean loss since the
        last evaluation, and `shown`."""
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip)
        if math.isfinite(norm.full_tensor() if self.accelerator.is_fsdp2 else norm):
            self.optimizer.step()
            self.losses.append(loss.item())
        else:
            self.skipped += 1
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.due(self.config.log_every):
            texts = {name: f"{float(value):.3f}" for name, value in shown.items()}
            own = {"lr": f"{self.optimizer.param_groups[0]['lr']:.1e}"}
            self.bar.set_postfix({**own, "loss": f"{self._mean_loss():.3f}", **texts})

    def _mean_loss(self) -> float:
        return sum(self.losses) / max(1, len(self.losses))

    def record(self, scores: Scores, line: str) -> None:
        """Append an evaluation, with the mean loss and the number of skipped steps since the last
        one, to the history, and print it as `line`. Raises FloatingPointError if most of these
        steps were skipped, or the loss is not finite."""
        skipped, steps = self.skipped, self.skipped + len(self.losses)
        own = torch.tensor(self._mean_loss(), device=self.accelerator.device)
        loss = float(self.accelerator.reduce(own, reduction="mean"))
        if 2 * skipped > steps or not math.isfinite(loss):
            raise FloatingPointError(
                f"{skipped} of the {steps} steps before step {self.step} had gradients that were "
                f"not finite, the mean loss of the others is {loss}; lower --lr, or use "
                "--input-scale bounded_delta"
            )
        self.history.append({"step": self.step, "loss": loss, "skipped": skipped, **scores})
        self.losses, self.skipped = [], 0
        if self.accelerator.is_main_process:
            self.bar.write(f"step {self.step}  loss {loss:.4f}  {line}")

    def finish(
        self, found: Mapping[str, Any], figures: Mapping[str, Callable[[], bytes]]
    ) -> dict[str, Any]:
        """Write the weights, metrics.json, whose content is returned, and the figures by name."""
        skipped = sum(entry["skipped"] for entry in self.history)
        metrics = {
            **found,
            **{"seconds": self.seconds, "seed": self.config.seed, "steps": self.step},
            **{"skipped": skipped, "failed": skipped > FAILED_SHARE * self.step},
            **{"parameters": self.parameters, "device": device_name(self.accelerator.device)},
            **{"versions": versions(), "config": self.options, "history": self.history},
        }
        weights = self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            once = {v.data_ptr(): name for name, v in weights.items()}  # tied weights
            # copies, because safetensors refuses parts of one buffer, as those of cuDNN's LSTM
            kept = {name: weights[name].clone() for name in once.values()}
            # first what is the most expensive to lose
            files: dict[str, Callable[[], bytes]] = {WEIGHTS: lambda: save(kept, {"format": "pt"})}
            for name, content in (files | {METRICS: lambda: as_json(metrics), **figures}).items():
                with checkpoint.writing(self.folder / name):
                    (self.folder / name).write_bytes(content())
            size = f"{self.parameters:,} parameters, {self.step} steps, {self.seconds:.0f} s"
            failed = f"\nFAILED: {skipped} steps had gradients that were not finite"
            print(f"{size}, results in {self.folder}{failed if metrics['failed'] else ''}")
        return metrics

    def save(self) -> Path:
        """Write a checkpoint; returns its folder."""
        return checkpoint.write_checkpoint(self.accelerator, self.folder, self.step, self.options)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has of this object: of each process its own losses and rows."""
        own = gather_object([(self.losses, self.rows.get_state())])
        return {**{name: getattr(self, name) for name in _COUNTERS}, "own": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        before, now = len(state["own"]), self.accelerator.num_processes
        if before != now:
            raise UsageError(f"--resume: {before} processes wrote it, got {now}; start as many")
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.losses, rows = state["own"][self.accelerator.process_index]
        self.rows.set_state(rows)


def versions() -> dict[str, str]:
    """Versions of the packages on which the numbers depend."""
    own = {"python": platform.python_version(), "bedouin": bedouin.__version__}
    others = {name: metadata.version(name) for name in ("torchdeq", "accelerate")}
    return {**own, "torch": torch.__version__, **others}


def device_name(device: torch.device) -> str:
    """E.g. "cpu (2 threads)" or the name of the GPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type} ({torch.get_num_threads()} threads)"


def as_json(metrics: Mapping[str, Any]) -> bytes:
    """Numbers as JSON; those that JSON cannot represent (NaN, Inf) become null."""
    plain = json.loads(json.dumps(metrics), parse_constant=lambda name: None)
    return (json.dumps(plain, indent=1) + "\n").encode()

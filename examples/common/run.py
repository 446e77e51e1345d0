"""A training run: devices and processes, the optimizer, progress, checkpoints, results."""

import dataclasses
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from bedouin import param_groups
from bedouin.tasks import Split, Stream, stream
from common.checkpoint import (
    METRICS,
    WEIGHTS,
    check_same_run,
    load_checkpoint,
    read_options,
    refusal,
    write_checkpoint,
    writing,
)
from common.interrupt import Interrupted, StopRequest
from common.options import RunConfig
from common.report import Scores, as_json, device_name, versions
from common.schedule import decay
from flags import UsageError

FAILED_SHARE = 0.01
"""A run with a larger share of skipped steps has failed."""
_COUNTERS = ("step", "seconds", "skipped", "history")


class Run:
    """The state of a training run, which continues from its checkpoint with --resume.

    Args:
        name: of the task, part of the default folder.
        same_rows: whether all processes draw the same training rows.
        options: of the Accelerator.

    Raises:
        UsageError: a folder that cannot be written, a checkpoint of another run, or one process
            where several were to be started.
        FileNotFoundError: nothing to resume.
    """

    def __init__(
        self,
        name: str,
        config: RunConfig,
        model: nn.Module,
        same_rows: bool = False,
        **options: Any,
    ) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.name, self.config = name, config
        self.folder = config.out or Path(f"runs/{name}-seed{config.seed}")
        if config.resume:
            path, saved = read_options(self.folder)
            check_same_run(path, saved, self.options)
        cpu, precision = config.device == "cpu", config.autocast
        self.accelerator = Accelerator(cpu=cpu, mixed_precision=precision, **options)
        # accelerate's launcher leaves the start of processes on a CPU to MPI, and only sets a port
        launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ
        if launched and "WORLD_SIZE" not in os.environ and self.accelerator.num_processes == 1:
            raise UsageError(
                "accelerate launch must start as many processes as --num_processes says, got 1, "
                "since on a CPU it starts no more: use torchrun --nproc-per-node"
            )
        found, replaces = [None], config.resume or config.overwrite
        if self.accelerator.is_main_process:
            found = [refusal(self.folder, replaces=replaces)]
        broadcast_object_list(found)
        if found[0] is not None:
            raise UsageError(f"--out must be a folder {found[0]}")
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        groups = param_groups(model.to(self.accelerator.device), config.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
        # not given to accelerate, which would let it take a step for each process
        self.schedule = LambdaLR(
            optimizer, lambda n: decay(config.schedule, n, config.warmup_steps, config.steps)
        )
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.rows = self.stream("train", same=same_rows)
        self.loss_sum, self.loss_count = 0.0, 0
        """Of the steps since the last evaluation, without those that were skipped."""
        self.step, self.seconds, self.skipped = 0, 0.0, 0
        self.history: list[dict[str, Any]] = []
        self.accelerator.register_for_checkpointing(self.schedule, self)
        if config.resume:
            load_checkpoint(self.accelerator, path)

    @property
    def options(self) -> dict[str, Any]:
        """The configuration as JSON values."""
        plain = dataclasses.asdict(self.config)
        return dict(json.loads(json.dumps(plain, default=str)))

    def stream(self, split: Split, draw: int = 0, *, same: bool = False) -> Stream:
        """The rows of a split: one stream for each process unless `same`, and two (`draw` 0 and 1)
        for each seed."""
        rank = 0 if same else self.accelerator.process_index
        return stream(split, 2 * self.config.seed + draw, self.accelerator.device, rank=rank)

    def due(self, every: int) -> bool:
        """Whether this step is a multiple of `every`, or the last one."""
        return self.step % every == 0 or self.step == self.config.steps

    def steps(self) -> Iterator[int]:
        """The numbers of the steps to take, each of which ends with `update`.

        Shows the progress and writes checkpoints. Raises Interrupted between two steps after Ctrl-C
        or SIGTERM, when a checkpoint is written.
        """
        config, started = self.config, time.perf_counter() - self.seconds
        # None shows the bar on a terminal only
        hidden = None if self.accelerator.is_main_process else True
        self.bar = tqdm(total=config.steps, initial=self.step, disable=hidden, unit="step")
        stop = StopRequest(self.accelerator)
        try:
            while self.step < config.steps:
                if stop.agreed(meeting=self.due(config.log_every)):
                    break
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
        """The optimizer's step with the gradients of a batch, and the next step's learning rate.

        Where the gradients are not finite, which all processes agree on, the step changes nothing
        and its loss does not count. The bar gets the rate, the mean loss since the last evaluation,
        and `shown`.
        """
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip)
        if math.isfinite(norm.full_tensor() if self.accelerator.is_fsdp2 else norm):
            self.optimizer.step()
            self.loss_sum += loss.item()
            self.loss_count += 1
        else:
            self.skipped += 1
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.due(self.config.log_every):
            numbers = {"loss": self.loss_sum / max(1, self.loss_count), **shown}
            texts = {name: f"{float(value):.3f}" for name, value in numbers.items()}
            self.bar.set_postfix({"lr": f"{self.schedule.get_last_lr()[0]:.1e}", **texts})

    def record(self, scores: Scores, line: str) -> None:
        """Append an evaluation, with the mean loss and the number of skipped steps since the last
        one, to the history, and print it as `line`.

        Raises FloatingPointError if the gradients of most of these steps, or the loss, are not
        finite.
        """
        skipped, steps = self.skipped, self.skipped + self.loss_count
        own = torch.tensor(self.loss_sum / max(1, self.loss_count), device=self.accelerator.device)
        loss = float(self.accelerator.reduce(own, reduction="mean"))
        if 2 * skipped > steps or not math.isfinite(loss):
            raise FloatingPointError(
                f"the gradients of {skipped} of the {steps} steps before step {self.step} were not "
                f"finite, the mean loss of the others is {loss}; lower --lr, or use --input-scale "
                "bounded_delta"
            )
        self.history.append({"step": self.step, "loss": loss, "skipped": skipped, **scores})
        self.loss_sum, self.loss_count, self.skipped = 0.0, 0, 0
        if self.accelerator.is_main_process:
            self.bar.write(f"step {self.step}  loss {loss:.4f}  {line}")

    def finish(
        self, found: Mapping[str, Any], figures: Mapping[str, Callable[[], bytes]]
    ) -> dict[str, Any]:
        """Write the weights, metrics.json, whose content is returned, and the figures by name."""
        skipped = sum(entry["skipped"] for entry in self.history)
        metrics = {
            **found,
            "seconds": self.seconds,
            "seed": self.config.seed,
            "steps": self.step,
            "skipped": skipped,
            "failed": skipped > FAILED_SHARE * self.step,
            "parameters": self.parameters,
            "device": device_name(self.accelerator.device),
            "versions": versions(),
            "config": self.options,
            "history": self.history,
        }
        weights = self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            once = {v.data_ptr(): name for name, v in weights.items()}  # tied weights
            # copies, because safetensors refuses parts of one buffer, as those of cuDNN's LSTM
            kept = {name: weights[name].clone() for name in once.values()}
            # first what is the most expensive to lose
            files: dict[str, Callable[[], bytes]] = {
                WEIGHTS: lambda: save(kept, {"format": "pt"}),
                METRICS: lambda: as_json(metrics),
                **figures,
            }
            for name, content in files.items():
                with writing(self.folder / name):
                    (self.folder / name).write_bytes(content())
            size = f"{self.parameters:,} parameters, {self.step} steps, {self.seconds:.0f} s"
            print(f"{size}, results in {self.folder}")
            if metrics["failed"]:
                print(f"FAILED: {skipped} steps had gradients that were not finite")
        return metrics

    def save(self) -> Path:
        """Write a checkpoint; returns its folder."""
        with writing(self.folder):
            return write_checkpoint(self.accelerator, self.folder, self.step, self.options)

    def state_dict(self) -> dict[str, Any]:
        """What accelerate's checkpoint has of this object: of each process its own sums and the
        state of its rows."""
        own = (self.loss_sum, self.loss_count, self.rows.get_state())
        counters = {name: getattr(self, name) for name in _COUNTERS}
        return {**counters, "own": gather_object([own])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        if len(state["own"]) != self.accelerator.num_processes:
            raise UsageError(
                f"--resume: {len(state['own'])} processes wrote the checkpoint, got "
                f"{self.accelerator.num_processes}; start as many"
            )
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.loss_sum, self.loss_count, rows = state["own"][self.accelerator.process_index]
        self.rows.set_state(rows)

"""Training of language models: one process or several, with evaluation and resume.

Letters: b batch, t time, v classes.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate.utils import DistributedType
from einops import rearrange
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from bedouin import SequenceModel
from bedouin.tasks import stream
from common.checkpoint import (
    plain_config,
    save_checkpoint,
    whole_states,
)
from common.errors import UsageError
from common.folder import CURVE, METRICS, SAMPLE, WEIGHTS, save_weights, write_weights, writing
from common.interrupt import StopRequest
from common.job import Place, Run
from common.layers import count
from common.lm_evaluation import bits_per_byte
from common.lm_options import LanguageConfig, build_language_model
from common.lm_text import END, VOCABULARY, Corpus, read_corpora
from common.options import matched
from common.report import device_name, save_curve, versions, write_metrics
from common.training import (
    add_entry,
    announce,
    carry_out,
    due,
    hidden,
    mean_loss,
    open_place,
    prepare_run,
    skipped_steps,
    summary_line,
    update,
)

SAMPLE_BYTES = 400
"""Of the text from the model, at most."""


@dataclass(frozen=True, kw_only=True)
class LanguageJob(Place):
    """The constants of a training run."""

    config: LanguageConfig
    training: Corpus
    held_out: Corpus


def train(config: LanguageConfig) -> dict[str, Any]:
    """Train, evaluate and write the results to the folder; returns the content of metrics.json.

    Raises:
        UsageError: options that do not fit the text or the processes, a folder that cannot be
            written, or a checkpoint of another run.
        FileNotFoundError: nothing to resume.
        FloatingPointError: the training loss or most gradients are no longer finite.
        Interrupted: Ctrl-C or SIGTERM, after the step was finished and a checkpoint written.
        OSError: a result could not be written.
    """
    job = start_job(matched(config, VOCABULARY, VOCABULARY))
    generator = stream("train", 2 * config.seed, job.accelerator.device)  # alike in all processes
    model = build_language_model(job.config)
    parameters = count(model)
    run = prepare_run(job, model, generator, config.length)
    scores = carry_out(job, run, train_steps, lambda: evaluate(job, run, config.final_bytes))
    return finish(job, run, scores, parameters)


def start_job(config: LanguageConfig) -> LanguageJob:
    """Read the text, and create the folder of the results. Raises the errors of `train`."""
    training, held_out = read_corpora(config.text, config.pattern)
    if len(training.tokens) <= config.length:
        raise UsageError(
            f"--length must be below the {len(training.tokens)} tokens of the text for training, "
            f"got {config.length}"
        )
    plugin = {}
    if config.shard:
        from common.sharded import sharding  # imports for seconds

        plugin["fsdp_plugin"] = sharding()
    place = open_place("lm", config, **plugin)
    accelerator = place.accelerator
    if config.shard and accelerator.distributed_type != DistributedType.FSDP:
        raise UsageError(
            "--shard needs several GPUs, over which accelerate can distribute a model, got "
            f"{accelerator.num_processes} processes on {accelerator.device.type}: leave it out"
        )
    parts = config.accumulate * accelerator.num_processes
    if config.batch_size % parts:
        raise UsageError(
            f"--batch-size must be a multiple of {parts}, --accumulate times the processes, got "
            f"{config.batch_size}"
        )
    return LanguageJob(
        config=config,
        accelerator=accelerator,
        folder=place.folder,
        training=training.to(accelerator.device),
        held_out=held_out.to(accelerator.device),
    )


def train_steps(job: LanguageJob, run: Run, stop: StopRequest, started: float) -> None:
    """Step until the end or an interruption."""
    config = job.config
    with tqdm(total=config.steps, initial=run.step, disable=hidden(job), unit="step") as bar:
        since, first = time.perf_counter(), run.step  # of this measurement of the speed
        while run.step < config.steps:
            if stop.agreed(meeting=due(run, config.log_every, config)):
                return
            train_step(job, run)
            bar.update()
            if due(run, config.log_every, config):
                bar.set_postfix({"loss": f"{float(mean_loss(run)):.3f}"})
            if due(run, config.eval_every, config):
                float(run.loss_sum)  # waits for the device
                tokens = (run.step - first) * config.batch_size * config.length
                announce(job, bar, record(job, run, tokens / (time.perf_counter() - since)))
            run.seconds = time.perf_counter() - started
            if due(run, config.checkpoint_every, config):
                save_checkpoint(job, run)
            if due(run, config.eval_every, config):
                since, first = time.perf_counter(), run.step


def train_step(job: LanguageJob, run: Run) -> None:
    """One optimizer step.

    All processes draw the same rows and each takes its part, so that the update depends neither on
    the number of processes nor on that of the parts, but for rounding.
    """
    config, accelerator = job.config, job.accelerator
    drawn = job.training.draw(config.batch_size, config.length, run.generator)
    shape = {"a": config.accumulate, "p": accelerator.num_processes}
    parts = rearrange(drawn, "(a p b) -> a p b", **shape)[:, accelerator.process_index]
    total = torch.zeros((), device=accelerator.device)
    for index, part in enumerate(parts):
        tokens, labels, document = job.training.rows(part, config.length)
        is_last = index == config.accumulate - 1  # processes add up their gradients once
        with nullcontext() if is_last else accelerator.no_sync(run.model):
            with accelerator.autocast():  # which a sharded model does not call itself
                logits = run.model(tokens, seq_idx=document)
            logits = rearrange(logits.float(), "b t v -> (b t) v")
            loss = cross_entropy(logits, labels.flatten())
            accelerator.backward(loss / config.accumulate)
        total += loss.detach() / config.accumulate
    update(job, run, total)


def record(job: LanguageJob, run: Run, speed: float) -> str:
    """Evaluate and append to the history; returns a line to print.

    Raises:
        FloatingPointError: the training loss or most gradients are no longer finite.
    """
    scores = evaluate(job, run, job.config.eval_bytes)
    found = {"bits_per_byte": scores, "tokens_per_second": {"training": speed}}
    loss = add_entry(job, run, found)
    return f"step {run.step}  loss {loss:.4f}  {describe(scores)}  {speed:,.0f} tokens/s"


def evaluate(job: LanguageJob, run: Run, limit: int) -> dict[str, float]:
    """Bits per byte of about `limit` held-out bytes, by the length of the pieces."""
    config, found = job.config, {}
    for length in sorted({config.length, *config.eval_lengths}):
        pieces = job.held_out.pieces(length, limit)
        value = bits_per_byte(job.accelerator, run.model, job.held_out, pieces, config.eval_tokens)
        found[str(length)] = value
    return found


def describe(scores: dict[str, float]) -> str:
    """The bits per byte by length."""
    return "bits per byte " + "  ".join(f"{n}: {value:.4f}" for n, value in scores.items())


@torch.no_grad()
def write_sample(model: nn.Module, path: Path) -> None:
    """Print and write the beginning of a document from the model."""
    assert isinstance(model, SequenceModel)
    device = model.head.weight.device
    begin, generator = torch.tensor([[END]], device=device), torch.Generator(device).manual_seed(0)
    model.eval()
    found = model.generate(begin, SAMPLE_BYTES, temperature=0.8, eos=END, generator=generator)
    text = bytes(token for token in found[0].tolist() if token != END).decode(errors="replace")
    print(f"a text from the model:\n{text}")
    with writing(path):
        path.write_text(text, encoding="utf-8")


def finish(job: LanguageJob, run: Run, scores: dict[str, float], parameters: int) -> dict[str, Any]:
    """Print the numbers, a text and the command that generates more; write the weights,
    metrics.json, the curve and the text."""
    config, device = job.config, job.accelerator.device
    speeds = [entry["tokens_per_second"]["training"] for entry in run.history]
    metrics = {
        "bits_per_byte": scores,
        "tokens_per_second": median(speeds),
        "seconds": run.seconds,
        "seed": config.seed,
        "steps": run.step,
        **skipped_steps(run),
        "parameters": parameters,
        "text": {
            "training_bytes": job.training.num_bytes,
            "training_files": len(job.training.starts),
            "held_out_bytes": job.held_out.num_bytes,
            "held_out_files": len(job.held_out.starts),
        },
        "processes": job.accelerator.num_processes,
        "device": device_name(device),
        "versions": versions(),
        "config": plain_config(config),
        "history": run.history,
    }
    if device.type == "cuda":
        metrics["peak_memory"] = torch.cuda.max_memory_allocated(device)
    model = job.accelerator.unwrap_model(run.model)
    weights = whole_states(job, run)[0] if job.accelerator.is_fsdp2 else None
    if job.accelerator.is_main_process:
        print(describe(scores))
        size = f"{parameters:,} parameters, d_model {config.d_model}"
        print(summary_line(run, size, job.folder))
        # first what is the most expensive to lose
        with writing(job.folder / WEIGHTS):
            if weights is None:
                save_weights(model, job.folder / WEIGHTS)
            else:
                write_weights(weights, job.folder / WEIGHTS)
        with writing(job.folder / METRICS):
            write_metrics(job.folder / METRICS, metrics)
        with writing(job.folder / CURVE):
            save_curve(job.folder / CURVE, run.history)
        if weights is None:
            write_sample(model, job.folder / SAMPLE)
        print(f"text from the model: python examples/generate.py --run {job.folder}")
    return metrics

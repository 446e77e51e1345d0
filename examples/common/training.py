"""The training loop of the example scripts: one process or several, with evaluation and resume.

Letters: b batch, t time, v classes of the output.
"""

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from accelerate import Accelerator
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from bedouin import param_groups
from bedouin.tasks import Batch, Stream
from common.checkpoint import (
    check_resumable,
    checkpoint_path,
    load_checkpoint,
    plain_config,
    save_checkpoint,
)
from common.curriculum import FACTORS, first_length, next_length
from common.errors import Interrupted, UsageError
from common.evaluation import evaluate, layer_stats, solve_scores, stop_accuracy
from common.folder import (
    CHECKPOINT,
    FIGURE,
    METRICS,
    WEIGHTS,
    prepare_folder,
    refuse_to_replace,
    save_weights,
    writing,
)
from common.interrupt import StopRequest
from common.job import Job, Place, Problem, Run
from common.layers import count
from common.options import RunConfig, TrainConfig, build_model, matched
from common.report import (
    Scores,
    device_name,
    evaluation_line,
    save_figure,
    table,
    versions,
    write_metrics,
)
from common.schedule import decay
from common.skipping import has_failed, skip_unless
from common.trackers import close_trackers, tracked_config, tracked_scores

JobT = TypeVar("JobT", bound=Place)
ScoresT = TypeVar("ScoresT")


def train(problem: Problem, config: TrainConfig) -> dict[str, Any]:
    """Train, evaluate and write the results to the folder; returns the content of metrics.json.

    Raises:
        UsageError: a folder that cannot be written, or a checkpoint of another run.
        ValueError: --match-parameters below the size of the narrowest model.
        FileNotFoundError: nothing to resume.
        FloatingPointError: the training loss or most gradients are no longer finite.
        Interrupted: Ctrl-C or SIGTERM, after the step was finished and a checkpoint written.
        OSError: a result could not be written.
    """
    job = start_job(problem, matched(config, problem.vocab_size, problem.output_size))
    run = start_run(job)
    scores = carry_out(job, run, train_steps, lambda: evaluate(job, run.model, final=True))
    return finish(job, run, scores)


def carry_out(
    job: JobT,
    run: Run,
    take_steps: Callable[[JobT, Run, StopRequest, float], None],
    evaluate_finally: Callable[[], ScoresT],
) -> ScoresT:
    """Resume the run if it is to continue, take its steps and return its final evaluation.

    take_steps: its last argument is the time at which the run began, as if it had not been
        interrupted. Raises the errors of `train` that come after the start.
    """
    if job.config.resume:
        load_checkpoint(job, run)
    started = time.perf_counter() - run.seconds
    with StopRequest(job.accelerator) as stop:
        take_steps(job, run, stop, started)
        if stop.agreed(meeting=True):
            leave(job, run, stop)
    scores = evaluate_finally()
    run.seconds = time.perf_counter() - started
    close_trackers(job.accelerator.trackers)
    return scores


def leave(job: Place, run: Run, stop: StopRequest) -> NoReturn:
    """Write a checkpoint and raise Interrupted."""
    save_checkpoint(job, run)
    close_trackers(job.accelerator.trackers)
    raise Interrupted(
        f"interrupted after step {run.step} of {job.config.steps}, saved in {checkpoint_path(job)}",
        stop.signum or signal.SIGINT,
    )


def train_steps(job: Job, run: Run, stop: StopRequest, started: float) -> None:
    """Step until the end, an early stop or an interruption."""
    problem, config = job.problem, job.config
    with tqdm(total=config.steps, initial=run.step, disable=hidden(job), unit="step") as bar:
        while run.step < config.steps and not run.stopped:
            if stop.agreed(meeting=due(run, config.log_every, config)):
                return
            batch = problem.train_batch(run.generator, run.step, run.length)
            logits = train_step(job, run, batch)
            if config.curriculum in FACTORS and run.step % config.curriculum_every == 0:
                lengthen(job, run, logits, batch)
            bar.update()
            if due(run, config.log_every, config):
                bar.set_postfix(progress(job, run, logits, batch))
            if due(run, config.eval_every, config):
                announce(job, bar, record(job, run, evaluate(job, run.model, final=False)))
            run.seconds = time.perf_counter() - started
            if due(run, config.checkpoint_every, config) or run.stopped:
                save_checkpoint(job, run)


def due(run: Run, every: int, config: RunConfig) -> bool:
    """Whether this step is a multiple of `every`, or the last one."""
    return run.step % every == 0 or run.step == config.steps


def start_job(problem: Problem, config: TrainConfig) -> Job:
    """Set threads and device, and create the folder of the results.

    Raises:
        FileNotFoundError, UsageError: nothing to resume, a folder that cannot be written or has
            another run, or one process where several were to be started.
    """
    place = open_place(problem.name, config)
    return Job(problem=problem, config=config, accelerator=place.accelerator, folder=place.folder)


def open_place(
    name: str,
    config: RunConfig,
    **options: Any,  # of the Accelerator
) -> Place:
    """What `start_job` does, for a run of this name. Raises its errors."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folder = config.out or Path("runs") / f"{name}-seed{config.seed}"
    accelerator = Accelerator(
        cpu=config.device == "cpu",
        mixed_precision=config.autocast,
        log_with=list(config.trackers) or None,
        project_dir=folder,
        **options,
    )
    check_processes(accelerator)
    place = Place(config=config, accelerator=accelerator, folder=folder)
    if config.resume:
        check_resumable(place)
    elif not config.overwrite:
        refuse_to_replace(folder, CHECKPOINT, METRICS)
    prepare_folder(folder, accelerator)
    if config.trackers:
        accelerator.init_trackers(name, config=tracked_config(plain_config(config)))
    return place


def check_processes(accelerator: Accelerator) -> None:
    """Raise UsageError if accelerate's launcher was to start several processes and started one: on
    a CPU it leaves that to MPI, and only sets a port."""
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ
    if launched and "WORLD_SIZE" not in os.environ and accelerator.num_processes == 1:
        raise UsageError(
            "accelerate launch must start as many processes as --num_processes says, got 1, since "
            "on a CPU it starts no more: use torchrun --nproc-per-node"
        )


def start_run(job: Job) -> Run:
    """A run at step 0."""
    model = build_model(job.config, job.problem.vocab_size, job.problem.output_size)
    length = first_length(job.config, max(job.problem.train_lengths))
    return prepare_run(job, model, job.stream("train"), length)


def prepare_run(job: Place, model: nn.Module, generator: Stream, length: int) -> Run:
    """A run of a model at step 0."""
    device = job.accelerator.device
    plain = build_optimizer(model.to(device), job.config)
    schedule = build_schedule(plain, job.config)
    model, optimizer = job.accelerator.prepare(model, plain)
    return Run(
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        generator=generator,
        length=length,
        loss_sum=torch.zeros((), device=device),
        skipped=torch.zeros((), dtype=torch.int64, device=device),
    )


def build_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    """AdamW in which parameters marked `_no_weight_decay`, biases and norms are not decayed. It is
    fused, so that its steps can be skipped (`skip_unless`)."""
    groups = param_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def build_schedule(optimizer: torch.optim.Optimizer, config: RunConfig) -> LambdaLR:
    """The learning rate by step. It is not given to accelerate, which would let it take a step for
    each process."""

    def factor(step: int) -> float:
        return decay(config.schedule, step, config.warmup_steps, config.steps)

    return LambdaLR(optimizer, factor)


def lengthen(
    job: Job,
    run: Run,
    logits: Tensor,  # (b, t, v)
    batch: Batch,
) -> None:
    """Let the training length grow if the accuracy of this batch, over all processes, suffices."""
    accuracy = job.problem.token_accuracy(logits, batch.labels)
    mean = float(job.accelerator.reduce(accuracy, reduction="mean"))
    run.length = next_length(job.config, run.length, max(job.problem.train_lengths), mean)


def train_step(job: Job, run: Run, batch: Batch) -> Tensor:  # (b, t, v)
    """One optimizer step; returns the logits. Does not synchronize with the device."""
    logits: Tensor = run.model(batch.tokens)
    tokens = rearrange(logits, "b t v -> (b t) v")
    loss = cross_entropy(tokens, rearrange(batch.labels, "b t -> (b t)"))
    job.accelerator.backward(loss)
    update(job, run, loss.detach())
    return logits.detach()


def update(
    job: Place,
    run: Run,
    loss: Tensor,  # ()
) -> None:
    """The optimizer's step with the gradients of a batch and its loss, and the next step's learning
    rate. Where the gradients are not finite, which all processes agree on, the step changes nothing
    and its loss does not count."""
    norm = job.accelerator.clip_grad_norm_(run.model.parameters(), job.config.clip)
    if job.accelerator.is_fsdp2:
        norm = norm.full_tensor()
    finite = torch.isfinite(norm)
    skip_unless(finite, run.optimizer.optimizer)
    run.optimizer.step()
    run.skipped += ~finite
    run.loss_sum += torch.where(finite, loss, 0.0)
    run.schedule.step()
    run.optimizer.zero_grad()
    run.loss_count += 1
    run.step += 1


def progress(
    job: Job,
    run: Run,
    logits: Tensor,  # (b, t, v)
    batch: Batch,
) -> dict[str, str]:
    """The numbers of the progress bar, from the last batch; the loss is the mean since the last
    evaluation."""
    solved = solve_scores(layer_stats(run.model, job.accelerator), job.accelerator)
    numbers = {
        "loss": f"{float(mean_loss(run)):.3f}",
        "accuracy": f"{float(job.problem.token_accuracy(logits, batch.labels)):.3f}",
    }
    if solved:
        numbers["num_steps"] = f"{solved['num_steps']:g}"
        numbers["residual"] = f"{solved['residual']:.0e}"
    return numbers


def mean_loss(run: Run) -> Tensor:  # ()
    """The mean training loss since the last evaluation, of the steps that were not skipped."""
    return run.loss_sum / (run.loss_count - run.skipped)


def record(job: Job, run: Run, scores: Scores) -> str:
    """Append an evaluation to the history and decide about an early stop; returns a line to print.

    Raises:
        FloatingPointError: the training loss or most gradients are no longer finite.
    """
    loss = add_entry(job, run, scores)
    if job.config.stop_at_accuracy is not None:
        run.stopped = stop_accuracy(job, scores) >= job.config.stop_at_accuracy
    return evaluation_line(run.step, loss, scores)


def add_entry(job: Place, run: Run, scores: Scores) -> float:
    """Append the scores, and the mean loss and the number of skipped steps since the last entry, to
    the history; returns the loss.

    Raises:
        FloatingPointError: the training loss, or the gradients of most of these steps, are not
            finite.
    """
    skipped, remedy = int(run.skipped), "lower --lr, or use --input-scale bounded_delta"
    if 2 * skipped > run.loss_count:
        raise FloatingPointError(
            f"the gradients of {skipped} of the {run.loss_count} steps before step {run.step} were "
            f"not finite; {remedy}"
        )
    loss = float(job.accelerator.reduce(mean_loss(run), reduction="mean"))
    if not math.isfinite(loss):
        raise FloatingPointError(f"the loss became {loss} before step {run.step}; {remedy}")
    run.history.append({"step": run.step, "loss": loss, "skipped": skipped, **scores})
    job.accelerator.log({"loss": loss, "skipped": skipped, **tracked_scores(scores)}, step=run.step)
    run.loss_sum.zero_()
    run.skipped.zero_()
    run.loss_count = 0
    return loss


def skipped_steps(run: Run) -> dict[str, Any]:
    """How many steps were skipped, and whether the run has therefore failed."""
    skipped = sum(entry["skipped"] for entry in run.history)
    return {"skipped": skipped, "failed": has_failed(skipped, run.step)}


def summary_line(run: Run, size: str, folder: Path) -> str:
    """The last line of a run: its size, steps, seconds and folder, and whether it failed."""
    line, found = f"{size}, {run.step} steps, {run.seconds:.0f} s, results in {folder}", ""
    if skipped_steps(run)["failed"]:
        found = (
            f"\nFAILED: {skipped_steps(run)['skipped']} steps had gradients that were not finite"
        )
    return line + found


def announce(job: Place, bar: tqdm, line: str) -> None:
    """Print a line above the progress bar, in the main process only."""
    if job.accelerator.is_main_process:
        bar.write(line)


def hidden(job: Place) -> bool | None:
    """tqdm's `disable`: None shows the bar on a terminal only, for the main process."""
    return None if job.accelerator.is_main_process else True


def finish(job: Job, run: Run, scores: Scores) -> dict[str, Any]:
    """Print the table, write the weights, metrics.json and accuracy.png."""
    first, second = job.problem.accuracy_names
    metrics = {
        "task": task_of(job.problem),
        **scores,
        first: scores["accuracy"],
        second: scores["sequence_accuracy"],
        "seconds": run.seconds,
        "seed": job.config.seed,
        "steps": run.step,
        **skipped_steps(run),
        "parameters": count(job.accelerator.unwrap_model(run.model)),
        "device": device_name(job.accelerator.device),
        "versions": versions(),
        "config": plain_config(job.config),
        "history": run.history,
    }
    if job.accelerator.is_main_process:
        print(table(scores, job.problem.accuracy_names))
        print(summary_line(run, f"{metrics['parameters']:,} parameters", job.folder))
        write_results(job, run, metrics, scores)
    return metrics


def task_of(problem: Problem) -> dict[str, Any]:
    """What metrics.json says of the task, the (longest) training length included."""
    return {
        "name": problem.name,
        "title": problem.title,
        "chance": problem.chance,
        "train_length": max(problem.train_lengths),
    }


def write_results(job: Job, run: Run, metrics: dict[str, Any], scores: Scores) -> None:
    """Write the weights, which are the most expensive to lose, the numbers and the figure."""
    folder, task = job.folder, metrics["task"]
    with writing(folder / WEIGHTS):
        save_weights(job.accelerator.unwrap_model(run.model), folder / WEIGHTS)
    with writing(folder / METRICS):
        write_metrics(folder / METRICS, metrics)
    with writing(folder / FIGURE):
        save_figure(
            folder / FIGURE,
            [scores],
            title=task["title"],
            train_length=task["train_length"],
            chance=task["chance"],
        )

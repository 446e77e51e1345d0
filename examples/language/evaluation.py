"""Bits per byte on held-out documents, over all processes, and texts from a model.

Letters: t time, v classes.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from common.checkpoint import writing
from common.evaluation import png
from common.run import Run
from language.text import END, Corpus, TextOptions

Piece = tuple[int, int]
"""Begin and end in the tokens of a corpus."""
SAMPLE_BYTES = 400
"""Of the text from the model, at most."""


def bits_by_length(run: Run, corpus: Corpus, options: TextOptions, limit: int) -> dict[str, float]:
    """Bits per byte of about `limit` held-out bytes, by the length of the pieces."""
    found = {}
    for length in sorted({options.length, *options.eval_lengths}):
        batches = batched(corpus.pieces(length, limit), options.eval_tokens)
        found[str(length)] = bits_per_byte(run.accelerator, run.model, corpus, batches)
    return found


@torch.no_grad()
def bits_per_byte(
    accelerator: Accelerator, model: nn.Module, corpus: Corpus, batches: list[list[Piece]]
) -> float:
    """The bits that the model needs for the tokens after those of the pieces, ends of documents
    included, divided by the number of bytes among them. Every piece begins with the state zero."""
    processes, rank = accelerator.num_processes, accelerator.process_index
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # nats, bytes
    model.eval()
    # every process calls the model equally often, because parts of a sharded model meet in a call
    for index in range(rank, math.ceil(len(batches) / processes) * processes, processes):
        tokens, labels, cu_seqlens = corpus.packed(batches[min(index, len(batches) - 1)])
        with accelerator.autocast():
            logits: Tensor = model(tokens, cu_seqlens=cu_seqlens)  # (1, t, v)
        if index < len(batches):
            nats = cross_entropy(logits[0].float(), labels[0], reduction="none").double().sum()
            sums += torch.stack([nats, (labels != END).sum()])
    model.train()
    nats, num_bytes = accelerator.reduce(sums, reduction="sum").tolist()
    return float(nats / math.log(2) / num_bytes)


def batched(pieces: list[Piece], tokens: int) -> list[list[Piece]]:
    """Pieces in their order, in lists of at most `tokens` tokens or of one piece."""
    found: list[list[Piece]] = []
    left = 0
    for start, stop in pieces:
        if stop - start > left or not found:
            found.append([])
            left = tokens
        found[-1].append((start, stop))
        left -= stop - start
    return found


def describe(bits: Mapping[str, float]) -> str:
    """The bits per byte by length."""
    return "bits per byte " + "  ".join(f"{n}: {value:.4f}" for n, value in bits.items())


def curve(history: Sequence[Mapping[str, Any]]) -> bytes:
    """Bits per byte of held-out text against the steps, a line for each length of the pieces."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    steps = [entry["step"] for entry in history]
    for length in history[0]["bits_per_byte"]:
        values = [entry["bits_per_byte"][length] for entry in history]
        axes.plot(steps, values, marker="o", label=f"pieces of {length} bytes")
    axes.set(xlabel="training steps", ylabel="bits per byte of held-out text")
    axes.legend(fontsize="small")
    return png(figure)


def finish(run: Run, options: TextOptions, training: Corpus, held_out: Corpus) -> dict[str, Any]:
    """Evaluate after training, print a text from the model, and write all results."""
    bits = bits_by_length(run, held_out, options, options.final_bytes)
    speeds = [entry["tokens_per_second"]["training"] for entry in run.history]
    sizes = training.sizes("training") | held_out.sizes("held_out")
    found = {"bits_per_byte": bits, "tokens_per_second": median(speeds), "text": sizes}
    found["processes"] = run.accelerator.num_processes
    metrics = run.finish(found, {"bits_per_byte.png": lambda: curve(run.history)})
    if run.accelerator.is_main_process:
        print(describe(bits))
        write_sample(run)
    return metrics


@torch.no_grad()
def write_sample(run: Run) -> None:
    """Print and write the beginning of a document from the model, unless its parameters are
    distributed, and print the command that generates more."""
    if not run.accelerator.is_fsdp2:
        model, path = run.accelerator.unwrap_model(run.model), run.folder / "sample.txt"
        begin = torch.tensor([[END]], device=run.accelerator.device)
        drawn = torch.Generator(begin.device).manual_seed(0)
        model.eval()
        found = model.generate(begin, SAMPLE_BYTES, temperature=0.8, eos=END, generator=drawn)
        text = bytes(token for token in found[0].tolist() if token != END).decode(errors="replace")
        print(f"a text from the model:\n{text}")
        with writing(path):
            path.write_text(text, encoding="utf-8")
    print(f"text from the model: python examples/generate.py --run {run.folder}")

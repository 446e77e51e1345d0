"""Train a language model of bytes on the source of Python's library, or on other text.

    python examples/train_lm.py                             # on a GPU if there is one, else the CPU
    python examples/train_lm.py --preset cpu --out runs/lm  # six minutes on two cores
    python examples/train_lm.py --text book.txt --layer tracking    # or a folder
    python examples/train_lm.py --resume                    # after Ctrl-C or a kill: continues
    accelerate launch examples/train_lm.py                  # several GPUs (--shard: FSDP2)
    torchrun --nproc-per-node 2 examples/train_lm.py        # the same, also on CPUs
    python examples/generate.py --run runs/lm               # text from the checkpoint

A row of a batch is a place in the files, one after the other: it holds parts of several, and the
state is reset at the begin of each (`seq_idx`). metrics.json has the bits per byte of held-out
files, cut into pieces of --length and of --eval-lengths, which are packed (`cu_seqlens`), and the
tokens per second in training; bits_per_byte.png is a curve, sample.txt a text from the model.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from bedouin import SequenceModel
from bedouin.baselines import Attention
from common.options import MakeLayer, RunConfig, make_layer, parse_config
from common.run import Run
from common.script import run_script
from flags import Count, Positive
from language.evaluation import bits_by_length, describe, finish
from language.sharded import accelerator_options, check_processes
from language.text import VOCABULARY, TextOptions, read_corpora


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(TextOptions, RunConfig):
    """Train a language model of bytes on files of text."""

    mlp_expand: Positive | None = None  # Width of MLPs as a multiple of d_model; None: no MLPs.
    batch_size: Count = 64  # Rows of an optimizer step, those of all processes together.
    attention_every: Count | None = None
    """Each layer whose number is a multiple of this is attention, with d_model / 64 heads."""
    accumulate: Count = 1  # Parts of a batch, whose gradients are added up, to need less memory.
    shard: bool = False
    """Distribute parameters, gradients and the optimizer's state over several GPUs (FSDP2)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preset == "paper":
            raise ValueError("--preset must be auto, cpu or gpu, got paper: it has no such task")
        if self.batch_size % self.accumulate:
            rows = f"--batch-size = {self.batch_size}"
            raise ValueError(f"--accumulate must divide {rows}, got {self.accumulate}")


CPU = LanguageConfig(
    preset="cpu",
    device="cpu",
    steps=1200,
    batch_size=16,
    length=128,
    lr=1e-2,
    warmup_steps=50,
    d_model=64,
    num_layers=2,
    mlp_expand=2,
    num_heads=4,
    num_householder=0,
    feedback=("delta",),
    d_conv=4,
    eval_every=200,
    checkpoint_every=200,
    log_every=10,
    eval_bytes=2**13,
    final_bytes=2**14,
    eval_tokens=2**12,
)

GPU = replace(
    CPU,
    preset="gpu",
    device="auto",
    layer="tracking",
    autocast="bf16",
    steps=5000,
    batch_size=64,
    length=1024,
    lr=1e-3,
    warmup_steps=200,
    weight_decay=0.1,
    d_model=512,
    num_layers=6,
    num_heads=None,
    num_householder=2,
    feedback=RunConfig.feedback,
    d_conv=None,
    eval_every=500,
    checkpoint_every=500,
    log_every=20,
    eval_lengths=(1024, 8192),
    eval_bytes=2**17,
    final_bytes=2**22,
    eval_tokens=2**16,
)

PRESETS = {"cpu": CPU, "gpu": GPU}


def make_model(config: LanguageConfig, make_layer: MakeLayer = make_layer) -> SequenceModel:
    """Embedding, residual blocks with MLPs, head, (b, t) -> (b, t, v), made from the seed."""
    torch.manual_seed(config.seed)
    every, heads = config.attention_every, max(1, config.d_model // 64)
    layers = [
        make_layer(config)
        if every is None or i % every
        else Attention(config.d_model, num_heads=heads)
        for i in range(1, config.num_layers + 1)
    ]
    return SequenceModel(VOCABULARY, config.d_model, layers, mlp_expand=config.mlp_expand)


def main(config: LanguageConfig, make_layer: MakeLayer = make_layer) -> dict[str, Any]:
    """Train and write the results; returns the content of metrics.json."""
    corpora = read_corpora(config)
    model, options = make_model(config, make_layer), accelerator_options(shard=config.shard)
    # all processes draw the same rows and each takes its part, so that the update depends neither
    # on their number nor on that of the parts, but for rounding
    run = Run("lm", config, model, same_rows=True, **options)
    accelerator, parts = run.accelerator, config.accumulate * run.accelerator.num_processes
    check_processes(accelerator, shard=config.shard, rows=config.batch_size, parts=parts)
    training, held_out = (corpus.to(accelerator.device) for corpus in corpora)
    began, first = time.perf_counter(), run.step
    for step in run.steps():
        if step % config.eval_every == 0:
            began, first = time.perf_counter(), step
        drawn = training.draw(config.batch_size, config.length, run.rows)
        own = drawn.view(config.accumulate, accelerator.num_processes, -1)
        total = torch.zeros((), device=accelerator.device)
        for index, part in enumerate(own[:, accelerator.process_index]):
            tokens, labels, document = training.rows(part, config.length)
            is_last = index == config.accumulate - 1  # processes add up their gradients once
            with nullcontext() if is_last else accelerator.no_sync(run.model):
                with accelerator.autocast():  # which a sharded model does not call itself
                    logits = run.model(tokens, seq_idx=document)
                loss = cross_entropy(logits.float().flatten(0, 1), labels.flatten())
                accelerator.backward(loss / config.accumulate)
            total += loss.detach() / config.accumulate
        run.update(total, accuracy=(logits.argmax(-1) == labels).float().mean())
        if run.due(config.eval_every):
            seconds = time.perf_counter() - began
            speed = (run.step - first) * config.batch_size * config.length / seconds
            bits = bits_by_length(run, held_out, config, config.eval_bytes)
            scores = {"bits_per_byte": bits, "tokens_per_second": {"training": speed}}
            run.record(scores, f"{describe(bits)}  {speed:,.0f} tokens/s")
    return finish(run, config, training, held_out)


if __name__ == "__main__":
    run_script(main, parse_config(PRESETS))

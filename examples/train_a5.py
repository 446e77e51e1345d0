"""Train one Bedouin layer on the word problem of A5: after every token, the product so far.

    python examples/train_a5.py                        # on a GPU if there is one, else on the CPU
    python examples/train_a5.py --preset cpu --seed 1 --out runs/a5-seed1
    python examples/train_a5.py --resume               # after Ctrl-C or a kill: continues
    accelerate launch examples/train_a5.py             # several GPUs
    torchrun --nproc-per-node 2 examples/train_a5.py   # the same, also on CPUs

The model is trained on products of one length and evaluated on longer ones. The table printed at
the end, metrics.json and accuracy.png show the accuracy by length;
model.safetensors holds the weights. `--help` lists all options. examples/README.md says how to
make a copy train on a task of your own.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from bedouin.tasks import Batch, Group, Stream, WordProblem, sequence_accuracy, token_accuracy
from common.checks import Count, naming_flags
from common.curriculum import draws_lengths, first_length
from common.job import Problem
from common.options import TrainConfig
from common.script import run_script
from common.tasks import WordOptions, word_options
from common.training import train


@dataclass(frozen=True, kw_only=True)
class WordProblemConfig(TrainConfig, WordOptions):
    """Train a Bedouin model on the word problem of a finite group."""

    group: str = "A5"
    """The group, e.g. A5, S5, Z60, D8 or a product like A4xZ5."""
    length: Count = 6
    """Length of the training sequences."""
    protocol: Literal["plain", "official"] = "plain"
    """official: special tokens and a counted BOS, as in the code of Fixed-Point RNNs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        first_length(self, self.length)
        with naming_flags(("group",)):
            order = Group.from_name(self.group).order
        if order < 2:
            raise ValueError(f"--group must have at least two elements, got {self.group!r}")
        with naming_flags(("protocol", *word_options(self))):
            self.task()

    def task(self) -> WordProblem:
        """The word problem that the flags describe."""
        group, variant = Group.from_name(self.group), word_options(self)
        return WordProblem(group, self.length, protocol=self.protocol, **variant)


# `Bedouin`, which learns A5 in so few steps (examples/results/a5-cpu).
CPU = WordProblemConfig(
    preset="cpu",
    device="cpu",
    steps=4500,
    batch_size=128,
    lr=1.5e-3,
    schedule="hold",
    length=6,
    curriculum="uniform",  # with seed 1 the loss leaves its plateau earlier
    feedback=("delta",),  # extrapolates further than feedback of B, C and the mixer as well
    eval_lengths=(6, 12, 24),
    final_lengths=(2, 4, 8, 10, 16, 20),
)

# Length 16 as in the papers, and the recipe of examples/results/table, with the rate of
# examples/results/tracking-trials.
GPU = WordProblemConfig(
    preset="gpu",
    mixer_layer="tracking",
    autocast="bf16",
    d_model=256,
    steps=12_000,
    batch_size=256,
    lr=2e-3,
    schedule="hold",
    length=16,
    curriculum="quadruple",
    eval_lengths=(16, 128, 512),
    final_lengths=(2, 4, 8, 32, 64, 256),
)

# Fixed-Point RNNs, appendix D.2: the layer, the sizes and the optimizer of the paper. Sequences are
# drawn afresh instead of from a file; 125,000 steps are its five epochs of 12.8 million sequences.
PAPER = WordProblemConfig(
    preset="paper",
    mixer_layer="paper",
    length=16,
    d_model=512,
    steps=125_000,
    batch_size=512,
    lr=1e-4,
    betas=(0.9, 0.999),
    warmup_steps=0,
    autocast="bf16",
    eval_every=5000,
    checkpoint_every=5000,
    eval_lengths=(16, 32, 50),
    final_lengths=tuple(range(2, 51, 4)),
)

PRESETS = {"cpu": CPU, "gpu": GPU, "paper": PAPER}


def word_problem(config: WordProblemConfig) -> Problem:
    """All that training knows of the task: what files and figure say of it, its data, which are
    products of `config.length` elements, or for the test of any number, and its accuracies."""
    task = config.task()

    def train_batch(rows: Stream, step: int, longest: int) -> Batch:
        if not draws_lengths(config, step, config.steps):
            return task.sample(config.batch_size, rows, length=longest)
        least = config.curriculum_from
        # one length for the whole batch
        drawn = torch.randint(least, longest + 1, (), generator=rows, device=rows.device)
        return task.sample(config.batch_size, rows, length=int(drawn))

    def test_batch(length: int, rows: Stream) -> Batch:
        return task.sample(config.eval_batch_size, rows, length=length)

    return Problem(
        name=task.group.name.lower(),
        title=f"Word problem of {task.group.name}, trained at length {config.length}",
        chance=task.chance,
        vocab_size=task.vocab_size,
        output_size=task.output_size,
        train_lengths=(config.length,),
        train_batch=train_batch,
        test_batch=test_batch,
        token_accuracy=token_accuracy,
        sequence_accuracy=sequence_accuracy,
    )


def main(config: WordProblemConfig) -> None:
    """Train and write the results."""
    train(word_problem(config), config)


if __name__ == "__main__":
    run_script(main, PRESETS)

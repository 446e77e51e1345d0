"""Train one Bedouin layer to copy strings: the answer to "$owl|" is "owl.".

    python examples/train_copy.py                       # on a GPU if there is one, else on the CPU
    python examples/train_copy.py --preset cpu --seed 1 --out runs/copy-seed1
    python examples/train_copy.py --resume              # after Ctrl-C or a kill: continues
    accelerate launch examples/train_copy.py            # several GPUs
    torchrun --nproc-per-node 2 examples/train_copy.py  # the same, also on CPUs

The model is trained on contexts packed with short strings and evaluated on single strings, up to
twice as long. Answers are read by teacher-forced argmax. The table printed at the end, metrics.json
and accuracy.png show character and string accuracy by length. `--help` lists all options.
"""

from dataclasses import dataclass, replace
from typing import Literal

from bedouin.tasks import Batch, Copying, Stream
from common.checks import naming_flags
from common.curriculum import first_length
from common.job import Problem
from common.options import TrainConfig
from common.script import run_script
from common.tasks import limited
from common.training import train


@dataclass(frozen=True, kw_only=True)
class CopyingConfig(TrainConfig):
    """Train a Bedouin model to copy strings."""

    min_length: int = 4
    """Letters in the shortest training string."""
    max_length: int = 8
    """Letters in the longest training string."""
    context_len: int = 32
    """Tokens in a training row, which holds several samples."""
    num_letters: int = 26
    """Size of the alphabet."""
    protocol: Literal["plain", "official"] = "plain"
    """official: test rows are padded to context_len, as in the code of Fixed-Point RNNs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        with naming_flags(_TASK_FIELDS):
            self.task()
        if self.curriculum == "uniform":
            raise ValueError(
                "--curriculum must be none, double or quadruple: copying draws lengths anyway"
            )
        first_length(self, self.max_length)

    def task(self) -> Copying:
        """The copying task that the flags describe."""
        return Copying(**{name: getattr(self, name) for name in _TASK_FIELDS})


_TASK_FIELDS = ("context_len", "min_length", "max_length", "num_letters", "protocol")


# `TrackingDeltaNet`, whose memory finds a letter by those before it.
CPU = CopyingConfig(
    preset="cpu",
    device="cpu",
    mixer_layer="tracking",
    d_model=64,
    steps=1000,
    batch_size=64,
    lr=4e-3,
    schedule="hold",
    eval_lengths=(4, 8, 16),
    final_lengths=(5, 6, 7, 10, 12, 14),
)

# The lengths of the paper, and the recipe of examples/results/table, with the rate of
# examples/results/tracking-trials.
GPU = replace(
    CPU,
    preset="gpu",
    device="auto",
    autocast="bf16",
    steps=5000,
    lr=8e-3,
    d_model=256,
    min_length=5,
    max_length=50,
    context_len=256,
    eval_lengths=(5, 25, 50, 100, 200),
    final_lengths=(10, 15, 20, 30, 35, 40, 45, 60, 70, 80, 90),
)

# Fixed-Point RNNs, section 5.3: the layer, the sizes and the optimizer of the paper.
PAPER = CopyingConfig(
    preset="paper",
    mixer_layer="paper",
    min_length=5,
    max_length=50,
    context_len=256,
    d_model=1024,
    steps=10_000,
    batch_size=128,
    lr=1e-5,
    schedule="linear",
    warmup_steps=300,
    weight_decay=0.1,
    betas=(0.9, 0.999),
    autocast="bf16",
    eval_lengths=(5, 25, 50, 100),
    final_lengths=(10, 15, 20, 30, 35, 40, 45, 60, 70, 80, 90),
)

PRESETS = {"cpu": CPU, "gpu": GPU, "paper": PAPER}


def copying(config: CopyingConfig) -> Problem:
    """The data: packed contexts for training, single strings of one length for the test."""
    task = config.task()

    def train_batch(rows: Stream, step: int, longest: int) -> Batch:
        return limited(task, longest).sample(config.batch_size, rows)

    def test_batch(length: int, rows: Stream) -> Batch:
        return task.sample_eval(config.eval_batch_size, length, rows)

    return Problem(
        name="copy",
        title=f"Copying, trained on {config.min_length} to {config.max_length} letters",
        chance=task.chance,
        vocab_size=task.vocab_size,
        output_size=task.output_size,
        train_lengths=tuple(range(config.min_length, config.max_length + 1)),
        train_batch=train_batch,
        test_batch=test_batch,
        token_accuracy=task.character_accuracy,
        sequence_accuracy=task.string_accuracy,
        accuracy_names=("character_accuracy", "string_accuracy"),
    )


def main(config: CopyingConfig) -> None:
    """Train and write the results."""
    train(copying(config), config)


if __name__ == "__main__":
    run_script(main, PRESETS)

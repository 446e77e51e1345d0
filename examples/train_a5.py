"""Train one Bedouin layer on the word problem of A5: after every token, the product so far.

    python examples/train_a5.py                        # on a GPU if there is one, else on the CPU
    python examples/train_a5.py --preset cpu --seed 1 --out runs/a5-seed1
    python examples/train_a5.py --layer tracking       # TrackingDeltaNet instead
    python examples/train_a5.py --solver picard --rtol 1e-3 --gamma-cap 4 1 --adjoint one_step
    python examples/train_a5.py --resume               # after Ctrl-C or a kill: continues
    accelerate launch examples/train_a5.py             # several GPUs
    torchrun --nproc-per-node 2 examples/train_a5.py   # the same, also on CPUs

The model is trained on products of one length and evaluated on longer ones. The table printed at
the end, metrics.json and accuracy.png show the accuracy by length; model.safetensors holds the
weights. `--help` lists all options. For a task of your own change `WordProblemConfig` and `main`.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import cross_entropy

from bedouin import SequenceModel
from bedouin.tasks import Group, Stream, WordProblem, sequence_accuracy, token_accuracy
from common.evaluation import Evaluation
from common.options import MakeLayer, TrainConfig, make_layer, parse_config
from common.run import Run
from common.script import run_script
from flags import Count, naming_flags


@dataclass(frozen=True, kw_only=True)
class WordProblemConfig(TrainConfig):
    """Train a Bedouin model on the word problem of a finite group."""

    group: str = "A5"  # The group, e.g. A5, S5, Z60, D8 or a product like A4xZ5.
    length: Count = 6  # Length of the training sequences.
    curriculum: Literal["none", "uniform"] = "none"
    """uniform: in the first third of the steps a length from 2 to --length is drawn."""
    protocol: Literal["plain", "official"] = "plain"
    """official: special tokens and a counted BOS, as in the code of Fixed-Point RNNs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        with naming_flags(("group", "protocol")):
            self.task()
        if self.curriculum == "uniform" and self.length < 2:
            raise ValueError(
                f"--length must be at least 2 with --curriculum uniform, got {self.length}"
            )

    def task(self) -> WordProblem:
        """The word problem that the flags describe."""
        return WordProblem(Group.from_name(self.group), self.length, protocol=self.protocol)


CPU = WordProblemConfig(
    preset="cpu",
    device="cpu",
    num_heads=2,
    steps=4500,
    lr=2e-3,
    schedule="hold",
    curriculum="uniform",  # with seed 1 the loss leaves its plateau earlier
    feedback=("delta",),  # extrapolates further than feedback of B, C and the mixer as well
    eval_lengths=(6, 12, 24),
    final_lengths=(2, 4, 8, 10, 16, 20),
)

# Length 16 as in the papers, and the recipe of examples/results/heads.
GPU = WordProblemConfig(
    preset="gpu",
    autocast="bf16",
    d_model=512,
    num_householder=4,
    steps=12_000,
    lr=5e-4,
    length=16,
    eval_lengths=(16, 128, 512),
    final_lengths=(2, 4, 8, 32, 64, 256),
)

# Fixed-Point RNNs, appendix D.2: the layer, the sizes and the optimizer of the paper. Sequences are
# drawn afresh instead of from a file; 125,000 steps are its five epochs of 12.8 million sequences.
PAPER = WordProblemConfig(
    preset="paper",
    layer="paper",
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


def make_model(config: WordProblemConfig, make_layer: MakeLayer = make_layer) -> SequenceModel:
    """Embedding, residual blocks and head, (b, t) -> (b, t, v), initialized from the seed."""
    task = config.task()
    torch.manual_seed(config.seed)
    layers = [make_layer(config) for _ in range(config.num_layers)]
    return SequenceModel(task.vocab_size, config.d_model, layers, output_size=task.output_size)


def draw_length(config: WordProblemConfig, step: int, rows: Stream) -> int:
    """The length of all products of a training batch."""
    if config.curriculum == "none" or step >= config.steps / 3:
        return config.length
    return int(torch.randint(2, config.length + 1, (), generator=rows, device=rows.device))


def main(config: WordProblemConfig, make_layer: MakeLayer = make_layer) -> dict[str, Any]:
    """Train and write the results; returns the content of metrics.json."""
    task = config.task()
    test = Evaluation(
        config=config,
        title=f"Word problem of {task.group.name}, trained at length {config.length}",
        train_length=config.length,
        chance=task.chance,
        sample=lambda length, rows: task.sample(config.eval_batch_size, rows, length=length),
        accuracies=(token_accuracy, sequence_accuracy),
    )
    run = Run(task.group.name.lower(), config, make_model(config, make_layer))
    for step in run.steps():
        length = draw_length(config, step, run.rows)
        tokens, labels = task.sample(config.batch_size, run.rows, length=length)
        logits = run.model(tokens)
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        run.accelerator.backward(loss)
        run.update(loss, accuracy=token_accuracy(logits, labels))
        if run.due(config.eval_every):
            test.record(run)
    return test.finish(run)


if __name__ == "__main__":
    run_script(main, parse_config(PRESETS))

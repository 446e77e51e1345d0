"""Train one Bedouin layer to copy strings: the answer to "$owl|" is "owl.".

    python examples/train_copy.py                       # on a GPU if there is one, else on the CPU
    python examples/train_copy.py --preset cpu --seed 1 --out runs/copy-seed1
    python examples/train_copy.py --layer tracking      # TrackingDeltaNet instead
    python examples/train_copy.py --resume              # after Ctrl-C or a kill: continues
    accelerate launch examples/train_copy.py            # several GPUs
    torchrun --nproc-per-node 2 examples/train_copy.py  # the same, also on CPUs

The model is trained on contexts packed with short strings and evaluated on single strings, up to
twice as long. Answers are read by teacher-forced argmax. The table printed at the end, metrics.json
and accuracy.png show character and string accuracy by length. `--help` lists all options.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.nn.functional import cross_entropy

from bedouin import SequenceModel
from bedouin.tasks import Copying
from common.evaluation import Evaluation
from common.options import MakeLayer, TrainConfig, make_layer, parse_config
from common.run import Run
from common.script import run_script
from flags import naming_flags

_TASK_FIELDS = ("context_len", "min_length", "max_length", "num_letters", "protocol")


@dataclass(frozen=True, kw_only=True)
class CopyingConfig(TrainConfig):
    """Train a Bedouin model to copy strings."""

    min_length: int = 4  # Letters in the shortest training string.
    max_length: int = 8  # Letters in the longest training string.
    context_len: int = 32  # Tokens in a training row, which holds several samples.
    num_letters: int = 26  # Size of the alphabet.
    protocol: Literal["plain", "official"] = "plain"
    """official: test rows are padded to context_len, as in the code of Fixed-Point RNNs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        with naming_flags(_TASK_FIELDS):
            self.task()

    def task(self) -> Copying:
        """The copying task that the flags describe."""
        return Copying(**{name: getattr(self, name) for name in _TASK_FIELDS})


# Four heads, each with keys of its own, that forget slowly; the convolution lets a letter be found
# by those before it.
CPU = CopyingConfig(
    preset="cpu",
    device="cpu",
    num_heads=4,
    d_conv=4,
    feedback=("delta",),
    rate_scale=(0.01, 0.01),
    steps=1000,
    batch_size=64,
    lr=4e-3,
    schedule="hold",
    eval_lengths=(4, 8, 16),
    final_lengths=(5, 6, 7, 10, 12, 14),
)

# The lengths of the paper.
GPU = replace(
    CPU,
    preset="gpu",
    device="auto",
    autocast="bf16",
    d_model=256,
    min_length=5,
    max_length=50,
    context_len=256,
    steps=5000,
    lr=2e-3,
    eval_lengths=(5, 25, 50, 100, 200),
    final_lengths=(10, 15, 20, 30, 35, 40, 45, 60, 70, 80, 90),
)

# Fixed-Point RNNs, section 5.3: the layer, the sizes and the optimizer of the paper.
PAPER = CopyingConfig(
    preset="paper",
    layer="paper",
    min_length=5,
    max_length=50,
    context_len=256,
    d_model=1024,
    steps=10_000,
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


def make_model(config: CopyingConfig, make_layer: MakeLayer = make_layer) -> SequenceModel:
    """Embedding, residual blocks and head, (b, t) -> (b, t, v), initialized from the seed."""
    task = config.task()
    torch.manual_seed(config.seed)
    layers = [make_layer(config) for _ in range(config.num_layers)]
    return SequenceModel(task.vocab_size, config.d_model, layers, output_size=task.output_size)


def main(config: CopyingConfig, make_layer: MakeLayer = make_layer) -> dict[str, Any]:
    """Train and write the results; returns the content of metrics.json."""
    task = config.task()
    test = Evaluation(
        config=config,
        title=f"Copying, trained on {config.min_length} to {config.max_length} letters",
        train_length=config.max_length,
        chance=task.chance,
        sample=lambda length, rows: task.sample(config.eval_batch_size, rows, length=length),
        accuracies=(task.character_accuracy, task.string_accuracy),
        names=("character_accuracy", "string_accuracy"),
    )
    run = Run("copy", config, make_model(config, make_layer))
    for _ in run.steps():
        tokens, labels = task.sample(config.batch_size, run.rows)
        logits = run.model(tokens)
        # labels at the places that are not asked for are ignored
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        run.accelerator.backward(loss)
        run.update(loss, accuracy=task.character_accuracy(logits, labels))
        if run.due(config.eval_every):
            test.record(run)
    return test.finish(run)


if __name__ == "__main__":
    run_script(main, parse_config(PRESETS))

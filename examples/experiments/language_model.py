"""A language model of bytes on the source of Python's library, with every layer."""

from common.lm_options import num_parameters
from common.options import parse_config
from experiments.plan import Experiment, Run, joined
from train_lm import PRESETS

COMMON = "--preset gpu"
MIXERS = {
    "bedouin": "--num-heads 16 --num-householder 2",
    "mamba": "--mixer-layer mamba",
    "deltaproduct": "--mixer-layer deltaproduct --num-householder 2 --num-heads 8",
    "lstm": "--mixer-layer lstm",
    "attention": "--mixer-layer attention --num-heads 8",
}
SEEDS = (0, 1, 2)


def language_model() -> Experiment:
    """Every mixer with as many parameters as Bedouin, three seeds each."""
    config = parse_config(PRESETS, joined(COMMON, MIXERS["bedouin"]).split())
    size = f"--match-parameters {num_parameters(config)}"
    return Experiment(
        "language-model",
        "How many bits per byte of held-out source files does each layer need?",
        tuple(
            Run(f"{name}-seed{seed}", joined(COMMON, flags, size, f"--seed {seed}"), "train_lm")
            for name, flags in MIXERS.items()
            for seed in SEEDS
        ),
    )

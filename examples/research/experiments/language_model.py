"""A language model of bytes on the source of Python's library, with every layer."""

from pathlib import Path

from research.experiments.plan import Experiment, Run, joined
from research.experiments.table import BEYOND, RATES
from research.runs import read_runs

COMMON = (
    "--preset gpu --num-layers 4 --steps 700 --warmup-steps 100 --eval-every 100 "
    "--checkpoint-every 700"
)
"""46 million tokens, between four and five times the text."""
COMPARED = {
    "bedouin": "--d-model 384 --mixer-layer bedouin --num-heads 6",
    "mamba": "--d-model 456 --mixer-layer mamba",
    "attention": "--d-model 512 --mixer-layer attention --num-heads 8",
    "lstm": "--d-model 288 --mixer-layer lstm",
    "tracking": "--d-model 416 --mixer-layer tracking",
    "gated_deltanet": "--d-model 432 --mixer-layer gated_deltanet --num-heads 6",
}
"""Widths with about equal numbers of parameters, and heads of sizes for which kernels are fast:
128 for Bedouin, whose default they are, 64 for the others. Each layer has its best learning rate of
those of the table, among them the further one where the best of three is at an edge."""
TUNING_SEED, SCORE = 100, "1024"
"""The seed that chooses a rate, and the length whose bits per byte it compares."""


def language(results: Path) -> Experiment:
    """The rates of all compared layers, and three seeds of those whose rate is known."""
    made = read_runs(results / "language")
    tuning, reported = [], []
    for name, flags in COMPARED.items():
        runs = {rate: made.get(f"{name}-{rate:g}", {}) for rate in (*RATES, *BEYOND.values())}
        bits = {
            rate: run["bits_per_byte"][SCORE]
            for rate, run in runs.items()
            if "bits_per_byte" in run
        }
        rates = list(RATES)
        if bits.keys() >= set(RATES):
            best = min(RATES, key=lambda rate: bits[rate])
            rates += [BEYOND[best]] if best in BEYOND else []
        options = {rate: joined(COMMON, flags, f"--lr {rate:g}") for rate in rates}
        for rate in rates:
            seeded = joined(options[rate], f"--seed {TUNING_SEED}")
            tuning.append(Run(f"{name}-{rate:g}", seeded, "train_lm"))
        if bits.keys() >= set(rates):
            settled = options[min(rates, key=lambda rate: bits[rate])]
            for seed in range(3):
                seeded = joined(settled, f"--seed {seed}")
                reported.append(Run(f"{name}-seed{seed}", seeded, "train_lm"))
    question = "How many bits per byte at the best of several learning rates?"
    return Experiment("language", question, (*tuning, *reported))

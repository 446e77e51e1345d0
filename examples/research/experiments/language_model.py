"""Language models of bytes: on the source of Python's library with every layer, and larger ones on
the source of installed packages."""

from collections.abc import Mapping
from pathlib import Path

from research.experiments.plan import Experiment, Run, joined
from research.experiments.table import BEYOND, RATES
from research.runs import read_runs

STEPS = "--preset gpu --steps 700 --warmup-steps 100 --eval-every 100 --checkpoint-every 700"
COMMON = joined(STEPS, "--num-layers 4")
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
LARGE = joined(STEPS, "--packages --length 2048 --batch-size 32 --eval-lengths 8192")
"""As many tokens, of the source of installed packages."""
LARGE_RATES = (4e-3, 8e-3)
LARGE_MODELS = {
    "tracking": ("TrackingDeltaNet", "--mixer-layer tracking --d-model 512", LARGE_RATES),
    "gated_deltanet": (
        "Gated DeltaNet",
        "--mixer-layer gated_deltanet --d-model 512 --num-heads 8 --mlp-expand 2.5",
        LARGE_RATES,
    ),
    "mamba": ("Mamba", "--mixer-layer mamba --d-model 576", (2e-3, *LARGE_RATES)),
    "attention": (
        "attention",
        "--mixer-layer attention --d-model 640 --num-heads 10",
        (1e-3, 2e-3, 4e-3),
    ),
    "hybrid": (
        "TrackingDeltaNet, attention every fourth layer",
        "--mixer-layer tracking --d-model 448 --num-layers 8 --attention-every 4 --mlp-expand 2.5",
        LARGE_RATES,
    ),
}
"""What a figure calls a model, its flags, and rates: the best of the smaller model, half of it, and
one more where the best of these two may be at an edge; 24.3 to 25.1 million parameters, in six
layers or eight."""


def language(results: Path) -> tuple[Experiment, ...]:
    """The rates of all compared layers, and seeds of those whose rate is known: of the small
    models, and of large ones."""
    small = {name: (flags, RATES) for name, flags in COMPARED.items()}
    large = {name: (flags, rates) for name, (_, flags, rates) in LARGE_MODELS.items()}
    question = "How many bits per byte at the best of several learning rates?"
    return (
        Experiment("language", question, _runs(results / "language", COMMON, small, SCORE, 3)),
        Experiment(
            "language-large",
            f"{question} 25 M parameters",
            _runs(results / "language-large", LARGE, large, "2048", 2),
        ),
    )


def _runs(
    folder: Path,
    common: str,
    models: Mapping[str, tuple[str, tuple[float, ...]]],
    score: str,
    seeds: int,
) -> tuple[Run, ...]:
    """Tuning runs at the rates of each model and a further one where the best is at an edge, and
    the reported seeds at the best."""
    made, tuning, reported = read_runs(folder), [], []
    for name, (flags, rates) in models.items():
        runs = {rate: made.get(f"{name}-{rate:g}", {}) for rate in (*rates, *BEYOND.values())}
        bits = {
            rate: run["bits_per_byte"][score]
            for rate, run in runs.items()
            if "bits_per_byte" in run
        }
        if bits.keys() >= set(rates):
            best = min(rates, key=lambda rate: bits[rate])
            rates = tuple(dict.fromkeys((*rates, BEYOND.get(best, best))))
        options = {rate: joined(common, flags, f"--lr {rate:g}") for rate in rates}
        for rate in rates:
            seeded = joined(options[rate], f"--seed {TUNING_SEED}")
            tuning.append(Run(f"{name}-{rate:g}", seeded, "train_lm"))
        if bits.keys() >= set(rates):
            settled = options[min(rates, key=lambda rate: bits[rate])]
            for seed in range(seeds):
                seeded = joined(settled, f"--seed {seed}")
                reported.append(Run(f"{name}-seed{seed}", seeded, "train_lm"))
    return (*tuning, *reported)

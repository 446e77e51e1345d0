"""What each part of the layer contributes to state tracking; on a CPU for short products of A5."""

from research.experiments.models import BASELINES, CHOSEN, WITHOUT_REFLECTIONS, training
from research.experiments.plan import REPORTED, Experiment, Run, joined
from research.experiments.words import A5

TASKS = {
    "a5": A5,
    "s3": f"{A5} --group S3",
    "parity": f"{A5} --task parity --length 40 --eval-lengths 40 128 512",
}
_SLOWLY = training("a5", "bedouin")
_REFLECTIONS = "--num-householder 2 --beta-max 1"
PARTS = {
    "default": "",
    "reflections": _REFLECTIONS,
    "no-feedback": "--feedback none",
    "no-feedback-reflections": f"--feedback none {_REFLECTIONS}",
    "feedback-mixer": f"--feedback mixer {_REFLECTIONS}",
    "all-feedback": f"--feedback delta+B+C+mixer {_REFLECTIONS}",
    "no-convolution": "--d-conv None",
    "one-rate": "--rate-scale 1 --rate-scale-last None",
    "full-eigenvalues": "--eigenvalues full",
}

CONTROLS = Experiment(
    "controls",
    "What does each part of bedouin contribute?",
    tuple(
        Run(f"{task}-{name}", joined(flags, REPORTED, model))
        for task, flags in TASKS.items()
        for name, model in {
            **{name: joined(CHOSEN, _SLOWLY, change) for name, change in PARTS.items()},
            "lstm": "--mixer-layer lstm",
        }.items()
    ),
)

CPU_PARTS = {
    "no_mixing": "--num-householder 0",
    "no_feedback": "--feedback",
    "mixer_feedback": "--feedback mixer",
    "lstm": "--mixer-layer lstm",
}
"""Changes of `make a5`, whose layer has two reflections and feedback of Delta."""

CONTROLS_CPU = Experiment(
    "controls-cpu",
    "What does each part contribute to A5 on a CPU, trained at length 6?",
    tuple(
        Run(f"{name}-seed{seed}", f"--preset cpu --threads 1 --seed {seed} {change}", "train_a5")
        for name, change in CPU_PARTS.items()
        for seed in (0, 1, 2)
    ),
)

SMALL = "--device cpu --d-model 64 --batch-size 64 --lr 8e-3 --schedule hold --curriculum double"
"""Training of a model an eighth as wide; its learning rate was tried on seed 100."""
SMALL_LAYER = f"{WITHOUT_REFLECTIONS} --d-state 16 --num-heads 2"
SMALL_REFLECTIONS = "--num-householder 2"
_SMALL_LENGTHS = "--length 16 --eval-lengths 16 48 128 512 --steps 1500"
_SMALL_PARTS = {
    "default": "",
    "reflections": SMALL_REFLECTIONS,
    "no-feedback": "--feedback none",
    "no-feedback-reflections": f"--feedback none {SMALL_REFLECTIONS}",
    "feedback-mixer": f"--feedback mixer {SMALL_REFLECTIONS}",
    "full-eigenvalues": "--eigenvalues full",
}

_SMALL_MIXERS = {
    "reflections-bounded": SMALL_REFLECTIONS,
    "kronecker": "--mixer kronecker",
    "monarch": "--mixer monarch",
}
_SMALL_BOUNDED = (
    "--input-scale bounded_delta --feedback delta --d-conv 4 --d-state 16 --num-heads 4 "
    "--rate-scale 8 --rate-scale-last 0.001"
)
"""The layer with mixers whose local systems are dense, which a bounded scale keeps regular; four
heads, since a token costs the third power of their channels."""

CONTROLS_SMALL = Experiment(
    "controls-small",
    "What does each part contribute to S3 and to parity, in a small layer on a CPU?",
    tuple(
        Run(f"{task}-{name}", joined(SMALL, _SMALL_LENGTHS, flags, REPORTED, model))
        for task, flags in {"s3": "--group S3", "parity": "--task parity"}.items()
        for name, model in {
            **{name: joined(SMALL_LAYER, change) for name, change in _SMALL_PARTS.items()},
            "lstm": "--mixer-layer lstm",
            "deltaproduct": f"{BASELINES['deltaproduct_l1']} --lr 4e-3",  # the rate chosen on A5
        }.items()
    )
    + tuple(
        Run(
            f"s3-{name}",
            joined(SMALL, _SMALL_LENGTHS, "--group S3", REPORTED, _SMALL_BOUNDED, mixer),
        )
        for name, mixer in _SMALL_MIXERS.items()
    ),
)

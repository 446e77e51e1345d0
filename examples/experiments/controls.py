"""What each part of the layer contributes to state tracking."""

from experiments.models import CHOSEN
from experiments.plan import REPORTED, Experiment, Run, joined
from experiments.words import A5

TASKS = {
    "a5": A5,
    "s3": f"{A5} --group S3",
    "parity": f"{A5} --task parity --length 40 --eval-lengths 40 128 512",
}
PARTS = {
    "default": "",
    "no-reflections": "--num-householder 1 --beta-max 1e-3",  # Q is nearly the identity
    "no-feedback": "--feedback none",
    "feedback-mixer": "--feedback mixer",
    "full-eigenvalues": "--eigenvalues full",
}

CONTROLS = Experiment(
    "controls",
    "What do reflections, feedback and eigenvalues contribute?",
    tuple(
        Run(f"{task}-{name}", joined(flags, REPORTED, model))
        for task, flags in TASKS.items()
        for name, model in {
            **{name: f"{CHOSEN} {change}" for name, change in PARTS.items()},
            "lstm": "--mixer-layer lstm",
        }.items()
    ),
)

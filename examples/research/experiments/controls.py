"""What each part of the layer contributes to short products of A5 on a CPU."""

from research.experiments.plan import Experiment, Run

_CPU = "--preset cpu --threads 1 --num-heads None --lr 0.0015"

CPU_PARTS = {
    "no_mixing": "--input-scale delta --num-householder 0",
    "no_feedback": "--input-scale delta --feedback",
    "mixer_feedback": "--input-scale delta --feedback mixer",
    "lstm": "--mixer-layer lstm",
}
"""Changes of the layer of `make a5`, which has two reflections and feedback of Delta, here with the
input scale Delta."""

CONTROLS_CPU = Experiment(
    "controls-cpu",
    "What does each part contribute to A5 on a CPU, trained at length 6?",
    tuple(
        Run(f"{name}-seed{seed}", f"{_CPU} --seed {seed} {change}", "train_a5")
        for name, change in CPU_PARTS.items()
        for seed in (0, 1, 2)
    ),
)

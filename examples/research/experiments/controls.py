"""What each part of the layer contributes to short products of A5 on a CPU."""

from research.experiments.plan import Experiment, Run

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

"""What the presets of the scripts reach, on a CPU and on a GPU."""

from research.experiments.plan import Experiment, Run, Script

_DELTA_A5 = "--preset cpu --feedback delta --threads 1 --num-heads None --lr 0.0015"
_CPU_A5 = (
    "--preset cpu --num-heads 1 --input-scale bounded_delta --feedback delta B C mixer --lr 0.0015"
)

A5_CPU = Experiment(
    "a5-cpu",
    "How far does one layer track A5, trained at length 6 on a CPU?",
    (
        *(Run(f"a5_cpu_heads_seed{n}", f"--preset cpu --seed {n}", "train_a5") for n in range(2)),
        *(Run(f"a5_cpu_seed{seed}", f"{_CPU_A5} --seed {seed}", "train_a5") for seed in range(3)),
        *(
            Run(
                f"a5_cpu_{name}_seed{seed}",
                f"{_DELTA_A5} --input-scale {name} --seed {seed}",
                "train_a5",
            )
            for name, seed in (
                *(("delta", seed) for seed in (0, 1, 2, 100)),
                *(("bounded_delta", seed) for seed in (0, 1, 2, 100)),
            )
        ),
    ),
)

COPYING_CPU = Experiment(
    "copying-cpu",
    "How far does the model of make copy copy, trained on two CPU cores?",
    (Run("copy_cpu_heads_seed0", "--preset cpu --seed 0", "train_copy"),),
)

_SCRIPTS: dict[str, Script] = {"a5": "train_a5", "copy": "train_copy"}

GPU_PRESETS = Experiment(
    "gpu-presets",
    "What do the models of train_a5.py and train_copy.py reach on a GPU?",
    tuple(
        Run(f"{task}_gpu_seed{seed}", f"--preset gpu --seed {seed}", script)
        for (task, script), seeds in zip(_SCRIPTS.items(), (range(3, 6), range(3)), strict=True)
        for seed in seeds
    ),
)
"""Of A5 seeds 3 to 5, because the rate was changed after another one had failed on 0 to 2."""

"""What the presets of the scripts reach, on a CPU and on a GPU."""

from research.experiments.plan import Experiment, Run, Script, joined

_DELTA_A5 = "--preset cpu --threads 1 --num-heads None --lr 0.0015"
_CPU_A5 = (
    "--preset cpu --num-heads 1 --input-scale bounded_delta --feedback delta B C mixer --lr 0.0015"
)

PARTS = {
    "no_mixing": "--input-scale delta --num-householder 0",
    "no_feedback": "--input-scale delta --feedback",
    "mixer_feedback": "--input-scale delta --feedback mixer",
    "a5_lstm": "--mixer-layer lstm",
}
"""Changes of the layer of `make a5`, which has two reflections and feedback of Delta, here with the
input scale Delta."""
LANGUAGE = {
    "bedouin": "--preset cpu",
    "lm_lstm": "--preset cpu --mixer-layer lstm --d-model 49",
}
"""What `make lm` trains, and an LSTM of its size; 0.01 suits both best (seed 100)."""

CPU = Experiment(
    "cpu",
    "What do make a5, make copy and make lm reach on two CPU cores, and by which parts?",
    (
        *(Run(f"a5_cpu_heads_seed{n}", f"--preset cpu --seed {n}", "train_a5") for n in range(2)),
        *(Run(f"a5_cpu_seed{seed}", f"{_CPU_A5} --seed {seed}", "train_a5") for seed in range(3)),
        *(
            Run(
                f"a5_cpu_{scale}_seed{seed}",
                f"{_DELTA_A5} --feedback delta --input-scale {scale} --seed {seed}",
                "train_a5",
            )
            for scale in ("delta", "bounded_delta")
            for seed in (0, 1, 2, 100)
        ),
        *(
            Run(f"{name}-seed{seed}", f"{_DELTA_A5} --seed {seed} {change}", "train_a5")
            for name, change in PARTS.items()
            for seed in range(3)
        ),
        Run("copy_cpu_heads_seed0", "--preset cpu --seed 0", "train_copy"),
        *(
            Run(f"{name}-seed{seed}", joined(flags, f"--device cpu --seed {seed}"), "train_lm")
            for name, flags in LANGUAGE.items()
            for seed in range(3)
        ),
    ),
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

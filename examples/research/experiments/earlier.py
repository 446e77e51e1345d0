"""The runs of the README and of examples/results, most of them stacked and with one head."""

from research.experiments.plan import Experiment, Run, Script

_OLD = "--num-heads 1 --eval-rows 256"
_SCALES = "bounded_delta delta one_minus_decay"
_CPU = "--preset cpu --num-heads 1"
_DELTA_A5 = "--preset cpu --feedback delta --threads 1 --num-heads None --lr 0.0015"
_CPU_A5 = f"{_CPU} --input-scale bounded_delta --feedback delta B C mixer --lr 0.0015"

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

A5_ONE_HEAD = Experiment(
    "a5-one-head",
    "How far does a layer with one head track A5, and with which schedule and parameterization?",
    (
        Run(
            "a5_schedules",
            f"--stacked {_OLD} --length 6 --eval-lengths 6 12 24 --num-householder 2 "
            "--batch-size 128 --steps 3000 --seeds 6 --schedule hold cosine "
            "--lr 0.001 0.0015 0.002",
        ),
        Run("a5_five_seeds", f"--stacked {_OLD} --steps 6000"),
        Run("a5_paper_size", f"--preset paper {_OLD}"),
        Run("a5_paper_size_3000_steps", f"--preset paper {_OLD} --steps 3000"),
        Run(
            "a5_parameterizations",
            f"--stacked {_OLD} --steps 2500 --input-scale {_SCALES} --d-state 16 4 "
            "--num-householder 4 2",
        ),
    ),
)

COPYING_ONE_HEAD = Experiment(
    "copying-one-head",
    "Does a layer with one head copy strings of twice the training length?",
    (
        Run(
            "copy_cpu_seed0",
            f"{_CPU} --mixer-layer bedouin --d-model 128 --lr 0.001 --schedule cosine "
            "--feedback delta B C mixer --d-conv None --rate-scale 1 1",
            "train_copy",
        ),
        Run(
            "copy_parameterizations",
            f"--stacked {_OLD} --task copy --eval-lengths 4 8 16 --input-scale bounded_delta delta "
            "--num-householder 1 2 --batch-size 64 --steps 3000 --seeds 3",
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

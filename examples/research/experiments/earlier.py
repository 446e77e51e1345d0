"""The runs of the README and of examples/results, most of them stacked and with one head."""

from research.experiments.plan import NARROW, STRINGS, TUNING, Experiment, Run, Script, joined

_OLD = "--num-heads 1 --eval-rows 256"
_SCALES = "bounded_delta delta one_minus_decay"
_CPU = "--preset cpu --num-heads 1"
_DELTA_A5 = "--preset cpu --feedback delta --threads 1"
_CPU_A5 = f"{_CPU} --input-scale bounded_delta --feedback delta B C mixer"

A5_CPU = Experiment(
    "a5-cpu",
    "How far does one layer track A5, trained at length 6 on a CPU?",
    (
        *(Run(f"a5_cpu_seed{seed}", f"{_CPU_A5} --seed {seed}", "train_a5") for seed in range(3)),
        *(
            Run(
                f"a5_cpu_{name}_seed{seed}",
                f"{_DELTA_A5} --input-scale {name} --seed {seed}",
                "train_a5",
            )
            for name, seed in (
                *(("delta", seed) for seed in (0, 1, 2, 100)),
                ("bounded_delta", 100),
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
            f"{_CPU} --mixer-layer bedouin --d-model 128 --lr 0.001 --schedule cosine",
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
    tuple(
        Run(f"copy_cpu_recall_seed{seed}", f"--preset cpu --seed {seed}", "train_copy")
        for seed in range(3)
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

_TASKS = {
    "a": f"{NARROW} --length 16 --eval-lengths 16 48 128 --batch-size 128 --steps 12000 --lr 5e-4",
    "c": f"{NARROW} {STRINGS} --steps 5000 --lr 1e-3",
}
_WORDS = {
    "griffin": "--decay griffin",
    "mamba": "--decay mamba",
    "delta": "--input-scale delta",
    "bounded": "--input-scale bounded_delta",
    "coupled": "--input-scale one_minus_decay",
    "all": "--feedback delta+B+C+mixer",
    "bcm": "--feedback B+C+mixer",
    "rate0.1": "--rate-scale 0.1",
    "rate0.03": "--rate-scale 0.03",
    "lr2e": "",  # "lr2e-3" is split at its hyphen
    "3": "--lr 2e-3",
    "seed101": "--first-seed 101",
    "seed102": "--first-seed 102",
    "d512": "--d-model 512",
    "heads8": "--num-heads 8",
    "heads16": "--num-heads 16",
    **{f"k{k}": f"--num-householder {k}" for k in (1, 2, 4)},
    **{f"n{n}": f"--d-state {n}" for n in (16, 64)},
}
_BASELINES = {
    "lstm-l1": "--mixer-layer lstm",
    "lstm-l2": "--mixer-layer lstm --num-layers 2",
    "attention-l2": "--mixer-layer attention --num-layers 2",
    "mamba-l2": "--mixer-layer mamba --num-layers 2",
    "mamba-full-l2": "--mixer-layer mamba --eigenvalues full --num-layers 2",
    "deltanet-l2": "--mixer-layer deltanet --num-layers 2",
    "deltaproduct-l1": "--mixer-layer deltaproduct",
}
_SETTINGS = {
    "a": (
        "griffin-delta-all-k2 griffin-delta-bcm-k2 griffin-bounded-all-k2 mamba-bounded-all-k2 "
        "mamba-bounded-all-k2-rate0.1 mamba-bounded-all-k2-rate0.03 mamba-delta-all-k2-rate0.1 "
        "lstm-l1 attention-l2 mamba-full-l2 deltaproduct-l1 deltanet-l2 "
        "mamba-bounded-all-k4-n16-d512-heads16"
    ),
    "c": (
        "griffin-delta-all-k2 griffin-delta-all-k4 griffin-delta-bcm-k2 griffin-delta-bcm-k4 "
        "griffin-bounded-bcm-k2 mamba-bounded-all-k2 mamba-bounded-all-k2-rate0.1 "
        "mamba-bounded-all-k2-rate0.03 mamba-bounded-bcm-k2 mamba-delta-all-k2-rate0.1 "
        "mamba-delta-bcm-k2 mamba-bounded-all-k2-rate0.1-lr2e-3 mamba-bounded-all-k2-rate0.1-n64 "
        "mamba-delta-all-k2-rate0.1-n64 mamba-bounded-all-k2-rate0.1-n16 "
        "mamba-bounded-all-k2-rate0.1-seed101 mamba-bounded-all-k1-rate0.1 "
        "mamba-delta-all-k2-rate0.1-seed101 mamba-coupled-all-k2-rate0.1 "
        "attention-l2 deltanet-l2 lstm-l1 lstm-l2 mamba-l2 deltanet-l2-seed101 deltanet-l2-seed102 "
        "attention-l2-seed101 attention-l2-seed102 mamba-delta-all-k2-rate0.1-n16-heads8"
    ),
}


def setting(name: str) -> str:
    """The flags that the name of a tuning run stands for."""
    baseline = next((b for b in _BASELINES if name == b or name.startswith(f"{b}-seed")), None)
    if baseline is not None:
        rest = name.removeprefix(baseline).removeprefix("-")
        return joined(_BASELINES[baseline], _WORDS.get(rest, ""))
    return joined("--d-state 32 --num-heads 1", *(_WORDS[word] for word in name.split("-")))


TUNING_RUNS = Experiment(
    "tuning",
    "Which setting copies and tracks?",
    tuple(
        Run(f"{task}-{name}", joined(_TASKS[task], TUNING, setting(name)))
        for task, names in _SETTINGS.items()
        for name in names.split()
    ),
)

"""Length, reflections and feedback of `Bedouin`, and chess, in the order of their value.

Of bedouin, chess and wide the run NAME-tuning trains at three rates on seed 100, NAME three seeds
at the best of them, in wide of the task that chose the rate at d_model 256. Trainings of bedouin
compare how one layer is trained. The seconds are those of one GPU (H200) without other work,
estimated from runs of examples/results with as many tokens; several runs side by side take about
half.

    length            1,000     bedouin, "training-*"   1,000     bedouin --only "a5-*"   1,800
    chess, "*-1m-*"   1,500     bedouin, "parity-*"     1,900     chess, "*-4m-*"         4,000
    wide              6,500

The rivals of the table, `gdn2_l1`, `kda_l1` and `mamba3_l1`, are runs of "table-tuning" (1,900) and
"table" (2,300).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from research.experiments import table
from research.experiments.plan import TUNING, Experiment, Run, joined
from research.experiments.table import LANGUAGES, NARROW, RECIPE, TASKS, layer_flags
from research.runs import read_runs

RATES = "5e-4 1e-3 2e-3"
LONG = "--eval-lengths 512 2048 16384 131072 --seeds 3 --states zero carried noise"
FROM_64, MORE = "--length 64", "--first-seed 3 --seeds 2"
FIXED_POINT = {
    "a5": "--lr 2e-3",
    "a5-from64": f"--lr 2e-3 {FROM_64}",
    "a5-from64-more": f"--lr 2e-3 {FROM_64} {MORE}",
    "s5-from64": f"--lr 2e-3 {FROM_64}",
    "a5-one_head": "--num-heads 1 --lr 1e-3",
    "s5": "--lr 2e-3",
    "s5-one_head": "--num-heads 1 --lr 1e-3",
}
"""Fixed-point layers of "length", with two reflections, and four heads of 128 channels or one of
512."""
BOUND = "--eval-definitions 16 16 16 --eval-lengths 32 128 512 --seeds 3"
CHESS = "--task chess --length 60 --eval-lengths 60 120 200 --batch-size 128 --steps 6000"
HEADS = "--num-heads 8 --num-householder 2 --d-state 64"
SIZES = {
    "tracking": ("--model tracking --d-model 256", "--model tracking --d-model 624"),
    "bedouin": (f"{HEADS} --d-model 256", f"{HEADS} --d-model 512"),
    **{
        name: (f"{layer_flags(form)} --d-model 256", f"{layer_flags(form)} --d-model 512")
        for name, form in (
            ("lstm_l1", "lstm_l1_forget"),
            ("gated_deltanet_l1", "gated_deltanet_l1_slow"),
            ("attention_l2", "attention_l2"),
        )
    },
}
"""Models of chess with 1.00 to 1.07 million parameters, and with 3.5 to 3.7."""

LAYERS = {
    "k0": "--num-householder 0",
    "k0-unfed": "--num-householder 0 --feedback none",
    **{
        f"k{k}{beta}{fed}": joined(f"--num-householder {k}", bound, feedback)
        for k in (1, 2, 4)
        for beta, bound in (("", ""), ("-beta2", "--beta-max 2"))
        for fed, feedback in (("", ""), ("-unfed", "--feedback none"))
    },
}
"""Four heads of 128 channels; "unfed": without feedback."""
SOME = ("k0", "k2", "k2-beta2", "k2-unfed")
"""Those for S5, copying and brackets, on which there are 24 runs each."""

SHORT = "--num-householder 2 --beta-max 2 --steps 3000 --batch-size 128 --seeds 3"
PICARD = "--solver picard --rtol 0.1 --no-graph"
ONE_STEP = f"{PICARD} --adjoint one_step"
TRAININGS = {
    "exact": ("exact", ""),
    "picard": ("Picard,\nexact\ngradient", PICARD),
    "picard-one_step": ("Picard,\none step\nback", ONE_STEP),
    "paper": ("caps\nΓ(4, 1)", f"{ONE_STEP} --gamma-cap 4 1"),
    "paper-16": ("caps\nΓ(16, 1)", f"{ONE_STEP} --gamma-cap 16 1"),
}
"""Trainings of two reflections: label in a figure, flags; "paper" is section 4.4 of the paper."""
SMALL = (
    "--d-model 64 --num-heads 1 --num-householder 2 --beta-max 2 --batch-size 64 --length 8 "
    "--eval-lengths 8 16 --curriculum quadruple --curriculum-until 0.4 --schedule hold "
    "--steps 5000 --log-every 100 --lr 2e-3 --seeds 1 --first-seed 103 --device cpu"
)
"""The same trainings on a CPU, at length 8."""
SMALL_TASKS = {
    "small_s5": joined(SMALL, "--beta-max 1 --first-seed 0 --group S5"),
    "small_copy": (
        "--task copy --min-string 4 --max-string 8 --context 32 --eval-lengths 8 16 --steps 1500 "
        "--batch-size 64 --schedule hold --d-model 64 --num-heads 1 --device cpu"
    ),
}
"""Tasks for the layers of `SOME` on a CPU."""
CAPS_32 = f"{ONE_STEP} --gamma-cap 32 1"
GROWN = f"{CAPS_32} --curriculum-until 1"
"""Rows grow only when they have been learned."""
BETA_1 = f"{GROWN} --beta-max 1"
"""A step of Picard then multiplies the difference of two outputs of a token by at most 1.15."""
SMALL_16 = {
    "paper-16": (TRAININGS["paper-16"][1], (103,)),
    "paper-32": (CAPS_32, (103, 0, 1)),
    "paper-32-grown": (f"{GROWN} --steps 8000", (104,)),
    "paper-32-beta1": (f"{BETA_1} --steps 8000", (0, 1, 2)),
}
"""Trainings at length 16 on a CPU: flags and seeds."""
PAPER_LAYER = (
    "--num-heads 1 --decay griffin --input-scale delta --feedback B+C+mixer --feedback-init 1"
)
"""That of the paper but for the norms, which `Bedouin.from_paper` leaves out."""

WIDE = ("tracking", "lstm_l1", "gated_deltanet_l1", "hybrid_l2", "attention_l2")
"""Models of the table at d_model 512, in the forms that were chosen at 256."""


def tuned(
    options: Mapping[str, str], made: Mapping[str, Any], source: Callable[[str], str] = str
) -> list[Run]:
    """The tuning runs, and the runs whose tuning runs, those of `source(run)`, have been made."""
    tuning, reported = [], []
    for run, flags in options.items():
        if source(run) == run:
            tuning.append(Run(f"{run}-tuning", joined(flags, TUNING, f"--lr {RATES}")))
        if rows := made.get(f"{source(run)}-tuning", {}).get("rows", ()):
            best = max(rows, key=table.score)["point"]["lr"]
            reported.append(Run(run, joined(flags, f"--seeds 3 --lr {best:g}")))
    return tuning + reported


def tuned_at_256(run: str) -> str:
    """The run of "wide" on the task whose tuning runs chose the rate of the same model at 256."""
    task, _, model = run.partition("-")
    return f"{table.tuned_on(task, model)}-{model}"


def further(results: Path) -> list[Experiment]:
    """All of them; length takes the rates of the table, or 2e-3."""
    runs, gate, length = read_runs(results / table.TUNED), read_runs(results / table.GATE), []
    for task in ("a5", "s5"):
        for model, form in (("tracking", "tracking"), ("lstm_l1", "lstm_l1_forget")):
            form, rate = table.settled(runs, gate, task, model) or (form, 2e-3)
            options = joined(TASKS[task], LONG, RECIPE, NARROW, layer_flags(form), f"--lr {rate:g}")
            from_64 = joined(options, FROM_64)
            length.append(Run(f"{task}-from64-{model}", from_64))
            if task == "a5":
                length.append(Run(f"{task}-from64-more-{model}", joined(from_64, MORE)))
                options = joined(options, "--seeds 5")
            length.append(Run(f"{task}-{model}", options))
    for name, flags in FIXED_POINT.items():
        task = joined(
            TASKS[name.partition("-")[0]], LONG, "--eval-lengths 128 512 2048 16384 131072"
        )
        options = joined(task, RECIPE, NARROW, "--num-householder 2", flags)
        length.append(Run(f"{name}-bedouin", options))
    for model in ("tracking", "hybrid_l2"):
        form, rate = table.settled(runs, gate, "bound_a5", model) or (model, 2e-3)
        options = joined(TASKS["bound_a5"], BOUND, RECIPE, NARROW, layer_flags(form))
        length.append(Run(f"bound_a5-{model}", joined(options, f"--lr {rate:g}")))
    games = {
        f"chess-{size}-{name}": joined(CHESS, RECIPE, sizes[i])
        for i, size in enumerate(("1m", "4m"))
        for name, sizes in SIZES.items()
    }
    layers = {
        f"{task}-{name}": joined(flags, "--steps 6000", RECIPE, NARROW, layer)
        for task, flags in (("a5", TASKS["a5"]), ("parity", LANGUAGES["parity"]))
        for name, layer in LAYERS.items()
    }
    others = {"s5": TASKS["s5"], "copy": TASKS["copy"], "brackets": LANGUAGES["brackets"]}
    large = {task: joined(flags, RECIPE, NARROW) for task, flags in others.items()}
    layers |= {
        f"{task}-{name}": joined(flags, LAYERS[name])
        for task, flags in (large | SMALL_TASKS).items()
        for name in SOME
    }
    wide = {
        f"{task}-{model}": joined(flags, RECIPE, "--d-model 512", layer_flags(choice[0]))
        for task, flags in TASKS.items()
        for model in WIDE
        if (choice := table.settled(runs, gate, task, model)) is not None
    }
    base = joined(TASKS["a5"], RECIPE, NARROW, SHORT)
    how = [Run(f"training-{name}", joined(base, flags)) for name, (_, flags) in TRAININGS.items()]
    how.append(Run("training-paper-layer", joined(base, TRAININGS["paper"][1], PAPER_LAYER)))
    how.append(Run("training-paper-32-beta1", joined(base, BETA_1, "--steps 6000")))
    how += [Run(f"small-{name}", joined(SMALL, flags)) for name, (_, flags) in TRAININGS.items()]
    small_16 = joined(SMALL, "--length 16 --eval-lengths 16 32 --steps 6000")
    how += [
        Run(f"small_16-{name}-s{seed}", joined(small_16, flags, f"--first-seed {seed}"))
        for name, (flags, seeds) in SMALL_16.items()
        for seed in seeds
    ]
    bedouin = how + tuned(layers, read_runs(results / "bedouin"))
    chess = tuned(games, read_runs(results / "chess"))
    wider = tuned(wide, read_runs(results / "wide"), tuned_at_256)
    return [
        Experiment("length", "How far do models track from states of their own?", tuple(length)),
        Experiment("bedouin", "What are reflections, feedback and training for?", tuple(bedouin)),
        Experiment("chess", "Which layer knows the board after 60 to 200 plies?", tuple(chess)),
        Experiment("wide", "Does width help, with rates of its own?", tuple(wider)),
    ]

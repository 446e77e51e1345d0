"""What reflections and feedback are for in `Bedouin`, and what its paper's training reaches."""

from pathlib import Path

from research.experiments.plan import Experiment, Run, joined
from research.experiments.table import LANGUAGES, RECIPE, TASKS
from research.experiments.tuned import tuned

WIDE = f"{RECIPE} --d-model 512"
LAYERS = {
    "k0": "--num-householder 0",
    "k0-unfed": "--num-householder 0 --feedback none",
    **{
        f"k{k}{name}": f"--num-householder {k} {flags}"
        for k in (1, 2, 4)
        for name, flags in (
            ("", ""),
            ("-beta2", "--beta-max 2"),
            ("-unfed", "--beta-max 2 --feedback none"),
        )
    },
}
"""Heads of 128 channels; "unfed": without feedback."""

PICARD = "--solver picard --rtol 0.1 --no-graph"
TRAININGS = {
    "exact": "",
    "picard": PICARD,
    "picard-one_step": f"{PICARD} --adjoint one_step",
    "paper": f"{PICARD} --adjoint one_step --gamma-cap 4 1",
}
"""How two reflections with beta <= 2 are trained; paper: as Fixed-Point RNNs, section 4.4, with
random caps of the steps."""
PAPER_LAYER = (
    "--num-heads 1 --decay griffin --input-scale delta --feedback B+C+mixer --feedback-init 1"
)
"""That of the paper but for the norms, which `Bedouin.from_paper` leaves out."""


def bedouin(results: Path) -> tuple[Experiment, ...]:
    """The layers on five tasks, and the trainings on A5."""
    tasks = {name: TASKS[name] for name in ("a5", "s5", "copy")}
    tasks |= {name: LANGUAGES[name] for name in ("parity", "brackets")}
    options = {
        f"{task}-{name}": joined(flags, WIDE, layer)
        for task, flags in tasks.items()
        for name, layer in LAYERS.items()
    }
    base = joined(TASKS["a5"], WIDE, "--num-householder 2 --beta-max 2 --seeds 3 --lr 5e-4")
    runs = [Run(f"a5-{name}", joined(base, how)) for name, how in TRAININGS.items()]
    runs.append(Run("a5-paper-layer", joined(base, TRAININGS["paper"], PAPER_LAYER)))
    how = Experiment("picard", "What does the training of Fixed-Point RNNs reach?", tuple(runs))
    return (*tuned("bedouin", "What are reflections and feedback for?", options, results), how)

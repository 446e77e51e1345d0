"""Chess: which layer knows every square after many random legal moves?"""

from pathlib import Path

from research.experiments.plan import Experiment, joined
from research.experiments.table import RECIPE
from research.experiments.tuned import tuned

TASK = (
    "--task chess --length 60 --eval-lengths 60 120 200 --batch-size 128 --steps 12000 "
    "--keep-weights"
)
MODELS = {
    "tracking": {"1m": "--model tracking --d-model 256", "4m": "--model tracking --d-model 624"},
    "bedouin": {
        "1m": "--d-model 256 --num-heads 8 --num-householder 2 --d-state 64",
        "4m": "--d-model 512 --num-heads 8 --num-householder 2 --d-state 64",
    },
    **{
        name: {size: f"--model {form} --d-model {m}" for size, m in (("1m", 256), ("4m", 512))}
        for name, form in (
            ("lstm_l1", "lstm_l1_forget"),
            ("gated_deltanet_l1", "gated_deltanet_l1_slow"),
            ("attention_l2", "attention_l2"),
        )
    },
}
"""Flags of every model with 1.00 to 1.07 million parameters, and with 3.5 to 3.7."""


def chess(results: Path) -> tuple[Experiment, Experiment]:
    """Every model with one recipe, at both sizes."""
    options = {
        f"chess-{size}-{name}": joined(TASK, RECIPE, flags)
        for name, sizes in MODELS.items()
        for size, flags in sizes.items()
    }
    return tuned("chess", "Which layer knows the board after 60 to 200 plies?", options, results)

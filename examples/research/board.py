"""Draw the board of a test game beside what a model says of it.

    python examples/research/experiment.py chess --only chess-1m-tracking
    python examples/research/board.py runs/experiments/chess/chess-1m-tracking --out board.png
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from matplotlib import pyplot as plt
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from flags import Count, Natural, UsageError, check_types
from research.boards import Chess, games_of, rows_of
from research.learned import stored_models

GLYPHS = " ♙♘♗♖♕♔♟♞♝♜♛♚"
"""Of the classes of a square."""


@dataclass(frozen=True)
class Options:
    """Which board."""

    folder: tyro.conf.Positional[Path]
    """Folder that ensemble.py has written with --task chess --keep-weights."""
    out: Path = Path("board.png")  # The figure.
    game: Natural = 0  # Number of the test game.
    plies: Count = 200  # Plies after which the board is shown.

    def __post_init__(self) -> None:
        check_types(self)


@torch.no_grad()
def main(options: Options) -> None:
    """The first model of the folder, on the CPU."""
    device = torch.device("cpu")
    model, data = stored_models(options.folder, device)[0]
    task = data.task
    if not isinstance(task, Chess):
        raise UsageError(f"{options.folder} must have models of --task chess, got {task}")
    moves = games_of(task.path, "test", device)[options.game, : options.plies].long()
    tokens, labels = rows_of(moves.unsqueeze(0))
    found = task.by_square(model(tokens))[0, -1].argmax(-1)
    draw(labels[0, -1], found, options)


def draw(board: Tensor, found: Tensor, options: Options) -> None:  # (64,), (64,)
    """Both boards side by side, with the model's errors in red."""
    wrong = (board != found).nonzero().flatten().tolist()
    figure, axes = plt.subplots(1, 2, figsize=(8.0, 4.3), layout="constrained")
    titles = f"after {options.plies} plies", f"prediction, {len(wrong)} of 64 squares wrong"
    light = torch.arange(8).unsqueeze(1).add(torch.arange(8)) % 2
    for panel, classes, title in zip(axes, (board, found), titles, strict=True):
        panel.imshow(light, cmap="gray", vmin=-2.5, vmax=1.1, origin="lower")
        for square, kind in enumerate(classes.tolist()):
            rank, file = divmod(square, 8)
            if panel is axes[1] and square in wrong:
                panel.plot(file, rank, "s", color="C3", alpha=0.6, markersize=26)
            panel.text(file, rank, GLYPHS[kind], fontsize=20, ha="center", va="center")
        panel.set(title=title, xticks=range(8), yticks=range(8))
        panel.set(xticklabels=list("abcdefgh"), yticklabels=range(1, 9))
    figure.savefig(options.out, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except UsageError as error:
        sys.exit(f"error: {error}")

"""Draw a board of a test game beside what a model says of it.

python examples/research/ensemble.py --task chess ... --keep-weights --out runs/board
python examples/research/board.py runs/board --plies 200 --out board.png
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from matplotlib import pyplot as plt
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from flags import Count, Device, Natural, UsageError, check_types, choose_device
from research.boards import Chess, games_of, rows_of
from research.learned import stored_models

GLYPHS = " ♙♘♗♖♕♔♟♞♝♜♛♚"
"""Of the classes of a square."""


@dataclass(frozen=True)
class Options:
    """Which board of which model."""

    folder: tyro.conf.Positional[Path]
    """Folder that ensemble.py has written with --task chess --keep-weights."""
    out: Path = Path("board.png")  # The figure.
    game: Natural = 0  # Number of the test game.
    plies: Count = 200  # Plies after which the board is shown.
    model: Natural = 0  # Number of the model among those of the folder's seeds.
    device: Device = "auto"  # auto: the GPU if there is one.

    def __post_init__(self) -> None:
        check_types(self)


@torch.no_grad()
def boards(options: Options) -> tuple[Tensor, Tensor]:
    """The classes (64,) of the squares, and those that the model gives."""
    device = choose_device(options.device)
    model, data = stored_models(options.folder, device)[options.model]
    task = data.task
    if not isinstance(task, Chess):
        raise UsageError(f"{options.folder} must have models of --task chess, got {task}")
    moves = games_of(task.path, "test", device)[options.game, : options.plies].long()
    tokens, labels = rows_of(moves.unsqueeze(0))
    found = task.by_square(model(tokens))[0, -1].argmax(-1)
    return labels[0, -1].cpu(), found.cpu()


def draw(board: Tensor, found: Tensor, plies: int, path: Path) -> None:
    """Both boards side by side, with the model's errors in red."""
    is_wrong = board != found
    titles = f"board after {plies} plies", f"prediction, {int(is_wrong.sum())} of 64 squares wrong"
    figure, axes = plt.subplots(1, 2, figsize=(8.0, 4.3), layout="constrained")
    light = torch.arange(8).unsqueeze(1).add(torch.arange(8)) % 2
    for panel, classes, title in zip(axes, (board, found), titles, strict=True):
        panel.imshow(light, cmap="gray", vmin=-2.5, vmax=1.1, origin="lower")
        for square, kind in enumerate(classes.tolist()):
            rank, file = divmod(square, 8)
            if panel is axes[1] and is_wrong[square]:
                panel.add_patch(
                    plt.Rectangle((file - 0.5, rank - 0.5), 1, 1, color="C3", alpha=0.6)
                )
            panel.text(file, rank, GLYPHS[kind], fontsize=20, ha="center", va="center")
        panel.set(title=title, xticks=range(8), yticks=range(8))
        panel.set(xticklabels=list("abcdefgh"), yticklabels=range(1, 9))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(options: Options) -> None:
    draw(*boards(options), options.plies, options.out)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except UsageError as error:
        sys.exit(f"error: {error}")

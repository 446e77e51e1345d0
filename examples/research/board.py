"""Draw the board of a test game beside what a model says of it.

python examples/research/experiment.py chess --only chess-1m-tracking
python examples/research/board.py examples/results/chess/chess-1m-tracking --out board.png
"""

import sys
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from common.evaluation import png
from research.runs import read_run

GLYPHS = " ♙♘♗♖♕♔♟♞♝♜♛♚"
"""Of the classes of a square."""


def figure(plies: int, board: list[int], found: list[int]) -> bytes:  # (64,), (64,)
    """Both boards side by side, with the model's errors in red."""
    wrong = [i for i in range(64) if board[i] != found[i]]
    drawn = Figure(figsize=(8.0, 4.3), layout="constrained")
    titles = f"after {plies} plies", f"prediction, {len(wrong)} of 64 squares wrong"
    light = np.add.outer(np.arange(8), np.arange(8)) % 2
    panels = drawn.subplots(1, 2)
    for axes, classes, title in zip(panels, (board, found), titles, strict=True):
        axes.imshow(light, cmap="gray", vmin=-2.5, vmax=1.1, origin="lower")
        for square, kind in enumerate(classes):
            rank, file = divmod(square, 8)
            if axes is panels[1] and square in wrong:
                axes.plot(file, rank, "s", color="C3", alpha=0.6, markersize=26)
            axes.text(file, rank, GLYPHS[kind], fontsize=20, ha="center", va="center")
        axes.set(title=title, xticks=range(8), yticks=range(8))
        axes.set(xticklabels=list("abcdefgh"), yticklabels=range(1, 9))
    return png(drawn)


def main(
    run: tyro.conf.Positional[Path],
    out: Path = Path("board.png"),
    plies: int = 200,
    model: int = 0,
) -> None:
    """Draw what a model said of the board after so many plies, one of the test lengths of the run
    NAME of FOLDER/runs.json."""
    board = read_run(run)["rows"][0]["boards"][str(plies)]
    out.write_bytes(figure(plies, board["labels"], board["found"][model]))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)

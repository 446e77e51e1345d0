"""Chess: boards from moves, files of games, measures, short runs, the figure."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from bedouin.tasks import stream
from flags import UsageError
from research import experiment, games, summarize
from research.data import metrics, predictions
from research.experiments.further import SIZES, further
from research.games import NAMES, Chess, boards_after, games_of
from research.runs import read_runs

PLIES = (
    "e2e4 a7a5 e4e5 d7d5 e5d6 a5a4 b2b4 a4b3 g1f3 b8c6 f1e2 c8g4 e1g1 d8d6 h2h3 e8c8 h3g4 b3a2 "
    "g4g5 a2b1n g5g6 g8f6 g6h7 f6d7 h7h8q"
)
"""En passant, castling and promotions of both colours, and the last board."""
CPU = torch.device("cpu")
END = "RnBQ.RK. ..PPBPP. .....N.. ........ ........ ..nq.... .ppnppp. ..kr.b.Q"


def test_boards_after_special_moves() -> None:
    squares = [f"{file}{rank}" for rank in range(1, 9) for file in "abcdefgh"]
    parts = ((v[:2], v[2:4], v[4:] or ".") for v in PLIES.split())
    moves = [(squares.index(a), squares.index(b), ".nbrq".index(c)) for a, b, c in parts]
    last = boards_after(torch.tensor([moves, moves[::-1]]))[0, -1]
    assert "".join(NAMES[i] for i in last) == END.replace(" ", "")


def write(path: Path) -> Path:
    """A file of games of 3 and 4 random moves, which need not be legal here."""
    rng, high = np.random.default_rng(0), (64, 64, 5)
    train, test = (rng.integers(0, high, (6, n, 3), np.uint8) for n in (3, 4))
    np.savez(path, train=train, test=test)
    return path


def test_rows_are_games_and_measures_are_squares_boards_and_last_boards(tmp_path: Path) -> None:
    task = Chess(write(tmp_path / "g.npz"), 2)
    tokens, labels = task.sample(7, stream("train", 0))
    moves = tokens.view(7, 2, 3) - torch.tensor([0, 64, 128])
    known = games_of(task.path, "train", CPU)[:, :2].long()
    assert all(any(torch.equal(row, game) for game in known) for row in moves)
    assert torch.equal(labels, boards_after(moves))
    assert task.sample(2, stream("test", 0), length=4).labels.shape == (2, 4, 64)
    logits = torch.full((7, 6, task.output_size), -1.0)  # not at the last tokens of moves
    logits[:, 2::3] = one_hot(labels, 13).flatten(2).float()
    logits[0, 2, :13] = logits[0, 2, :13].flip(0).roll(1)  # a1 after the first move
    logits[1, 5, :26] = 0.0
    given = predictions(task, logits), labels, tokens
    right = (given[0].argmax(-1) == labels).double()
    boards = right.amin(-1)
    expected = {"token": right.mean(), "sequence": boards.mean(), "last": boards[:, 1].mean()}
    found = {name: float(measure(*given)) for name, measure in metrics(task).items()}
    assert found == pytest.approx({name: float(v) for name, v in expected.items()})
    with pytest.raises(ValueError, match=r"length must be in \[1, 3\]"):
        task.sample(1, stream("train", 0), length=4)
    with pytest.raises(UsageError, match="--games must be a file"):
        Chess(tmp_path / "none.npz").sample(1, stream("train", 0))


def test_files_of_games_hold_legal_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m, pytest.raises(UsageError, match="needs python-chess: pip"):
        m.setitem(sys.modules, "chess", None)
        games.play(0, "train", 2, 0)
    chess, path = pytest.importorskip("chess"), tmp_path / "a" / "g.npz"
    games.main(path, (1, 40), (1, 90), seed=1, processes=1)
    (moves,), position = games_of(path, "test", CPU), chess.Board()
    for left, entered, promotion in moves.tolist():  # find_move refuses illegal moves
        position.push(position.find_move(left, entered, promotion + 1 if promotion else None))
    last = boards_after(moves[None].long())[0, -1].view(8, 8).flip(0)
    assert [NAMES[i] for i in last.flatten()] == str(position).split()


@pytest.mark.parametrize("model", SIZES)
def test_a_short_run_and_its_figure(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = "--length 3 --eval-lengths 3 4 --steps 2 --log-every 1 --batch-size 2 --eval-rows 2"
    path, name = write(tmp_path / "g.npz"), f"chess-1m-{model}"
    extra = f"{short} --seeds 1 --lr 0.001 --device cpu --autocast no --no-compile --games {path}"
    config = experiment.Config(("chess-tuning",), (name,), extra=extra, out=tmp_path)
    assert experiment.main(config) == 0
    (row,) = read_runs(tmp_path / "chess-tuning")[name]["rows"]
    assert 0.9e6 < row["parameters"] < 1.1e6 and not any(row["failed"])
    (reported,) = {found.name: found for found in further(tmp_path)}["chess"].runs
    assert reported.name == name and reported.options.endswith("--seeds 3 --lr 0.001")
    summarize.main(summarize.Config((tmp_path / "chess-tuning" / name,), tmp_path / "board.png"))
    assert (tmp_path / "board.png").stat().st_size > 5000

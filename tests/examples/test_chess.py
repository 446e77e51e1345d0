"""Chess: boards from moves, files of games, measures, short runs, the figure."""

import sys
from pathlib import Path
from typing import Any

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
"""En passant, castling and promotions of both colours."""

CPU = torch.device("cpu")
END = "RnBQ.RK. ..PPBPP. .....N.. ........ ........ ..nq.... .ppnppp. ..kr.b.Q"


def test_boards_after_special_moves() -> None:
    squares = {
        f"{file}{rank}": 8 * rank + i - 8
        for i, file in enumerate("abcdefgh")
        for rank in range(1, 9)
    }
    moves = [(squares[v[:2]], squares[v[2:4]], ".nbrq".index(v[4:] or ".")) for v in PLIES.split()]
    boards = boards_after(torch.tensor([moves, moves[::-1]]))[0]
    found = ["".join(NAMES[i] for i in row) for row in boards.tolist()]
    assert (found[3][35], found[4][35], found[4][43]) == ("p", ".", "P")  # en passant
    assert found[-1] == END.replace(" ", "")


def write(path: Path) -> Path:
    """A file of games of 3 and 4 random moves, which need not be legal here."""
    rng, sizes = np.random.default_rng(0), {"train": (6, 3), "test": (5, 4)}
    arrays: dict[str, Any] = {
        split: rng.integers(0, (64, 64, 5), (*n, 3), np.uint8) for split, n in sizes.items()
    }
    np.savez(path, **arrays)
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
    assert found["last"] == pytest.approx(6 / 7)
    with pytest.raises(ValueError, match=r"length must be in \[1, 3\]"):
        task.sample(1, stream("train", 0), length=4)
    with pytest.raises(UsageError, match="--games must be a file"):
        Chess(tmp_path / "none.npz").sample(1, stream("train", 0))


def test_files_of_games_hold_legal_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "chess", None)
        with pytest.raises(UsageError, match="needs python-chess: pip install"):
            games.play(0, "train", 2, 0)
    chess, path = pytest.importorskip("chess"), tmp_path / "a" / "g.npz"
    games.main(path, (2, 40), (1, 90), seed=1, processes=1)
    for moves in (*games_of(path, "train", CPU), *games_of(path, "test", CPU)):
        position, boards = chess.Board(), boards_after(moves[None].long())[0]
        for (left, entered, promotion), board in zip(moves.tolist(), boards.tolist(), strict=True):
            move = chess.Move(left, entered, promotion + 1 if promotion else None)
            assert move in position.legal_moves
            position.push(move)
            pieces = map(position.piece_at, range(64))
            assert [NAMES[i] for i in board] == [p.symbol() if p else "." for p in pieces]


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
    assert set(row["accuracy"]["4"]) == {"token", "sequence", "last"}
    (reported,) = {found.name: found for found in further(tmp_path)}["chess"].runs
    assert reported.name == name and reported.options.endswith("--seeds 3 --lr 0.001")
    summarize.main(summarize.Config((tmp_path / "chess-tuning" / name,), tmp_path / "board.png"))
    assert (tmp_path / "board.png").stat().st_size > 5000

"""Chess: boards from moves, files of games, short runs, the figure."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bedouin.tasks import stream
from flags import UsageError
from research import board, experiment, games
from research.data import metrics, predictions
from research.experiments.further import SIZES, further
from research.games import NAMES, Chess, boards_after, games_of
from research.runs import read_runs

PLIES = (
    "e2e4 a7a5 e4e5 d7d5 e5d6 a5a4 b2b4 a4b3 g1f3 b8c6 f1e2 c8g4 e1g1 d8d6 h2h3 e8c8 h3g4 b3a2 "
    "g4g5 a2b1n g5g6 g8f6 g6h7 f6d7 h7h8q"
)
"""En passant, castling and promotions of both colours."""

END = "RnBQ.RK. ..PPBPP. .....N.. ........ ........ ..nq.... .ppnppp. ..kr.b.Q"


def square(name: str) -> int:
    return "abcdefgh".index(name[0]) + 8 * int(name[1]) - 8


def test_boards_after_special_moves() -> None:
    moves = [(square(v[:2]), square(v[2:4]), ".nbrq".index(v[4:] or ".")) for v in PLIES.split()]
    boards = boards_after(torch.tensor([moves, moves[::-1]]))[0]
    found = ["".join(NAMES[i] for i in row) for row in boards.tolist()]
    assert (found[3][35], found[4][35], found[4][43]) == ("p", ".", "P")  # en passant
    assert found[-1] == END.replace(" ", "")


def write(path: Path, train: int = 3, test: int = 4) -> None:
    """A file of games of random moves, which need not be legal here."""
    rng = np.random.default_rng(0)
    high = (64, 64, 5)
    sizes = {"train": (6, train), "test": (5, test)}
    arrays = {split: rng.integers(0, high, (*n, 3), np.uint8) for split, n in sizes.items()}
    np.savez(path, **arrays)


def test_rows_are_the_games_of_their_split(tmp_path: Path) -> None:
    write(tmp_path / "g.npz")
    task = Chess(tmp_path / "g.npz", 2)
    tokens, labels = task.sample(7, stream("train", 0))
    assert (tokens.shape, labels.shape) == ((7, 6), (7, 2, 64))
    moves = tokens.view(7, 2, 3) - torch.tensor([0, 64, 128])
    known = games_of(task.path, "train", torch.device("cpu"))[:, :2].long()
    assert all(any(torch.equal(row, game) for game in known) for row in moves)
    assert torch.equal(labels, boards_after(moves))
    assert task.sample(2, stream("test", 0), length=4).labels.shape == (2, 4, 64)
    with pytest.raises(ValueError, match=r"length must be in \[1, 3\]"):
        task.sample(1, stream("train", 0), length=4)
    with pytest.raises(UsageError, match="--games must be a file"):
        Chess(tmp_path / "none.npz").sample(1, stream("train", 0))


def test_measures_are_squares_boards_and_last_boards(tmp_path: Path) -> None:
    write(tmp_path / "g.npz")
    task = Chess(tmp_path / "g.npz", 2)
    tokens, labels = task.sample(2, stream("train", 0))
    logits = torch.full((2, 6, task.output_size), -1.0)  # not at the last tokens of moves
    logits[:, 2::3] = torch.nn.functional.one_hot(labels, 13).flatten(2).float()
    logits[0, 2, :13] = logits[0, 2, :13].flip(0).roll(1)  # a1 after the first move
    logits[1, 5, :26] = 0.0
    right = predictions(task, logits).argmax(-1) == labels
    found = {
        n: float(f(predictions(task, logits), labels, tokens)) for n, f in metrics(task).items()
    }
    boards = right.all(-1).double()
    expected = {
        "token": right.double().mean(),
        "sequence": boards.mean(),
        "last": boards[:, 1].mean(),
    }
    assert found == pytest.approx({name: float(v) for name, v in expected.items()})
    assert 0 < found["token"] < 1 and found["last"] == 0.5


def test_files_of_games_hold_legal_games(tmp_path: Path) -> None:
    chess, path = pytest.importorskip("chess"), tmp_path / "a" / "g.npz"
    games.main(path, (2, 40), (1, 90), seed=1, processes=1)
    with np.load(path) as file:
        assert file["test"].shape == (1, 90, 3) and file["train"].dtype == np.uint8
        assert file["train"][1].tobytes() == games.play(1, "train", 40, 1)
        for moves in (*file["train"], *file["test"]):
            position, rows = chess.Board(), boards_after(torch.tensor(moves)[None].long())[0]
            for (left, entered, promotion), row in zip(moves.tolist(), rows.tolist(), strict=True):
                move = chess.Move(left, entered, promotion + 1 if promotion else None)
                assert move in position.legal_moves
                position.push(move)
                placed = position.piece_map()
                names = [placed[i].symbol() if i in placed else "." for i in range(64)]
                assert [NAMES[i] for i in row] == names


def test_without_the_library_no_games_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "chess", None)
    with pytest.raises(UsageError, match="needs python-chess: pip install"):
        games.play(0, "train", 2, 0)


@pytest.mark.parametrize("model", SIZES)
def test_a_short_run_and_its_figure(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "g.npz")
    short = "--length 3 --eval-lengths 3 4 --steps 2 --log-every 1 --batch-size 2 --eval-rows 2"
    rest = f"--seeds 1 --lr 0.001 --device cpu --autocast no --games {tmp_path}/g.npz"
    name = f"chess-1m-{model}"
    config = experiment.Config(("chess-tuning",), (name,), extra=f"{short} {rest}", out=tmp_path)
    assert experiment.main(config) == 0
    (row,) = read_runs(tmp_path / "chess-tuning")[name]["rows"]
    assert 0.9e6 < row["parameters"] < 1.1e6 and not any(row["failed"])
    assert set(row["accuracy"]["4"]) == {"token", "sequence", "last"}
    found = {experiment.name: experiment for experiment in further(tmp_path)}
    (reported,) = found["chess"].runs  # at the rate of the run above
    assert reported.name == name and reported.options.endswith("--seeds 3 --lr 0.001")
    assert row["boards"].keys() == {"3", "4"} and len(row["boards"]["4"]["found"][0]) == 64
    board.main(tmp_path / "chess-tuning" / name, tmp_path / "board.png", plies=4)
    assert (tmp_path / "board.png").stat().st_size > 5000

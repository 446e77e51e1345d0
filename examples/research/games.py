"""Chess as a task of state tracking: the 64 squares after each move of a game of legal moves.

    pip install "chess>=1.11,<2"      # python-chess, GPL-3.0-or-later, needed to write games alone
    python examples/research/games.py --out runs/chess/games.npz      # 10 minutes on a core

A move is three tokens: the square that it leaves, the one that it enters, and what a pawn becomes.
At the third a label for each square says what stands there. Every move is drawn uniformly from the
legal ones; a game that ends early is replaced by another one, and draws by rule do not end a game.
A game depends on --seed, split and number alone. The published benchmark (Chess-World-Model, arXiv
2605.30100) trains on games of people and has 75 labels a position; here there are 64.

Letters: b games, t moves.
"""

import random
import sys
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next import

from bedouin.tasks import Batch, Split
from bedouin.tasks.batch import Task
from bedouin.tasks.streams import integers
from flags import UsageError

SQUARES = 64
"""a1, b1, ..., h1, a2, ..., h8, as python-chess numbers them."""
NAMES = ".PNBRQKpnbrqk"
"""The classes of a square: empty, then the pieces of White and of Black, in the notation of FEN."""
TOKENS, PROMOTIONS = 3, 5
"""Tokens of a move, and values of the third: nothing, or a knight, a bishop, a rook or a queen."""
START = [NAMES.index(name) for name in f"RNBQKBNR{'P' * 8}{'.' * 32}{'p' * 8}rnbqkbnr"]
_PAWN, _ROOK, _KING, _BLACK = 1, 4, 6, 6  # classes, and the first of Black less one


@dataclass(frozen=True)
class Chess(Task):
    """Games of the file `path`, of which a row has the first `length` moves.

    Labels are (b, t, 64), one t for each move. `sample` raises UsageError without the file and
    ValueError for more moves than its games have.
    """

    path: Path
    length: int = 60

    vocab_size: ClassVar[int] = 2 * SQUARES + PROMOTIONS
    output_size: ClassVar[int] = SQUARES * len(NAMES)

    def by_square(self, logits: Tensor) -> Tensor:  # (b, 3 t, 64 * 13) -> (b, t, 64, 13)
        """The logits of a label each, those at the last token of a move."""
        last: Tensor = logits[:, TOKENS - 1 :: TOKENS].unflatten(-1, (SQUARES, len(NAMES)))
        return last

    def _draw(self, b: int, length: int | None, split: Split, rng: torch.Generator) -> Batch:
        t = self.length if length is None else length
        games = games_of(self.path, "test" if split == "test" else "train", rng.device)
        if not 1 <= t <= games.shape[1]:
            raise ValueError(f"length must be in [1, {games.shape[1]}] of {self.path}, got {t}")
        moves = games[integers(0, len(games), (b,), rng), :t].long()
        first = torch.tensor([0, SQUARES, 2 * SQUARES], device=moves.device)
        return Batch((moves + first).flatten(1), boards_after(moves))


@lru_cache(maxsize=8)
def games_of(path: Path, split: str, device: torch.device) -> Tensor:  # (games, moves, 3) uint8
    """The moves of a file's games on a device, which keeps them for the next calls."""
    if not path.exists():
        raise UsageError(f"--games must be a file that games.py has written, got {path}")
    with np.load(path) as file:
        return torch.from_numpy(file[split]).to(device)


def boards_after(moves: Tensor) -> Tensor:  # (b, t, 3) int64 -> (b, t, 64) int64
    """The class of every square after each move, whose legality is not checked.

    A move changes at most four squares: the one that it leaves, the one that it enters, and that of
    the pawn that is taken en passant or those of the rook with which it castles.
    """
    start = torch.tensor(START, device=moves.device)
    board, boards = start.expand(len(moves), SQUARES), []
    for move in moves.unbind(1):
        left, entered, promotion = move.split(1, 1)  # (b, 1)
        piece = board.gather(1, left)
        black = _BLACK * (piece > _BLACK)
        placed = torch.where(promotion > 0, promotion + _PAWN + black, piece)
        is_diagonal = (left - entered) % 8 != 0
        takes_behind = (piece - black == _PAWN) & is_diagonal & (board.gather(1, entered) == 0)
        castles = (piece - black == _KING) & ((left - entered).abs() == 2)
        corner = torch.where(entered > left, entered + 1, entered - 2)
        behind = left - left % 8 + entered % 8
        emptied = torch.where(takes_behind, behind, torch.where(castles, corner, left))
        crossed = torch.where(castles, (left + entered) // 2, entered)
        rook = torch.where(castles, _ROOK + black, placed)
        nothing = torch.zeros_like(piece)
        # where a move changes fewer squares, two of these are one square with one value
        changed = torch.cat([left, emptied, entered, crossed], 1)
        board = board.scatter(1, changed, torch.cat([nothing, nothing, placed, rook], 1))
        boards.append(board)
    return torch.stack(boards, 1)


def play(number: int, split: str, plies: int, seed: int) -> bytes:
    """The plies of a game, three bytes each. Raises UsageError without python-chess."""
    try:
        import chess
    except ImportError as error:
        raise UsageError('games.py needs python-chess: pip install "chess>=1.11,<2"') from error
    draws = random.Random(f"{seed}-{split}-{number}")
    while True:
        board, moves = chess.Board(), bytearray()
        while len(moves) < 3 * plies and (legal := list(board.legal_moves)):
            move = draws.choice(legal)
            promotion = move.promotion - 1 if move.promotion else 0
            moves += bytes((move.from_square, move.to_square, promotion))
            board.push(move)
        if len(moves) == 3 * plies:
            return bytes(moves)


def main(
    out: Path = Path("runs/chess/games.npz"),
    train: tuple[int, int] = (200_000, 60),
    test: tuple[int, int] = (2048, 200),
    seed: int = 0,
    processes: int | None = None,
) -> None:
    """Write a file with the arrays "train" and "test", of so many games and plies, by so many
    processes, None: one a core."""
    arrays: dict[str, Any] = {}
    with get_context("spawn").Pool(processes) as pool:
        for split, (number, plies) in (("train", train), ("test", test)):
            one = partial(play, split=split, plies=plies, seed=seed)
            games = b"".join(pool.map(one, range(number), chunksize=100))
            arrays[split] = np.frombuffer(games, np.uint8).reshape(number, plies, 3)
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, **arrays)


if __name__ == "__main__":
    try:
        tyro.cli(main, description=__doc__)
    except UsageError as error:
        sys.exit(f"error: {error}")

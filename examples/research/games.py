"""Write games of random legal moves into one file, which `--task chess` reads.

    pip install "chess>=1.11,<2"      # python-chess, GPL-3.0-or-later, needed by this script alone
    python examples/research/games.py --out runs/chess/games.npz

Every move is drawn uniformly from the legal ones. A game that ends before it has the number of
plies is replaced by another one; draws by rule do not end a game. A game depends on --seed, its
split and its number alone, not on the number of processes. The default takes a core about 20
minutes. A ply is three numbers of uint8: the square that is left, the one that is entered (a1 is 0,
h8 is 63), and 0 or, from 1 on, the promotion to knight, bishop, rook, queen.
"""

import os
import random
import sys
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next import

from flags import Count, Natural, UsageError, check_types


@dataclass(frozen=True)
class Options:
    """How many games of which lengths."""

    out: Path = Path("runs/chess/games.npz")  # The file, with the arrays "train" and "test".
    train: tuple[Count, Count] = (200_000, 60)  # Training games, and plies of each.
    test: tuple[Count, Count] = (2048, 200)  # The same of test games.
    seed: Natural = 0  # Of all games.
    processes: Count = os.cpu_count() or 1  # Processes that play.

    def __post_init__(self) -> None:
        check_types(self)


def chess_library() -> Any:
    """python-chess. Raises UsageError where it is not installed."""
    try:
        import chess
    except ImportError as error:
        raise UsageError('games.py needs python-chess: pip install "chess>=1.11,<2"') from error
    return chess


def play(number: int, split: str, plies: int, seed: int) -> bytes:
    """The plies of a game, three bytes each."""
    chess, draws = chess_library(), random.Random(f"{seed}-{split}-{number}")
    while True:
        board, moves = chess.Board(), bytearray()
        while len(moves) < 3 * plies and (legal := list(board.legal_moves)):
            move = draws.choice(legal)
            promotion = move.promotion - 1 if move.promotion else 0
            moves += bytes((move.from_square, move.to_square, promotion))
            board.push(move)
        if len(moves) == 3 * plies:
            return bytes(moves)


def main(options: Options) -> None:
    chess_library()
    started, arrays = time.perf_counter(), {}
    with get_context("spawn").Pool(options.processes) as pool:
        for split, (number, plies) in (("train", options.train), ("test", options.test)):
            one = partial(play, split=split, plies=plies, seed=options.seed)
            games = b"".join(pool.map(one, range(number), chunksize=100))
            arrays[split] = np.frombuffer(games, np.uint8).reshape(number, plies, 3)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.out, **arrays)
    size, seconds = options.out.stat().st_size / 2**20, time.perf_counter() - started
    print(f"{options.out}: {size:.1f} MiB, {seconds:.0f} s")


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except UsageError as error:
        sys.exit(f"error: {error}")

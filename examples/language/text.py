"""Text for language models: files as documents of bytes, split by their names, and cut into rows.

Letters: b batch, t time, n tokens of a corpus.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flags import Count, UsageError

END = 256
"""The token before and after every document; the others are the 256 bytes."""
VOCABULARY = 257
HELD_OUT = 16
"""One file of so many is held out."""
_NOT_LIBRARY = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
)
"""Folders of Python's library that other packages fill, or that some installations lack."""


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options of the text, and of the evaluation on what is held out."""

    text: Path | None = None
    """Folder of the text, with all folders below it, of which one file of 16, chosen by a hash of
    its name, is held out; or one file, whose last sixteenth is held out. None: the source of
    Python's library, without its tests."""
    packages: bool = False
    """Read the source of all installed packages in the place of Python's library."""
    pattern: str | None = None
    """Names of the files in the folder; None: all that are not hidden, or *.py without --text."""
    length: Count = 1024  # Tokens of a training row; documents in a row are kept apart.
    eval_lengths: tuple[Count, ...] = ()
    """Lengths of the pieces into which held-out files are cut; --length is always one of them."""
    eval_bytes: Count = 2**17  # Held-out bytes of an evaluation during training.
    final_bytes: Count = 2**22  # Held-out bytes of the evaluation after training.
    eval_tokens: Count = 2**16  # Tokens of an evaluation batch, at least one piece.


@dataclass(frozen=True)
class Corpus:
    """Documents one after the other: END, the bytes of a file, END, the bytes of the next, END."""

    tokens: Tensor  # (n,) int16
    starts: Tensor  # (documents,) int64, the place of the END before each document

    @property
    def num_bytes(self) -> int:
        """The bytes of all documents."""
        return len(self.tokens) - len(self.starts) - 1

    def sizes(self, name: str) -> dict[str, int]:
        """The numbers of bytes and of documents, with a name for metrics.json."""
        return {f"{name}_bytes": self.num_bytes, f"{name}_files": len(self.starts)}

    def to(self, device: torch.device) -> "Corpus":
        """The corpus on a device."""
        return Corpus(self.tokens.to(device), self.starts.to(device))

    def draw(
        self,
        b: int,
        t: int,
        generator: torch.Generator,
    ) -> Tensor:  # (b,) int64
        """Where b rows of t tokens begin, uniform over all places."""
        places = len(self.tokens) - t
        return torch.randint(places, (b,), generator=generator, device=self.tokens.device)

    def rows(
        self,
        first: Tensor,  # (b,) int64
        t: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # (b, t) int64 each
        """Tokens, the tokens that follow them, and the index of the document that each is in."""
        places = first.unsqueeze(1) + torch.arange(t + 1, device=first.device)
        window = self.tokens[places].long()
        document = torch.searchsorted(self.starts, places[:, :-1].contiguous(), right=True)
        return window[:, :-1], window[:, 1:], document

    def pieces(self, length: int, limit: int) -> list[tuple[int, int]]:
        """Begin and end of pieces of at most `length` tokens, `limit` tokens of all documents from
        the first one on; the longest pieces first."""
        ends = [*self.starts.tolist(), len(self.tokens) - 1]
        found, left = [], limit
        for start, stop in zip(ends, ends[1:], strict=False):
            stop = min(stop, start + left)
            left -= stop - start
            found += [(i, min(i + length, stop)) for i in range(start, stop, length)]
        return sorted(found, key=lambda piece: piece[0] - piece[1])

    def packed(
        self, pieces: list[tuple[int, int]]
    ) -> tuple[Tensor, Tensor, Tensor]:  # (1, t), (1, t) and (pieces + 1,) int64
        """Pieces as one row: tokens, the tokens that follow them, and where each piece begins."""
        device = self.tokens.device
        sizes = torch.tensor([0, *(stop - start for start, stop in pieces)], device=device)
        places = torch.cat([torch.arange(*piece, device=device) for piece in pieces])
        tokens, labels = self.tokens[places].long(), self.tokens[places + 1].long()
        return tokens[None], labels[None], sizes.cumsum(0)


def read_corpora(options: TextOptions) -> tuple[Corpus, Corpus]:
    """The documents for training and those held out, at least one, which a hash of a file's name
    selects; of one file the last of HELD_OUT parts is held out.

    Raises UsageError if there is nothing for one of the two, or not a row to train with.
    """
    files, pattern = _read(options), options.pattern
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    if len(files) == 1:
        ((_, content),) = files
        cut = len(content) - len(content) // HELD_OUT
        parts = [content[:cut]], [content[cut:]]
    else:
        hashed = ((hashlib.sha256(name.encode()).digest(), content) for name, content in files)
        # in the order of the hashes, so that the first ones are a random choice
        for digest, content in sorted(hashed):
            parts[digest[0] % HELD_OUT == 0].append(content)
        if files and not parts[1]:
            parts[1].append(parts[0].pop(0))
    if not all(map(any, parts)):
        where = "" if pattern is None else f" with --pattern {pattern!r}"
        raise UsageError(
            f"--text must have text to train with and to hold out, got {len(files)} files{where}"
        )
    training, held_out = make_corpus(parts[0]), make_corpus(parts[1])
    if len(training.tokens) <= options.length:
        raise UsageError(
            f"--length must be below the {len(training.tokens)} tokens of the text for training, "
            f"got {options.length}"
        )
    return training, held_out


def make_corpus(documents: list[bytes]) -> Corpus:
    """Documents as tokens."""
    end = torch.tensor([END], dtype=torch.int16)
    pieces = [end]
    for document in documents:
        if document:
            pieces.append(torch.frombuffer(bytearray(document), dtype=torch.uint8).to(torch.int16))
        pieces.append(end)
    lengths = torch.tensor([0, *(len(document) + 1 for document in documents[:-1])])
    return Corpus(torch.cat(pieces), lengths.cumsum(0))


def _read(options: TextOptions) -> list[tuple[str, bytes]]:
    """The names below the folder and the contents of all files. A file with several names, by
    links, counts once, if possible by the name that is no link."""
    text, pattern = options.text, options.pattern
    if text is not None and options.packages:
        raise UsageError(f"--packages is for runs without --text, got {text}: leave one out")
    if text is not None and text.is_file():
        if pattern is not None:
            raise UsageError(f"--pattern is for a folder, got the file {text}: leave it out")
        return [(text.name, text.read_bytes())]
    installed = Path(sysconfig.get_path("purelib" if options.packages else "stdlib"))
    root = installed if text is None else text
    if not root.is_dir():
        raise UsageError(f"--text must be a file or a folder, got {root}, which does not exist")
    if pattern is None and text is None:
        pattern = "*.py"
    paths = {path.relative_to(root): path for path in root.rglob(pattern or "*") if path.is_file()}
    seen, found = set(), []
    for name in sorted(paths, key=lambda name: (paths[name].is_symlink(), name)):
        hidden = pattern is None and any(part.startswith(".") for part in name.parts)
        if hidden or (text is None and _NOT_LIBRARY & set(name.parts)):
            continue
        status = paths[name].stat()
        if (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            found.append((name.as_posix(), paths[name].read_bytes()))
    return found

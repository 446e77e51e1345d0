"""Copying strings from memory.

Letters: b batch, t time, v vocabulary; J strings packed into a row, L letters in a string.
"""

from dataclasses import dataclass
from string import ascii_lowercase
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from bedouin.tasks.batch import IGNORE, Batch, Task, as_text
from bedouin.tasks.metrics import sequence_accuracy, token_accuracy
from bedouin.tasks.streams import Split, draw_last, integers, one_of, row_hash, whole_number

Protocol = Literal["plain", "official"]


@dataclass(frozen=True)
class Copying(Task):
    """Repeat a string: `$` starts a sample, `|` requests the copy, `.` ends it, `*` is padding.

    A training row with `context_len=24, min_length=2, max_length=4` consists of packed samples, of
    which the last is cut off. Each label is written below the token after which it must be
    predicted. A blank stands for `IGNORE`: prompts and a sample that is cut off have no labels:

        tokens  $bat|bat.$node|node.$ox|
        labels      bat.      node.

    An evaluation row, `sample(..., length=3)`: one string of one exact length, 1 or more:

        tokens  $owl|owl.
        labels      owl.

    Protocol (Repeat After Me, arXiv 2402.01032, and Fixed-Point RNNs, arXiv 2503.10799). Lengths
    are uniform in [min_length, max_length], letters uniform and independent. Predictions are
    teacher-forced argmaxes, *not* generated. The final `.` counts in the loss but in neither
    accuracy. The last letter keeps a string in its stream's split (see `bedouin.tasks.streams`);
    the official code has no such split.

    `protocol="official"` fills evaluation rows with `.` up to `context_len`, as the code of
    Fixed-Point RNNs does (copy_exp). These positions are ignored; with a causal model they do not
    change the result. The official script also omits the longest evaluation length.

    Args:
        context_len: tokens in a training row; at least one whole sample, 2·max_length + 3.
        min_length, max_length: smallest and largest number of letters in a training string.
        num_letters: size of the alphabet, 2 to 26; the vocabulary has 4 more symbols.
        protocol: `"plain"` or `"official"`.

    Raises ValueError for a field out of its range and TypeError for a number that is no int.
    """

    context_len: int = 32
    min_length: int = 4
    max_length: int = 8
    num_letters: int = 26
    protocol: Protocol = "plain"

    def __post_init__(self) -> None:
        for name in ("context_len", "min_length", "max_length", "num_letters"):
            whole_number(name, getattr(self, name), 1)
        if self.min_length > self.max_length:
            raise ValueError(
                "min_length must be at most max_length, "
                f"got min_length={self.min_length}, max_length={self.max_length}"
            )
        if self.context_len < 2 * self.max_length + 3:
            raise ValueError(
                f"context_len must hold a whole sample, 2·max_length + 3 = "
                f"{2 * self.max_length + 3}, got {self.context_len}: raise it or lower max_length"
            )
        if not 2 <= self.num_letters <= len(ascii_lowercase):
            raise ValueError(f"num_letters must be in [2, 26], got {self.num_letters}")
        one_of("protocol", self.protocol, get_args(Protocol))

    @property
    def symbols(self) -> str:
        """The character of every id: the letters, then `$ | . *`."""
        return ascii_lowercase[: self.num_letters] + "$|.*"

    @property
    def vocab_size(self) -> int:
        """Number of input ids: letters and four symbols, 30 by default."""
        return len(self.symbols)

    @property
    def chance(self) -> float:
        return 1 / self.num_letters

    def character_accuracy(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """`token_accuracy` of the letters: the fraction of answer letters that are right."""
        return token_accuracy(prediction, self._letters_only(labels))

    def string_accuracy(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """`sequence_accuracy` of the letters: the fraction of evaluation rows without an error."""
        return sequence_accuracy(prediction, self._letters_only(labels))

    def decode(self, tokens: Tensor) -> list[str]:
        """Rows (b, t) as text, with a blank for `IGNORE`. Synchronizes with the device."""
        return as_text(tokens, self.symbols, ignored=" ")

    def _letters_only(self, labels: Tensor) -> Tensor:  # (b, t) -> (b, t)
        """The labels with IGNORE in place of symbols."""
        return labels.masked_fill(labels >= self.num_letters, IGNORE)

    def _draw(self, b: int, length: int | None, split: Split, rng: torch.Generator) -> Batch:
        if length is None:
            num_strings = -(-self.context_len // (2 * self.min_length + 3))  # J, if all are short
            lengths = integers(self.min_length, self.max_length + 1, (b, num_strings), rng)
            return self._rows(lengths, self.max_length, self.context_len, split, rng)
        width = whole_number("length", length, 1)
        lengths = torch.full((b, 1), width, device=rng.device)
        tokens, labels = self._rows(lengths, width, 2 * width + 3, split, rng)
        missing = max(0, self.context_len - 2 * width - 3) if self.protocol == "official" else 0
        filled = pad(tokens, (0, missing), value=self.symbols.index("."))
        return Batch(filled, pad(labels, (0, missing), value=IGNORE))

    def _rows(
        self, lengths: Tensor, width: int, row_len: int, split: Split, rng: torch.Generator
    ) -> Batch:  # (b, J)
        """Rows of `$string|string.` J times, cut off at their ends, with strings of `split`."""
        letters = integers(0, self.num_letters, (*lengths.shape, width), rng)  # (b, J, width)
        last = lengths.unsqueeze(-1) - 1
        prefix = letters.masked_fill(torch.arange(width, device=rng.device) >= last, 0)
        drawn = draw_last(row_hash(prefix), self.num_letters, split, rng)
        letters = letters.scatter(-1, last, drawn.unsqueeze(-1)).flatten(1)
        ends = (2 * lengths + 3).cumsum(-1)  # (b, J)
        position = torch.arange(row_len, device=rng.device)
        which = (position.unsqueeze(-1) >= ends.unsqueeze(1)).sum(-1)  # (b, t): index of the sample
        length, end = lengths.gather(-1, which), ends.gather(-1, which)
        local = position - end + 2 * length + 3  # (b, t): position inside the sample
        offset = torch.where(local <= length, local - 1, local - length - 2).clamp(0, width - 1)
        tokens = letters.gather(-1, which * width + offset)
        for symbol, place in (("$", 0), ("|", length + 1), (".", 2 * length + 2)):
            tokens = tokens.masked_fill(local == place, self.symbols.index(symbol))
        answered = (local >= length + 2) & (end <= row_len)
        labels = tokens.masked_fill(~answered, IGNORE)
        return Batch(tokens, pad(labels[:, 1:], (0, 1), value=IGNORE))

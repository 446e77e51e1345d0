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
from bedouin.tasks.checks import one_of, whole_number
from bedouin.tasks.metrics import sequence_accuracy, token_accuracy
from bedouin.tasks.streams import Split, draw_last, integers, row_hash

Protocol = Literal["plain", "official"]


@dataclass(frozen=True)
class Copying(Task):
    """Repeat a string: `$` starts a sample, `|` requests the copy, `.` ends it, `*` is padding.

    A training row with `context_len=24, min_length=2, max_length=4` consists of packed samples, of
    which the last is cut off. Labels are shifted by one: each is written below the token after
    which it must be predicted. A blank stands for `IGNORE`: prompts, a sample that is cut off, and
    the last position have no labels:

        tokens  $bat|bat.$node|node.$ox|
        labels      bat.      node.

    An evaluation row, `sample_eval(..., length=3)`: one string of one exact length:

        tokens  $owl|owl.
        labels      owl.

    Protocol (Repeat After Me, arXiv 2402.01032, and Fixed-Point RNNs, arXiv 2503.10799). Lengths
    are uniform in [min_length, max_length], letters uniform and independent. Predictions are
    teacher-forced argmaxes, *not* generated: after a wrong letter the model reads the right one.
    Character accuracy is the fraction of answer letters that are right, string accuracy the
    fraction of answers without an error; the final `.` counts in the loss but in neither accuracy.
    Train and test strings of equal length never coincide, because the last letter of a string is
    drawn from those that its split allows (see `bedouin.tasks.streams`). The official code has no
    such split: it draws training and test strings from the same distribution.

    `protocol="official"` fills evaluation rows with `.` up to `context_len`, as the code of
    Fixed-Point RNNs does (copy_exp). These positions are ignored; with a causal model they cost
    time but do not change the result. The official script also omits the longest evaluation length.

    Args:
        context_len: tokens in a training row; at least one whole sample, 2·max_length + 3.
        min_length, max_length: smallest and largest number of letters in a training string.
        num_letters: size of the alphabet, 2 to 26; the vocabulary has 4 more symbols.
        protocol: `"plain"` or `"official"`.

    Raises:
        ValueError: a field out of its range.
        TypeError: a number that is not an int.
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
        """Accuracy of guessing a letter."""
        return 1 / self.num_letters

    def sample(
        self,
        batch_size: int,
        generator: torch.Generator,
        *,
        device: torch.device | str | None = None,
        split: Split | None = None,
    ) -> Batch:
        """Draw packed training rows: tokens and labels (b, context_len).

        Arguments and errors are those of `WordProblem.sample`.
        """
        return self._sample(batch_size, generator, device, split, None)

    def sample_eval(
        self,
        batch_size: int,
        length: int,
        generator: torch.Generator,
        *,
        device: torch.device | str | None = None,
        split: Split | None = None,
    ) -> Batch:
        """Draw evaluation rows, each one string of exactly `length` letters, 1 or more.

        The other arguments and the errors are those of `WordProblem.sample`.

        Returns:
            tokens and labels (b, 2·length + 3), padded to `context_len` in the official protocol.
        """
        length = whole_number("length", length, 1)
        tokens, labels = self._sample(batch_size, generator, device, split, length)
        missing = self.context_len - tokens.shape[-1] if self.protocol == "official" else 0
        if missing <= 0:
            return Batch(tokens, labels)
        filled = pad(tokens, (0, missing), value=self.symbols.index("."))
        return Batch(filled, pad(labels, (0, missing), value=IGNORE))

    def character_accuracy(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Fraction of the answer letters that are right; arguments and errors are those of
        `token_accuracy`."""
        return token_accuracy(prediction, self._letters_only(labels))

    def string_accuracy(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Fraction of the rows of `sample_eval` whose answer letters are all right; arguments and
        errors are those of `token_accuracy`."""
        return sequence_accuracy(prediction, self._letters_only(labels))

    def decode(self, tokens: Tensor) -> list[str]:
        """Rows (b, t) as text, with a blank for `IGNORE`. Synchronizes with the device."""
        return as_text(tokens, self.symbols, ignored=" ")

    def _letters_only(self, labels: Tensor) -> Tensor:  # (b, t) -> (b, t)
        """The labels with IGNORE in place of symbols."""
        return labels.masked_fill(labels >= self.num_letters, IGNORE)

    def _draw(self, b: int, length: int | None, split: Split, rng: torch.Generator) -> Batch:
        """Training rows for None, else evaluation rows of this length."""
        if length is None:
            shape = (b, -(-self.context_len // (2 * self.min_length + 3)))  # J, if all are short
            width, row_len = self.max_length, self.context_len
            lengths = integers(self.min_length, self.max_length + 1, shape, rng)  # (b, J)
        else:
            width, row_len = length, 2 * length + 3
            lengths = torch.full((b, 1), length, device=rng.device)
        letters = integers(0, self.num_letters, (*lengths.shape, width), rng)  # (b, J, width)
        last = lengths.unsqueeze(-1) - 1
        prefix = letters.masked_fill(torch.arange(width, device=rng.device) >= last, 0)
        drawn = draw_last(row_hash(prefix), self.num_letters, split, rng)
        return self._render(letters.scatter(-1, last, drawn.unsqueeze(-1)), lengths, row_len)

    def _render(
        self,
        letters: Tensor,  # (b, J, width)
        lengths: Tensor,  # (b, J)
        context_len: int,
    ) -> Batch:
        """Write `$string|string.` J times into each row and cut the rows off at `context_len`."""
        ends = (2 * lengths + 3).cumsum(-1)  # (b, J)
        position = torch.arange(context_len, device=letters.device)
        which = (position.unsqueeze(-1) >= ends.unsqueeze(1)).sum(
            -1
        )  # (b, t): sample at a position
        length, end = lengths.gather(-1, which), ends.gather(-1, which)
        local = position - end + 2 * length + 3  # (b, t): position inside the sample
        offset = torch.where(local <= length, local - 1, local - length - 2)
        offset = offset.clamp(0, letters.shape[-1] - 1)
        tokens = letters.flatten(1).gather(-1, which * letters.shape[-1] + offset)
        for symbol, place in (("$", 0), ("|", length + 1), (".", 2 * length + 2)):
            tokens = tokens.masked_fill(local == place, self.symbols.index(symbol))
        answered = (local >= length + 2) & (end <= context_len)
        labels = tokens.masked_fill(~answered, IGNORE)
        return Batch(tokens, pad(labels[:, 1:], (0, 1), value=IGNORE))

"""Copying strings from memory.

Letters: b batch, t time, v vocabulary; J strings packed into a row, L letters in a string.
"""

import string
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from bedouin.tasks.batch import IGNORE, Batch, sequence_accuracy, token_accuracy
from bedouin.tasks.checks import whole_number
from bedouin.tasks.streams import Split, draw_last, resolve_split, row_hash

Protocol = Literal["plain", "official"]


@dataclass(frozen=True)
class Copying:
    """Repeat a string: `$` starts a sample, `|` asks for the copy, `.` ends it, `*` is padding.

    A training row, `context_len=24, min_length=2, max_length=4`: packed samples, the last one is
    cut. Labels are shifted by one, so they stand under the token that must predict them; a blank
    is ignored: prompts are, the cut sample is, and so is the last position:

        tokens  $bat|bat.$node|node.$ox|
        labels      bat.      node.

    An evaluation row, `sample_eval(..., length=3)`: one string of one exact length:

        tokens  $owl|owl.
        labels      owl.

    Protocol (Repeat After Me, arXiv 2402.01032; the same in Fixed-Point RNNs). Lengths are uniform
    in [min_length, max_length], letters uniform with repetition. Answers are read by teacher-forced
    argmax, *not* generated: a wrong letter is replaced by the right one before the next is asked
    for. Character accuracy is the fraction of answer letters that are right, string accuracy that
    of answers without an error; the final `.` counts in the loss but in neither accuracy.
    Train and test strings of equal length never coincide (see `bedouin.tasks.streams`): a string's
    last letter keeps it in its split. The split is ours; the official code samples both alike.

    `protocol="official"` fills evaluation rows with `.` up to `context_len`, as the code of
    Fixed-Point RNNs does (copy_exp); these positions are ignored, and with a causal model they cost
    time and change nothing. The official script also leaves out the longest evaluation length.

    Args:
        context_len: tokens in a training row; at least one whole sample, 2·max_length + 3.
        min_length, max_length: number of letters in a training string, both included.
        num_letters: size of the alphabet, 2 to 26; the vocabulary has 4 more.
        protocol: `"plain"` or `"official"`.

    Raises:
        ValueError: a field out of its range.
        TypeError: a number that is no int.
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
        if not 2 <= self.num_letters <= len(string.ascii_lowercase):
            raise ValueError(f"num_letters must be in [2, 26], got {self.num_letters}")
        if self.protocol not in get_args(Protocol):
            raise ValueError(f"protocol must be one of {get_args(Protocol)}, got {self.protocol!r}")

    @property
    def symbols(self) -> str:
        """The character of every id: the letters, then `$ | . *`."""
        return string.ascii_lowercase[: self.num_letters] + "$|.*"

    @property
    def vocab_size(self) -> int:
        """Number of input ids: letters and four symbols, 30 by default."""
        return self.num_letters + 4

    @property
    def output_size(self) -> int:
        """Number of classes, the vocabulary."""
        return self.vocab_size

    def sample(
        self,
        batch_size: int,
        generator: torch.Generator,
        *,
        device: torch.device | str | None = None,
        split: Split | None = None,
    ) -> Batch:
        """Draw packed training rows, on the generator's device and without waiting for it.

        Args:
            batch_size: number of rows, 0 or more.
            generator: a `stream("train" | "test", seed)`; a plain `torch.Generator` draws from all
                strings, or from the `split` that is named.
            device: where the result is moved to, if not where it was made.
            split: None for the stream's own; naming another one raises.

        Returns:
            tokens and labels (b, context_len).

        Raises:
            ValueError: a negative batch size, or a split that is not the stream's.
            TypeError: a batch size that is no int, or no generator.
        """
        split = resolve_split(generator, split)
        most = -(-self.context_len // (2 * self.min_length + 3))  # J: enough if all are short
        shape = (whole_number("batch_size", batch_size, 0), most)
        lengths = torch.randint(
            self.min_length,
            self.max_length + 1,
            shape,
            generator=generator,
            device=generator.device,
        )
        letters = self._draw_strings(lengths, self.max_length, split, generator)
        return self._render(letters, lengths, self.context_len).to(device)

    def sample_eval(
        self,
        batch_size: int,
        length: int,
        generator: torch.Generator,
        *,
        device: torch.device | str | None = None,
        split: Split | None = None,
    ) -> Batch:
        """Draw evaluation rows: one string of exactly `length` letters, no packing.

        Returns:
            tokens and labels (b, 2·length + 3); the official protocol fills up to `context_len`.

        Raises:
            ValueError: as `sample`, or a length below 1.
        """
        length = whole_number("length", length, 1)
        split = resolve_split(generator, split)
        shape = (whole_number("batch_size", batch_size, 0), 1)
        lengths = torch.full(shape, length, device=generator.device)
        letters = self._draw_strings(lengths, length, split, generator)
        tokens, labels = self._render(letters, lengths, 2 * length + 3)
        if self.protocol == "official":
            missing = max(0, self.context_len - tokens.shape[-1])
            tokens = pad(tokens, (0, missing), value=self.symbols.index("."))
            labels = pad(labels, (0, missing), value=IGNORE)
        return Batch(tokens, labels).to(device)

    def character_accuracy(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Fraction of the answer letters that are right: logits (b, t, v) or ids (b, t), labels."""
        return token_accuracy(prediction, self._letters_only(labels))

    def string_accuracy(self, prediction: Tensor, labels: Tensor) -> Tensor:
        """Fraction of the rows whose answer letters are all right (rows of `sample_eval`)."""
        return sequence_accuracy(prediction, self._letters_only(labels))

    def decode(self, tokens: Tensor) -> list[str]:
        """Rows as text: (b, t) -> b strings. `IGNORE` is shown as a blank. Reads the device."""
        rows = tokens.tolist()
        return ["".join(" " if i == IGNORE else self.symbols[i] for i in row) for row in rows]

    def _letters_only(self, labels: Tensor) -> Tensor:
        return labels.masked_fill(labels >= self.num_letters, IGNORE)

    def _draw_strings(
        self,
        lengths: Tensor,  # (b, J)
        width: int,
        split: Split,
        rng: torch.Generator,
    ) -> Tensor:
        """Letters (b, J, width); the first `lengths` are used, the last of them keeps the split."""
        shape = (*lengths.shape, width)
        letters = torch.randint(self.num_letters, shape, generator=rng, device=rng.device)
        last = lengths.unsqueeze(-1) - 1  # (b, J, 1)
        is_prefix = torch.arange(width, device=rng.device) < last
        prefix = letters.masked_fill(~is_prefix, 0)
        drawn = draw_last(row_hash(prefix), self.num_letters, split, rng)
        return letters.scatter(-1, last, drawn.unsqueeze(-1))

    def _render(
        self,
        letters: Tensor,  # (b, J, width)
        lengths: Tensor,  # (b, J)
        context_len: int,
    ) -> Batch:
        """Write `$string|string.` J times into rows that are cut at `context_len`."""
        ends = (2 * lengths + 3).cumsum(-1)  # (b, J)
        position = torch.arange(context_len, device=letters.device)
        which = (position[:, None] >= ends[:, None, :]).sum(-1)  # (b, t): the sample at a position
        length, end = lengths.gather(-1, which), ends.gather(-1, which)
        local = position - end + 2 * length + 3  # (b, t): the place inside the sample
        offset = torch.where(local <= length, local - 1, local - length - 2)
        offset = offset.clamp(0, letters.shape[-1] - 1)
        tokens = letters.flatten(1).gather(-1, which * letters.shape[-1] + offset)
        for symbol, place in (("$", 0), ("|", length + 1), (".", 2 * length + 2)):
            tokens = tokens.masked_fill(local == place, self.symbols.index(symbol))
        answered = (local >= length + 2) & (end <= context_len)
        labels = tokens.masked_fill(~answered, IGNORE)
        return Batch(tokens, pad(labels[:, 1:], (0, 1), value=IGNORE))

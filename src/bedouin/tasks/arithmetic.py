"""Arithmetic modulo m.

Letters: b batch, t time.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from bedouin.tasks.batch import IGNORE, Batch, Task, as_text
from bedouin.tasks.checks import whole_number
from bedouin.tasks.expressions import (
    SYMBOLS,
    Kind,
    Layout,
    bracketed_layout,
    bracketed_value,
    flat_layout,
    flat_value,
)
from bedouin.tasks.streams import Split, draw_last, draw_lengths, integers, row_hash


@dataclass(frozen=True)
class ModularArithmetic(Task):
    """The value of an expression modulo m, the label of the `=` that ends it.

    Two rows of `ModularArithmetic(length=10, min_length=4)`; `_` is padding, `.` is ignored:

        tokens  2-3-3*2+4=     4*3+1=____
        labels  .........2     .....3....

    A row of `ModularArithmetic(brackets=True, length=13)`:

        tokens  ((-4)*(2+3))=
        labels  ............0

    Digits and operators are uniform. Without brackets they alternate, and `*` binds more tightly
    than `+` and `-`. With brackets, an expression of 1, 2, 3 or 4 tokens is `d`, `-d`, `(d)` or
    `(-d)`; one of n >= 5 tokens is `(left operator right)`, a left part of uniform length from 1 to
    n - 4 and a right part that takes the remaining tokens, both drawn in the same way. This is the
    distribution of Neural Networks and the Chomsky Hierarchy (arXiv 2207.02098), except that the
    last digit keeps the row in its stream's split (see `bedouin.tasks.streams`).

    Protocol. Published (xLSTM, arXiv 2405.04517; arXiv 2411.12537; Fixed-Point RNNs): m = 5,
    lengths uniform from 3 to 40 in training and from 40 to 256 in the test (`min_length=3,
    length=40`, then `min_length=40, length=256`), scaled accuracy. The lengths of their code count
    the answer, which is no token here, and with brackets a padding token. With brackets and
    multiplication the values are not uniform: for m = 5, lengths 40 to 256, 0 has probability 0.30,
    so an answer that is always 0 has a scaled accuracy of 0.12.

    Args:
        modulus: m, at least 2. The digits are 0 to m - 1, one token each, also above 10.
        brackets: whether there are brackets and negations.
        length: number of tokens in a row, `=` included, the largest one if `min_length` is given.
            Without brackets only even numbers are possible.
        min_length: draw the length of every row uniformly from the possible ones in `min_length` to
            `length`, both included, and fill rows with padding. None: every row has `length`.
        multiplication: whether `*` is drawn; its token exists in any case.

    Raises ValueError for a field out of its range and TypeError for a number that is no int.
    """

    modulus: int = 5
    brackets: bool = False
    length: int = 40
    min_length: int | None = None
    multiplication: bool = True

    def __post_init__(self) -> None:
        whole_number("modulus", self.modulus, 2)
        whole_number("length", self.length, 2)
        if self.min_length is not None:
            whole_number("min_length", self.min_length, 2, self.length + 1)
        if not self._lengths:
            raise ValueError(
                f"length must be even without brackets, got {self.length}: "
                "digits and operators alternate, and = ends the row"
            )

    @property
    def symbols(self) -> tuple[str, ...]:
        """The text of every id: digits, `+ - *`, brackets if there are any, `=`, padding `_`."""
        brackets = ("(", ")") if self.brackets else ()
        return (*map(str, range(self.modulus)), "+", "-", "*", *brackets, "=", "_")

    @property
    def vocab_size(self) -> int:
        """Number of input ids: m + 5, with brackets m + 7 (10 and 12 for m = 5)."""
        return len(self.symbols)

    @property
    def output_size(self) -> int:
        """Number of classes, m."""
        return self.modulus

    def decode(self, tokens: Tensor) -> list[str]:
        """Rows (b, t) as text, with a dot for `IGNORE`. Synchronizes with the device."""
        return as_text(tokens, self.symbols, ignored=".")

    @property
    def _lengths(self) -> range:
        """The lengths that a row can have."""
        least, step = self.min_length or self.length, 1 if self.brackets else 2
        return range(least + least % step, self.length + 1, step)

    def _draw(self, b: int, length: int | None, split: Split, rng: torch.Generator) -> Batch:
        if length is not None:
            return replace(self, length=length, min_length=None)._draw(b, None, split, rng)
        lengths, width = draw_lengths(b, self._lengths, rng) - 1, self._lengths[-1] - 1  # no "="
        if self.brackets:
            layout, evaluate = bracketed_layout(lengths, width, rng), bracketed_value
        else:
            layout, evaluate = flat_layout(lengths, width), flat_value
        digits = integers(0, self.modulus, (b, width), rng)
        operators = integers(0, 3 if self.multiplication else 2, (b, width), rng)
        is_digit = layout.kind == Kind.DIGIT
        last = (is_digit * torch.arange(width, device=rng.device)).amax(-1, keepdim=True)  # (b, 1)
        prefix = self._expression(digits.scatter(-1, last, 0), operators, layout)
        # without the padding, so that a row is in the same split whatever it is padded to
        prefix = prefix.masked_fill(layout.kind == Kind.NOTHING, 0)
        drawn = draw_last(row_hash(prefix), self.modulus, split, rng)
        digits = digits.scatter(-1, last, drawn.unsqueeze(-1))
        value = evaluate(digits, operators, layout, self.modulus)
        tokens = pad(self._expression(digits, operators, layout), (0, 1), value=self._id("_"))
        labels = torch.full_like(tokens, IGNORE)
        return Batch(
            tokens.scatter(-1, lengths, self._id("=")),
            labels.scatter(-1, lengths, value.unsqueeze(-1)),
        )

    def _expression(
        self, digits: Tensor, operators: Tensor, layout: Layout
    ) -> Tensor:  # (b, t), (b, t) -> (b, t)
        """Tokens of expressions, padding behind them."""
        tokens = torch.where(layout.kind == Kind.DIGIT, digits, self.modulus + operators)
        for kind, symbol in SYMBOLS.items():
            if symbol in self.symbols:
                tokens = tokens.masked_fill(layout.kind == kind, self._id(symbol))
        return tokens

    def _id(self, symbol: str) -> int:
        return self.symbols.index(symbol)

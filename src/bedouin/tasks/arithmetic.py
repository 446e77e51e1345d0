"""Arithmetic modulo m: random expressions and their values, for whole batches at once.

A layout says what stands at each position of a row without naming digits and operators. The same
random numbers serve all rounds of its construction, because a position opens at most one division.

Letters: b batch, t time.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bedouin.tasks.batch import IGNORE, Batch, Task, as_text
from bedouin.tasks.streams import Split, draw_last, draw_lengths, integers, row_hash, whole_number


class Kind(IntEnum):
    """What stands at a position."""

    NOTHING = 0  # behind the expression
    DIGIT = 1
    OPERATOR = 2  # a binary + - *
    NEGATION = 3
    BRACKET = 4  # a "(" around a digit or a negated digit
    BINARY_BRACKET = 5  # a "(" around left part, operator and right part
    CLOSING = 6


SYMBOLS: Final = {  # of the kinds that have a single one
    Kind.NOTHING: "_",
    Kind.NEGATION: "-",
    Kind.BRACKET: "(",
    Kind.BINARY_BRACKET: "(",
    Kind.CLOSING: ")",
}

_SHORT: Final = (  # d, -d, (d) and (-d)
    (Kind.DIGIT,),
    (Kind.NEGATION, Kind.DIGIT),
    (Kind.BRACKET, Kind.DIGIT, Kind.CLOSING),
    (Kind.BRACKET, Kind.NEGATION, Kind.DIGIT, Kind.CLOSING),
)


class Layout(NamedTuple):
    """Where the parts of expressions stand."""

    kind: Tensor  # (b, t) int64, of Kind
    right: Tensor  # (b, t) int64: at a BINARY_BRACKET, where its right part begins
    depth: int  # binary brackets inside one another, at most


def flat_layout(lengths: Tensor, width: int) -> Layout:  # (b, 1), odd
    """Digits at even positions, operators at odd ones."""
    position = torch.arange(width, device=lengths.device).expand(len(lengths), -1)
    kind = torch.full_like(position, Kind.DIGIT).masked_fill(position % 2 == 1, Kind.OPERATOR)
    return Layout(kind.masked_fill(position >= lengths, Kind.NOTHING), position, depth=0)


def bracketed_layout(lengths: Tensor, width: int, rng: torch.Generator) -> Layout:  # (b, 1)
    """Draw layouts of bracketed expressions of exactly these lengths (`ModularArithmetic`). Every
    round divides all spans of at least 5 tokens, in every row. A part is at least 4 tokens shorter
    than its span, which bounds the number of rounds. On the CPU, where a test costs no
    synchronization, they end when no span is left."""
    position = torch.arange(width, device=lengths.device).expand(len(lengths), -1)
    draws = integers(0, 2**62, position.shape, rng)
    start = torch.zeros_like(position)  # of the undivided span around a position
    size = lengths * (position < lengths)  # of that span; 0 where none is left
    kind, right = torch.zeros_like(position), torch.zeros_like(position)
    depth = (width - 1) // 4
    for rounds in range(depth):
        divides = size >= 5
        if divides.device.type == "cpu" and not divides.any():
            depth = rounds
            break
        left = 1 + draws.gather(-1, start) % (size - 4).clamp(min=1)
        offset, right_start = position - start, start + left + 2
        opens, closes = divides & (offset == 0), divides & (offset == size - 1)
        operates = divides & (offset == left + 1)
        kind = kind + opens * Kind.BINARY_BRACKET + operates * Kind.OPERATOR + closes * Kind.CLOSING
        right = torch.where(opens, right_start, right)
        in_left = divides & (offset > 0) & (offset <= left)
        in_right = divides & (offset > left + 1) & ~closes
        start = torch.where(in_left, start + 1, torch.where(in_right, right_start, start))
        size_in_right = torch.where(in_right, size - left - 3, size.masked_fill(divides, 0))
        size = torch.where(in_left, left, size_in_right)
    for kinds in _SHORT:
        for place, short in enumerate(kinds):
            there = (size == len(kinds)) & (position == start + place)
            kind = kind.masked_fill(there, short)
    return Layout(kind, right, depth)


def flat_value(digits: Tensor, operators: Tensor, layout: Layout, modulus: int) -> Tensor:  # (b,)
    """Values of flat expressions, `*` before `+` and `-`. digits (b, t) and operators (b, t), 0, 1,
    2 for + - *, are read where the layout has one. With a product p in front of it, the rest of an
    expression from an operator on makes the value a p + c. From right to left, "* d" turns a into a
    d; "+ d" and "- d" add a d to c or subtract it, and make a 1."""
    present = layout.kind == Kind.DIGIT
    digit = torch.where(present, digits, 1)  # with "*", a missing digit changes nothing
    before = pad(operators, (1, 0))[:, :-1]
    times = ~present | (before == 2)
    sign = ((before == 0).long() - (before == 1).long()).masked_fill(~present, 0)
    a, c = torch.ones_like(digits[:, 0]), torch.zeros_like(digits[:, 0])
    for place in range((digits.shape[-1] - 1) // 2 * 2, 0, -2):  # the digits, last one first
        product = a * digit[:, place] % modulus
        a = torch.where(times[:, place], product, 1)
        c = (c + sign[:, place] * product) % modulus
    return (a * digit[:, 0] + c) % modulus


def bracketed_value(digits: Tensor, operators: Tensor, layout: Layout, modulus: int) -> Tensor:
    """Values of bracketed expressions. The value at a position is that of the part which begins
    there: with v the value one position further and w that of the right part, it is a v + c w + e v
    w + d. Repeated in all places at once it is exact after as many rounds as the depth."""
    kind, right, depth = layout
    is_binary = kind == Kind.BINARY_BRACKET
    operator = operators.gather(-1, (right - 1).clamp(min=0)).masked_fill(~is_binary, -1)
    linear = (operator == 0) | (operator == 1)
    a = (linear | (kind == Kind.BRACKET)).long() - (kind == Kind.NEGATION).long()
    c = (operator == 0).long() - (operator == 1).long()
    e, d = (operator == 2).long(), digits.masked_fill(kind != Kind.DIGIT, 0)
    value = d
    for _ in range(depth + 2):  # 2: a bracket around a negated digit
        v, w = pad(value[:, 1:], (0, 1)), value.gather(-1, right)
        value = (a * v + c * w + e * v * w + d) % modulus
    return value[:, 0]


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
    lengths uniform from 3 to 40 in training and from 40 to 256 in the test, scaled accuracy. The
    lengths of their code count the answer, which is no token here, and with brackets a padding
    token. There the values are not uniform: for m = 5, lengths 40 to 256, with multiplication, 0
    has probability 0.30, so an answer that is always 0 has a scaled accuracy of 0.12.

    Args:
        modulus: m, at least 2. The digits are 0 to m - 1, one token each, also above 10.
        brackets: whether there are brackets and negations.
        length, min_length: the number of tokens in a row, `=` included, even without brackets; with
            a min_length uniform over the possible ones from that on, and padding fills rows.
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
            layout = bracketed_layout(lengths, width, rng)
        else:
            layout = flat_layout(lengths, width)
        digits = integers(0, self.modulus, (b, width), rng)
        operators = integers(0, 3 if self.multiplication else 2, (b, width), rng)
        is_digit = layout.kind == Kind.DIGIT
        last = (is_digit * torch.arange(width, device=rng.device)).amax(-1, keepdim=True)  # (b, 1)
        prefix = self._expression(digits.scatter(-1, last, 0), operators, layout)
        # without the padding, so that a row is in the same split whatever it is padded to
        prefix = prefix.masked_fill(layout.kind == Kind.NOTHING, 0)
        drawn = draw_last(row_hash(prefix), self.modulus, split, rng)
        digits = digits.scatter(-1, last, drawn.unsqueeze(-1))
        evaluate = bracketed_value if self.brackets else flat_value
        value = evaluate(digits, operators, layout, self.modulus)
        tokens = pad(self._expression(digits, operators, layout), (0, 1), value=self._id("_"))
        labels = torch.full_like(tokens, IGNORE)
        return Batch(
            tokens.scatter(-1, lengths, self._id("=")),
            labels.scatter(-1, lengths, value.unsqueeze(-1)),
        )

    def _expression(self, digits: Tensor, operators: Tensor, layout: Layout) -> Tensor:
        """Tokens (b, t) of expressions, padding behind them."""
        tokens = torch.where(layout.kind == Kind.DIGIT, digits, self.modulus + operators)
        for kind, symbol in SYMBOLS.items():
            if symbol in self.symbols:
                tokens = tokens.masked_fill(layout.kind == kind, self._id(symbol))
        return tokens

    def _id(self, symbol: str) -> int:
        return self.symbols.index(symbol)

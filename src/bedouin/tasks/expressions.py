"""Random arithmetic expressions and their values modulo m, for whole batches at once.

Letters: b batch, t time, j place of a digit among the digits of a flat expression.

A layout says what stands at each position of a row without naming digits and operators. The same
random numbers serve all rounds of the construction, because a position opens at most one division.
"""

from enum import IntEnum
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from bedouin.tasks.streams import integers


class Kind(IntEnum):
    """What stands at a position."""

    NOTHING = 0  # behind the expression
    DIGIT = 1
    OPERATOR = 2  # a binary + - *
    NEGATION = 3
    BRACKET = 4  # a "(" around a digit or a negated digit
    BINARY_BRACKET = 5  # a "(" around left part, operator and right part
    CLOSING = 6


SYMBOLS: Final = {
    Kind.NOTHING: "_",
    Kind.NEGATION: "-",
    Kind.BRACKET: "(",
    Kind.BINARY_BRACKET: "(",
    Kind.CLOSING: ")",
}
"""The symbols of the kinds that have a single one."""

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
    """Draw layouts of bracketed expressions of exactly these lengths.

    An expression of 1, 2, 3 or 4 tokens is `d`, `-d`, `(d)` or `(-d)`. A longer one of n tokens is
    `(left operator right)`, the length of the left part uniform from 1 to n - 4.

    Every round divides all spans of at least 5 tokens, in every row. A part is at least 4 tokens
    shorter than its span, which bounds the number of rounds. On the CPU, where a test costs no
    synchronization, they end when no span is left.
    """
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


def flat_value(
    digits: Tensor,  # (b, t), read where the layout has a digit
    operators: Tensor,  # (b, t), 0, 1, 2 for + - *, read where the layout has an operator
    layout: Layout,
    modulus: int,
) -> Tensor:  # (b,), modulo `modulus`
    """Values of flat expressions, `*` before `+` and `-`.

    With a product p in front of it, the rest of an expression from an operator on makes the value
    a p + c. From right to left, "* d" turns a into a d, and "+ d" or "- d" adds a d to c or
    subtracts it, and makes a 1.
    """
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


def bracketed_value(
    digits: Tensor,  # (b, t), read where the layout has a digit
    operators: Tensor,  # (b, t), 0, 1, 2 for + - *, read where the layout has an operator
    layout: Layout,
    modulus: int,
) -> Tensor:  # (b,), modulo `modulus`
    """Values of bracketed expressions.

    The value at a position is that of the part which begins there: with v the value one position
    further and w that of the right part, it is a v + c w + e v w + d. Repeating this in all places
    at once is exact as soon as the rounds reach the depth of the expression.
    """
    kind, right, depth = layout
    is_binary = kind == Kind.BINARY_BRACKET
    operator = operators.gather(-1, (right - 1).clamp(min=0)).masked_fill(~is_binary, -1)
    linear = (operator == 0) | (operator == 1)
    a = (linear | (kind == Kind.BRACKET)).long() - (kind == Kind.NEGATION).long()
    c = (operator == 0).long() - (operator == 1).long()
    e = (operator == 2).long()
    d = digits.masked_fill(kind != Kind.DIGIT, 0)
    value = d
    for _ in range(depth + 2):  # 2: a bracket around a negated digit
        v, w = pad(value[:, 1:], (0, 1)), value.gather(-1, right)
        value = (a * v + c * w + e * v * w + d) % modulus
    return value[:, 0]

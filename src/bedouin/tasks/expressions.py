"""Random arithmetic expressions and their values modulo m, for whole batches at once.

Letters: b batch, t time, j place of a digit among the digits of a flat expression.

A layout says what stands at each position of a row without naming digits and operators. The same
random numbers serve all rounds of the construction, because a position opens at most one division.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Kind(IntEnum):
    """What stands at a position."""

    NOTHING = 0
    """Behind the expression."""
    DIGIT = 1
    OPERATOR = 2
    """A binary `+`, `-` or `*`."""
    NEGATION = 3
    """A unary `-`."""
    BRACKET = 4
    """A `(` around a digit or a negated digit."""
    BINARY_BRACKET = 5
    """A `(` around left part, operator and right part."""
    CLOSING = 6


class Layout(NamedTuple):
    """Where the parts of expressions stand."""

    kind: Tensor  # (b, t) int64, of Kind
    right: Tensor  # (b, t) int64: at a BINARY_BRACKET, where its right part begins
    depth: int  # binary brackets inside one another, at most


def flat_layout(
    lengths: Tensor,  # (b, 1), odd
    width: int,
) -> Layout:
    """Digits at even positions, operators at odd ones."""
    position = torch.arange(width, device=lengths.device).expand(len(lengths), -1)
    kind = torch.full_like(position, Kind.DIGIT).masked_fill(position % 2 == 1, Kind.OPERATOR)
    return Layout(kind.masked_fill(position >= lengths, Kind.NOTHING), position, depth=0)


def bracketed_layout(
    lengths: Tensor,  # (b, 1)
    width: int,
    rng: torch.Generator,
) -> Layout:
    """Draw layouts of bracketed expressions of exactly these lengths.

    An expression of 1, 2, 3 or 4 tokens is `d`, `-d`, `(d)` or `(-d)`. A longer one of n tokens is
    `(left operator right)`, the length of the left part uniform from 1 to n - 4.

    Every round divides all spans of at least 5 tokens, in every row. A part is at least 4 tokens
    shorter than its span, which bounds the number of rounds. On the CPU, where looking costs
    nothing, they end when no span is left; on a GPU all are made, without waiting for it.
    """
    position = torch.arange(width, device=lengths.device).expand(len(lengths), -1)
    draws = torch.randint(2**62, position.shape, generator=rng, device=rng.device)
    start = torch.zeros_like(position)  # of the undivided span around a position
    size = lengths * (position < lengths)  # of that span; 0 where none is left
    kind, right = torch.zeros_like(position), torch.zeros_like(position)
    depth = max_depth(width)
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
    return Layout(kind + _short_kinds(position - start, size), right, depth)


def max_depth(length: int) -> int:
    """Largest number of binary brackets inside one another in an expression of this length."""
    return (length - 1) // 4


def _short_kinds(
    offset: Tensor,  # (b, t): place inside the span
    size: Tensor,  # (b, t): tokens of the span, 0 to 4
) -> Tensor:
    """Kinds (b, t) in `d`, `-d`, `(d)` and `(-d)`; 0 outside of them."""
    bracketed = size >= 3
    negated = (size == 2) | (size == 4)
    kind = (bracketed & (offset == 0)) * Kind.BRACKET
    kind = kind + (bracketed & (offset == size - 1)) * Kind.CLOSING
    kind = kind + (negated & (offset == bracketed.long())) * Kind.NEGATION
    is_digit = (size > 0) & (offset == bracketed.long() + negated.long())
    return kind + is_digit * Kind.DIGIT


def flat_value(
    digits: Tensor,  # (b, t), read where the layout has a digit
    operators: Tensor,  # (b, t), 0, 1, 2 for + - *, read where the layout has an operator
    layout: Layout,
    modulus: int,
) -> Tensor:
    """Values (b,) modulo `modulus` of flat expressions, `*` before `+` and `-`.

    Reading from left to right keeps a sum s of finished products and the running product p. An
    operator and the digit behind it are the map (s, p) -> (s + a p + c, u p + e): "+ d" is
    a = 1, e = d; "- d" is a = 1, e = -d; "* d" is u = d; what is not named is 0. Such maps are
    closed under composition, so neighbours are composed in about log2(t) rounds.
    """
    count = (digits.shape[-1] + 1) // 2
    missing = 2 ** (count - 1).bit_length() - count
    digit = pad(digits[:, ::2], (0, missing))  # (b, j)
    before = pad(operators[:, 1::2], (1, missing))[:, : digit.shape[-1]]  # "+" before the first
    present = pad(layout.kind[:, ::2] == Kind.DIGIT, (0, missing))
    times = present & (before == 2)
    adds = present & ~times
    a, c = adds.long(), torch.zeros_like(digit)
    u = torch.where(times, digit, (~present).long())  # a missing digit changes nothing
    e = torch.where(before == 1, -digit, digit).masked_fill(~adds, 0)
    while a.shape[-1] > 1:
        (a1, a2), (c1, c2), (u1, u2), (e1, e2) = ((x[:, ::2], x[:, 1::2]) for x in (a, c, u, e))
        a, c = (a1 + a2 * u1) % modulus, (c1 + a2 * e1 + c2) % modulus
        u, e = (u2 * u1) % modulus, (u2 * e1 + e2) % modulus
    return (c + e).squeeze(-1) % modulus


def bracketed_value(
    digits: Tensor,  # (b, t), read where the layout has a digit
    operators: Tensor,  # (b, t), 0, 1, 2 for + - *, read where the layout has an operator
    layout: Layout,
    modulus: int,
) -> Tensor:
    """Values (b,) modulo `modulus` of bracketed expressions.

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

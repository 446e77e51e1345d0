"""Names bound to elements of a finite group: recall of bindings and their running product.

Letters: b batch, t time; m definitions and L operations of a row, n elements of the group.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from bedouin.tasks.batch import IGNORE, Batch
from bedouin.tasks.checks import whole_number
from bedouin.tasks.group import Group
from bedouin.tasks.lengths import draw_lengths
from bedouin.tasks.streams import Split, draw_last, resolve_split, row_hash

NUM_NAMES: Final = 26
_USE, _REBIND = 0.8, 0.1


@dataclass(frozen=True)
class BoundPermutations:
    """m definitions `name g`, then L operations on what the names are bound to.

    With probability 0.8 an operation is `name .`: the running product is multiplied, from the
    right, by the name's current element, and is the label at `.`; with 0.1 `! name g`: the name is
    bound anew; with 0.1 `? name`: the label at the name is its current element. A row of Z5
    (g · h = g + h mod 5) with two definitions and five operations, padded with `*`:

        tokens  a 3 f 4 a . f . ! a 1 ? a a . * * * *
        labels            3   2         1   3

    A blank stands for `IGNORE`. Token ids: names 0 to 25, element g is 26 + g, then `!` 26 + n, `?`
    27 + n, `.` 28 + n, and padding 29 + n. Products are those of `WordProblem`; names of a row are
    distinct and drawn uniformly, as are elements.

    Protocol. m and L are uniform over their ranges. Train with at most 4 operations first and more
    later (`dataclasses.replace(task, max_operations=8)`). The element of the last definition is
    drawn from those that the stream's split allows (see `bedouin.tasks.streams`), so that no row of
    a training stream is a row of a test stream. Report the accuracy of products and of answers
    separately (`products`, `answers`).

    Args:
        group: the group, for instance `Group.from_name("S3")`.
        min_definitions, max_definitions: the range of m, at most 26.
        min_operations, max_operations: the range of L.

    Raises:
        ValueError: a field out of its range, or a group of one element.
        TypeError: a group that is no `Group`, a number that is no int.
    """

    group: Group = Group.from_name("A5")
    min_definitions: int = 4
    max_definitions: int = 16
    min_operations: int = 4
    max_operations: int = 32

    def __post_init__(self) -> None:
        if not isinstance(self.group, Group):
            raise TypeError(
                f"group must be a Group, got {self.group!r}: parse names with Group.from_name"
            )
        if self.group.order < 2:
            raise ValueError(f"group must have at least two elements, got {self.group.name}")
        whole_number("max_definitions", self.max_definitions, 1, NUM_NAMES + 1)
        whole_number("min_definitions", self.min_definitions, 1, self.max_definitions + 1)
        whole_number("max_operations", self.max_operations, 1)
        whole_number("min_operations", self.min_operations, 1, self.max_operations + 1)

    @property
    def vocab_size(self) -> int:
        """Number of input ids: names, elements, three symbols and padding."""
        return NUM_NAMES + self.group.order + 4

    @property
    def output_size(self) -> int:
        """Number of classes, the elements."""
        return self.group.order

    def sample(
        self,
        batch_size: int,
        generator: torch.Generator,
        definitions: int | None = None,
        operations: int | None = None,
        *,
        device: torch.device | str | None = None,
        split: Split | None = None,
    ) -> Batch:
        """Draw rows on the generator's device, without synchronization.

        Args:
            batch_size: number of rows, 0 or more.
            generator: a `stream("train" | "test", seed)`; a plain `torch.Generator` draws from
                the uniform distribution over all rows, or from `split`.
            definitions, operations: m and L of every row; None: drawn from their ranges.
            device: the device of the result; None: the generator's.
            split: None: the stream's own. Another one than the stream's raises an error.

        Returns:
            tokens and labels (b, t), t = 2 m + 3 L with the largest m and L.

        Raises:
            ValueError: a number out of its range, or a split that is not the stream's.
            TypeError: a number that is not an int, or a generator that is not one.
        """
        defined = range(self.min_definitions, self.max_definitions + 1)
        if definitions is not None:
            m = whole_number("definitions", definitions, 1, NUM_NAMES + 1)
            defined = range(m, m + 1)
        operated = range(self.min_operations, self.max_operations + 1)
        if operations is not None:
            L = whole_number("operations", operations, 1)
            operated = range(L, L + 1)
        batch_size = whole_number("batch_size", batch_size, 0)
        split = resolve_split(generator, split)
        return self._draw(batch_size, defined, operated, split, generator).to(device)

    def products(
        self,
        labels: Tensor,  # (b, t)
        tokens: Tensor,  # (b, t)
    ) -> Tensor:  # (b, t)
        """The labels at `.` alone, with IGNORE elsewhere."""
        return labels.masked_fill(tokens != NUM_NAMES + self.group.order + 2, IGNORE)

    def answers(
        self,
        labels: Tensor,  # (b, t)
        tokens: Tensor,  # (b, t)
    ) -> Tensor:  # (b, t)
        """The labels after `?` alone, with IGNORE elsewhere."""
        return labels.masked_fill(tokens == NUM_NAMES + self.group.order + 2, IGNORE)

    def _draw(
        self, b: int, defined: range, operated: range, split: Split, rng: torch.Generator
    ) -> Batch:
        """Random rows that belong to `split`."""
        n, device = self.group.order, rng.device
        rebind_symbol, ask_symbol, use_symbol, padding = (NUM_NAMES + n + i for i in range(4))
        most, width = defined[-1], 2 * defined[-1] + 3 * operated[-1]
        m = draw_lengths(b, defined, rng).unsqueeze(1)  # (b, 1)
        L = draw_lengths(b, operated, rng).unsqueeze(1)
        # rows do not depend on the default dtype
        drawn: dict[str, Any] = {"dtype": torch.float32, "device": device, "generator": rng}
        names = torch.rand(b, NUM_NAMES, **drawn).argsort(-1)[:, :most]
        bound = torch.randint(n, (b, most), generator=rng, device=device)
        shape = (b, operated[-1])
        kind, which = torch.rand(2, *shape, **drawn)
        rebound = torch.randint(n, shape, generator=rng, device=device)
        uses, asks = kind < _USE, kind >= _USE + _REBIND
        rebinds = ~uses & ~asks
        slot = (which * m).long().clamp(max=m - 1)  # the definition of an operation's name
        name = names.gather(1, slot)

        definition = torch.arange(most, device=device).expand(b, -1)
        operation = torch.arange(operated[-1], device=device).expand(b, -1)
        size = 2 + rebinds.long()
        # what a row does not have is written behind its end
        first = (2 * definition).masked_fill(definition >= m, width)
        start = (2 * m + size.cumsum(-1) - size).masked_fill(operation >= L, width)
        third = (start + 2).masked_fill(~rebinds, width)
        places = torch.cat([first, first + 1, start, start + 1, third], dim=-1)
        row = torch.full((b, width + 3), padding, device=device)

        def write(bound: Tensor) -> Tensor:
            """The rows whose definitions have these elements."""
            symbol = torch.where(rebinds, rebind_symbol, ask_symbol)
            written = [
                *(names, NUM_NAMES + bound),
                *(torch.where(uses, name, symbol), torch.where(uses, use_symbol, name)),
                NUM_NAMES + rebound,
            ]
            return row.scatter(1, places, torch.cat(written, dim=-1))[:, :width]

        tokens = write(bound.scatter(1, m - 1, 0))
        # zeros at the end of a row do not change its hash
        others = row_hash(tokens.masked_fill(tokens == padding, 0))
        bound = bound.scatter(1, m - 1, draw_last(others, n, split, rng).unsqueeze(1))

        current = _current(bound, slot, rebinds, rebound)
        product = self.group.prefix_products(current.masked_fill(~uses, 0))  # 0 is the identity
        answer = torch.where(uses, product, current).masked_fill(rebinds, IGNORE)
        labels = torch.full_like(row, IGNORE).scatter(1, start + 1, answer)
        return Batch(write(bound), labels[:, :width])


def _current(
    bound: Tensor,  # (b, m), the elements of the definitions
    slot: Tensor,  # (b, L), the definition of an operation's name
    rebinds: Tensor,  # (b, L) bool
    rebound: Tensor,  # (b, L), the elements that rebinding operations bind
) -> Tensor:  # (b, L)
    """The element to which the name of each operation is bound before it."""
    operation = torch.arange(slot.shape[1], device=slot.device)
    same = (slot.unsqueeze(1) == slot.unsqueeze(2)) & rebinds.unsqueeze(1)  # (b, L, L)
    earlier = same & (operation < operation.unsqueeze(1))
    last = operation.masked_fill(~earlier, -1).amax(-1)
    return torch.where(last < 0, bound.gather(1, slot), rebound.gather(1, last.clamp(min=0)))

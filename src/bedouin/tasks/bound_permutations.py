"""Names bound to elements of a finite group: recall of bindings and their running product.

Letters: b batch, t time; m definitions and L operations of a row, n elements of the group.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from bedouin.tasks.batch import IGNORE, Batch, Task
from bedouin.tasks.group import Group, check_group
from bedouin.tasks.streams import Split, draw_last, draw_lengths, integers, row_hash, whole_number

NUM_NAMES: Final = 26
_USE, _REBIND = 0.8, 0.1


@dataclass(frozen=True)
class BoundPermutations(Task):
    """m definitions `name g`, then L operations on what the names are bound to.

    With probability 0.8 an operation is `name .`: the running product is multiplied, from the
    right, by the name's current element, and is the label at `.`; with 0.1 `! name g`: the name is
    bound anew; with 0.1 `? name`: the label at the name is its current element. A row of Z5
    (g · h = g + h mod 5) with two definitions and five operations, padded with `*`:

        tokens  a 3 f 4 a . f . ! a 1 ? a a . * * * *
        labels            3   2         1   3

    A blank stands for `IGNORE`. Token ids: names 0 to 25, element g is 26 + g, then `!` 26 + n, `?`
    27 + n, `.` 28 + n, and padding 29 + n. Products are those of `WordProblem`; names of a row are
    distinct and drawn uniformly, as are elements, m and L.

    Protocol. Train with at most 4 operations first and more later (`dataclasses.replace(task,
    max_operations=8)`). The element of the last definition keeps the row in its stream's split (see
    `bedouin.tasks.streams`). Report `products` and `answers` separately.

    Args:
        group: the group, for instance `Group.from_name("S3")`.
        min_definitions, max_definitions: the range of m, at most 26.
        min_operations, max_operations: the range of L.

    Raises ValueError for a field out of its range or a group of one element, TypeError for a group
    that is no `Group` and a number that is no int.
    """

    group: Group = Group.from_name("A5")
    min_definitions: int = 4
    max_definitions: int = 16
    min_operations: int = 4
    max_operations: int = 32

    def __post_init__(self) -> None:
        check_group("group", self.group)
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
        return self.group.order

    def sample(  # type: ignore[override]
        self,
        batch_size: int,
        generator: torch.Generator,
        definitions: int | None = None,
        operations: int | None = None,
        *,
        device: torch.device | str | None = None,
        split: Split | None = None,
    ) -> Batch:
        """Draw rows of `definitions` and `operations`, m and L; None: drawn from their ranges.
        Returns tokens and labels (b, t), t = 2 m + 3 L with the largest m and L. The other
        arguments and the errors are those of `Task.sample`."""
        task = self
        if definitions is not None:
            m = whole_number("definitions", definitions, 1, NUM_NAMES + 1)
            task = replace(task, min_definitions=m, max_definitions=m)
        if operations is not None:
            L = whole_number("operations", operations, 1)
            task = replace(task, min_operations=L, max_operations=L)
        return super(BoundPermutations, task).sample(
            batch_size, generator, device=device, split=split
        )

    def products(self, labels: Tensor, tokens: Tensor) -> Tensor:  # (b, t), (b, t) -> (b, t)
        """The labels at `.` alone, with IGNORE elsewhere."""
        return labels.masked_fill(tokens != NUM_NAMES + self.group.order + 2, IGNORE)

    def answers(self, labels: Tensor, tokens: Tensor) -> Tensor:  # (b, t), (b, t) -> (b, t)
        """The labels after `?` alone, with IGNORE elsewhere."""
        return labels.masked_fill(tokens == NUM_NAMES + self.group.order + 2, IGNORE)

    def _draw(self, b: int, length: int | None, split: Split, rng: torch.Generator) -> Batch:
        n, device = self.group.order, rng.device
        rebind_symbol, ask_symbol, use_symbol, padding = (NUM_NAMES + n + i for i in range(4))
        most, longest = self.max_definitions, self.max_operations
        width = 2 * most + 3 * longest
        m = draw_lengths(b, range(self.min_definitions, most + 1), rng)  # (b, 1)
        L = draw_lengths(b, range(self.min_operations, longest + 1), rng)
        # rows do not depend on the default dtype
        drawn: dict[str, Any] = {"dtype": torch.float32, "device": device, "generator": rng}
        names = torch.rand(b, NUM_NAMES, **drawn).argsort(-1)
        defined_elements = integers(0, n, (b, most), rng)
        kind, which = torch.rand(2, b, longest, **drawn)
        rebound_elements = integers(0, n, (b, longest), rng)

        # from here on a definition is an operation that binds a name: (b, most + L)
        index = torch.arange(most + longest, device=device)
        defines, exists = index < most, (index < m) | ((index >= most) & (index < most + L))
        uses, asks = pad(kind < _USE, (most, 0)), pad(kind >= _USE + _REBIND, (most, 0))
        binds = ~uses & ~asks
        used = (which * m).long().clamp(max=m - 1)
        slot = torch.cat([index[:most].expand(b, -1), used], dim=-1)  # the definition of the name
        name = names.gather(1, slot)
        element = torch.cat([defined_elements.scatter(1, m - 1, 0), rebound_elements], dim=-1)

        symbol = torch.where(binds, rebind_symbol, ask_symbol)
        first = torch.where(uses | defines, name, symbol)
        second = torch.where(defines, NUM_NAMES + element, torch.where(uses, use_symbol, name))
        tokens = torch.stack([first, second, NUM_NAMES + element], dim=-1).flatten(1)
        written = torch.stack([exists, exists, exists & binds & ~defines], dim=-1).flatten(1)
        # what a row does not have is written behind its end
        place = (written.cumsum(-1) - 1).masked_fill(~written, width)
        row = torch.full((b, width + 1), padding, device=device)
        tokens = row.scatter(1, place, tokens)[:, :width]
        # zeros at the end of a row do not change its hash
        others = row_hash(tokens.masked_fill(tokens == padding, 0))
        last = draw_last(others, n, split, rng).unsqueeze(1)

        element = element.scatter(1, m - 1, last)
        same = (slot.unsqueeze(1) == slot.unsqueeze(2)) & binds.unsqueeze(1)
        binding = (index * same.tril(-1)).amax(-1)  # the last one before each operation
        current = element.gather(1, binding)
        product = self.group.prefix_products(current.masked_fill(~uses, 0))  # 0 is the identity
        answer = torch.where(uses, product, current).masked_fill(binds, IGNORE)
        labels = torch.full_like(row, IGNORE).scatter(1, place[:, 1::3], answer)[:, :width]
        return Batch(tokens.scatter(1, 2 * m - 1, NUM_NAMES + last), labels)

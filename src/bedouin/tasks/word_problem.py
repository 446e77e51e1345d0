"""Word problems of finite groups: keep track of a running product.

Letters: b batch, t time, v vocabulary.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from bedouin.tasks.batch import IGNORE, Batch
from bedouin.tasks.checks import whole_number
from bedouin.tasks.group import Group
from bedouin.tasks.streams import Split, draw_last, resolve_split, row_hash

Elements = Literal["all", "swaps", "3-permutations"]
Protocol = Literal["plain", "official"]

_MOST_MOVED: Final[dict[Elements, int]] = {"swaps": 2, "3-permutations": 3}
_NUM_SPECIALS: Final = 7  # PAD, BOS, UNK, EOS, SEP, CLS, MASK, in this order
_BOS: Final = 1


@dataclass(frozen=True)
class WordProblem:
    """Prefix products in a finite group: label_t = g_0 · g_1 · … · g_t, read from left to right.

    A row of Z5, `length=6` (g · h = g + h mod 5):

        tokens  3 0 4 1 1 2
        labels  3 3 2 3 4 1

    The same with `tokens_per_transition=2`; the filler is token 5, `.` is ignored:

        tokens  3 5 0 5 4 5 1 5 1 5 2 5
        labels  . 3 . 3 . 2 . 3 . 4 . 1

    The same with `protocol="official"`; BOS is token 6, in the labels too:

        tokens  6 3 0 4 1 1 2
        labels  6 3 3 2 3 4 1

    Protocol. Elements are drawn uniformly and independently, except that the last one keeps the row
    in its stream's split (see `bedouin.tasks.streams`): no row of a train stream is ever a row of a
    test stream at the same length. At lengths 1 and 2 the space itself is small, so a split of it
    says little. Report token and sequence accuracy, at the training length and beyond.

    `protocol="official"` is that of the code of Fixed-Point RNNs (word_problem_exp): 7 special
    tokens behind the elements in input *and* output (67 ids for A5), BOS in front of tokens and
    labels, and counted in loss and accuracy, which flatters both: knowing BOS alone is worth
    1/(length + 1). By default that code also mixes all lengths from 2 on: pass `length` for that.

    Args:
        group: the group, `Group.from_name("A5")`.
        length: number of group elements in a row, unless `sample` is told otherwise.
        elements: what is drawn. `"all"`; `"swaps"`: transpositions only; `"3-permutations"`:
            elements that move two or three points (the identity is not among them). Both as in
            Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues, section 5.
            Labels still range over the whole group.
        tokens_per_transition: every element is followed by this many less one filler tokens, and
            the label stands at the last of them; gives a layer more steps for each product.
        protocol: `"plain"` or `"official"`.

    Raises:
        ValueError: a field out of its range; fewer than two elements to draw from; fillers in the
            official protocol, which has none.
        TypeError: a group that is no `Group`, a number that is no int.
    """

    group: Group
    length: int = 16
    elements: Elements = "all"
    tokens_per_transition: int = 1
    protocol: Protocol = "plain"

    def __post_init__(self) -> None:
        if not isinstance(self.group, Group):
            raise TypeError(
                f"group must be a Group, got {self.group!r}: parse names with Group.from_name"
            )
        _check_choice("elements", self.elements, get_args(Elements))
        _check_choice("protocol", self.protocol, get_args(Protocol))
        whole_number("length", self.length, 1)
        whole_number("tokens_per_transition", self.tokens_per_transition, 1)
        self._check_alphabet()

    def _check_alphabet(self) -> None:
        if len(self.alphabet) < 2:
            raise ValueError(
                f"elements={self.elements!r} must leave at least two elements of {self.group.name} "
                f'to draw from, got {len(self.alphabet)}: use elements="all" or a larger group'
            )
        if self.protocol == "official" and self.tokens_per_transition != 1:
            raise ValueError(
                "tokens_per_transition must be 1 with protocol='official', which has no fillers, "
                f"got {self.tokens_per_transition}: use protocol='plain'"
            )

    @property
    def alphabet(self) -> tuple[int, ...]:
        """The elements that are drawn."""
        if self.elements == "all":
            return tuple(range(self.group.order))
        most = _MOST_MOVED[self.elements]
        return tuple(g for g, moved in enumerate(self.group.num_moved) if 0 < moved <= most)

    @property
    def vocab_size(self) -> int:
        """Number of input ids: the elements, then the filler or the 7 special tokens."""
        if self.protocol == "official":
            return self.group.order + _NUM_SPECIALS
        return self.group.order + (self.tokens_per_transition > 1)

    @property
    def output_size(self) -> int:
        """Number of classes: the elements; in the official protocol the special tokens as well."""
        return self.vocab_size if self.protocol == "official" else self.group.order

    def sample(
        self,
        batch_size: int,
        generator: torch.Generator,
        *,
        device: torch.device | str | None = None,
        length: int | None = None,
        split: Split | None = None,
    ) -> Batch:
        """Draw rows, on the generator's device and without waiting for it.

        Args:
            batch_size: number of rows, 0 or more.
            generator: a `stream("train" | "test", seed)`; a plain `torch.Generator` draws from
                the uniform distribution over all rows, or from the `split` that is named.
            device: where the result is moved to, if not where it was made.
            length: number of group elements, `self.length` if None.
            split: None for the stream's own; naming another one raises.

        Returns:
            tokens and labels (b, t), t = length · tokens_per_transition, plus 1 for the official
            BOS.

        Raises:
            ValueError: a negative batch size, a length below 1, or not the stream's split.
            TypeError: a batch size or length that is no int, or no generator.
        """
        length = whole_number("length", self.length if length is None else length, 1)
        batch_size = whole_number("batch_size", batch_size, 0)
        split = resolve_split(generator, split)
        elements = self._draw(batch_size, length, split, generator)
        batch = self._dress(elements, self.group.prefix_products(elements))
        return batch if device is None else Batch(batch[0].to(device), batch[1].to(device))

    def _draw(self, batch_size: int, length: int, split: Split, rng: torch.Generator) -> Tensor:
        alphabet = _alphabet_on(self, rng.device)
        size = len(alphabet)
        shape = (batch_size, length - 1)
        prefix = torch.randint(size, shape, generator=rng, device=rng.device)
        last = draw_last(row_hash(prefix), size, split, rng)
        return alphabet[torch.cat([prefix, last.unsqueeze(-1)], dim=-1)]

    def _dress(self, tokens: Tensor, labels: Tensor) -> Batch:  # (b, length), (b, length)
        if self.protocol == "official":
            bos = tokens.new_full((len(tokens), 1), self.group.order + _BOS)
            return Batch(torch.cat([bos, tokens], dim=-1), torch.cat([bos, labels], dim=-1))
        fillers = (*tokens.shape, self.tokens_per_transition - 1)
        filler, ignored = (
            tokens.new_full(fillers, self.group.order),
            labels.new_full(fillers, IGNORE),
        )
        return Batch(
            torch.cat([tokens.unsqueeze(-1), filler], dim=-1).flatten(1),
            torch.cat([ignored, labels.unsqueeze(-1)], dim=-1).flatten(1),
        )


@lru_cache(maxsize=64)
def _alphabet_on(task: WordProblem, device: torch.device) -> Tensor:
    return torch.tensor(task.alphabet, device=device)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")

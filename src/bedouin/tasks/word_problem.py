"""Word problems of finite groups: the running product of a sequence of elements.

Letters: b batch, t time, v vocabulary.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, get_args

import torch
from einops import rearrange
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

    The same with `tokens_per_transition=2`; the filler is token 5, and `.` stands for `IGNORE`:

        tokens  3 5 0 5 4 5 1 5 1 5 2 5
        labels  . 3 . 3 . 2 . 3 . 4 . 1

    The same with `protocol="official"`; BOS is token 6, also in the labels:

        tokens  6 3 0 4 1 1 2
        labels  6 3 3 2 3 4 1

    Protocol. Elements are drawn uniformly and independently, except that the last one is drawn from
    those that the stream's split allows (see `bedouin.tasks.streams`): no row of a training stream
    is a row of a test stream of the same length. There are so few rows of lengths 1 and 2 that a
    test split of them says little. Report token and sequence accuracy, at the training length and
    beyond.

    `protocol="official"` is that of the code of Fixed-Point RNNs (word_problem_exp): 7 special
    tokens after the elements in input *and* output (67 ids for A5), and BOS in front of tokens and
    labels. BOS counts in loss and accuracy and improves both: predicting BOS alone gives an
    accuracy of 1/(length + 1). By default that code also mixes all lengths from 2 on; pass `length`
    to `sample` for that.

    Args:
        group: the group, for instance `Group.from_name("A5")`.
        length: number of group elements in a row, unless `sample` gets another one.
        elements: what is drawn. `"all"`; `"swaps"`: transpositions only; `"3-permutations"`:
            elements that move two or three points. These are the restrictions of Unlocking
            State-Tracking in Linear RNNs Through Negative Eigenvalues, section 5, except that the
            paper also draws the identity in both. Labels range over the whole group.
        tokens_per_transition: every element is followed by this number minus one of filler tokens,
            and its label is at the last of them, which gives a layer more steps for each product.
        protocol: `"plain"` or `"official"`.

    Raises:
        ValueError: a field out of its range; fewer than two elements to draw from; fillers with the
            official protocol, which has none.
        TypeError: a group that is not a `Group`, a number that is not an int.
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
        """The numbers of the elements that are drawn."""
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
        """Draw rows on the generator's device, without synchronization.

        Args:
            batch_size: number of rows, 0 or more.
            generator: a `stream("train" | "test", seed)`; a plain `torch.Generator` draws from
                the uniform distribution over all rows, or from `split`.
            device: the device of the result; None: the generator's.
            length: number of group elements; None: `self.length`.
            split: None: the stream's own. Another one than the stream's raises an error.

        Returns:
            tokens and labels (b, t), t = length · tokens_per_transition, plus 1 for the official
            BOS.

        Raises:
            ValueError: a negative batch size, a length below 1, or a split that is not the
                stream's.
            TypeError: a batch size or length that is not an int, or a generator that is not one.
        """
        length = whole_number("length", self.length if length is None else length, 1)
        batch_size = whole_number("batch_size", batch_size, 0)
        split = resolve_split(generator, split)
        elements = self._draw(batch_size, length, split, generator)
        batch = self._add_specials(elements, self.group.prefix_products(elements))
        return batch if device is None else Batch(batch[0].to(device), batch[1].to(device))

    def _draw(
        self, batch_size: int, length: int, split: Split, rng: torch.Generator
    ) -> Tensor:  # (b, length)
        """Random elements whose rows belong to `split`."""
        alphabet = _alphabet_on(self, rng.device)
        size = len(alphabet)
        shape = (batch_size, length - 1)
        prefix = torch.randint(size, shape, generator=rng, device=rng.device)
        last = draw_last(row_hash(prefix), size, split, rng)
        return alphabet[torch.cat([prefix, rearrange(last, "b -> b 1")], dim=-1)]

    def _add_specials(
        self,
        tokens: Tensor,  # (b, length)
        labels: Tensor,  # (b, length)
    ) -> Batch:
        """Add BOS (official protocol) or fillers, if there are any."""
        if self.protocol == "official":
            bos = tokens.new_full((len(tokens), 1), self.group.order + _BOS)
            return Batch(torch.cat([bos, tokens], dim=-1), torch.cat([bos, labels], dim=-1))
        fillers = (*tokens.shape, self.tokens_per_transition - 1)
        filler = tokens.new_full(fillers, self.group.order)
        ignored = labels.new_full(fillers, IGNORE)
        tokens = torch.cat([rearrange(tokens, "b t -> b t 1"), filler], dim=-1)
        labels = torch.cat([ignored, rearrange(labels, "b t -> b t 1")], dim=-1)
        return Batch(*(rearrange(row, "b t step -> b (t step)") for row in (tokens, labels)))


@lru_cache(maxsize=64)
def _alphabet_on(task: WordProblem, device: torch.device) -> Tensor:  # (size of the alphabet,)
    return torch.tensor(task.alphabet, device=device)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")

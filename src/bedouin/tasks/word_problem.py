"""Word problems of finite groups: the running product of a sequence of elements.

Letters: b batch, t time, v vocabulary.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, get_args

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from bedouin.tasks.batch import IGNORE, Batch
from bedouin.tasks.checks import one_of, whole_number
from bedouin.tasks.group import Group, generating_set
from bedouin.tasks.streams import Split, draw_last, resolve_split, row_hash

Elements = Literal["all", "swaps", "3-permutations"]
Protocol = Literal["plain", "official"]
LabelAt = Literal["transition", "every", "last"]

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

    The same with `label_at="every"` as well, where 0 is the identity, and with `label_at="last"`:

        labels  0 3 3 3 3 2 2 3 3 4 4 1
        labels  . . . . . . . . . . . 1

    The same with `protocol="official"`; BOS is token 6, in the labels too:

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
            elements that move two or three points. Labels still range over the whole group.
        tokens_per_transition: every element is followed by this number minus one of filler tokens,
            which gives a layer more steps for each product.
        protocol: `"plain"` or `"official"`.
        include_identity: whether `"swaps"` and `"3-permutations"` draw the identity too.
        label_at: where a label stands. `"transition"`: at the last token of every element, so at
            every token without fillers; `"every"`: at the fillers too, where the label of a product
            follows its element after `tokens_per_transition - 1` tokens and the identity stands
            before the first; `"last"`: at the last token of the row only.
        generators: draw from a fixed random set of this many elements that generates the group
            (see `bedouin.tasks.generating_set`) instead of from all; None for all.
        generator_seed: which of these sets.

    Published variants. Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues
    (arXiv 2411.12537, section 5.2) on S5, trained at length 32, with accuracy of whole sequences:
    `elements="swaps"` and `elements="3-permutations"`, both with `include_identity=True` (the
    default leaves the identity out), and `tokens_per_transition=4, label_at="every"` at 16
    elements. PD-SSM (arXiv 2509.22284), trained up to 40 and tested from 40 to 256:
    `generators=12` on A5, `generators=8` and `generators=32` on S5, with `label_at="last"`; the
    elements of its sets are not published, so the sets here are others of the same size.

    Raises:
        ValueError: a field out of its range; fewer than two elements to draw from; fillers or
            another `label_at` in the official protocol, which has neither; `include_identity` with
            `elements="all"`, which has it; `generators` together with restricted `elements`.
        TypeError: a group that is no `Group`, a number that is no int.
    """

    group: Group
    length: int = 16
    elements: Elements = "all"
    tokens_per_transition: int = 1
    protocol: Protocol = "plain"
    include_identity: bool = False
    label_at: LabelAt = "transition"
    generators: int | None = None
    generator_seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.group, Group):
            raise TypeError(
                f"group must be a Group, got {self.group!r}: parse names with Group.from_name"
            )
        one_of("elements", self.elements, get_args(Elements))
        one_of("protocol", self.protocol, get_args(Protocol))
        one_of("label_at", self.label_at, get_args(LabelAt))
        whole_number("length", self.length, 1)
        whole_number("tokens_per_transition", self.tokens_per_transition, 1)
        self._check_restrictions()
        self._check_alphabet()

    def _check_restrictions(self) -> None:
        if self.include_identity and self.elements == "all":
            raise ValueError(
                'include_identity=True needs elements="swaps" or "3-permutations": '
                'elements="all" draws the identity anyway'
            )
        if self.generators is None:
            if self.generator_seed != 0:
                raise ValueError(
                    f"generator_seed must be 0 without generators, got {self.generator_seed}: "
                    "it chooses the set of generators"
                )
            return
        whole_number("generators", self.generators, 2, self.group.order)
        whole_number("generator_seed", self.generator_seed, 0)
        if self.elements != "all":
            raise ValueError(
                f'generators needs elements="all", got {self.elements!r}: both restrict what is '
                "drawn"
            )

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
        if self.protocol == "official" and self.label_at != "transition":
            raise ValueError(
                "label_at must be 'transition' with protocol='official', which labels every token, "
                f"got {self.label_at!r}: use protocol='plain'"
            )

    @property
    def alphabet(self) -> tuple[int, ...]:
        """The numbers of the elements that are drawn."""
        if self.generators is not None:
            return generating_set(self.group, self.generators, self.generator_seed)
        if self.elements == "all":
            return tuple(range(self.group.order))
        least = 0 if self.include_identity else 2
        most = _MOST_MOVED[self.elements]
        return tuple(g for g, moved in enumerate(self.group.num_moved) if least <= moved <= most)

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

    @property
    def chance(self) -> float:
        """Accuracy of guessing an element."""
        return 1 / self.group.order

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
        return self._add_specials(elements, self.group.prefix_products(elements)).to(device)

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
        if self.label_at == "last":
            labels = pad(labels[:, -1:], (labels.shape[-1] - 1, 0), value=IGNORE)
        if self.tokens_per_transition == 1:
            return Batch(tokens, labels)
        fillers = (*tokens.shape, self.tokens_per_transition - 1)
        filler = tokens.new_full(fillers, self.group.order)
        previous = torch.full_like(labels, IGNORE)
        if self.label_at == "every":
            previous = pad(labels[:, :-1], (1, 0))  # element 0 is the identity
        before = repeat(previous, "b t -> b t step", step=fillers[-1])
        tokens = torch.cat([rearrange(tokens, "b t -> b t 1"), filler], dim=-1)
        labels = torch.cat([before, rearrange(labels, "b t -> b t 1")], dim=-1)
        return Batch(*(rearrange(row, "b t step -> b (t step)") for row in (tokens, labels)))


@lru_cache(maxsize=64)
def _alphabet_on(task: WordProblem, device: torch.device) -> Tensor:  # (size of the alphabet,)
    return torch.tensor(task.alphabet, device=device)

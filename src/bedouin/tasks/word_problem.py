"""Word problems of finite groups: the running product of a sequence of elements.

Letters: b batch, t time, v vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, get_args

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from bedouin.tasks.batch import IGNORE, Batch, LengthTask
from bedouin.tasks.checks import one_of, whole_number
from bedouin.tasks.group import Group, check_group, generating_set
from bedouin.tasks.streams import Split, draw_last, integers, row_hash

Elements = Literal["all", "swaps", "3-permutations"]
Protocol = Literal["plain", "official"]
LabelAt = Literal["transition", "every", "last"]

_MOST_MOVED: Final[dict[Elements, int]] = {"swaps": 2, "3-permutations": 3}
_NUM_SPECIALS: Final = 7  # PAD, BOS, UNK, EOS, SEP, CLS, MASK, in this order
_BOS: Final = 1
_JOIN: Final = "b t r -> b (t r)"


@dataclass(frozen=True)
class WordProblem(LengthTask):
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
        check_group("group", self.group)
        one_of("elements", self.elements, get_args(Elements))
        one_of("protocol", self.protocol, get_args(Protocol))
        one_of("label_at", self.label_at, get_args(LabelAt))
        whole_number("length", self.length, 1)
        whole_number("tokens_per_transition", self.tokens_per_transition, 1)
        if self.generators is not None:
            whole_number("generators", self.generators, 2, self.group.order)
            whole_number("generator_seed", self.generator_seed, 0)
        for forbidden, message in self._rules():
            if forbidden:
                raise ValueError(message)

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """Combinations of fields that exclude each other, and what to do about them."""
        yield (
            self.include_identity and self.elements == "all",
            'include_identity=True needs elements="swaps" or "3-permutations": '
            'elements="all" draws the identity anyway',
        )
        yield (
            self.generators is None and self.generator_seed != 0,
            f"generator_seed must be 0 without generators, got {self.generator_seed}: "
            "it chooses the set of generators",
        )
        yield (
            self.generators is not None and self.elements != "all",
            f'generators needs elements="all", got {self.elements!r}: both restrict what is drawn',
        )
        yield (
            len(self.alphabet) < 2,
            f"elements={self.elements!r} must leave at least two elements of {self.group.name} "
            f'to draw from, got {len(self.alphabet)}: use elements="all" or a larger group',
        )
        official = self.protocol == "official"
        yield (
            official and self.tokens_per_transition != 1,
            "tokens_per_transition must be 1 with protocol='official', which has no fillers, "
            f"got {self.tokens_per_transition}: use protocol='plain'",
        )
        yield (
            official and self.label_at != "transition",
            "label_at must be 'transition' with protocol='official', which labels every token, "
            f"got {self.label_at!r}: use protocol='plain'",
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

    def _draw(self, b: int, length: int | None, split: Split, rng: torch.Generator) -> Batch:
        t = whole_number("length", self.length if length is None else length, 1)
        alphabet = _alphabet_on(self, rng.device)
        prefix = integers(0, len(alphabet), (b, t - 1), rng)
        last = draw_last(row_hash(prefix), len(alphabet), split, rng)
        elements = alphabet[torch.cat([prefix, last.unsqueeze(-1)], dim=-1)]
        return self._add_specials(elements, self.group.prefix_products(elements))

    def _add_specials(
        self,
        tokens: Tensor,  # (b, length)
        labels: Tensor,  # (b, length)
    ) -> Batch:
        """Add BOS (official protocol) or fillers, if there are any."""
        if self.protocol == "official":
            bos = self.group.order + _BOS
            return Batch(*(pad(row, (1, 0), value=bos) for row in (tokens, labels)))
        r, t = self.tokens_per_transition, tokens.shape[-1]
        tokens = rearrange(pad(tokens.unsqueeze(-1), (0, r - 1), value=self.group.order), _JOIN)
        if self.label_at == "every":  # element 0 is the identity
            return Batch(tokens, pad(repeat(labels, "b t -> b (t r)", r=r), (r - 1, 0))[:, : t * r])
        if self.label_at == "last":
            labels = pad(labels[:, -1:], (t - 1, 0), value=IGNORE)
        labels = pad(labels.unsqueeze(-1), (r - 1, 0), value=IGNORE)
        return Batch(tokens, rearrange(labels, _JOIN))


@lru_cache(maxsize=64)
def _alphabet_on(task: WordProblem, device: torch.device) -> Tensor:  # (size of the alphabet,)
    return torch.tensor(task.alphabet, device=device)

"""Word problems of finite groups: the running product of a sequence of elements.

Letters: b batch, t time; r tokens of an element.
"""

from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from bedouin.tasks.batch import IGNORE, Batch, Task
from bedouin.tasks.group import Group, check_group, generating_set, on_device
from bedouin.tasks.streams import Split, draw_last, integers, one_of, row_hash, whole_number

Elements = Literal["all", "swaps", "3-permutations"]
Protocol = Literal["plain", "official"]
LabelAt = Literal["transition", "every", "last"]

_MOST_MOVED: Final[dict[Elements, int]] = {"swaps": 2, "3-permutations": 3}
_NUM_SPECIALS: Final = 7  # PAD, BOS, UNK, EOS, SEP, CLS, MASK, in this order
_BOS: Final = 1


@dataclass(frozen=True)
class WordProblem(Task):
    """Prefix products in a finite group: label_t = g_0 · g_1 · … · g_t, read from left to right.

    A row of Z5, `length=6` (g · h = g + h mod 5):

        tokens  3 0 4 1 1 2
        labels  3 3 2 3 4 1

    The same with `tokens_per_transition=2`; the filler is token 5, and `.` stands for `IGNORE`.
    Below, its labels with `label_at="every"`, where 0 is the identity, and with `label_at="last"`:

        tokens  3 5 0 5 4 5 1 5 1 5 2 5
        labels  . 3 . 3 . 2 . 3 . 4 . 1
        every   0 3 3 3 3 2 2 3 3 4 4 1
        last    . . . . . . . . . . . 1

    The first row with `protocol="official"`; BOS is token 6, in the labels too:

        tokens  6 3 0 4 1 1 2
        labels  6 3 3 2 3 4 1

    Protocol. Elements are uniform and independent, except that the last one keeps the row in its
    stream's split (see `bedouin.tasks.streams`). Report token and sequence accuracy, at the
    training length and beyond. Published variants: arXiv 2411.12537 (section 5.2), S5 trained at
    length 32, accuracy of whole sequences, `"swaps"` and `"3-permutations"` with
    `include_identity=True`, and `tokens_per_transition=4, label_at="every"` at 16 elements; PD-SSM
    (arXiv 2509.22284), trained up to 40 and tested from 40 to 256, `label_at="last"`,
    `generators=12` on A5 and 8 and 32 on S5, whose sets are not published: others of the same size.

    `protocol="official"` is that of the code of Fixed-Point RNNs (word_problem_exp): 7 special
    tokens after the elements in input *and* output (67 ids for A5), and BOS in loss and accuracy,
    of which it is 1/(length + 1). By default that code also mixes all lengths from 2 on.

    Args:
        group: the group, for instance `Group.from_name("A5")`.
        length: number of group elements in a row.
        elements: what is drawn. `"all"`; `"swaps"`: transpositions only; `"3-permutations"`:
            elements that move two or three points. Labels still range over the whole group.
        tokens_per_transition: r; every element is followed by r - 1 filler tokens.
        protocol: `"plain"` or `"official"`.
        include_identity: whether `"swaps"` and `"3-permutations"` draw the identity too.
        label_at: `"transition"`: a label at the last token of every element; `"every"`: at the
            fillers too, where a product's comes r - 1 tokens after its element; `"last"`: at the
            last token of the row only.
        generators, generator_seed: draw from a random set of this many elements that generates the
            group, and which one (`bedouin.tasks.generating_set`); None: from all.

    Raises ValueError for a field out of its range, fields that exclude each other and fewer than
    two elements to draw from, and TypeError for another type of a field.
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
        if self.include_identity and self.elements == "all":
            raise ValueError(
                'include_identity=True needs elements="swaps" or "3-permutations": '
                'elements="all" draws the identity anyway'
            )
        if self.generators is None and self.generator_seed != 0:
            raise ValueError(
                f"generator_seed must be 0 without generators, got {self.generator_seed}: "
                "it chooses the set of generators"
            )
        if self.generators is not None:
            whole_number("generators", self.generators, 2, self.group.order)
            whole_number("generator_seed", self.generator_seed, 0)
            if self.elements != "all":
                raise ValueError(
                    f'generators needs elements="all", got {self.elements!r}: both restrict what '
                    "is drawn"
                )
        if len(self.alphabet) < 2:
            raise ValueError(
                f"elements={self.elements!r} must leave at least two elements of {self.group.name} "
                f'to draw from, got {len(self.alphabet)}: use elements="all" or a larger group'
            )
        for name, only, why in (
            ("tokens_per_transition", 1, "has no fillers"),
            ("label_at", "transition", "labels every token"),
        ):
            if self.protocol == "official" and (got := getattr(self, name)) != only:
                raise ValueError(
                    f"{name} must be {only!r} with protocol='official', which {why}, got {got!r}: "
                    "use protocol='plain'"
                )

    @property
    def alphabet(self) -> tuple[int, ...]:
        """The numbers of the elements that are drawn."""
        if self.generators is not None:
            return generating_set(self.group, self.generators, self.generator_seed)
        if self.elements == "all":
            return tuple(range(self.group.order))
        least, most = 0 if self.include_identity else 2, _MOST_MOVED[self.elements]
        return tuple(g for g, moved in enumerate(self.group.num_moved) if least <= moved <= most)

    @property
    def vocab_size(self) -> int:
        """Number of input ids: the elements, then the filler or the 7 special tokens."""
        specials = _NUM_SPECIALS if self.protocol == "official" else self.tokens_per_transition > 1
        return self.group.order + specials

    @property
    def output_size(self) -> int:
        """Number of classes: the elements; in the official protocol the special tokens as well."""
        return self.vocab_size if self.protocol == "official" else self.group.order

    @property
    def chance(self) -> float:
        return 1 / self.group.order

    def _draw(self, b: int, length: int | None, split: Split, rng: torch.Generator) -> Batch:
        t = whole_number("length", self.length if length is None else length, 1)
        alphabet = on_device(self, "alphabet", rng.device)
        prefix = integers(0, len(alphabet), (b, t - 1), rng)
        last = draw_last(row_hash(prefix), len(alphabet), split, rng)
        elements = alphabet[torch.cat([prefix, last.unsqueeze(-1)], dim=-1)]
        return self._add_specials(elements, self.group.prefix_products(elements))

    def _add_specials(self, tokens: Tensor, labels: Tensor) -> Batch:  # (b, t), (b, t)
        """Add BOS (official protocol) or fillers, if there are any."""
        if self.protocol == "official":
            bos = self.group.order + _BOS
            return Batch(pad(tokens, (1, 0), value=bos), pad(labels, (1, 0), value=bos))
        r, t = self.tokens_per_transition, tokens.shape[-1]
        tokens = pad(tokens.unsqueeze(-1), (0, r - 1), value=self.group.order)  # (b, t, r)
        if self.label_at == "every":
            identity_first = pad(repeat(labels, "b t -> b (t r)", r=r), (r - 1, 0), value=0)
            labels = rearrange(identity_first[:, : t * r], "b (t r) -> b t r", r=r)
        else:
            if self.label_at == "last":
                labels = pad(labels[:, -1:], (t - 1, 0), value=IGNORE)
            labels = pad(labels.unsqueeze(-1), (r - 1, 0), value=IGNORE)
        return Batch(*(rearrange(row, "b t r -> b (t r)") for row in (tokens, labels)))

"""Multi-query associative recall.

Letters: b batch, t time, r pairs.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from bedouin.tasks.batch import IGNORE, Batch, Task
from bedouin.tasks.streams import Split, draw_last, integers, row_hash, whole_number


@dataclass(frozen=True)
class MQAR(Task):
    """Pairs of a key and a value, then the keys again, each at a random place: what was its value?

    A row with `vocab_size=12, length=16, num_pairs=2`, in which keys are 1 to 5 and values 6 to 11.
    A blank stands for `IGNORE`, and `*` for a random token, which may look like a key:

        tokens  2 8 4 7 * * 4 * * * 2 * * * * *
        labels              7       8

    Protocol (Zoology, arXiv 2312.04927, and its code, zoology/data/multiquery_ar.py). Keys and
    values of a row are drawn without replacement; queries stand at even distances g from the end of
    the pairs, which are drawn without replacement with probabilities proportional to
    (g / 2 + 1)^(power - 1), so mostly soon after the pairs. Tokens in between are uniform over the
    whole vocabulary. The last value is drawn from those that the stream's split allows (see
    `bedouin.tasks.streams`), where it may repeat another value of the row.

    Args:
        vocab_size: number of ids, the smaller half of which but 0 are keys.
        length: t, even. num_pairs: r.
        power: of the distribution of distances; 1 is uniform.

    Raises ValueError for a field out of range or a length below 4 r, TypeError for no int.
    """

    vocab_size: int = 8192
    length: int = 256
    num_pairs: int = 32
    power: float = 0.01

    def __post_init__(self) -> None:
        whole_number("vocab_size", self.vocab_size, 4)
        r = whole_number("num_pairs", self.num_pairs, 1, self.vocab_size // 2)
        if whole_number("length", self.length, 1) < 4 * r or self.length % 2:
            raise ValueError(
                f"length must be even and at least 4 num_pairs = {4 * r}, got {self.length}: "
                "a pair and its query take two places each"
            )
        if not self.power > 0:
            raise ValueError(f"power must be > 0, got {self.power}")

    def sample(
        self,
        batch_size: int,
        generator: torch.Generator,
        *,
        device: torch.device | str | None = None,
        length: int | None = None,
        num_pairs: int | None = None,
        split: Split | None = None,
    ) -> Batch:
        """`Task.sample` with `num_pairs` pairs in a row; None: as many as the task says."""
        given = {"length": length, "num_pairs": num_pairs}
        task = replace(self, **{name: v for name, v in given.items() if v is not None})
        return super(MQAR, task).sample(batch_size, generator, device=device, split=split)

    def _draw(self, b: int, length: int | None, split: Split, rng: torch.Generator) -> Batch:
        t, r = self.length, self.num_pairs
        half, device = self.vocab_size // 2, rng.device
        # rows do not depend on the default dtype
        drawn: dict[str, Any] = {"dtype": torch.float32, "device": device}
        keys = 1 + torch.rand(b, half - 1, generator=rng, **drawn).topk(r).indices
        values = half + torch.rand(b, half, generator=rng, **drawn).topk(r).indices
        # the smallest of exponential variables with these rates are a draw without replacement
        rate = torch.arange(1, t // 2 - r + 1, **drawn) ** (self.power - 1)
        times = torch.empty(b, len(rate), **drawn).exponential_(generator=rng) / rate
        query = 2 * (r + times.topk(r, largest=False).indices)  # (b, r)
        tokens = integers(0, self.vocab_size, (b, t), rng)
        tokens[:, : 2 * r : 2] = keys
        tokens[:, 1 : 2 * r : 2] = values
        tokens = tokens.scatter(1, query, keys)
        last = 2 * r - 1
        tokens[:, last] = 0
        tokens[:, last] = half + draw_last(row_hash(tokens), self.vocab_size - half, split, rng)
        labels = torch.full_like(tokens, IGNORE).scatter(1, query, tokens[:, 1 : 2 * r : 2])
        return Batch(tokens, labels)

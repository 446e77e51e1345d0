"""Print the number of parameters of one layer: Bedouin with different numbers of heads, and others.

    python examples/parameters.py
    python examples/parameters.py --d-model 256 --num-heads 1 4 8

Every layer keeps its default options except those named. A baseline of two layers has twice its
number here; an embedding and a head come on top.
"""

from dataclasses import dataclass

import torch
import tyro

from bedouin import Bedouin
from common.checks import check_heads, check_ranges, whole
from common.layers import BASELINES, count

EXPAND = 2


@dataclass(frozen=True)
class Config:
    """The sizes of the layers."""

    d_model: int = 512
    """Width of every layer."""
    num_householder: int = 4
    """Reflections of Bedouin."""
    num_heads: tuple[int, ...] = (1, 8, 16)
    """Numbers of heads of Bedouin."""

    def __post_init__(self) -> None:
        check_ranges(self, dict.fromkeys(("d_model", "num_householder", "num_heads"), whole(1)))
        for heads in self.num_heads:
            check_heads(heads, EXPAND * self.d_model)


def counts(config: Config) -> dict[str, int]:
    """The number of parameters by the layer's title."""
    found = {}
    with torch.device("meta"):  # allocates no memory
        for heads in config.num_heads:
            layer = Bedouin(
                config.d_model,
                expand=EXPAND,
                num_heads=heads,
                num_householder=config.num_householder,
            )
            found[f"Bedouin, {heads} head{'s' if heads > 1 else ''}"] = count(layer)
        for baseline in BASELINES.values():
            found[baseline.__name__] = count(baseline(config.d_model))
    return found


def main(config: Config) -> None:
    """Print a Markdown table, with the ratio to Mamba."""
    found = counts(config)
    print(f"| d_model {config.d_model}, k = {config.num_householder} | parameters | of Mamba's |")
    print("|---|---|---|")
    for title, number in found.items():
        print(f"| {title} | {number:,} | {number / found['Mamba']:.1f} |")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

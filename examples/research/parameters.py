"""Measure one layer: its parameters, its state, and what it keeps in training for the backward.

    python examples/research/parameters.py
    python examples/research/parameters.py --d-model 256 --num-heads 1 4 8 --out sizes.json

Prints a table of Bedouin with different numbers of heads and of the baselines, in float32 on a CPU;
the default takes about a minute. Every layer keeps its default options except those named. The
state is that of one sample after --length tokens. What a layer keeps are the tensors that autograd
saves for one sequence of this length, without parameters; a storage counts once. They are those of
plain PyTorch: kernels on a GPU save others, and what only the backward itself allocates is not
counted.

A baseline of two layers has twice its numbers here; an embedding and a head come on top.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from bedouin import Bedouin
from common.run import as_json, device_name, versions
from flags import Count, check_heads, check_types
from research.baselines import BASELINES, count

EXPAND = 2
KIB = 1024


@dataclass(frozen=True)
class Config:
    """The sizes of the layers."""

    d_model: tuple[Count, ...] = (256, 512, 1024)  # Widths of every layer.
    num_householder: Count = 4  # Reflections of Bedouin.
    num_heads: tuple[Count, ...] = (1, 8, 16)  # Numbers of heads of Bedouin.
    length: Count = 256  # Tokens of the sequence.
    out: Path | None = None  # Also write the numbers to this JSON file.

    def __post_init__(self) -> None:
        check_types(self)
        for heads in self.num_heads:
            for d_model in self.d_model:
                check_heads(heads, EXPAND * d_model)


@dataclass(frozen=True)
class Sizes:
    """One row of the table; bytes of one sample."""

    d_model: int
    layer: str
    parameters: int
    state_bytes: int
    saved_bytes_a_token: float


def layers(config: Config, d_model: int) -> Iterator[tuple[str, nn.Module]]:
    """The layers of one width by their titles."""
    options: dict[str, Any] = {"expand": EXPAND, "num_householder": config.num_householder}
    for heads in config.num_heads:
        title = f"Bedouin, {heads} head{'s' if heads > 1 else ''}"
        yield title, Bedouin(d_model, num_heads=heads, **options)
    for name, baseline in BASELINES.items():
        layer = baseline(d_model)
        title = type(layer).__name__
        yield f"gated {title}" if name == "gated_deltanet" else title, layer


def saved_bytes(
    layer: nn.Module,
    x: Tensor,  # (b, t, m)
) -> int:
    """Bytes of the tensors, except parameters, that autograd keeps for a call's backward."""
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    # held, so that no other tensor gets the same address
    found: dict[int, torch.UntypedStorage] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        layer(x)
    return sum(storage.nbytes() for storage in found.values())


def measure(config: Config) -> list[Sizes]:
    """The rows of the table."""
    rows = []
    for d_model in config.d_model:
        x = torch.randn(1, config.length, d_model)
        for title, layer in layers(config, d_model):
            kept = saved_bytes(layer, x) / config.length
            with torch.no_grad():
                _, state = layer(x, return_state=True)
            state_bytes = sum(tensor.nbytes for tensor in state)
            rows.append(Sizes(d_model, title, count(layer), state_bytes, kept))
    return rows


def table(rows: list[Sizes]) -> list[str]:
    """The lines of a Markdown table, with the ratio to Mamba's parameters."""
    mamba = {row.d_model: row.parameters for row in rows if row.layer == "Mamba"}
    lines = [
        "| d_model | layer | parameters | of Mamba's | state, KiB | saved, KiB a token |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = row.parameters / mamba[row.d_model]
        numbers = f"{row.parameters:,} | {ratio:.2f} | {row.state_bytes / KIB:.0f}"
        kept = row.saved_bytes_a_token / KIB
        lines.append(f"| {row.d_model} | {row.layer} | {numbers} | {kept:.0f} |")
    return lines


def main(config: Config) -> None:
    """Print the table, and write the numbers."""
    begin = time.perf_counter()
    torch.manual_seed(0)
    rows = measure(config)
    print("\n".join(table(rows)))
    if config.out is None:
        return
    report: dict[str, Any] = {
        "config": {name: value for name, value in asdict(config).items() if name != "out"},
        "versions": versions(),
        "device": device_name(torch.device("cpu")),
        "seconds": time.perf_counter() - begin,
        "layers": [asdict(row) for row in rows],
    }
    config.out.write_bytes(as_json(report))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

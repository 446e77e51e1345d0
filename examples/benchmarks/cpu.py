"""Time of the layers on a CPU, as a multiple of an LSTM's.

    python examples/benchmarks/cpu.py                                   # five minutes
    python examples/benchmarks/cpu.py --out examples/results/cpu.json

Forward + backward of one layer in one thread, float32, 16 samples of 128 tokens. The LSTM is
torch's, from d_model to 2 d_model, as wide as the layers are inside. A time is the time of the
process on its core, without that of other processes; a ratio is the median over rounds of the
layer's time divided by the LSTM's in the same round.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from bedouin import Bedouin, FixedPointRNN, GatedDeltaNet, TrackingDeltaNet
from flags import Count, check_types


def _compiled(layer: nn.Module) -> nn.Module:
    """The layer under torch.compile, which torch types as a function."""
    found: Any = torch.compile(layer, fullgraph=True)
    module: nn.Module = found
    return module


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "Bedouin": Bedouin,
    "Bedouin, 1 head": lambda m: Bedouin(m, num_heads=1),
    "Bedouin, compiled": lambda m: _compiled(Bedouin(m)),
    "Bedouin.from_paper": lambda m: Bedouin.from_paper(m, on_unconverged="ignore"),
    "FixedPointRNN": FixedPointRNN,
    "TrackingDeltaNet": TrackingDeltaNet,
    "GatedDeltaNet": GatedDeltaNet,
}
LSTM = "LSTM"


@dataclass(frozen=True)
class Config:
    """Options of the measurement."""

    widths: tuple[int, ...] = (64, 256)
    """The d_model of the layers."""
    batch: Count = 16
    tokens: Count = 128
    rounds: Count = 11
    """How often each layer is timed, after one call that is not."""
    out: Path | None = None
    """A JSON file for the numbers."""


def both(layer: nn.Module, x: Tensor) -> float:
    """Seconds of one forward and backward pass."""
    start = time.process_time()
    output = layer(x)
    output = output[0] if isinstance(output, tuple) else output
    output.sum().backward()
    return time.process_time() - start


def state_size(layer: nn.Module, m: int) -> int:
    """Numbers in the state of one sample."""
    if isinstance(layer, nn.LSTM):
        return 4 * m  # h and c
    state = layer.init_state(1)  # type: ignore[operator]
    return sum(part.numel() for part in state if part is not None)


def measure(config: Config, m: int) -> list[dict[str, Any]]:
    """A row for each layer of width m."""
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {LSTM: nn.LSTM(m, 2 * m, batch_first=True)}
    layers |= {name: make(m) for name, make in LAYERS.items()}
    x = torch.randn(config.batch, config.tokens, m)
    for layer in layers.values():
        both(layer, x)
    rounds = [
        {name: both(layer, x) for name, layer in layers.items()} for _ in range(config.rounds)
    ]
    return [
        {
            "layer": name,
            "d_model": m,
            "ms": 1e3 * median(times[name] for times in rounds),
            "of_lstm": median(times[name] / times[LSTM] for times in rounds),
            "parameters": sum(parameter.numel() for parameter in layer.parameters()),
            "state_size": state_size(layer, m),
            "steps": _steps(layer),
        }
        for name, layer in layers.items()
    ]


def _steps(layer: nn.Module) -> int | None:
    """Iterations of the last solve; None for a layer without a solver."""
    stats = getattr(layer, "stats", None)
    return None if stats is None else int(stats.num_steps.max())


def main(config: Config) -> None:
    check_types(config)
    torch.set_num_threads(1)
    rows = [row for m in config.widths for row in measure(config, m)]
    for row in rows:
        name = f"{row['layer']}({row['d_model']})"
        steps = "" if row["steps"] is None else f", {row['steps']} steps"
        print(f"{name:26} {row['ms']:8.1f} ms, {row['of_lstm']:6.2f} of the LSTM{steps}")
    if config.out is not None:
        options = {name: value for name, value in asdict(config).items() if name != "out"}
        content = {"device": "cpu", "torch": torch.__version__, "config": options, "rows": rows}
        config.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))

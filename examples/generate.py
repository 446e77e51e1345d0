"""Stream text from a language model that `train_lm.py` has trained.

    python examples/generate.py --run runs/lm-seed0
    python examples/generate.py --run runs/lm-seed0 --prompt "def main(" --temperature 0
    python examples/generate.py --run runs/lm-seed0 --length 10000 --top-p 0.95 --seed 3

The prompt is one call of the model, each byte after it one step of a `Decoder`, whose time does not
depend on the bytes before it (but for attention). Bytes are written when they are drawn; the text
ends after --length bytes or where the model ends the document. With temperature 0 it is that of
`SequenceModel.generate`. A run may still be training: its last checkpoint is read.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import tyro
from safetensors.torch import load_model as load_weights
from torch import Tensor

from bedouin import Decoder, SequenceModel
from bedouin.generation import Sampling
from common.checkpoint import WEIGHTS, read_options
from common.options import make_layer
from flags import Count, Device, Natural, UsageError, check_types, choose_device, naming_flags
from language.text import END
from research.baselines import BASELINES, make_baseline
from train_lm import LanguageConfig, make_model


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to generate."""

    run: Path
    """Folder of a run of `train_lm.py`."""
    prompt: str = ""  # The text that is continued; without one a document begins.
    length: Count = 1000  # Bytes at most.
    temperature: float = 0.8
    """0 takes the most probable byte; otherwise logits are divided by it, and a byte is drawn."""
    top_k: int | None = None  # Draw from the k most probable bytes.
    top_p: float | None = None  # Draw from the fewest bytes that have this probability together.
    seed: Natural = 0  # Seed of the draws.
    device: Device = "auto"  # auto: the GPU if there is one.

    def __post_init__(self) -> None:
        check_types(self)
        with naming_flags(("temperature", "top_k", "top_p")):
            Sampling(self.temperature, self.top_k, self.top_p)


def load_model(folder: Path, device: torch.device) -> SequenceModel:
    """The model of a run's last checkpoint, for evaluation.

    Raises UsageError if the folder has no checkpoint of a language model, or one of a model that is
    shared out among processes (--shard) and not yet trained.
    """
    path, config = read_config(folder, "--run", LanguageConfig)
    weights = path / "pytorch_model.bin"
    model = make_model(config, make_baseline if config.layer in BASELINES else make_layer)
    if weights.exists():
        model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    elif (folder / WEIGHTS).exists():
        load_weights(model, folder / WEIGHTS)
    else:
        raise UsageError(f"--run must be a run that has ended if it has --shard, got {folder}")
    return model.to(device).eval()


def read_config(folder: Path, option: str, kind: type[Any]) -> tuple[Path, Any]:
    """The last checkpoint of a run, and its options as `kind`, the class of a training script.
    Raises UsageError, which names `option`, if there is no checkpoint of this script."""
    try:
        path, saved = read_options(folder, option)
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
    if saved.keys() != {field.name for field in fields(kind)}:
        script = f"{kind.__module__}.py"
        raise UsageError(f"{option} must be a run of this version of {script}, got {folder}")
    # in the file tuples are lists
    return path, kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in saved.items()})


@torch.no_grad()
def stream_bytes(
    model: SequenceModel, prompt: bytes, length: int, sampling: Sampling
) -> Iterator[bytes]:
    """The bytes that follow the prompt, one at a time."""
    device = model.head.weight.device
    tokens = torch.tensor([[END, *prompt]], device=device)
    logits, state = model(tokens, return_state=True)
    decoder = Decoder(model, 1, state=state)
    last: Tensor = logits[:, -1]  # (1, v)
    for index in range(length):
        token = sampling.choose(last)
        value = int(token)
        if value == END:
            return
        yield bytes([value])
        if index < length - 1:
            last = decoder(token)


def main(config: Config) -> None:
    """Write the prompt and the text to the standard output, and the speed to the standard error."""
    device = choose_device(config.device)
    model = load_model(config.run, device)
    generator = torch.Generator(device).manual_seed(config.seed)
    sampling = Sampling(config.temperature, config.top_k, config.top_p, generator)
    prompt, out, number = config.prompt.encode(), sys.stdout.buffer, 0
    out.write(prompt)
    out.flush()
    started = time.perf_counter()
    for piece in stream_bytes(model, prompt, config.length, sampling):
        out.write(piece)
        out.flush()
        number += 1
    speed = number / (time.perf_counter() - started)
    print(f"\n{number} bytes, {speed:.0f} bytes/s", file=sys.stderr)


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except UsageError as error:
        sys.exit(f"error: {error}")

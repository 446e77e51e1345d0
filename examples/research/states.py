"""Draw the outputs of the layer of `train_a5.py` by their principal components.

    python examples/train_a5.py --preset cpu --out runs/a5
    python examples/research/states.py runs/a5     # runs/a5/states.png

Every point is the output of the layer after one token of a test word, divided by its norm and
projected on the principal components of all outputs; its colour is the product so far. A layer that
tracks the group has one cluster for each element.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from matplotlib.figure import Figure
from safetensors.torch import load_model as load_weights
from torch import Tensor
from torch.nn.functional import normalize

from bedouin import SequenceModel
from bedouin.tasks import stream

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from common.checkpoint import WEIGHTS
from common.evaluation import png
from flags import UsageError
from generate import read_config
from train_a5 import WordProblemConfig, make_model

COMPONENTS = 4


@dataclass(frozen=True)
class Config:
    """What to draw."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run of `train_a5.py` that has ended."""
    length: int = 12
    """Tokens of a test word."""
    words: int = 256
    out: Path | None = None
    """The picture; None: states.png in the run's folder."""


@torch.no_grad()
def outputs(
    model: SequenceModel,
    tokens: Tensor,  # (b, t)
) -> tuple[Tensor, Tensor]:  # (b, t, m), and the predicted elements (b, t)
    """What the last layer gives at every token."""
    found: list[Tensor] = []
    layer: Any = model.blocks[-1].mixer
    handle = layer.register_forward_hook(lambda *call: found.append(call[2]))
    logits = model.eval()(tokens)
    handle.remove()
    return found[0], logits.argmax(-1)


def components(
    values: Tensor,  # (n, m)
) -> Tensor:  # (n, COMPONENTS)
    """The principal components."""
    centred = values - values.mean(0)
    return centred @ torch.pca_lowrank(centred, COMPONENTS, center=False)[2]


def figure(
    points: Tensor,  # (n, COMPONENTS)
    labels: Tensor,  # (n,)
    title: str,
) -> bytes:
    """Two components a panel, a colour an element."""
    drawn = Figure(figsize=(8.0, 4.2), layout="constrained")
    panels = drawn.subplots(1, COMPONENTS // 2)
    for i, axes in enumerate(panels):
        x, y = points[:, 2 * i], points[:, 2 * i + 1]
        axes.scatter(x, y, c=labels, cmap="hsv", s=5, linewidths=0)
        axes.set(xlabel=f"component {2 * i + 1}", ylabel=f"component {2 * i + 2}")
        axes.set(xticks=[], yticks=[])
    drawn.suptitle(title, fontsize="medium")
    return png(drawn)


def main(config: Config) -> None:
    _, options = read_config(config.run, "RUN", WordProblemConfig)
    model, task = make_model(options), options.task()
    load_weights(model, config.run / WEIGHTS)
    tokens, labels = task.sample(config.words, stream("test", 0), length=config.length)
    values, predicted = outputs(model, tokens)
    right = (predicted == labels).double().mean()
    points = components(normalize(values.flatten(0, 1), dim=-1))
    title = f"{task.group.name}, {config.length} tokens, {right:.1%} of the products right"
    path = config.out or config.run / "states.png"
    path.write_bytes(figure(points, labels.flatten(), title))
    print(path)


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except (UsageError, OSError) as error:
        sys.exit(f"error: {error}")

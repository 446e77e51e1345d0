"""What trained layers have learned, from the weights that `ensemble.py --keep-weights` writes.

    python examples/research/ensemble.py --d-model 256 --keep-weights --keep-every 500 \\
        --out runs/learned/a5
    python examples/research/learned.py runs/learned/a5 --out examples/results/learned

Of every model of a folder, on test rows:

* horizon: accuracy of the labels far beyond the training length, by position;
* recovery: the accuracy behind noise that is added to the state once, by the size of the noise;
* exponent: the largest Lyapunov exponent a token, and with --keep-every its mean over rows during
  the training, by step;
* steps: those of Picard and Jacobi by number of tokens, and the milliseconds of both and of Direct;
* heads: the accuracy without the output of each head, and quantiles of its decays lambda;
* transition: of each head, the largest moduli of the eigenvalues of the Jacobian of a token from
  (h_{t-1}, y_{t-1}) to (h_t, y_t), and the effective rank of its part that reads y_{t-1};
* keys: of each head, the effective dimension of its keys B_t;
* reflections: the same of the vectors u, and the mean beta, where there are any.

OUT/runs.json has the numbers under the name of the folder; OUT/horizon.png, OUT/steps.png and
OUT/exponents.png show those of all folders. Horizon and recovery are those of word problems.
Letters: b rows, t time, m d_model, d channels of all heads, n states, H heads.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import torch
import tyro
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, for the next imports

from bedouin import Bedouin, SequenceModel
from bedouin.kernels.heads import fold
from bedouin.kernels.scan import discretize
from bedouin.layers.mixers import NoMixing
from bedouin.solvers import Direct, FixedCap, Jacobi, Picard
from bedouin.state import BedouinState
from bedouin.tasks import WordProblem, stream
from bedouin.testing import copy_with, find_fixed_point, lyapunov
from flags import Device, UsageError, choose_device
from research.data import Data, eval_points
from research.ensemble import RESULTS
from research.runs import add_runs, read_runs
from research.study import Config, make_model, model_seeds

CHUNK = 500
"""Tokens of a call, whose state the next one continues."""

EIGENVALUES = 16
"""Largest eigenvalues of a transition that are kept."""

SOLVERS = {"picard": "-", "jacobi": ":"}
"""Those whose steps are shown, and their lines."""

SLOW = 5_000.0
"""Milliseconds of a call that is timed once."""

DIFFERENCE = 1e-6
"""Step of the difference quotients of a transition, in float64."""


@dataclass(frozen=True)
class Options:
    """What to measure."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders that ensemble.py has written with --keep-weights."""
    out: Path = Path("runs/learned")  # Folder for runs.json and the figures.
    horizon: int = 100_000  # Tokens of the horizon.
    tokens: int = 256  # Tokens of the other measurements.
    rows: int = 64  # Test rows.
    noise: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    """Sizes of noise, relative to the root mean square of each head's memory."""
    lengths: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    """Numbers of tokens at which steps are counted."""
    device: Device = "auto"  # auto: the GPU if there is one.


@dataclass(frozen=True)
class Trained:
    """A model with its data, and the layer that is measured, which is its only one."""

    model: SequenceModel
    data: Data
    layer: Bedouin

    def rows(self, number: int, length: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels (b, t) of test rows; those of other tasks than word problems have the
        task's last test length."""
        task = self.data.task
        if isinstance(task, WordProblem):
            return task.sample(number, stream("test", 0, self.device), length=length)
        options = self.data.options
        assert isinstance(options, Config)
        found = self.data.eval_batch(number, eval_points(options, options.eval_lengths)[-1])
        return found[0][0], found[1][0]

    @property
    def device(self) -> torch.device:
        return self.model.head.weight.device

    def inputs(self, tokens: Tensor) -> Tensor:  # (b, t) -> (b, t, m)
        """What the layer is called with."""
        found: list[Tensor] = []
        hook = self.layer.register_forward_pre_hook(lambda layer, given: found.append(given[0]))
        self.model(tokens)
        hook.remove()
        return found[0]


def stored_models(
    folder: Path, device: torch.device, name: str = "weights-point0.safetensors"
) -> list[tuple[SequenceModel, Data]]:
    """The models of the first point of the grid of a folder, from the file with this name, each
    with its data. Raises UsageError without the files."""
    weights = folder / name
    if not (folder / RESULTS).exists() or not weights.exists():
        raise UsageError(f"{folder} must have {RESULTS} and {weights.name}: see --keep-weights")
    content = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in content["config"].items()
    }
    config = Config(**given | {"out": folder})
    stacked, found = load_file(weights), []
    for i, seed in enumerate(model_seeds(config)):
        model = make_model(config, content["rows"][0]["point"]).eval()
        names = dict(model.named_parameters()).keys()
        buffers = {name: v for name, v in model.state_dict().items() if name not in names}
        model.load_state_dict(buffers | {name: v[i] for name, v in stacked.items()})
        found.append((model.to(device), Data(config, range(seed, seed + 1), device)))
    return found


def load(
    folder: Path, device: torch.device, name: str = "weights-point0.safetensors"
) -> list[Trained]:
    """`stored_models` with their layer. Raises UsageError for a model with several layers or
    another one, too."""
    found = []
    for model, data in stored_models(folder, device, name):
        (layer,) = model.mixers if len(model.mixers) == 1 else (None,)
        if not isinstance(layer, Bedouin):
            raise UsageError(f"{folder} must have models with one layer of Bedouin, got {layer}")
        found.append(Trained(model, data, layer))
    return found


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:  # (b, t, v), (b, t) -> (t,)
    """The share of right labels at each position."""
    return (logits.argmax(-1) == labels).double().mean(0)


def run_on(
    trained: Trained,
    tokens: Tensor,  # (b, t)
    labels: Tensor,  # (b, t)
    state: Any = None,
) -> tuple[Tensor, Any]:  # (t,)
    """The accuracy at each position from a state on, in chunks, and the state after them."""
    found = []
    for part, wanted in zip(tokens.split(CHUNK, 1), labels.split(CHUNK, 1), strict=True):
        logits, state = trained.model(part, state, True)
        found.append(accuracy(logits, wanted))
    return torch.cat(found), state


def horizon(trained: Trained, options: Options) -> dict[str, float]:
    """The mean accuracy up to positions that double."""
    rows = max(1, min(options.rows, 2**20 // options.horizon))
    found, _ = run_on(trained, *trained.rows(rows, options.horizon))
    ends, start, means = [16], 0, {}
    while ends[-1] < len(found):
        ends.append(min(2 * ends[-1], len(found)))
    for end in ends:
        means[str(end)] = found[start:end].mean().item()
        start = end
    return means


def recovery(trained: Trained, options: Options) -> dict[str, float]:
    """The mean accuracy of the tokens behind noise in the memory, by its size; 0: without noise."""
    tokens, labels = trained.rows(options.rows, 2 * options.tokens)
    first, last = (v.split(options.tokens, 1) for v in (tokens, labels))
    _, (state,) = run_on(trained, first[0], last[0])
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(state.ssm.shape, generator=generator).to(state.ssm)
    # of each head, because those of memories are far larger than those of heads that track
    squares = state.ssm.unflatten(1, (trained.layer.num_heads, -1)).square()
    sizes = squares.mean((0, 2, 3)).sqrt()  # (H,)
    noise *= sizes.repeat_interleave(noise.shape[1] // len(sizes))[:, None]
    means = {}
    for size in (0.0, *options.noise):
        moved = BedouinState(state.ssm + size * noise, *state.tensors[1:])
        means[str(size)] = run_on(trained, first[1], last[1], (moved,))[0].mean().item()
    return means


def steps(trained: Trained, options: Options) -> dict[str, dict[str, float]]:
    """Evaluations of Picard and Jacobi, and milliseconds, by number of tokens."""
    found = {}
    is_word = isinstance(trained.data.task, WordProblem)
    for t in options.lengths if is_word else options.lengths[:1]:
        x = trained.inputs(trained.rows(8, t)[0])
        numbers = {}
        for solver in (Direct(), Picard(rtol=1e-4), Jacobi(rtol=1e-4)):
            name = type(solver).__name__.lower()
            probe = copy_with(
                trained.layer,
                solver=solver,
                max_steps=FixedCap(x.shape[1] + 1),
                on_unconverged="ignore",
            )
            numbers[f"{name}_ms"] = milliseconds(probe, x)
            assert probe.stats is not None
            numbers[name] = int(probe.stats.num_steps.max())
            numbers[f"{name}_converged"] = bool(probe.stats.converged.all())
        found[str(x.shape[1])] = numbers
    return found


def milliseconds(layer: Bedouin, x: Tensor) -> float:  # x: (b, t, m)
    """The median of three calls, after one; the time of that one if it is SLOW or more."""

    def once() -> float:
        started = time.perf_counter()
        layer(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - started)

    first = once()
    return first if first >= SLOW else median(once() for _ in range(3))


@contextmanager
def without_head(layer: Bedouin, head: int) -> Iterator[None]:
    """The layer without the output of a head: with zeros in the head's columns of out_proj."""
    weight = layer.out_proj.weight
    columns, before = weight.unflatten(1, (layer.num_heads, -1))[:, head], weight.clone()
    columns.zero_()
    try:
        yield
    finally:
        weight.copy_(before)


def heads(trained: Trained, options: Options) -> dict[str, Any]:
    """The mean accuracy of the labelled tokens without each head, and quantiles of its decays."""
    tokens, labels = trained.rows(options.rows, options.tokens)

    def score() -> float:
        right = trained.model(tokens).argmax(-1) == labels
        return (right & (labels >= 0)).sum().item() / (labels >= 0).sum().item()

    without = []
    for head in range(trained.layer.num_heads):
        with without_head(trained.layer, head):
            without.append(score())
    delta, *_, f = coefficients(trained, tokens[:8])
    A, how = f.operands.A, f.parameterization
    levels = torch.tensor([0.1, 0.5, 0.9], device=delta.device)
    decays = []
    for own, rates in zip(by_head(delta, trained), A.view(-1, *A.shape[-2:]), strict=True):
        decay = discretize(own, rates, how.input_scale, how.eigenvalues)[0]
        decays.append(decay[:, -1].flatten().quantile(levels).tolist())
    return {"all": score(), "without": without, "decay_quantiles": decays}


def by_head(v: Tensor, trained: Trained) -> list[Tensor]:  # (H b, ...) -> H of (b, ...)
    return list(v.unflatten(0, (trained.layer.num_heads, -1)))


def coefficients(trained: Trained, tokens: Tensor) -> tuple[Any, ...]:  # tokens: (b, t)
    """Delta, B, C and the mixer's raw values of folded heads, and the map."""
    found = find_fixed_point(trained.layer, trained.inputs(tokens))
    y = fold(found.y, trained.layer.num_heads)
    f = found.f.apart()
    return *f.split(f.fed(y)[1]), f


def keys(trained: Trained, options: Options) -> dict[str, list[float]]:
    """The participation ratio of the principal components of B_t, by head."""
    tokens, _ = trained.rows(options.rows, options.tokens)
    _, B, *_ = coefficients(trained, tokens)
    dimensions = [participation(torch.linalg.svdvals(v.flatten(0, 1))) for v in by_head(B, trained)]
    return {"dimension": dimensions}


def participation(values: Tensor) -> float:  # (k,), singular values
    """(sum of s^2)^2 / sum of s^4: the number of values, if all are equal; 0 of zeros."""
    squares = values.double().square()
    total = squares.sum().item()
    return total * total / squares.square().sum().item() if total else 0.0


def transition(trained: Trained, options: Options) -> dict[str, Any]:
    """Moduli of eigenvalues, and effective rank of the part that reads y_{t-1}, of the Jacobian of
    one token after `tokens`, by head, of one row."""
    layer = copy_with(trained.layer, on_unconverged="ignore").double()
    x = trained.inputs(trained.rows(1, options.tokens)[0]).double()
    _, state = layer(x[:, :-1], return_state=True)
    moduli, ranks = [], []
    for head in range(layer.num_heads):
        J = jacobian(layer, x[:, -1], state, head)
        moduli.append(largest_moduli(J))
        ranks.append(participation(torch.linalg.svdvals(J[..., -1].flatten(0, 1))))
    return {"moduli": moduli, "rank": ranks}


def largest_moduli(J: Tensor) -> list[float]:  # (d, n + 1, d, n + 1)
    """Those of the eigenvalues of a Jacobian."""
    # a block-diagonal matrix has the eigenvalues of its blocks, here one for each channel
    blocks = J.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    is_block_diagonal = blocks.count_nonzero() == J.count_nonzero()
    matrices = blocks if is_block_diagonal else J.flatten(2).flatten(0, 1)
    moduli = torch.linalg.eigvals(matrices.cpu()).abs().flatten().sort(descending=True).values
    found: list[float] = moduli[:EIGENVALUES].tolist()
    return found


def jacobian(
    layer: Bedouin,
    x_t: Tensor,  # (1, m)
    state: BedouinState,
    head: int,
) -> Tensor:  # (d, n + 1, d, n + 1)
    """The derivative of (h_t, y_t) by (h_{t-1}, y_{t-1}), by central differences: of each of the d
    channels of the head the n numbers of h, then y.

    Without mixing, a channel's h_t and y_t depend on no other channel's h_{t-1}, so that one number
    of h_{t-1} is moved in all channels at the same time.
    """
    ssm, y = state.ssm[0], state.y[0]
    d, n = len(y) // layer.num_heads, ssm.shape[1]
    own = slice(head * d, head * d + d)
    mixes = not isinstance(layer.mixer, NoMixing)
    numbers = d * n if mixes else n
    moved = torch.eye(numbers + d, dtype=x_t.dtype, device=x_t.device) * DIFFERENCE
    columns = []
    for part in moved.split(64):
        after = []
        for sign in (1, -1):
            ssms, ys = ssm.repeat(len(part), 1, 1), y.repeat(len(part), 1)
            ssms[:, own] += sign * part[:, :numbers].unflatten(1, (-1, n))
            ys[:, own] += sign * part[:, numbers:]
            rest = (v.expand(len(part), *v.shape[1:]) for v in state.tensors[2:])
            _, found = layer.step(x_t.expand(len(part), -1), BedouinState(ssms, ys, *rest))
            after.append(torch.cat([found.ssm[:, own], found.y[:, own, None]], 2))
        columns.append((after[0] - after[1]) / (2 * DIFFERENCE))
    by_h, by_y = torch.cat(columns).permute(1, 2, 0).split([numbers, d], dim=2)
    J = torch.zeros(d, n + 1, d, n + 1, dtype=x_t.dtype, device=x_t.device)
    if mixes:
        J[..., :n] = by_h.unflatten(2, (d, n))
    else:
        J.diagonal(dim1=0, dim2=2)[:, :n] = by_h.permute(1, 2, 0)
    J[..., n] = by_y
    return J


def reflections(trained: Trained, options: Options) -> dict[str, list[float]]:
    """The participation ratio of the principal components of the unit vectors u of all tokens, and
    the mean beta, by head."""
    tokens, _ = trained.rows(options.rows, options.tokens)
    *_, raw, f = coefficients(trained, tokens)
    _, U, M = f.mixer(raw)
    vectors = [v.flatten(0, -2) for v in by_head(U, trained)]
    betas = by_head(M.diagonal(dim1=-2, dim2=-1), trained)
    return {
        "dimension": [participation(torch.linalg.svdvals(v)) for v in vectors],
        "beta": [v.mean().item() for v in betas],
    }


@torch.no_grad()
def exponents(folder: Path, device: torch.device, options: Options) -> list[dict[str, float]]:
    """Of each model, the Lyapunov exponent by step at which weights were kept."""
    pattern = "weights-point0-step*.safetensors"
    files = {int(path.stem.rpartition("step")[2]): path.name for path in folder.glob(pattern)}
    found: dict[int, list[float]] = {}
    for step in sorted(files):
        models = load(folder, device, files[step])
        found[step] = [exponent(model, options).mean().item() for model in models]
    number = min(map(len, found.values()), default=0)
    return [{str(step): values[i] for step, values in found.items()} for i in range(number)]


def exponent(trained: Trained, options: Options) -> Tensor:  # (b,)
    x = trained.inputs(trained.rows(8, options.tokens)[0])
    return lyapunov(trained.layer, x)


@torch.no_grad()
def measure(trained: Trained, options: Options) -> dict[str, Any]:
    """All numbers of one model."""
    found: dict[str, Any] = {}
    if isinstance(trained.data.task, WordProblem):
        found |= {"horizon": horizon(trained, options), "recovery": recovery(trained, options)}
    found["exponent"] = exponent(trained, options).tolist()
    for kind in (steps, heads, transition, keys):
        found[kind.__name__] = kind(trained, options)
    if getattr(trained.layer.mixer, "num_householder", 0):
        found["reflections"] = reflections(trained, options)
    return found


def draw(out: Path) -> None:
    """The figures of all folders that have been measured; none for what no folder has."""
    runs = read_runs(out)
    labels = {
        "horizon": ("tokens", "accuracy of the labels"),
        "steps": ("tokens", "evaluations"),
        "exponents": ("training step", "largest Lyapunov exponent a token"),
    }
    for kind, (across, label) in labels.items():
        if not any(kind in model for run in runs.values() for model in run["models"]):
            continue
        figure, axes = plt.subplots(figsize=(5.4, 3.8), layout="constrained")
        for number, (name, run) in enumerate(runs.items()):
            for i, model in enumerate(run["models"] if kind in run["models"][0] else ()):
                points = model[kind]
                for solver, dashes in SOLVERS.items() if kind == "steps" else (("", "-"),):
                    values = [v[solver] if solver else v for v in points.values()]
                    shown = f"{name} {solver}".strip() if i == 0 else None
                    # the models of a folder have one colour
                    style: dict[str, Any] = {
                        "color": f"C{number}",
                        "linestyle": dashes,
                        "marker": ".",
                    }
                    axes.plot([int(t) for t in points], values, label=shown, **style)
        axes.set(xscale="linear" if kind == "exponents" else "log", xlabel=across, ylabel=label)
        axes.legend(fontsize="small")
        figure.savefig(out / f"{kind}.png", dpi=150)
        plt.close(figure)


def main(options: Options) -> None:
    device = choose_device(options.device)
    for folder in options.folders:
        models: list[dict[str, Any]] = []
        during = exponents(folder, device, options)
        for i, trained in enumerate(load(folder, device)):
            found = measure(trained, options)
            models.append(found | {"exponents": during[i]} if during else found)
            print(folder.name, json.dumps(models[-1]), flush=True)
            # after each, because a model takes minutes
            add_runs(options.out, {folder.name: {"models": models, "device": str(device)}})
    draw(options.out)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except UsageError as error:
        sys.exit(f"error: {error}")

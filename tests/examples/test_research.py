"""Scripts of examples/research: sizes, iterations, states and figures are those of their runs; the
published layers of the table equal their equations, token by token; games of chess, their boards
and short runs with them."""

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from tests.examples.training import a5_config
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import one_hot

import train_a5
from bedouin.solvers import SolveStats
from bedouin.tasks import stream
from common.evaluation import accuracy_figure, solve_scores
from common.run import Scores, as_json
from flags import UsageError
from research import experiment, games, iterations, states, summarize, summary
from research.data import metrics, predictions
from research.experiments.further import SIZES, further
from research.figures import figure_of_boards
from research.games import NAMES, Chess, boards_after, games_of
from research.rivals import M2RNN, GatedDeltaNet2, KimiDeltaAttention, Mamba3, RecurrentDeltaNet
from research.rivals.key_decay import NORM_EPS
from research.runs import add_runs, read_runs

PAGE = iterations.RESULTS / "README.md"


def test_steps_are_counted_before_and_after_training(tmp_path: Path) -> None:
    config = iterations.Config(tmp_path, seeds=1, steps=2, lengths=(2, 3), cap=40)
    iterations.main(config)
    entries = list(read_runs(tmp_path).values())
    assert [entry["steps"] for entry in entries] == [0, 2, 0, 2]
    for entry in entries:
        assert entry["iterations"].keys() == {"Picard", "Jacobi", "Anderson"}
        # exact after t steps, and one more finds that nothing changes
        assert all(1 <= entry["iterations"]["Jacobi"][t] <= int(t) + 1 for t in ("2", "3"))
    assert (tmp_path / "iterations.png").stat().st_size > 1000


def test_a_solve_that_does_not_converge_is_null() -> None:
    config, feedback = iterations.Config(lengths=(16,), cap=1), iterations.FEEDBACK["with feedback"]
    found = iterations.counts(config, iterations.make_model(config, feedback, "auto"), feedback)
    assert all(of == {"16": None} for of in found.values())


@pytest.mark.parametrize("layer", list(iterations.FEEDBACK))
def test_the_page_of_iterations_has_the_numbers_of_its_runs(layer: str) -> None:
    runs = read_runs(iterations.RESULTS)
    trained = [runs[f"{layer}, seed {seed}, 5000 steps"]["iterations"] for seed in range(3)]
    page = PAGE.read_text(encoding="utf-8")
    for solver in ("Picard", "Jacobi", "Anderson"):
        cells = [
            " ".join("–" if of[solver][t] is None else str(of[solver][t]) for of in trained)
            for t in ("16", "64", "256")
        ]
        assert f"| {layer} | {solver} | {' | '.join(cells)} |" in page


def test_states_of_a_run_are_drawn(tmp_path: Path) -> None:
    small = {"d_model": 8, "batch_size": 4, "steps": 2, "eval_every": 2, "eval_rows": 4}
    train_a5.main(a5_config(tmp_path / "run", final_rows=4, final_lengths=(), **small))
    states.main(states.Config(tmp_path / "run", length=3, words=4, out=tmp_path / "states.png"))
    assert (tmp_path / "states.png").stat().st_size > 1000


SCORES: Scores = {
    "accuracy": {"6": 0.995, "12": 0.5},
    "sequence_accuracy": {"6": 0.98, "12": 0.25},
    "num_steps": {"6": 7.0, "12": 13.0},
    "residual": {"6": 1e-6, "12": 3e-5},
    "conditioning": {"6": 0.5, "12": 0.25},
}


def test_json_replaces_what_it_cannot_hold() -> None:
    content = json.loads(as_json({"a": {"6": math.nan}, "h": [{"r": math.inf}, (1, 0.5)]}))
    assert content == {"a": {"6": None}, "h": [{"r": None}, [1, 0.5]]}


def labels(figure: Figure) -> list[str]:
    return [str(line.get_label()) for axes in figure.axes for line in axes.get_lines()]


def test_figure_shows_chance_and_the_iterations_of_iterative_solvers_only(
    figures: list[Figure],
) -> None:
    direct = {**SCORES, "num_steps": {"6": 1.0, "12": 1.0}}
    for scores in (SCORES, direct):
        accuracy_figure([scores], title="A5", train_length=6, chance=1 / 60)
    iterative, exact = figures
    assert "median iterations" in labels(iterative) and len(iterative.axes) == 2
    assert "median iterations" not in labels(exact) and len(exact.axes) == 1
    for figure in figures:
        assert "training length" in labels(figure)
        (chance,) = [x for x in figure.axes[0].get_lines() if x.get_label() == "chance, one token"]
        assert list(chance.get_ydata()) == [1 / 60, 1 / 60]  # type: ignore[arg-type]
        assert not figure.axes[0].collections


@pytest.mark.parametrize("runs", [[], [SCORES, {**SCORES, "accuracy": {"6": 1.0}}]])
def test_figure_refuses_runs_that_do_not_belong_together(runs: list[Scores]) -> None:
    with pytest.raises(ValueError, match="runs must be at least one, all evaluated at the same"):
        accuracy_figure(runs, title="A5", train_length=6, chance=1 / 60)


def test_three_seeds_become_one_figure(tmp_path: Path, figures: list[Figure]) -> None:
    paths = tuple(experiment.RESULTS / "cpu" / f"a5_cpu_seed{seed}" for seed in range(3))
    summarize.main(summarize.Config(paths, tmp_path / "f.png"))
    axes = figures[0].axes[0]
    assert (
        axes.get_title() == "A5, trained at length 6: seed 0, 1, 2, cpu"
        and len(axes.collections) == 2
    )
    assert len(figures[0].axes) == 1


def test_solve_scores_are_median_worst_and_smallest() -> None:
    fine = torch.ones(3, dtype=torch.bool)
    first = SolveStats(torch.tensor([1, 2, 9]), torch.tensor([0.1, 0.3, 0.2]), fine)
    second = SolveStats(
        torch.tensor([3, 3, 9]), torch.full((3,), 0.05), fine, torch.full((3,), 0.7)
    )
    one: Any = SimpleNamespace(accelerator=SimpleNamespace(gather=lambda tensor: tensor))
    scores = solve_scores(one, [first, second])
    assert scores == pytest.approx({"num_steps": 3.0, "residual": 0.3, "conditioning": 0.7})


Outputs = list[Tensor]  # of every token, (b, h, v)


def convolved(layer: Any, x: Tensor) -> Tensor:  # (b, t, m) -> (b, t, h, r)
    weight = layer.conv.weight.unsqueeze(1)
    padded = F.pad(layer.qkv_proj(x).mT, (weight.shape[-1] - 1, 0))
    return F.conv1d(padded, weight, groups=len(weight)).mT


def outer(k: Tensor, v: Tensor) -> Tensor:  # (b, h, p), (b, h, v) -> (b, h, p, v)
    return torch.einsum("bhp,bhv->bhpv", k, v)


def read(S: Tensor, k: Tensor) -> Tensor:  # (b, h, p, v), (b, h, p) -> (b, h, v)
    return torch.einsum("bhpv,bhp->bhv", S, k)


def m2rnn(layer: M2RNN, x: Tensor) -> Outputs:
    h, p, v = layer.num_heads, layer.head_dim, layer.value_dim
    qkv = F.silu(convolved(layer, x)).unflatten(-1, (h, -1))
    dt = F.softplus(layer.f_proj(x) + layer.dt_bias)
    f, gate = torch.exp(-layer.A_log.exp() * dt), F.silu(layer.g_proj(x)).unflatten(-1, (h, -1))
    S, outputs = x.new_zeros(len(x), h, p, v), []
    for t in range(x.shape[1]):
        q, k, value = qkv[:, t].split([p, p, v], -1)
        new = torch.tanh(S @ layer.state_weight + outer(k, value))
        S = torch.lerp(new, S, f[:, t, :, None, None])
        o = (read(S, q) + layer.D * value) * gate[:, t]
        outputs.append(F.rms_norm(o, (v,), None, NORM_EPS) * layer.norm_weight)
    return outputs


def recurrent_delta_net(layer: RecurrentDeltaNet, x: Tensor) -> Outputs:
    h, p, v = layer.num_heads, layer.head_dim, layer.value_dim
    raw = torch.cat([convolved(layer, x).unflatten(-1, (h, -1)), layer.b_proj(x).unsqueeze(-1)], -1)
    S, y, outputs = x.new_zeros(len(x), h, p, v), x.new_zeros(len(x), h, v), []
    for t in range(x.shape[1]):
        fed = raw[:, t] + torch.einsum("bhv,hvr->bhr", torch.tanh(y), layer.y_proj)
        q, k, value, beta = fed.split([p, p, v, 1], -1)
        k = torch.softmax(k, -1)
        S = S + outer(k, torch.sigmoid(beta) * (value - read(S, k)))
        y = read(S, torch.softmax(q, -1))
        outputs.append(y)
    return outputs


def key_decay(layer: GatedDeltaNet2, x: Tensor) -> Outputs:
    h, p, is_kimi = layer.num_heads, layer.head_dim, isinstance(layer, KimiDeltaAttention)
    qkv = F.silu(convolved(layer, x)).unflatten(-1, (-1, h, p))
    raw, low = torch.sigmoid(layer.strength_proj(x)), layer.low_proj(x)
    f = layer.f_proj(low[..., :p]) + layer.dt_bias
    g = torch.sigmoid(layer.g_proj(low[..., p:]))
    S, outputs = x.new_zeros(len(x), h, p, p), []
    for t in range(x.shape[1]):
        q, k, value = qkv[:, t].unbind(1)
        q, k = (u / u.norm(dim=-1, keepdim=True) for u in (q, k))
        gates = raw[:, t].unflatten(-1, (-1, h, 1 if is_kimi else p))
        b, w = 2 * gates[:, 0], 2 * gates[:, 0] if is_kimi else gates[:, 1]
        dt = F.softplus(f[:, t]).unflatten(-1, (h, p))
        S = torch.exp(-layer.A_log.exp()[:, None] * dt).unsqueeze(-1) * S
        S = S - outer(k, read(S, b * k)) + outer(k, w * value)
        o = F.rms_norm(read(S, q) / p**0.5, (p,), layer.norm_weight, NORM_EPS)
        outputs.append(o * g[:, t].unflatten(-1, (h, p)))
    return outputs


def mamba3(layer: Mamba3, x: Tensor) -> Outputs:
    h, n, d = layer.num_heads, layer.biases.shape[-1], layer.out_proj.in_features
    memory = before = x.new_zeros(len(x), h, n, d // h)
    angle, outputs = x.new_zeros(len(x), h, n // 4), []
    for raw in layer.in_proj(x).unbind(1):
        z, v, *BC, dt, A, trap, theta = raw.split([d, d, n, n, h, h, h, n // 4], -1)
        D_t, lam = F.softplus(dt + layer.dt_bias), torch.sigmoid(trap)
        angle = angle + torch.pi * torch.tanh(theta).unsqueeze(1) * D_t.unsqueeze(-1)
        turned = []
        for i, u in enumerate(BC):
            u = (F.rms_norm(u, (n,)) * layer.norm_weights[i]).unsqueeze(1) + layer.biases[i]
            number = torch.view_as_complex(u[..., : n // 2].unflatten(-1, (-1, 2)))
            number = number * torch.polar(torch.ones_like(angle), angle)
            turned.append(torch.cat([torch.view_as_real(number).flatten(-2), u[..., n // 2 :]], -1))
        v, alpha = v.unflatten(-1, (h, -1)), torch.exp(-F.softplus(A) * D_t)[..., None, None]
        now, own = outer(turned[0], v), (lam * D_t)[..., None, None]
        memory = alpha * (memory + (D_t[..., None, None] - own) * before) + own * now
        o, before = read(memory, turned[1]) + layer.D[:, None] * v, now
        outputs.append(o * F.silu(z).unflatten(-1, (h, -1)))
    return outputs


VALUES: dict[str, Any] = {"num_heads": 2, "head_dim": 3, "expand_v": 2 / 3}
KEYS: dict[str, Any] = {"num_heads": 2, "head_dim": 3, "d_conv": 3}


@pytest.mark.parametrize(
    ("make", "equations", "t"),
    [
        (partial(M2RNN, **VALUES, d_conv=3), m2rnn, 7),
        (partial(RecurrentDeltaNet, **VALUES, d_conv=3), recurrent_delta_net, 7),
        *((partial(GatedDeltaNet2, **KEYS), key_decay, t) for t in (1, 16, 34)),
        (partial(KimiDeltaAttention, **KEYS), key_decay, 34),
        (partial(Mamba3, d_state=8, head_dim=3, expand=1), mamba3, 67),
    ],
)
def test_equals_the_recurrence(make: Any, equations: Callable[..., Outputs], t: int) -> None:
    """Outputs and gradients, also behind decays so strong that their products are 0."""
    layer = make(6).double()
    parameters = dict(layer.named_parameters())
    marked = {n for n, p in parameters.items() if getattr(p, "_no_weight_decay", False)}
    exempt = {"A_log", "dt_bias", "D", "norm_weight", "norm_weights"}
    assert marked == exempt & parameters.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name in ("state_weight", "D", "norm_weight", "norm_weights", "biases", "A_log"):
                parameter.add_(2 * torch.randn_like(parameter))
    x = torch.randn(2, t, 6, dtype=torch.float64, requires_grad=True)
    expected = torch.stack(equations(layer, x), 1).flatten(-2) @ layer.out_proj.weight.T
    outputs, inputs = (layer(x), expected), [x, *layer.parameters()]
    grads = [torch.autograd.grad(v.square().sum(), inputs) for v in outputs]
    for pair in (outputs, *zip(*grads, strict=True)):
        torch.testing.assert_close(*pair, rtol=1e-7, atol=1e-7)


PLIES = (
    "e2e4 a7a5 e4e5 d7d5 e5d6 a5a4 b2b4 a4b3 g1f3 b8c6 f1e2 c8g4 e1g1 d8d6 h2h3 e8c8 h3g4 b3a2 "
    "g4g5 a2b1n g5g6 g8f6 g6h7 f6d7 h7h8q"
)
"""En passant, castling and promotions of both colours, and the last board."""
CPU = torch.device("cpu")
END = "RnBQ.RK. ..PPBPP. .....N.. ........ ........ ..nq.... .ppnppp. ..kr.b.Q"


def test_boards_after_special_moves() -> None:
    squares = [f"{file}{rank}" for rank in range(1, 9) for file in "abcdefgh"]
    parts = ((v[:2], v[2:4], v[4:] or ".") for v in PLIES.split())
    moves = [(squares.index(a), squares.index(b), ".nbrq".index(c)) for a, b, c in parts]
    last = boards_after(torch.tensor([moves, moves[::-1]]))[0, -1]
    assert "".join(NAMES[i] for i in last) == END.replace(" ", "")


def write(path: Path) -> Path:
    """A file of games of 3 and 4 random moves, which need not be legal here."""
    rng, high = np.random.default_rng(0), (64, 64, 5)
    train, test = (rng.integers(0, high, (6, n, 3), np.uint8) for n in (3, 4))
    np.savez(path, train=train, test=test)
    return path


def test_rows_are_games_and_measures_are_squares_boards_and_last_boards(tmp_path: Path) -> None:
    task = Chess(write(tmp_path / "g.npz"), 2)
    tokens, labels = task.sample(7, stream("train", 0))
    moves = tokens.view(7, 2, 3) - torch.tensor([0, 64, 128])
    known = games_of(task.path, "train", CPU)[:, :2].long()
    assert all(any(torch.equal(row, game) for game in known) for row in moves)
    assert torch.equal(labels, boards_after(moves))
    assert task.sample(2, stream("test", 0), length=4).labels.shape == (2, 4, 64)
    logits = torch.full((7, 6, task.output_size), -1.0)  # not at the last tokens of moves
    logits[:, 2::3] = one_hot(labels, 13).flatten(2).float()
    logits[0, 2, :13] = logits[0, 2, :13].flip(0).roll(1)  # a1 after the first move
    logits[1, 5, :26] = 0.0
    given = predictions(task, logits), labels, tokens
    right = (given[0].argmax(-1) == labels).double()
    boards = right.amin(-1)
    expected = {"token": right.mean(), "sequence": boards.mean(), "last": boards[:, 1].mean()}
    found = {name: float(measure(*given)) for name, measure in metrics(task).items()}
    assert found == pytest.approx({name: float(v) for name, v in expected.items()})
    with pytest.raises(ValueError, match=r"length must be in \[1, 3\]"):
        task.sample(1, stream("train", 0), length=4)
    with pytest.raises(UsageError, match="--games must be a file"):
        Chess(tmp_path / "none.npz").sample(1, stream("train", 0))


def test_files_of_games_hold_legal_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m, pytest.raises(UsageError, match="needs python-chess: pip"):
        m.setitem(sys.modules, "chess", None)
        games.play(0, "train", 2, 0)
    chess, path = pytest.importorskip("chess"), tmp_path / "a" / "g.npz"
    games.main(path, (1, 40), (1, 90), seed=1, processes=1)
    (moves,), position = games_of(path, "test", CPU), chess.Board()
    for left, entered, promotion in moves.tolist():  # find_move refuses illegal moves
        position.push(position.find_move(left, entered, promotion + 1 if promotion else None))
    last = boards_after(moves[None].long())[0, -1].view(8, 8).flip(0)
    assert [NAMES[i] for i in last.flatten()] == str(position).split()


@pytest.mark.parametrize("model", SIZES)
def test_a_short_run_its_numbers_and_its_figure(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = "--length 3 --eval-lengths 3 4 --steps 2 --log-every 1 --batch-size 2 --eval-rows 2"
    path, name = write(tmp_path / "g.npz"), f"chess-1m-{model}"
    extra = f"{short} --seeds 1 --lr 0.001 --device cpu --autocast no --no-compile --games {path}"
    config = experiment.Config(("chess",), (f"{name}-tuning",), extra=extra, out=tmp_path)
    assert experiment.main(config) == 0
    made = read_runs(tmp_path / "chess")[f"{name}-tuning"]
    (row,) = made["rows"]
    assert 0.9e6 < row["parameters"] < 1.1e6 and not any(row["failed"])
    *_, reported = {found.name: found for found in further(tmp_path)}["chess"].runs
    assert reported.name == name and reported.options.endswith("--seeds 3 --lr 0.001")
    add_runs(tmp_path / "chess", {name: made})
    numbers = summary.summarize(tmp_path)["chess"][model]
    assert numbers["squares_4"] == row["accuracy"]["4"]["token"] and numbers["tuning_runs"] == 1
    assert figure_of_boards(read_runs(tmp_path / "chess")) is not None

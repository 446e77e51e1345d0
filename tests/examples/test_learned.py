"""examples/research/learned.py: what trained layers have learned."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bedouin import Bedouin
from bedouin.state import BedouinState
from flags import UsageError
from research import ensemble, learned
from research.runs import read_runs
from research.study import Config

CPU = torch.device("cpu")


def trained(folder: Path, **options: object) -> Path:
    """A folder that ensemble.py has written, of a small layer with two heads."""
    flags = "--d-model 8 --d-state 3 --num-heads 2 --batch-size 8 --steps 2 --seeds 2".split()
    flags += "--log-every 2 --eval-rows 8 --eval-lengths 4 --no-stacked --device cpu".split()
    config = ensemble.parse([*flags, "--keep-weights", "--out", str(folder)])
    values = {**vars(config), "keep_every": 1, **options}
    ensemble.main(Config(**values))
    return folder


def test_every_number_of_every_model(tmp_path: Path) -> None:
    folder = trained(tmp_path / "s3", group="S3", length=4)
    options = learned.Options(
        (folder,), tmp_path, horizon=40, tokens=6, rows=4, noise=(0.5,), lengths=(4, 8)
    )
    learned.main(options)
    run = read_runs(tmp_path)["s3"]
    assert len(run["models"]) == 2
    for model in run["models"]:
        assert list(model["horizon"]) == ["16", "32", "40"]
        assert set(model["recovery"]) == {"0.0", "0.5"} and len(model["exponent"]) == 8
        assert model["steps"]["8"]["direct"] == 1 and 1 < model["steps"]["8"]["jacobi"] <= 9
        assert len(model["heads"]["without"]) == len(model["keys"]["dimension"]) == 2
        for low, middle, high in model["heads"]["decay_quantiles"]:
            assert 0 < low <= middle <= high < 1
        assert all(1 <= rank <= 8 for rank in model["transition"]["rank"])
        assert list(model["exponents"]) == ["1", "2"]
        last = sum(model["exponent"]) / len(model["exponent"])
        assert model["exponents"]["2"] == pytest.approx(last)
        reflections = model["reflections"]
        assert all(1 <= size <= 8 for size in reflections["dimension"])
        assert all(0 < beta < 1 for beta in reflections["beta"])
    for name in ("horizon", "steps", "exponents"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


def test_tasks_without_a_horizon(tmp_path: Path) -> None:
    folder = trained(tmp_path / "copy", task="copy", eval_lengths=(6,))
    learned.main(learned.Options((folder,), tmp_path, tokens=6, rows=4, lengths=(4, 8)))
    (first, _) = read_runs(tmp_path)["copy"]["models"]
    assert "horizon" not in first and len(first["steps"]) == 1


def test_the_weights_are_those_that_were_trained(tmp_path: Path) -> None:
    folder = trained(tmp_path, group="S3", length=4)
    row = json.loads((folder / "results.json").read_text())["rows"][0]
    for i, model in enumerate(learned.load(folder, CPU)):
        # the test rows of the training's own evaluation
        tokens, labels = model.data.eval_batch(8, 4)
        found = learned.accuracy(model.model(tokens[0]), labels[0]).mean().item()
        assert found == pytest.approx(row["accuracy"]["4"]["token"][i])


def test_a_head_is_switched_off_and_on_again(tmp_path: Path) -> None:
    folder = trained(tmp_path, group="S3", length=4)
    with torch.no_grad():
        check_heads(learned.load(folder, CPU)[0])


def check_heads(model: learned.Trained) -> None:
    """The outputs without each of two heads add up to that of both."""
    x, before = torch.randn(2, 5, 8), model.layer.out_proj.weight.clone()
    whole = model.layer(x)
    parts = []
    for head in range(2):
        with learned.without_head(model.layer, head):
            parts.append(model.layer(x))
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-6)
    assert torch.equal(model.layer.out_proj.weight, before)


SIZES: dict[str, Any] = {"d_state": 3, "num_heads": 2, "dtype": torch.float64}


@pytest.mark.parametrize("num_householder", [0, 2])
@pytest.mark.parametrize("d_conv", [None, 3])
def test_the_jacobian_is_that_of_autograd(d_conv: int | None, num_householder: int) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"d_conv": d_conv, "num_householder": num_householder}
    layer = Bedouin(4, feedback_init=1.0, **SIZES, **options)
    _, state = layer(torch.randn(1, 5, 4, dtype=torch.float64), return_state=True)
    x_t, (ssm, y, *window) = torch.randn(1, 4, dtype=torch.float64), state.tensors
    with torch.no_grad():
        J = learned.jacobian(layer, x_t, state, 1).flatten(2).flatten(0, 1)

    def after(flat: torch.Tensor) -> torch.Tensor:
        h, own = flat.view(1, 4, 4).split([3, 1], dim=2)
        own = own.squeeze(2)
        moved = BedouinState(torch.cat([ssm[:, :4], h], 1), torch.cat([y[:, :4], own], 1), *window)
        _, found = layer.step(x_t, moved)
        return torch.cat([found.ssm[0, 4:], found.y[0, 4:, None]], 1).flatten()

    flat = torch.cat([ssm[0, 4:], y[0, 4:, None]], 1).flatten().detach()
    expected = torch.autograd.functional.jacobian(after, flat)
    torch.testing.assert_close(J, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("feedback", [(), ("delta",)])
def test_the_largest_moduli_are_those_of_the_whole_jacobian(feedback: tuple[str, ...]) -> None:
    """Also where channels do not interact, as without feedback and mixing."""
    torch.manual_seed(0)
    layer = Bedouin(4, num_householder=0, feedback=feedback, input_scale="delta", **SIZES)
    with torch.no_grad():
        _, state = layer(torch.randn(1, 5, 4, dtype=torch.float64), return_state=True)
        J = learned.jacobian(layer, torch.randn(1, 4, dtype=torch.float64), state, 0)
    assert bool(J[..., -1].any()) == bool(feedback)
    moduli = torch.linalg.eigvals(J.flatten(2).flatten(0, 1)).abs().sort(descending=True).values
    expected = moduli[: learned.EIGENVALUES].tolist()
    assert learned.largest_moduli(J) == pytest.approx(expected, abs=1e-9)


def test_equal_values_all_take_part() -> None:
    assert learned.participation(torch.full((5,), 0.3)) == pytest.approx(5)
    assert learned.participation(torch.tensor([2.0, 0.0, 0.0])) == pytest.approx(1)


def test_what_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must have results.json and weights-point0.safetensors"):
        learned.load(tmp_path, CPU)
    folder = trained(tmp_path, group="S3", length=4, num_layers=2)
    with pytest.raises(UsageError, match="one layer of Bedouin"):
        learned.load(folder, CPU)

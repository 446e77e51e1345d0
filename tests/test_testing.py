"""bedouin.testing: assertions fail when they should, and measurements are right."""

import pytest
import torch
from torch import Tensor

from bedouin import Bedouin
from bedouin.solvers import Direct, GammaCap, Picard
from bedouin.testing import (
    assert_close,
    decode_gap,
    find_fixed_point,
    measure_growth,
    relative_error,
)

NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=[1, 2])
def layer(request: pytest.FixtureRequest) -> Bedouin:
    """With one head and with two."""
    return Bedouin(4, d_state=4, num_heads=request.param, dtype=torch.float64)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1e-3], [0.0], 1e-3),
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([NAN, 1.0], [1.0, 1.0], INF),
        ([1.0, 1.0], [NAN, 1.0], INF),
        ([INF], [INF], 0.0),
        ([INF], [-INF], INF),
        ([], [], 0.0),
    ],
)
def test_relative_error(actual: list[float], expected: list[float], error: float) -> None:
    assert relative_error(torch.tensor(actual), torch.tensor(expected)) == pytest.approx(error)


def test_assert_close_names_tensor_error_and_place() -> None:
    expected = torch.tensor([[1.0, -4.0], [2.0, 3.0]])
    actual = expected + torch.tensor([[0.0, 0.0], [0.5, 0.0]])
    message = (
        r"weights: relative error 1.25e-01 > 1.0e-03 \(.*4.00e\+00\), "
        r"worst at \(1, 0\): 2.5, expected 2"
    )
    with pytest.raises(AssertionError, match=message):
        assert_close("weights", actual, expected, 1e-3)
    assert_close("weights", actual, expected, 0.13)
    assert_close("weights", actual, expected, 0.0, atol=0.5)


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        (torch.zeros(3), r"y: shape \(3,\), not \(2,\)"),
        (torch.zeros(2, dtype=torch.float64), "y: dtype torch.float64, not torch.float32"),
        (torch.tensor([0.0, NAN]), r"y: relative error inf .*worst at \(1,\): nan"),
        (torch.tensor([INF, 0.0]), r"y: relative error inf .*worst at \(0,\): inf"),
    ],
)
def test_assert_close_is_not_fooled(actual: Tensor, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_close("y", actual, torch.zeros(2), 1.0)


def test_growth_of_a_mild_layer_is_small(layer: Bedouin, x: Tensor) -> None:
    growth = measure_growth(layer, x)
    assert 1 <= growth < 50
    assert measure_growth(layer, x) == growth != measure_growth(layer, x, seed=1)


def growths(t: int) -> list[float]:
    """Of layers with large initial feedback, on t tokens."""
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        layer = Bedouin(
            4, d_state=1, num_householder=1, beta_max=2.0, decay="griffin", input_scale="delta",
            feedback_init=10.0, dtype=torch.float64,
        )  # fmt: skip
        x = torch.randn(1, 64, 4, dtype=torch.float64)
        found.append(measure_growth(layer, x[:, :t]))
    return found


def test_growth_sees_what_feedback_does_over_time() -> None:
    assert max(growths(64)) > 1e2
    assert max(growths(1)) < 10


def test_growth_where_a_result_is_not_finite(layer: Bedouin, x: Tensor) -> None:
    x[0, 2, 1] = NAN
    assert measure_growth(layer, x) == INF
    assert measure_growth(layer, x[:, :0]) == 1.0
    with pytest.raises(ValueError, match="size must be positive, got 0"):
        measure_growth(layer, x, size=0)


def test_residual_is_measured_on_the_layers_own_map(layer: Bedouin, x: Tensor) -> None:
    exact = find_fixed_point(layer, x, solver=Direct())
    loose = find_fixed_point(layer, x, solver=Picard(rtol=0.3))
    assert exact.residual.max() < 1e-14
    assert 1e-6 < loose.residual.max() < 0.3
    assert torch.equal(exact.output, layer(x))


def test_decode_gap_sees_a_loose_parallel_solve(layer: Bedouin, x: Tensor) -> None:
    assert decode_gap(layer, x) < 1e-12
    layer.solver = Picard(rtol=0.3)
    assert decode_gap(layer, x) > 1e-6
    assert decode_gap(layer, x[:, :0]) == 0.0


def test_measurements_are_those_of_evaluation() -> None:
    layer = Bedouin(4, solver=Picard(rtol=1e-12), max_steps=GammaCap(1.0, 0.5, 500)).double()
    x, before = torch.randn(2, 20, 4, dtype=torch.float64), torch.get_rng_state()
    assert decode_gap(layer, x) < 1e-9 and measure_growth(layer, x) >= 1
    assert torch.equal(torch.get_rng_state(), before) and layer.training

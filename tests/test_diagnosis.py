"""`diagnose`, its table and its figure, and bedouin.testing: the numbers are right, the layer is as
before, and assertions fail when they should."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.messages import Row, of, refused
from torch import Tensor

from bedouin import Bedouin, FixedPointRNN, LowRank, diagnose
from bedouin.baselines import LSTM
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.layers.mixers import ChannelMixer
from bedouin.solvers import (
    Anderson,
    Direct,
    GammaCap,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    Picard,
    UnrolledAdjoint,
)
from bedouin.testing import (
    assert_close,
    decode_gap,
    find_fixed_point,
    layer_gradients,
    log_growth,
    lyapunov,
    measure_growth,
    relative_error,
)


class Diagonal(ChannelMixer):
    """Q = diag(sigmoid(raw)), which has no declared structure."""

    def raw_size(self, d_inner: int) -> int:
        return d_inner

    def complement(self, raw: Tensor, v: Tensor) -> Tensor:
        return torch.sigmoid(-raw) * v


def chaotic(**options: Any) -> Bedouin:
    layer = Bedouin(
        4, d_state=2, feedback_init=20.0, decay="griffin", input_scale="delta",
        on_unconverged="ignore", **options,
    )  # fmt: skip
    with torch.no_grad():
        layer.dt_bias.fill_(3.0)
    return layer


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 12, 4)


def test_growth_is_that_of_the_jacobian_of_each_token() -> None:
    """One channel without feedback: the state is a number, and so is the Jacobian."""
    layer = FixedPointRNN(1, expand=1, feedback=(), dtype=torch.float64)
    x = torch.randn(2, 9, 1, dtype=torch.float64)
    expected, state = [], layer.init_state(2)
    for x_t in x.unbind(1):
        h = state.ssm.detach().requires_grad_()
        state = layer.step(x_t, state._replace(ssm=h))[1]
        # y_t is h_t, so that both entries of the state grow alike after the first token
        expected.append(torch.autograd.grad(state.ssm.sum(), h)[0].flatten().abs().log())
    steps = torch.stack(expected)
    growth = log_growth(layer, x, num_directions=3)
    torch.testing.assert_close(growth.diff(dim=0), steps[1:], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lyapunov(layer, x), steps[2:].mean(0), rtol=1e-6, atol=1e-6)


LAYERS: list[tuple[type[FixedPointLayer], dict[str, Any]]] = [
    (Bedouin, {"num_heads": 2, "solver": Picard(), "adjoint": OneStepAdjoint()}),
    (Bedouin, {"mixer": LowRank(2), "dtype": torch.bfloat16}),
    (Bedouin, {"mixer": Diagonal(), "num_heads": 4, "solver": Anderson(rtol=1e-3)}),
    (FixedPointRNN, {"num_heads": 4, "solver": Jacobi(), "max_steps": GammaCap(4.0, 1.0, 30)}),
]


@pytest.mark.parametrize(("kind", "options"), LAYERS, ids=str)
def test_it_measures_any_layer_and_leaves_it_alone(
    kind: type[FixedPointLayer], options: dict[str, Any], x: Tensor
) -> None:
    layer: FixedPointLayer = kind(4, **{"on_unconverged": "raise", **options})
    x = x.to(layer.D.dtype)
    called: list[Any] = []
    layer.register_forward_pre_hook(lambda *_: called.append(layer))
    layer(x).sum().backward()
    layer.D.requires_grad_(False)
    stats, generator = layer.stats, torch.get_rng_state()
    grads = [parameter.grad for parameter in layer.parameters()]
    before = copy.deepcopy((layer.state_dict(), grads))

    found = diagnose(layer, x)

    assert layer.stats is stats and layer.training and not layer.D.requires_grad
    assert len(called) == 1 and torch.equal(torch.get_rng_state(), generator)
    torch.testing.assert_close((layer.state_dict(), grads), before, rtol=0, atol=0)
    assert all(p.grad is grad for p, grad in zip(layer.parameters(), grads, strict=True))

    assert found.growth.shape == (12, 2) and found.lyapunov.shape == (2,)
    assert found.decode_gap < 5e-2 and found.bias < 0.5 and 0.8 < found.cosine < 1 + 1e-12
    names = [run.name.partition("(")[0] for run in found.runs]
    if isinstance(options.get("mixer"), Diagonal):
        assert names == ["Anderson", "Picard", "Broyden"]
        assert found.pivots is None and found.contraction is None
    else:
        assert set(names) == {"Direct", "Jacobi", "Picard", "Anderson", "Broyden"}
        assert found.pivots is not None and found.pivots.shape == (2,)
        assert found.contraction is not None and 0 < found.contraction < 1
    for run in found.runs:
        assert run.converged == 1 and run.stats.history is not None
        assert run.stats.history.shape == (run.steps, 2)
    assert all(math.isfinite(v) for v in (found.bias, found.cosine, found.decode_gap))
    assert bool(found.lyapunov.isfinite().all() and found.growth.isfinite().all())
    table = str(found)
    assert all(run.name in table for run in found.runs) and "Nothing to change" in table


def test_the_numbers_are_what_they_say(x: Tensor) -> None:
    layer: Any = Bedouin(4, solver=Picard(rtol=1e-3), adjoint=OneStepAdjoint(), dtype=torch.float64)
    x = x.double()
    found = diagnose(layer, x)
    chosen = layer_gradients(layer, x)
    exact = layer_gradients(layer, x, ImplicitAdjoint(), solver=Direct())
    g, g_exact = (
        torch.cat([v[n].flatten() for n, _ in layer.named_parameters()]) for v in (chosen, exact)
    )
    assert found.bias == pytest.approx(((g - g_exact).norm() / g_exact.norm()).item())
    assert found.cosine == pytest.approx(torch.cosine_similarity(g, g_exact, 0).item())
    assert found.decode_gap == decode_gap(layer, x)
    assert found.rtol == 1e-3 and found.runs[0].name == "Picard(rtol=0.001)"
    layer(x)
    assert torch.equal(found.runs[0].stats.num_steps, layer.stats.num_steps)
    assert diagnose(layer, x, rtol=1e-8).runs[2].steps > found.runs[1].steps
    assert max(run.steps for run in diagnose(layer, x, max_steps=2).runs) == 2

    fixed = find_fixed_point(layer, x, solver=Direct())
    apply, _ = fixed.f.block_transpose(fixed.y)  # type: ignore[union-attr]
    columns = [apply(v.expand_as(fixed.y)) for v in torch.eye(layer.d_inner, dtype=x.dtype)]
    radius = torch.linalg.eigvals(torch.stack(columns, -1)).abs().max().item()
    assert found.contraction == pytest.approx(radius, rel=0.05)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (
            {"beta_max": 2.0, "solver": Jacobi(), "adjoint": OneStepAdjoint()},
            [
                "The layer is chaotic here: a difference grows",
                "Undamped Picard does not contract",
                "Direct takes one sweep and is exact",
                "The gradient is off by",
            ],
        ),
        (
            {"solver": Picard(), "max_steps": 3},
            ["does not converge on 100%: use Direct", "Decoding differs .*: use Direct, or a sm"],
        ),
    ],
    ids=["jacobi", "picard"],
)
def test_advice(options: dict[str, Any], advice: list[str]) -> None:
    torch.manual_seed(1)
    text = str(diagnose(chaotic(**options), torch.randn(3, 16, 4)))
    for sentence in advice:
        assert re.search(sentence, text), text


def test_an_input_that_is_not_finite_is_reported(x: Tensor) -> None:
    x[0, 3] = torch.nan
    found = diagnose(Bedouin(4), x)
    assert bool(found.lyapunov.isnan().any()) and found.runs[0].converged == 0.5
    assert "Direct() does not converge on 50%: check input, pivots and growth." in str(found)


U = torch.zeros(2, 12, 4)
OTHER: Any = LSTM(4)
UNROLLED = Bedouin(4, solver=Anderson(), adjoint=UnrolledAdjoint())
WRONG: list[Row] = [
    *((of(measure, OTHER, U), TypeError, "layer must be a Bedouin or FixedPointRNN, got LSTM: of")
      for measure in (diagnose, lyapunov, find_fixed_point, measure_growth)),
    (of(diagnose, Bedouin(4), U[:, :0]), ValueError,
     "at least one sample and token, got (2, 0, 4)"),
    (of(diagnose, Bedouin(4), U, rtol=-1.0), ValueError, "rtol must lie in"),
    (of(diagnose, UNROLLED, U), TypeError, "UnrolledAdjoint cannot differentiate Anderson"),
    (of(lyapunov, Bedouin(4), U[:, :0]), ValueError,
     "x must have shape ... t >= 1, got (2, 0, 4)"),
    *((of(assert_close, "y", actual, torch.zeros(2), 1.0), AssertionError, message)
      for actual, message in (
          (torch.zeros(3), "y: shape (3,), not (2,)"),
          (torch.zeros(2).double(), "y: dtype torch.float64, not torch.float32"),
          (torch.tensor([0.0, math.nan]), "y: relative error inf ...worst at (1,): nan"),
          (torch.tensor([math.inf, 0.0]), "y: relative error inf ...worst at (0,): inf"),
      )),
]  # fmt: skip

test_what_is_refused = refused(WRONG)


def test_the_figure(tmp_path: Path, x: Tensor) -> None:
    found = diagnose(Bedouin(4), x[:, :3])
    path = tmp_path / "diagnosis.svg"
    assert len(found.plot(path).axes) == 4
    assert "Lyapunov" in path.read_text()


NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=[1, 2])
def layer(request: pytest.FixtureRequest) -> Bedouin:
    """With one head and with two."""
    return Bedouin(4, d_state=4, num_heads=request.param, dtype=torch.float64)


@pytest.fixture
def u() -> Tensor:
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


def test_growth_of_a_mild_layer_is_small(layer: Bedouin, u: Tensor) -> None:
    growth = measure_growth(layer, u)
    assert 1 <= growth < 50
    assert measure_growth(layer, u) == growth != measure_growth(layer, u, seed=1)


def test_growth_sees_what_feedback_does_over_time() -> None:
    layer, u = chaotic(dtype=torch.float64), torch.randn(1, 64, 4, dtype=torch.float64)
    assert measure_growth(layer, u) > 1e2
    assert measure_growth(layer, u[:, :1]) < 10


def test_growth_where_a_result_is_not_finite(layer: Bedouin, u: Tensor) -> None:
    u[0, 2, 1] = NAN
    assert measure_growth(layer, u) == INF
    assert measure_growth(layer, u[:, :0]) == 1.0


def test_residual_is_measured_on_the_layers_own_map(layer: Bedouin, u: Tensor) -> None:
    exact = find_fixed_point(layer, u, solver=Direct())
    loose = find_fixed_point(layer, u, solver=Picard(rtol=0.3))
    assert exact.residual.max() < 1e-14
    assert 1e-6 < loose.residual.max() < 0.3
    assert torch.equal(exact.output, layer(u))


def test_decode_gap_sees_a_loose_parallel_solve(layer: Bedouin, u: Tensor) -> None:
    assert decode_gap(layer, u) < 1e-12
    layer.solver = Picard(rtol=0.3)
    assert decode_gap(layer, u) > 1e-6
    assert decode_gap(layer, u[:, :0]) == 0.0


def test_measurements_are_those_of_evaluation() -> None:
    layer = Bedouin(4, solver=Picard(rtol=1e-12), max_steps=GammaCap(1.0, 0.5, 500)).double()
    u, before = torch.randn(2, 20, 4, dtype=torch.float64), torch.get_rng_state()
    assert decode_gap(layer, u) < 1e-9 and measure_growth(layer, u) >= 1
    assert torch.equal(torch.get_rng_state(), before) and layer.training

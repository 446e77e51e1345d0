"""Warnings and errors about solves that fail: which calls, which samples, which line."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bedouin import Bedouin, FixedPointRNN, NoMixing
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.solvers import (
    Anderson,
    Broyden,
    ConvergenceError,
    ConvergenceWarning,
    Direct,
    GammaCap,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    Picard,
    Solver,
    solve,
)
from bedouin.solvers.reporting import DeferredWarning

SOLVERS: list[Solver] = [Direct(), Jacobi(), Picard(), Anderson(), Broyden()]
NAN = torch.nan
interpreted = pytest.param("triton", marks=pytest.mark.interpreter)
on_gpu = pytest.param("cuda", marks=pytest.mark.gpu)


def make(**options: Any) -> Any:
    return Bedouin(4, d_state=2, dtype=torch.float64, **options)


def draw(*spoiled: int, b: int = 3, t: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    """An input whose samples `spoiled` are NaN from the second token on."""
    x = torch.randn(b, t, 4, dtype=dtype)
    for sample in spoiled:
        x[sample, 1:] = NAN
    return x


# -- random caps


SHORT = GammaCap(shape=1e-3, scale=1e-3, limit=9)
FAILING: list[tuple[dict[str, Any], tuple[int, ...], str]] = [
    # an iteration cannot converge in a single step, but this cap is also the limit
    *(
        ({"solver": solver, "max_steps": GammaCap(limit=limit)}, (1,), f"{count} of 3.*not finite")
        for solver in SOLVERS
        for limit, count in ((1, 1 if solver.is_exact else 3), (50, 1))
    ),
    (
        {"solver": Picard(0.0, 0.0), "max_steps": GammaCap(shape=50.0, limit=3)},
        (),
        "Bedouin: 3 of 3 samples did not converge in 3 steps .*raise max_steps",
    ),
    # rounding is the only reason for an exact solve not to converge
    ({"adjoint": OneStepAdjoint(), "max_steps": SHORT}, (2,), "1 of 3"),
]


@pytest.mark.parametrize(("options", "spoiled", "message"), FAILING, ids=str)
def test_what_a_random_cap_does_not_excuse(
    options: dict[str, Any], spoiled: tuple[int, ...], message: str
) -> None:
    """A sample that is not finite, a cap drawn at its limit, and an exact solve that is cut."""
    assert SHORT.draw(0) == 1
    layer = make(on_unconverged="raise", **options)
    with pytest.raises(ConvergenceError, match=message):
        layer(draw(*spoiled))
    layer.on_unconverged = "warn"
    with pytest.warns(ConvergenceWarning, match=message):
        layer(draw(*spoiled))


@pytest.mark.parametrize("solver", [Direct(), Picard()])
def test_a_random_cap_excuses_an_adjoint_that_it_cuts_short(solver: Solver) -> None:
    adjoint = ImplicitAdjoint(Picard(0.0, 0.0))
    cap = GammaCap(limit=50)
    layer = make(solver=solver, adjoint=adjoint, max_steps=cap, on_unconverged="raise")
    layer(draw()).sum().backward()
    assert not bool(layer.stats.backward.converged.all())
    with pytest.raises(ConvergenceError, match="Bedouin, adjoint solve: 1 of 3.*not finite"):
        layer(draw()).backward(spoil(1))


# -- the exact adjoint


def spoil(*samples: int, b: int = 3, t: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    """A cotangent of the output that is NaN at the last token of some samples."""
    grad = torch.ones(b, t, 4, dtype=dtype)
    for sample in samples:
        grad[sample, -1] = NAN
    return grad


EXACT = [
    (Bedouin, Direct(), "reference"),
    (Bedouin, Jacobi(), "reference"),
    (Bedouin, Picard(), "reference"),
    (Bedouin, Anderson(), "reference"),
    (FixedPointRNN, Direct(), "reference"),
    pytest.param(Bedouin, Direct(), "triton", marks=pytest.mark.interpreter),
]


@pytest.mark.parametrize(("kind", "solver", "backend"), EXACT)
def test_the_exact_adjoint_raises_and_warns(kind: Any, solver: Solver, backend: str) -> None:
    layer: Any = kind(4, solver=solver, backend=backend)
    x, grad = draw(t=2, dtype=torch.float32), spoil(0, t=2, dtype=torch.float32)
    message = f"{kind.__name__}, adjoint solve: 1 of 3 samples did not.*not finite"
    layer.on_unconverged = "raise"
    with pytest.raises(ConvergenceError, match=message) as caught:
        layer(x).backward(grad)
    assert layer.stats.backward.converged.tolist() == [False, True, True]
    assert caught.value.stats is not None
    assert torch.equal(caught.value.stats.converged, layer.stats.backward.converged)
    layer.on_unconverged = "warn"
    with pytest.warns(ConvergenceWarning, match=message) as found:
        layer(x).backward(grad)
    assert len(found) == 1
    layer.on_unconverged = "ignore"
    layer(x).backward(grad)
    assert layer.stats.backward.converged.tolist() == [False, True, True]


@pytest.mark.parametrize("place", ["reference", interpreted, on_gpu])
@pytest.mark.parametrize("solver", [Direct(), Picard()])
@pytest.mark.parametrize("options", [{}, {"feedback": ()}, {"num_heads": 2}, {"d_state": 64}])
@pytest.mark.parametrize("value", [NAN, torch.inf])
def test_an_adjoint_without_reflections_is_reported(
    place: str, solver: Solver, options: dict[str, Any], value: float
) -> None:
    """Its equation is explicit, so that a cotangent that is not finite leaves a defect of 0."""
    kept: dict[str, Any] = {"device": "cuda"} if place == "cuda" else {"backend": place}
    m, t = (64, 40) if place == "cuda" else (4, 3)
    kept |= {"mixer": NoMixing(), "on_unconverged": "raise"}
    layer: Any = Bedouin(m, solver=solver, **kept, **options)
    grad = torch.ones(3, t, m)
    grad[1, 1] = value
    x, grad = (v.to(layer.D.device) for v in (torch.randn(3, t, m), grad))
    with pytest.raises(ConvergenceError, match="Bedouin, adjoint solve: 1 of 3 samples.*not fin"):
        layer(x).backward(grad)
    assert layer.stats.backward.converged.tolist() == [True, False, True]
    assert layer.stats.backward.residual.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("solver", SOLVERS)
def test_statistics_of_a_map_have_one_entry_a_sample(solver: Solver) -> None:
    layer, start = make(num_heads=4), torch.zeros(3, 2, 8).double()
    f = layer.map(torch.randn(3, 2, 4, dtype=torch.float64))
    solution = solve(f, start, solver, time_dim=1)
    with pytest.warns(ConvergenceWarning, match="solve, adjoint solve: 3 of 3"):
        solution.value.backward(torch.full_like(start, NAN))
    for stats in (solution.stats, solution.stats.backward):
        assert stats is not None
        assert stats.num_steps.shape == stats.residual.shape == stats.converged.shape == (3,)


def test_of_a_vmapped_call_the_adjoint_is_not_read() -> None:
    layer, x = make(on_unconverged="raise"), draw().unsqueeze(1).requires_grad_()
    torch.func.vmap(layer)(x).backward(spoil(0).unsqueeze(1))
    assert x.grad is not None and x.grad.isnan().flatten(1).any(1).tolist() == [True, False, False]
    layer.solver, layer.max_steps = Picard(0.0, 0.0), 2
    torch.func.vmap(layer)(x)  # nor is the outcome of the call


# -- statistics and messages


@pytest.mark.parametrize("solver", SOLVERS)
def test_after_an_error_the_statistics_are_those_of_the_failed_call(solver: Solver) -> None:
    layer = make(solver=solver, on_unconverged="raise")
    layer(draw())
    with pytest.raises(ConvergenceError) as caught:
        layer(draw(0, 2))
    assert layer.stats is caught.value.stats and layer.stats is not None
    assert layer.stats.converged.tolist() == [False, True, False]


class Model(nn.Module):
    """A user's own module around a layer."""

    def __init__(self, layer: FixedPointLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def line_of(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_warnings_point_at_the_line_of_the_user() -> None:
    layer, grad = make(), spoil(0)
    with pytest.warns(ConvergenceWarning) as found:
        Model(layer)(draw(1))
        y = layer(draw())
        y.backward(grad)  # the adjoint
        layer.step(draw(0)[:, 1], layer.init_state(3))  # a token
        layer.deferred.warn("late", "late")  # as `flush` does
    lines = [line_of(Model.forward, "self.layer(x)")]
    here = test_warnings_point_at_the_line_of_the_user
    lines += [line_of(here, text) for text in ("# the adjoint", "# as `flush`")]
    assert [w.filename for w in found] == [__file__] * len(lines)
    assert [w.lineno for w in found] == lines


def test_a_warning_of_solve_points_at_its_caller() -> None:
    with pytest.warns(ConvergenceWarning) as found:
        solve(lambda y: 2 * y + 1, torch.zeros(1, 1), Picard(), max_steps=3)
    assert found[0].filename == __file__


def test_forward_and_adjoint_are_counted_apart_and_layers_too() -> None:
    layers = [make(), make()]
    with pytest.warns(ConvergenceWarning) as found:
        for layer in layers:
            layer(draw(0))
            layer(draw()).backward(spoil(0))
    assert len(found) == 4


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputation_is_not_reported_again(use_reentrant: bool) -> None:
    layer = make(solver=Picard(0.0, 0.0), adjoint=OneStepAdjoint(), max_steps=2)
    layer.deferred = DeferredWarning(every=True)
    x = draw().requires_grad_()
    with pytest.warns(ConvergenceWarning):
        y = checkpoint(layer, x, use_reentrant=use_reentrant)
    y.sum().backward()


class _SolvesBackward(torch.autograd.Function):
    """A function whose backward pass solves an equation of its own, without success."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return solve(lambda y: y + 1, grad, Picard(), max_steps=2).value


def test_a_solve_in_a_backward_pass_is_reported() -> None:
    y = _SolvesBackward.apply(draw().requires_grad_())  # type: ignore[no-untyped-call]
    with pytest.warns(ConvergenceWarning):
        y.sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_statistics_of_the_adjoint_under_checkpointing(use_reentrant: bool) -> None:
    layer = make()
    layer(draw())  # statistics of an earlier call, which has a graph and no backward pass
    checkpoint(layer, draw().requires_grad_(), use_reentrant=use_reentrant).sum().backward()
    assert bool(layer.stats.backward.converged.all())

"""`solve` on tuples and dictionaries of tensors, its callback and its history.

Letters: b batch, t tokens, c values of a token.
"""

from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from bedouin import Bedouin
from bedouin.solvers import (
    Anderson,
    Broyden,
    Direct,
    Jacobi,
    Picard,
    Solver,
    SolveStep,
    UnrolledAdjoint,
    solve,
)
from bedouin.testing import find_fixed_point

SOLVERS: list[Solver] = [Picard(1e-12, 0.0), Anderson(1e-12, 0.0), Broyden(1e-12, 0.0)]


class Pair(NamedTuple):
    a: Tensor  # (b, 3)
    b: Tensor  # (b, 2, 2)


def coupled(weight: Tensor, time: bool = False) -> tuple[Any, Any, Any, Any]:
    """A contraction of dictionaries, the same one of a joined tensor, and their starts."""
    rows = (2, 5) if time else (2,)
    x = torch.randn(*rows, 7, dtype=torch.float64)

    def joined(y: Tensor) -> Tensor:
        return torch.tanh(y @ weight + x)

    def of_trees(tree: dict[str, Any]) -> dict[str, Any]:
        pair, (other,) = tree["pair"], tree["rest"]
        y = torch.cat([pair.a, pair.b.flatten(-2), other.unsqueeze(-1)], -1)[..., :7]
        a, b, _ = joined(y).split([3, 4, 0], -1)
        return {"pair": Pair(a, b.unflatten(-1, (2, 2))), "rest": [other / 2 + 1]}

    zeros = torch.zeros(*rows, 7, dtype=torch.float64)
    start = {"pair": Pair(zeros[..., :3], zeros[..., 3:].unflatten(-1, (2, 2)))}
    return of_trees, start | {"rest": [zeros[..., 0]]}, joined, zeros


def flat(tree: dict[str, Any]) -> Tensor:
    """All values of such a dictionary without time, (b, 8)."""
    pair, (other,) = tree["pair"], tree["rest"]
    return torch.cat([pair.a, pair.b.flatten(1), other.unsqueeze(1)], 1)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("time", [False, True])
def test_a_tree_has_the_values_and_the_gradients_of_one_tensor(solver: Solver, time: bool) -> None:
    weight = (0.2 * torch.randn(7, 7, dtype=torch.float64)).requires_grad_()
    of_trees, start, joined, zeros = coupled(weight, time)
    time_dim: Literal[1] | None = 1 if time else None
    tree: Any = solve(of_trees, start, solver, max_steps=200, time_dim=time_dim).value
    expected = solve(joined, zeros, solver, max_steps=200, time_dim=time_dim).value
    pair, (other,) = tree["pair"], tree["rest"]
    assert isinstance(pair, Pair) and pair.b.shape == (*zeros.shape[:-1], 2, 2)
    found = torch.cat([pair.a, pair.b.flatten(-2)], -1)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(other, torch.full_like(other, 2.0), rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(v.square().sum(), weight)[0] for v in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


def test_a_tuple_is_unrolled() -> None:
    x = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    options: dict[str, Any] = {"adjoint": UnrolledAdjoint(), "max_steps": 100}
    start = (torch.zeros_like(x), torch.zeros_like(x))
    (a, b) = solve(lambda y: (y[1] / 2 + x, y[0] / 2), start, Picard(1e-12), **options).value
    # y0 = y1 / 2 + x, y1 = y0 / 2
    (gradient,) = torch.autograd.grad(a + b, x)
    assert gradient.item() == pytest.approx(2.0, abs=1e-9)


@pytest.mark.parametrize(
    ("y0", "error", "message"),
    [
        ((), ValueError, "at least one tensor"),
        ((torch.zeros(2), 1.0), TypeError, "got one of float"),
        ((torch.zeros(2), torch.zeros(2).double()), ValueError, "one dtype, got torch.float32"),
        ((torch.zeros(2), torch.zeros(3, 1)), ValueError, r"\(b,\), got \(2,\) and \(3, 1\)"),
    ],
)
def test_trees_that_do_not_fit(y0: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        solve(lambda y: y, y0, Picard())


@pytest.mark.parametrize("result", [torch.zeros(2, 1), (torch.zeros(2),), (torch.zeros(2, 1), 1)])
def test_f_must_keep_the_structure(result: Any) -> None:
    with pytest.raises(ValueError, match="structure and the shapes of y0"):
        solve(lambda y: result, (torch.zeros(2, 1),), Picard())


@pytest.mark.parametrize("solver", SOLVERS)
def test_history_and_callback_see_every_evaluation(solver: Solver) -> None:
    weight = 0.2 * torch.randn(7, 7, dtype=torch.float64)
    of_trees, start, _, _ = coupled(weight.requires_grad_())
    steps: list[SolveStep] = []
    solution = solve(
        of_trees, start, solver, max_steps=200, callback=steps.append, record_history=True
    )
    history = solution.stats.history
    assert history is not None and history.shape == (len(steps), 2)
    # all evaluations but the one that may only measure the last iterate
    assert int(solution.stats.num_steps.max()) in (len(steps), len(steps) - 1)
    torch.testing.assert_close(history[-1], solution.stats.residual, rtol=0, atol=0)
    assert [step.index for step in steps] == list(range(len(steps)))
    for step in steps:
        y, f_y = (flat(tree).detach() for tree in (step.value, of_trees(step.value)))
        residual = (f_y - y).abs().amax(1) / f_y.abs().amax(1)
        torch.testing.assert_close(step.residual, residual, rtol=1e-3, atol=1e-14)
        assert not step.value["pair"].a.requires_grad
    again = solve(of_trees, start, solver, max_steps=200)
    assert again.stats.history is None
    values: list[Any] = [again.value, solution.value]
    assert torch.equal(*(flat(value) for value in values))


@pytest.mark.parametrize(
    ("solver", "max_steps", "evaluations"),
    [(Jacobi(rtol=1e-12), 2, 3), (Jacobi(rtol=1e-12), 50, None), (Direct(), 1, 1)],
)
def test_history_of_a_structured_map(
    solver: Solver, max_steps: int, evaluations: int | None
) -> None:
    layer = Bedouin(4, d_state=2).double()
    f = find_fixed_point(layer, torch.randn(2, 5, 4, dtype=torch.float64)).f
    y0 = torch.zeros(2, 5, layer.d_inner, dtype=torch.float64)
    options: dict[str, Any] = {"time_dim": 1, "record_history": True, "on_unconverged": "ignore"}
    with torch.no_grad():
        solution = solve(f, y0, solver, max_steps=max_steps, **options)
    history = solution.stats.history
    assert history is not None
    # a cap that ends the solve is followed by one that only measures
    assert len(history) == (evaluations or int(solution.stats.num_steps.max()))
    assert torch.equal(history[-1], solution.stats.residual)

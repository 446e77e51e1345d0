"""Layers whose first raw values have feedback, against the same with rows of zeros in W^y."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin import Bedouin, LowRank
from bedouin.kernels.feedback import padded_rows
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.layers.options import split_feedback_weight
from bedouin.solvers import (
    Jacobi,
    OneStepAdjoint,
    PhantomAdjoint,
    Picard,
    UnrolledAdjoint,
)
from bedouin.testing import assert_close

DELTA = ("delta",)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 5e-2}
# these never converge, so both layers take all steps
STEPS: dict[str, Any] = {"max_steps": 3, "on_unconverged": "ignore"}
OPTIONS: list[dict[str, Any]] = [
    {"feedback": DELTA},
    {"feedback": DELTA, "dtype": torch.float32},
    {"feedback": DELTA, "dtype": torch.bfloat16, "num_heads": 2},
    {"feedback": DELTA, "num_heads": 2, "feedback_norm": False},
    {"feedback": DELTA, "mixer": LowRank(2)},
    {"feedback": ("delta", "B"), "input_scale": "one_minus_decay", "eigenvalues": "full"},
    {"feedback": ("delta", "B", "C"), "num_heads": 2},
    {"feedback": ("B",)},
    {"feedback": DELTA, "solver": Picard(rtol=0, atol=0), **STEPS},
    {"feedback": DELTA, "solver": Jacobi(rtol=0, atol=0), "num_heads": 2, **STEPS},
    {"feedback": DELTA, "solver": Picard(rtol=1e-12), "adjoint": OneStepAdjoint()},
    {"feedback": DELTA, "solver": Jacobi(rtol=1e-12), "adjoint": PhantomAdjoint(2)},
    {"feedback": DELTA, "adjoint": UnrolledAdjoint()},
]


def pair(**options: Any) -> list[FixedPointLayer]:
    """The same layer twice; the second multiplies by rows of zeros as well."""
    options = {"d_state": 3, "dtype": torch.float64, "feedback_init": 1.0, **options}
    layers: list[FixedPointLayer] = [Bedouin(4, **options) for _ in range(2)]
    whole: Any = layers[1]
    whole.load_state_dict(layers[0].state_dict())
    compact = whole._feedback_weights

    def feedback_weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        loop, gate = compact(dtype)
        return padded_rows(loop, whole.raw_size), gate

    whole._feedback_weights = feedback_weights
    return layers


def results(layer: FixedPointLayer, x: Tensor) -> list[Tensor]:
    """Of a call with padding, a second chunk, a step, and packed documents; the gradients."""
    x = x.clone().requires_grad_()
    mask = torch.tensor([[True, True, False], [True, True, True]])
    first, state = layer(x, mask=mask, return_state=True)
    second, state = layer(x, state, return_state=True)
    last, state = layer.step(x[:, 0], state)
    packed = layer(x.flatten(0, 1).unsqueeze(0), cu_seqlens=torch.tensor([0, 2, 6]))
    outputs = [first, second, last, state.ssm, state.y, packed]
    loss = torch.stack([v.double().sin().sum() for v in outputs]).sum()
    return [*outputs, *torch.autograd.grad(loss, [x, *layer.parameters()])]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_of_zeros_change_nothing(options: dict[str, Any]) -> None:
    compact, whole = pair(**options)
    dtype = compact.D.dtype
    x, tolerance = torch.randn(2, 3, 4, dtype=dtype), TOLERANCE[dtype]
    pairs = zip(results(compact, x), results(whole, x), strict=True)
    for i, (ours, theirs) in enumerate(pairs):
        assert ours.dtype == theirs.dtype
        assert_close(f"result {i}", ours.double(), theirs.double(), tolerance, atol=tolerance)


@pytest.mark.interpreter
@pytest.mark.parametrize("solver", [Picard(rtol=0, atol=0), Jacobi(rtol=0, atol=0)])
def test_iterations_in_kernels_pad_the_rows(solver: Any) -> None:
    """Against the plain iteration, which multiplies by the rows that there are."""
    layer, _ = pair(feedback=DELTA, solver=solver, dtype=torch.float32, **STEPS)
    exact, x = copy.deepcopy(layer).double(), torch.randn(1, 2, 4)
    layer.backend = "triton"
    with torch.no_grad():
        assert_close("output", layer(x).double(), exact(x.double()), 2e-6)


def test_rows_of_zeros_change_nothing_in_a_graph() -> None:
    compact, whole = pair(feedback=DELTA)
    compiled: Any = torch.compile(compact, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    assert_close("output", compiled(x), whole(x), 1e-10)


@pytest.mark.parametrize(
    ("feedback", "rows"),
    [
        (("a",), [1, 1]),
        (("a", "b"), [1, 1, 2]),
        (("b",), [0, 0, 2]),
        (("a", "c"), [1, 1, 0, 3]),
    ],
)
def test_the_rows_up_to_the_last_component_with_feedback(
    feedback: tuple[str, ...], rows: list[int]
) -> None:
    """Rows of "a", "b" and "c" hold 1, 2 and 3, those of the gate 4."""
    sizes, values = {"a": 2, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 3}
    kept = [float(values[name]) for name in feedback for _ in range(sizes[name])]
    weight = torch.tensor([*kept, 4.0, 4.0]).unsqueeze(1).expand(-1, 2)
    loop, gate = split_feedback_weight(weight, feedback, sizes, 2)
    assert loop is not None
    assert loop.tolist() == [[v, v] for v in rows]
    assert gate.tolist() == [[4, 4], [4, 4]]

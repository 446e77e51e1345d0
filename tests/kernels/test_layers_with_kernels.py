"""Layers that take the kernels of the exact sweep or of the iteration are those without."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin import Bedouin, FixedPointRNN, LowRank
from bedouin.kernels.backend import interpreter_is_on
from bedouin.solvers import Direct, Jacobi, OneStepAdjoint, Picard, UnrolledAdjoint
from bedouin.testing import assert_close

DEVICE = "cpu" if interpreter_is_on() else "cuda"
# numpy's, of rows of a program that have no sample
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.interpreter if interpreter_is_on() else pytest.mark.gpu,
]
ONE_STEP: dict[str, Any] = {"adjoint": OneStepAdjoint()}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Bedouin, {}),
        (Bedouin, {"decay": "griffin", "num_householder": 3, "feedback": ()}),
        (FixedPointRNN, {}),
        (FixedPointRNN, {"decay": "griffin", "beta_max": 2.0}),
        (Bedouin, ONE_STEP | {"solver": Jacobi(1e-2)}),
        (FixedPointRNN, ONE_STEP | {"solver": Picard(0.1)}),
        (FixedPointRNN, ONE_STEP | {"solver": Jacobi(1e-2)}),
        (Bedouin, ONE_STEP | {"solver": Picard(0.1), "num_heads": 2}),
        # which takes the plain loop
        (Bedouin, {"solver": Picard(0.1), "adjoint": UnrolledAdjoint()}),
    ],
    ids=str,
)
def test_a_layer_with_the_kernels_is_the_layer_without(kind: Any, options: dict[str, Any]) -> None:
    outputs: list[list[Tensor]] = []
    for backend in ("reference", "triton"):
        torch.manual_seed(0)
        layer = kind(5, device=DEVICE, backend=backend, **options)
        y = layer(torch.randn(2, 3, 5, device=DEVICE))
        outputs.append([y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))])
        assert bool(layer.stats.converged.all())
        assert "adjoint" in options or bool(layer.stats.backward.converged.all())
    tolerance = 2e-6 if "adjoint" in options else 2e-5
    for actual, expected in zip(outputs[1], outputs[0], strict=True):
        assert_close("output or gradient", actual, expected, tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": LowRank(2)}, r"does not support the mixer LowRank \(only HouseholderProduct"),
        (
            {"mixer": LowRank(2), "solver": Direct()},
            r"does not support the mixer LowRank \(only HouseholderProduct",
        ),
        ({"solver": Picard(patience=2)}, r"does not support adaptive damping \(patience\)"),
        ({"num_householder": 9}, "does not support 9 reflections"),
    ],
)
def test_what_the_kernels_do_not_cover_is_said(options: dict[str, Any], message: str) -> None:
    options = {"solver": Picard()} | options
    with pytest.raises(ValueError, match=message):
        Bedouin(5, device=DEVICE, backend="triton", **options)(torch.randn(1, 2, 5, device=DEVICE))

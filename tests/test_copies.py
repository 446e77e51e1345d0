"""Copies and checkpoints of a layer, and ensembles of layers under torch.func.vmap."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin import Bedouin, FixedPointRNN
from bedouin.solvers import GammaCap, ImplicitAdjoint, Jacobi, OneStepAdjoint, Picard
from bedouin.testing import assert_close

KINDS = [Bedouin, FixedPointRNN]
X = torch.linspace(-1, 1, 2 * 8 * 4, dtype=torch.float64).view(2, 8, 4)


@pytest.mark.parametrize(
    "other",
    [
        {"solver": Picard()},
        {"solver": Jacobi(), "adjoint": OneStepAdjoint()},
        {"adjoint": ImplicitAdjoint(Picard())},
        {"max_steps": GammaCap()},
        {"backend": "reference", "on_unconverged": "ignore"},
    ],
    ids=str,
)
def test_checkpoints_fit_layers_that_solve_otherwise(other: dict[str, Any]) -> None:
    first = Bedouin(4, max_steps=GammaCap())
    first(torch.randn(1, 2, 4))
    second = Bedouin(4, **other)
    second.load_state_dict(first.state_dict(), strict=True)
    first.load_state_dict(second.state_dict(), strict=True)
    assert first.state_dict().keys() == second.state_dict().keys()
    assert second.num_calls == 1


def stacked(layers: list[Bedouin]) -> dict[str, Tensor]:
    parameters, _ = torch.func.stack_module_state(layers)
    return parameters


def test_statistics_leave_a_transform_by_being_returned() -> None:
    layers = [Bedouin(4, dtype=torch.float64) for _ in range(2)]
    template = copy.deepcopy(layers[0])

    def call(own: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        output = torch.func.functional_call(template, own, (X,))
        assert template.stats is not None and template.stats.conditioning is not None
        return output, template.stats.conditioning

    _, conditioning = torch.vmap(call)(stacked(layers))
    for layer, expected in zip(layers, conditioning, strict=True):
        layer(X)
        assert layer.stats is not None and layer.stats.conditioning is not None
        assert_close("conditioning", layer.stats.conditioning, expected, 1e-10)


def test_vmap_over_models_does_not_warn() -> None:
    cut: dict[str, Any] = {"solver": Picard(rtol=1e-12, atol=0.0), "max_steps": 2}
    layers = [Bedouin(4, dtype=torch.float64, **cut) for _ in range(2)]
    template = copy.deepcopy(layers[0])

    def call(own: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(template, own, (X,))
        return output

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert torch.vmap(call)(stacked(layers)).shape == (2, *X.shape)

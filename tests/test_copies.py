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


@pytest.mark.parametrize("options", [{}, {"decay": "griffin", "feedback": ()}], ids=str)
def test_an_ensemble_under_vmap_is_the_loop_over_its_models(options: dict[str, Any]) -> None:
    layers = [Bedouin(4, d_state=4, dtype=torch.float64, **options) for _ in range(3)]
    x, parameters = torch.randn(3, 2, 6, 4, dtype=torch.float64), stacked(layers)
    template = copy.deepcopy(layers[0])

    def call(own: dict[str, Tensor], x: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(template, own, (x,))
        return output

    output = torch.vmap(call)(parameters, x)
    output.square().sum().backward()
    for i, layer in enumerate(layers):
        expected = layer(x[i])
        expected.square().sum().backward()
        assert_close(f"output {i}", output[i], expected, 1e-11)
        for name, p in layer.named_parameters():
            gradient = parameters[name].grad
            assert gradient is not None and p.grad is not None
            assert_close(f"gradient {i} of {name}", gradient[i], p.grad, 1e-9)


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

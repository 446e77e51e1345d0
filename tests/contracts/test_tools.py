"""Gradients of samples by opacus, which hooks every module of a model.

Letters: b batch, t time, m d_model.
"""

import copy

import pytest
import torch
from tests.layer_cases import CPU, draw, make

NAMES = "one head", "convolution", "no mixing", "vector, heads", "model"


# opacus warns of what it does itself, and the library of mixers with hooks
@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("kind", NAMES)
def test_gradients_of_samples_by_opacus(kind: str) -> None:
    opacus = pytest.importorskip("opacus")
    place = CPU._replace(m=16, dtype=torch.float32)
    model = make(kind, place).train()
    x = torch.randint(5, (2, 5)) if kind == "model" else draw(2, 5, place)
    wrapped = opacus.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    wrapped(x).square().sum().backward()
    for i in range(len(x)):
        model.zero_grad()
        model(x[i : i + 1]).square().sum().backward()
        for ours, theirs in zip(model.parameters(), wrapped.parameters(), strict=True):
            torch.testing.assert_close(theirs.grad_sample[i], ours.grad, rtol=1e-3, atol=1e-4)

"""Initial values on the way from the meta device, where tools reset one module at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bedouin import Bedouin, FixedPointRNN, Initialization, SequenceModel
from bedouin.baselines import LSTM, Attention, DeltaNet, DeltaProduct, Mamba

Make = Callable[..., nn.Module]

ENOUGH = 1024
"""Entries with which a standard deviation is known within 20 %."""


def make_model(*, device: str, **options: Any) -> SequenceModel:
    """A model with other initial values than those of torch's modules."""
    mixers = [Bedouin(64, device=device), Mamba(64, device=device)]
    return SequenceModel(256, 64, mixers, embedding_std=0.1, device=device, **options)


def make_layer(**options: Any) -> Make:
    return lambda device: Bedouin(64, device=device, **options)


KINDS: dict[str, Make] = {
    "layer": make_layer(),
    "heads": make_layer(num_heads=4),
    "no Delta of x": make_layer(initialization=Initialization(delta_from_x=0.01)),
    "heads, no Delta of x": make_layer(
        num_heads=2, initialization=Initialization(delta_from_x=0.01)
    ),
    "convolution": make_layer(d_conv=4),
    "paper": lambda device: Bedouin.from_paper(64, device=device),
    "vector": lambda device: FixedPointRNN(64, num_heads=2, device=device),
    "model": lambda device: make_model(device=device, mlp_expand=1),
    "tied model": lambda device: make_model(device=device, tie_embeddings=True),
    **{
        kind.__name__: lambda device, kind=kind: kind(64, device=device)
        for kind in (LSTM, Attention, DeltaNet, DeltaProduct, Mamba)
    },
}


def walk(module: nn.Module, *, parents_first: bool) -> None:
    """Reset each module of the meta device for its own parameters, as FSDP1 of torch does."""
    modules = list(module.modules())
    for part in modules if parents_first else modules[::-1]:
        part.to_empty(device="cpu", recurse=False)
        for parameter in part.parameters(recurse=False):
            parameter.data.fill_(torch.nan)
        if parameter_names(part):
            part.reset_parameters()  # type: ignore[operator]


def parameter_names(part: nn.Module) -> list[str]:
    return [name for name, _ in part.named_parameters(recurse=False)]


@pytest.mark.parametrize("parents_first", [True, False])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_modules_may_be_reset_in_any_order(make: Make, parents_first: bool) -> None:
    usual, walked = make(device="cpu"), make(device="meta")
    walk(walked, parents_first=parents_first)
    found = dict(walked.named_parameters())
    for name, value in usual.named_parameters():
        assert found[name].isfinite().all(), name
        # rows by themselves, since those of Delta alone may be smaller
        for rows, expected in zip(found[name].chunk(8), value.chunk(8), strict=True):
            if expected.numel() >= ENOUGH:
                torch.testing.assert_close(rows.std(), expected.std(), rtol=0.2, atol=0, msg=name)


@pytest.mark.parametrize("parents_first", [True, False])
def test_the_projection_to_delta_draws_its_own_bias(parents_first: bool) -> None:
    layer = Mamba(64, device="meta")
    walk(layer, parents_first=parents_first)
    assert layer.dt_proj.bias is not None
    delta = F.softplus(layer.dt_proj.bias)
    assert bool((delta > 0.99e-3).all()) and bool((delta < 0.101).all())


def test_a_tied_weight_stays_tied_on_the_way_from_the_meta_device() -> None:
    model = make_model(device="meta", tie_embeddings=True).to_empty(device="cpu")
    assert model.head.weight is model.embedding.weight
    for part in model.modules():
        if parameter_names(part):
            part.reset_parameters()  # type: ignore[operator]
    assert 0.08 < model.embedding.weight.detach().std() < 0.12

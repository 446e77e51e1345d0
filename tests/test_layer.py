"""A layer as a module: shapes, options, statistics, caps, warnings, initial values."""

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.layer_cases import LAYERS
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin import (
    Bedouin,
    FixedPointRNN,
    Initialization,
    LowRank,
    NoMixing,
    SequenceModel,
    TrackingDeltaNet,
    param_groups,
)
from bedouin.baselines import Mamba
from bedouin.solvers import FixedCap, Picard
from bedouin.testing import assert_close

KINDS = [Bedouin, FixedPointRNN]


def test_the_defaults_are_the_documented_ones() -> None:
    layer = Bedouin(4)
    assert (layer.d_inner, layer.d_state, layer.decay) == (8, 16, "mamba")
    assert layer.feedback == ("delta", "B", "C", "mixer") and layer.feedback_norm
    assert layer.feedback_init == 0.1 and layer.cap == FixedCap(100)
    assert layer.adjoint is None and layer.on_unconverged == "warn" and layer.backend == "auto"
    assert layer.layer_idx is None and Bedouin(4, layer_idx=3).layer_idx == 3


def test_initial_values() -> None:
    layer = Bedouin(32, dtype=torch.float64)
    delta = nn.functional.softplus(layer.dt_bias)
    assert delta.min() >= 1e-3 - 1e-9 and delta.max() <= 0.1 + 1e-9
    A = layer.get_parameter("A_log").exp()
    assert_close("exp(A_log)", A[5], torch.arange(1, 17, dtype=torch.float64), 1e-6)
    assert layer.D.eq(1).all()
    griffin = Bedouin(32, decay="griffin", dtype=torch.float64)
    decay = torch.exp(-8 * nn.functional.softplus(griffin.get_parameter("omega")))
    assert decay.min() >= 0.9 - 1e-9 and decay.max() <= 0.999 + 1e-9


def test_feedback_init_scales_the_feedback_weights() -> None:
    def weights(factor: float) -> Any:
        torch.manual_seed(1)
        layer: Any = Bedouin(8, feedback_init=factor, dtype=torch.float64)
        return layer.y_proj.weight.detach()

    assert_close("W^y", weights(0.1), 0.1 * weights(1.0), 1e-14)
    assert not weights(0.0).any()


def test_marks_for_initializers() -> None:
    """Those for optimizers are seen in their groups."""
    layer = Bedouin(4)
    marked = [n for n, p in layer.named_parameters() if getattr(p, "_no_reinit", False)]
    assert marked == ["dt_bias"] and type(layer.out_proj) is nn.Linear


def test_every_parameter_is_in_one_group_of_the_optimizer() -> None:
    mixers = [Bedouin(4), FixedPointRNN(4, decay="griffin"), Mamba(4), TrackingDeltaNet(4)]
    model = SequenceModel(5, 4, mixers, mlp_expand=1, tie_embeddings=True)
    model.get_submodule("blocks.0.mixer.in_proj").requires_grad_(False)
    out_proj: Any = mixers[2].out_proj
    nn.utils.parametrizations.weight_norm(out_proj)
    decayed, exempt = param_groups(model, weight_decay=0.1)
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    grouped = [id(p) for p in [*decayed["params"], *exempt["params"]]]
    assert len(grouped) == len(set(grouped)) and set(grouped) == set(names)
    parts = {names[id(p)].rpartition("mixer.")[2] for p in exempt["params"]}
    assert {"D", "omega", "A_log", "dt_bias", "raw_bias", "dt_proj.bias", "norm.weight"} <= parts
    of_both, of_tracker = ("A_log", "dt_bias", "norm_weight"), ("D", "erase_bias")
    assert {f"{part}.{name}" for part in ("memory", "tracker") for name in of_both} <= parts
    assert {f"tracker.{name}" for name in of_tracker} <= parts
    kept = {names[id(p)].rpartition(".")[2] for p in decayed["params"]}
    assert kept == {"weight", "original0", "original1"}
    assert not [name for name in parts if "proj.weight" in name or "embedding" in name]


@pytest.mark.parametrize("make", [Bedouin, Bedouin.from_paper])
def test_weights_from_x_to_delta_may_start_smaller(make: Any) -> None:
    def drawn(**options: Any) -> dict[str, Tensor]:
        torch.manual_seed(3)
        return dict(make(4, **options).named_parameters())

    for factor in (1.0, 0.5, 0.0):
        initialization, expected = Initialization(delta_from_x=factor), drawn()
        with torch.no_grad():
            expected["x_proj.weight"][:8] *= factor
        found = drawn(initialization=initialization)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        layer = make(4, initialization=initialization)
        layer.reset_parameters()
        assert layer.x_proj.weight[:8].any() == (factor > 0)


def test_feedback_may_be_any_iterable_of_names() -> None:
    """An iterator is read only once, although two classes use it."""
    assert Bedouin(4, feedback=iter(("C", "B"))).feedback == ("B", "C")  # type: ignore[arg-type]
    assert FixedPointRNN(4, feedback=iter(("mixer",))).feedback == ("mixer",)  # type: ignore[arg-type]
    assert Bedouin(4, feedback={"B", "C"}).feedback == ("B", "C")
    assert FixedPointRNN(4, feedback=()).y_proj is None


def test_a_width_of_one_is_silu_alone() -> None:
    layer = Bedouin(8, d_conv=1, dtype=torch.float64)
    plain = Bedouin(8, dtype=torch.float64)
    plain.load_state_dict({n: v for n, v in layer.state_dict().items() if "extra" not in n})
    assert layer.conv is not None and not list(layer.conv.parameters())
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    window = layer(x, return_state=True)[1].conv
    assert window is not None and window.shape == (2, 0, 16)
    assert not torch.allclose(layer(x), plain(x))


def test_repr_says_what_is_solved_how() -> None:
    assert "adjoint=ImplicitAdjoint(solver=None)" in repr(Bedouin(4))
    text = repr(Bedouin(4, solver=Picard(), mixer=LowRank(3)))
    assert "d_inner=8" in text and "solver=Picard(" in text and "LowRank(rank=3)" in text


@pytest.mark.parametrize(
    "options",
    [{}, {"num_householder": 1, "beta_max": 0.02}, {"mixer": LowRank(1)}, {"feedback": ()}],
    ids=str,
)
def test_the_constructor_warns_of_singular_local_systems(options: dict[str, Any]) -> None:
    message = "input_scale='delta' with .* use input_scale='bounded_delta', or mixer=NoMixing"
    with pytest.warns(UserWarning, match=message) as found:
        layer = Bedouin(4, input_scale="delta", **options)
    assert [warning.filename for warning in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert same.input_scale == "delta"


def test_the_constructor_does_not_warn_where_no_local_system_becomes_singular() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Bedouin(4)
        Bedouin(4, input_scale="one_minus_decay")
        Bedouin(4, input_scale="delta", mixer=NoMixing())
        Bedouin(4, input_scale="delta", num_householder=10, beta_max=1e-3)
        Bedouin(4, input_scale="delta", decay="griffin")  # Delta is below 1
        Bedouin.from_paper(4)


@pytest.mark.parametrize("rate", [0.01, 1.0, 2.0])
@pytest.mark.parametrize("scale", ["bounded_delta", "one_minus_decay"])
def test_a_mixed_channel_grows_by_the_documented_factor(scale: Any, rate: float) -> None:
    layer: Any = Bedouin(1, d_state=1, expand=1, num_householder=1, feedback=(), input_scale=scale)
    with torch.no_grad():
        layer.x_proj.weight.zero_()
        layer.raw_bias.fill_(40.0)  # B, C and u are 1, as is beta
        layer.A_log.fill_(math.log(rate))
        layer.dt_bias.fill_(math.log(math.e - 1))  # Delta = 1
    state = layer.init_state(1)._replace(ssm=torch.ones(1, 1, 1))
    _, after = layer(torch.zeros(1, 1, 1), state, return_state=True)
    growth = {"bounded_delta": 2 * math.exp(-rate), "one_minus_decay": 1.0}
    assert after.ssm.item() == pytest.approx(growth[scale], rel=1e-5)


def test_a_model_warns_once_for_all_its_layers() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        SequenceModel(5, 4, lambda _: Bedouin(4, input_scale="delta"), num_layers=3)
    assert len(found) == 1


# -- initial values on the way from the meta device, where tools reset one module at a time

Make = Callable[..., nn.Module]

ENOUGH = 1024
"""Entries with which a standard deviation is known within 20 %."""


def make_model(m: int, *, device: str, **options: Any) -> SequenceModel:
    """A model with other initial values than those of torch's modules."""
    mixers = [Bedouin(m, device=device), Mamba(m, device=device)]
    return SequenceModel(256, m, mixers, embedding_std=0.1, device=device, **options)


SMALL = Initialization(delta_from_x=0.01)
MADE: dict[str, Make] = LAYERS | {
    "no Delta of x": partial(Bedouin, num_heads=1, initialization=SMALL),
    "heads, no Delta of x": partial(Bedouin, num_heads=2, initialization=SMALL),
    "model": partial(make_model, mlp_expand=1),
    "tied model": partial(make_model, tie_embeddings=True),
}


def walk(module: nn.Module, *, parents_first: bool) -> None:
    """Reset each module of the meta device for its own parameters, as FSDP1 of torch does."""
    modules = list(module.modules())
    for part in modules if parents_first else modules[::-1]:
        part.to_empty(device="cpu", recurse=False)
        for parameter in part.parameters(recurse=False):
            parameter.data.fill_(torch.nan)
        if list(part.parameters(recurse=False)):
            part.reset_parameters()  # type: ignore[operator]


@pytest.mark.parametrize("parents_first", [True, False])
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_modules_may_be_reset_in_any_order(make: Make, parents_first: bool) -> None:
    usual, walked = make(64, device="cpu"), make(64, device="meta")
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
    layer: Any = Mamba(64, device="meta")
    walk(layer, parents_first=parents_first)
    delta = F.softplus(layer.dt_proj.bias)
    assert bool((delta > 0.99e-3).all()) and bool((delta < 0.101).all())


def test_a_tied_weight_stays_tied_on_the_way_from_the_meta_device() -> None:
    model = make_model(64, device="meta", tie_embeddings=True).to_empty(device="cpu")
    assert model.head.weight is model.embedding.weight
    for part in model.modules():
        if list(part.parameters(recurse=False)):
            part.reset_parameters()  # type: ignore[operator]
    assert 0.08 < model.embedding.weight.detach().std() < 0.12

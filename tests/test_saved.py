"""Files of earlier versions load strictly and compute what they computed then; parameters loaded
into a layer with other options are told.

Write the file of a new version with `python -P tests/test_saved.py tests/saved/NAME.pt`, and
keep the older ones.
"""

import copy
import inspect
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from bedouin import Bedouin, FixedPointRNN, HouseholderProduct, LowRank, NoMixing, SequenceModel
from bedouin.baselines import Attention, DeltaNet, DeltaProduct, Mamba
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.layers.mixers import Kronecker
from bedouin.layers.tracking import Tracker
from bedouin.solvers import GammaCap, ImplicitAdjoint, Jacobi, OneStepAdjoint, Picard

Load = Callable[[nn.Module, nn.Module], Any]


def load(target: nn.Module, source: nn.Module) -> None:
    target.load_state_dict(source.state_dict(), strict=True)


def warnings_of(load: Load, target: nn.Module, source: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        load(target, source)
    told = [warning for warning in found if "were saved" in str(warning.message)]
    assert all(warning.filename == __file__ for warning in told)
    return [str(warning.message) for warning in told]


def make_model(**options: Any) -> SequenceModel:
    return SequenceModel(5, 4, [Bedouin(4)], **options)


TOLD: list[tuple[nn.Module, nn.Module, str]] = [
    # mixers of the same number of raw values
    (Bedouin(8), Bedouin(8, mixer=LowRank(2)),
     "saved with mixer='HouseholderProduct', but it has mixer='LowRank'"),
    (Bedouin(8, mixer=Kronecker((2, 8))), Bedouin(8, mixer=Kronecker((8, 2))),
     "saved with factors=[2, 8], but it has factors=[8, 2]"),
    # all options that differ
    (Bedouin(8), Bedouin(8, eigenvalues="full", norm_eps=0.1),
     "saved with eigenvalues='positive', norm_eps=1e-05, but"),
    # those of the model itself
    (make_model(), make_model(norm_eps=0.1),
     "this SequenceModel were saved with norm_eps=1e-05, but it has norm_eps=0.1"),
    (make_model(), make_model(tie_embeddings=True), "tie_embeddings=False, but"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "message"), TOLD, ids=str)
def test_one_warning_tells_all(source: nn.Module, target: nn.Module, message: str) -> None:
    (told,) = warnings_of(load, target, source)
    assert message in told


VALUES: dict[str, tuple[Any, ...]] = {
    "expand": (1,),
    "d_state": (8,),
    "num_heads": (2,),
    "head_dim": (6,),
    "expand_v": (1,),
    "dt_rank": (2,),
    "num_householder": (1,),
    "beta_max": (0.5,),
    "mixer": (LowRank(2), NoMixing()),
    "decay": ("griffin",),
    "input_scale": ("one_minus_decay",),
    "eigenvalues": ("positive", "full"),
    "d_conv": (None, 1, 3),
    "feedback": ((), ("mixer",)),
    "feedback_norm": (False,),
    "norm_eps": (0.1,),
    "rope_base": (100.0, None),
    "gated": (True,),
    "output_gate": (False,),
    "bias": (True, False),
    "solver": (Picard(1e-12), Jacobi(1e-12)),
    "adjoint": (OneStepAdjoint(), ImplicitAdjoint(Picard())),
    "max_steps": (GammaCap(),),
    "on_unconverged": ("ignore",),
}
KINDS = Bedouin, FixedPointRNN, Mamba, DeltaProduct, DeltaNet, Tracker, Attention


@pytest.mark.parametrize(
    ("kind", "option"),
    [(k, name) for k in KINDS for name in inspect.signature(k).parameters if name in VALUES],
    ids=str,
)
def test_no_option_changes_numbers_in_silence(kind: type[Any], option: str) -> None:
    """It changes the names or shapes of the parameters, or one warning names it with both values,
    also of a layer in a model, or it has no effect."""
    source = kind(16, dtype=torch.float64).eval()
    for value in VALUES[option]:
        target = kind(16, dtype=torch.float64, **{option: value}).eval()
        try:
            told = warnings_of(load, target, source)
        except RuntimeError as error:
            assert "key(s) in state_dict" in str(error) or "size mismatch" in str(error)
            continue
        if told:
            both = [layer.number_options() for layer in (source, target)]
            names = [name for name, v in both[0].items() if both[1].get(name, v) != v]
            values = [", ".join(f"{name}={of[name]!r}" for name in names) for of in both]
            in_models = (SequenceModel(5, 16, [copy.deepcopy(v)]) for v in (target, source))
            for (message,) in (told, warnings_of(load, *in_models)):
                assert "saved with {}, but it has {},".format(*values) in message
            load(target, copy.deepcopy(target))  # any warning is an error here
        else:
            x = torch.randn(2, 5, 16, dtype=torch.float64)
            torch.testing.assert_close(target(x), source(x))


def by_safetensors(target: nn.Module, source: nn.Module) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    target.load_state_dict(safetensors.load(safetensors.save(source.state_dict())))


def by_checkpoint(target: nn.Module, source: nn.Module) -> None:
    """In place; torch.distributed.checkpoint refuses tensors of other sizes."""
    with TemporaryDirectory() as folder:
        save_checkpoint(source.state_dict(), checkpoint_id=folder)
        state = target.state_dict()
        load_checkpoint(state, checkpoint_id=folder)
    target.load_state_dict(state)


def by_values(change: Callable[[Tensor], Tensor]) -> Load:
    """With changed values in the state dict."""
    return lambda target, source: target.load_state_dict(
        {name: change(v) for name, v in source.state_dict().items()}
    )


WAYS: dict[str, Load] = {
    "cast": by_values(Tensor.bfloat16),
    "averaged": by_values(lambda v: (v + v.clone()) / 2),
    "stacked": by_values(lambda v: torch.stack([v, v])[1]),
    "assigned": lambda target, source: target.to("meta").load_state_dict(
        source.state_dict(), assign=True
    ),
    "safetensors": by_safetensors,
    "checkpoint": by_checkpoint,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_extra_state_survives_what_tools_do_to_a_state_dict(way: Load) -> None:
    source = Bedouin(4, feedback=("B",))
    source(torch.randn(1, 2, 4))
    (message,) = warnings_of(way, Bedouin(4, beta_max=2.0, feedback=("C",)), source)
    assert "feedback=['B'], beta_max=1.0, but it has feedback=['C'], beta_max=2.0," in message
    target = Bedouin(4, feedback=("B",))
    way(target, source)
    assert target.num_calls == 1


def test_averages_of_other_options_are_told() -> None:
    first, second = Bedouin(4), Bedouin(4, input_scale="one_minus_decay")
    states = first.state_dict(), second.state_dict()
    mean = {k: (v + states[1][k]) / 2 for k, v in states[0].items()}
    with pytest.warns(UserWarning, match="this Bedouin were saved cannot be read from its extra"):
        first.load_state_dict(mean)


def test_a_count_alone_loads_as_versions_up_to_0_2_saved_it() -> None:
    layer = Bedouin(4, beta_max=2.0)
    layer.load_state_dict(Bedouin(4, beta_max=2.0).state_dict() | {"_extra_state": torch.tensor(7)})
    assert layer.num_calls == 7


def test_an_option_of_another_version_is_no_difference() -> None:
    class Later(Bedouin):
        saved_options = (*Bedouin.saved_options, "d_model")

    load(Bedouin(4), Later(4))
    load(Later(4), Bedouin(4))


def test_classes_that_torch_derives_are_no_difference() -> None:
    class Scaled(HouseholderProduct):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    layer = Bedouin(4, mixer=Scaled())
    nn.utils.parametrize.register_parametrization(layer.mixer, "scale", nn.Identity())
    assert layer.number_options()["mixer"] == "Scaled"


def test_functional_calls_take_a_whole_state_dict() -> None:
    layers = [Bedouin(4) for _ in range(2)]
    x, states = torch.randn(1, 3, 4), [layer.state_dict() for layer in layers]
    stack = {k: torch.stack([state[k] for state in states]) for k in states[0]}
    template = copy.deepcopy(layers[0])

    def call(own: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(template, own, (x,))

    expected = torch.stack([layer(x) for layer in layers])
    torch.testing.assert_close(torch.vmap(call)(stack), expected)


FILES = sorted((Path(__file__).parent / "saved").glob("*.pt"))
SMALL: dict[str, Any] = {"expand": 1, "dtype": torch.float64}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "Bedouin": lambda: Bedouin(4, d_state=2, **SMALL),
    "Bedouin with heads": lambda: Bedouin(4, d_state=2, num_heads=2, decay="griffin", **SMALL),
    "paper": lambda: Bedouin.from_paper(4, d_state=2, **SMALL),
    "low rank": lambda: Bedouin(4, d_state=2, mixer=LowRank(1), feedback=("B",), **SMALL),
    "FixedPointRNN": lambda: FixedPointRNN(4, **SMALL),
    "SequenceModel": lambda: SequenceModel(
        5, 4, [Bedouin(4, d_state=2, **SMALL)], mlp_expand=1, dtype=torch.float64
    ),
}


def save(path: str) -> None:
    saved = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make()
        is_model = isinstance(model, SequenceModel)
        x = torch.randint(5, (2, 3)) if is_model else torch.randn(2, 3, 4, dtype=torch.float64)
        model(x)  # one training call, which the extra state counts
        with torch.no_grad():
            saved[name] = {"x": x, "y": model.eval()(x), "state_dict": model.state_dict()}
    torch.save(saved, path)


def test_there_is_a_file() -> None:
    assert FILES


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_saved_model_loads_and_computes_the_same(path: Path, name: str) -> None:
    saved, model = torch.load(path, weights_only=True)[name], MODELS[name]().eval()
    model.load_state_dict(saved["state_dict"], strict=True)
    with torch.no_grad():
        torch.testing.assert_close(model(saved["x"]), saved["y"], rtol=1e-9, atol=1e-12)
    assert [m.num_calls for m in model.modules() if isinstance(m, FixedPointLayer)] == [1]


@pytest.mark.parametrize("name", ["Bedouin", "SequenceModel"])
def test_a_state_dict_without_the_counter_loads(name: str) -> None:
    model, other = MODELS[name](), MODELS[name]()
    values = {k: v for k, v in model.state_dict().items() if not k.endswith("_extra_state")}
    assert len(values) == len(list(model.parameters()))
    assert other.load_state_dict(values, strict=True) == ([], [])
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    values.popitem()
    with pytest.raises(RuntimeError, match=r"Missing key\(s\)"):
        other.load_state_dict(values)


if __name__ == "__main__":
    save(sys.argv[1])

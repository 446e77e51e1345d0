"""bedouin.integrations.hf: the configuration, its files and its errors."""

import copy
import inspect
import json
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.16")

from tests.integrations.hf_models import CONVOLVED, HYBRID, TRACKING, VOCAB, make_config, mixers  # noqa: E402
from tests.integrations.mixings import same  # noqa: E402
from tests.messages import Row, refused  # noqa: E402

import bedouin  # noqa: E402
from bedouin import (  # noqa: E402
    Bedouin,
    ChannelMixer,
    FixedPointRNN,
    GatedDeltaNet,
    Initialization,
    Kronecker,
    LowRank,
    NoMixing,
    Tracker,
    TrackingDeltaNet,
)
from bedouin.integrations.hf import BedouinConfig, BedouinForCausalLM, BedouinModel  # noqa: E402
from bedouin.solvers import GammaCap, ImplicitAdjoint, Jacobi, Picard  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")


class Scale(ChannelMixer):
    """Q = (1 - factor sigmoid(raw)) I, as a user writes a mixer: in one class, with its options."""

    def __init__(self, factor: float = 0.5, more: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.factor, self.more = factor, more

    def raw_size(self, d_inner: int) -> int:
        return 1

    def complement(self, raw: Tensor, v: Tensor) -> Tensor:
        return self.factor * torch.sigmoid(raw) * v


class Forgetful(Scale):
    """A mixer that does not keep its option."""

    def __init__(self, strength: float = 1.0) -> None:
        super().__init__(strength)


class Patient(Picard):
    """A solver of a user's."""


def is_mixer(kind: Any) -> bool:
    is_class = inspect.isclass(kind) and not inspect.isabstract(kind)
    return is_class and issubclass(kind, ChannelMixer)


def local_solver() -> Picard:
    class Local(Picard):
        pass

    return Local()


BAD: list[Row] = [
    ({"solver": local_solver()}, TypeError, "solver must be one of ... got ...Local: define that"),
    ({"mixer": Forgetful()}, TypeError, "Forgetful without strength: write self.strength = str"),
    (
        {"adjoint": {"type": "ImplicitAdjoint", "solver": {"type": "Newton"}}},
        TypeError,
        "adjoint.solver must be an object ...'Newton'...: import the module",
    ),
    ({"solver": {"type": "Picard", "steps": 3}}, TypeError, "Picard has no option 'steps'"),
    ({"mixer": LowRank(2), "num_householder": 1}, ValueError, "num_householder must be 2 beside"),
    ({"mixer": LowRank(2), "beta_max": 0.5}, ValueError, "beta_max must be 1.0 beside"),
    ({"num_householder": 0, "beta_max": 0.5}, ValueError, "beta_max must be 1"),
    ({"output": "gate"}, ValueError, "output must be"),
    ({"num_householders": 2}, TypeError, "did you mean 'num_householder'"),
    ({"fuse_linear_cross_entropy": "trition"}, ValueError, "fuse_linear_cross_entropy must be one"),
    ({"layer": "Mamba"}, ValueError, "layer must be one of ('Bedouin', ...got 'Mamba'"),
    ({"layer": {"num_trackers": 2}}, ValueError, "layer must be one of ...'paper', ...got None"),
    ({"layer": {"type": "rnn", "d_state": 2}}, TypeError, "FixedPointRNN has no option 'd_state'"),
    ({"layer": {"type": "paper", "decay": "mamba"}}, TypeError, "from_paper has no option 'decay'"),
    ({"layer": "rnn", "expand": 3}, ValueError, "expand must be 2 beside layer='FixedPointRNN'"),
    ({"layer": {"type": "tracking", "tracker_dims": 2}}, TypeError, "you mean 'tracker_dim'"),
    ({"layer": {"type": "Bedouin", "num_heads": 2}}, TypeError, "Bedouin has no option 'num_heads"),
    ({"layer": {"type": "Tracker", "num_trackers": 0}}, ValueError, "num_trackers must be"),
    (HYBRID | {"attn_layers": [3]}, ValueError, "indices from 0 to ... = 2, ... got [3]"),
    (HYBRID | {"attn_layers": [1, 1]}, ValueError, "different indices ... got [1, 1]"),
    (HYBRID | {"attn_layers": [0, 1, 2]}, ValueError, "not all of them"),
    (HYBRID | {"attn_layers": []}, ValueError, "some ..., got [] beside attn={'num_heads': 4"),
    (HYBRID | {"attn": None}, ValueError, "attn['num_heads'] must be an int >= 1, got None"),
    *(
        (HYBRID | {"attn": {"num_heads": 2} | attn}, ValueError, message)
        for attn, message in (
            ({"num_heads": 3}, "must divide hidden_size / 2 = 4, ... got 3 and 3"),
            ({"num_heads": 4, "num_kv_heads": 3}, "must divide attn..., got 4 and 3"),
            ({"window": 1}, "attn['window'] must be None or an int"),
            ({"rope_theta": 0}, "attn['rope_theta'] must lie in"),
            ({"windows": 4}, "did you mean 'window'"),
        )
    ),
]


test_options_that_do_not_fit = refused(
    BAD, lambda **options: BedouinForCausalLM(make_config(**options))
)


MIXERS = [
    *(kind() for kind in vars(bedouin).values() if is_mixer(kind)),
    *(Kronecker((2, 8)), Scale(0.3, (1, 2))),
]


def loaded_from(folder: Path, content: dict[str, Any] | BedouinConfig) -> Any:
    """The configuration from a file with a content, or that a configuration writes."""
    if isinstance(content, BedouinConfig):
        content.save_pretrained(folder)
    else:
        (folder / "config.json").write_text(json.dumps(content))
    return transformers.AutoConfig.from_pretrained(folder)


class TestConfig:
    def test_the_model_of_a_file_computes_the_layer_that_the_options_describe(
        self, tmp_path: Path
    ) -> None:
        sizes = {"num_hidden_layers": 1, "intermediate_size": None, "expand": 1.5}
        config = make_config(**sizes, **CONVOLVED)
        loaded = loaded_from(tmp_path, config)
        assert isinstance(loaded, BedouinConfig)
        assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()
        assert isinstance(transformers.AutoModel.from_config(loaded), BedouinModel)
        model = transformers.AutoModelForCausalLM.from_config(loaded).double().eval()
        layer = Bedouin(
            8, d_state=4, num_heads=2, mixer=NoMixing(), input_scale="delta", d_conv=3, expand=1.5,
            feedback=["delta", "B"], initialization=CONVOLVED["initialization"], layer_idx=0,
        ).double()  # fmt: skip
        (mixer,) = mixers(model)
        assert repr(mixer) == repr(layer) and mixer.initialization == layer.initialization
        layer.load_state_dict(mixer.state_dict())
        ids = torch.randint(1, VOCAB, (3, 7))
        block, x = model.model.layers[0], model.model.embed_tokens(ids)
        same(model.model(ids).last_hidden_state, model.model.norm(x + layer(block.norm(x))))

    def test_a_file_without_the_newer_options_keeps_its_meaning(self, tmp_path: Path) -> None:
        newer = ["conv_kernel", "initialization"]
        newer += ["mixer", "solver", "adjoint", "max_steps", "backend", "on_unconverged"]
        config = make_config(num_heads=2, decay="griffin")
        old = {k: v for k, v in config.to_dict().items() if k not in newer}
        mixer = loaded_from(tmp_path, old).make_mixer(1)
        expected = Bedouin(8, d_state=4, num_heads=2, decay="griffin", layer_idx=1)
        assert repr(mixer) == repr(expected) and mixer.initialization == Initialization()
        assert mixer.state_dict().keys() == expected.state_dict().keys()

    @pytest.mark.parametrize(
        ("size", "old", "new"), [(8, 1, 1), (96, 1, 2), (192, 1, 3), (256, 4, 4), (384, 6, 6)]
    )
    def test_files_name_the_number_of_heads(
        self, size: int, old: int, new: int, tmp_path: Path
    ) -> None:
        """Those of versions up to 0.2.0 left out the number that these chose."""
        config = make_config(hidden_size=size, num_heads=None)
        config.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert saved["num_heads"] == config.make_mixer(0).num_heads == new
        without = {k: v for k, v in saved.items() if "heads" not in k}
        for text in (saved | {"num_heads": None}, without):
            loaded = loaded_from(tmp_path, text)
            assert loaded.make_mixer(0).num_heads == loaded.num_heads == old
        assert make_config(layer="GatedDeltaNet").to_dict()["num_heads"] is None

    OF_0_2: ClassVar[dict[str, Any]] = {
        **{"erase": 0.0, "projection": "inner", "output": "norm", "bias": True},
        **{"feedback_scope": "head", "feedback_heads": None, "num_groups": None},
        **{"bounded_x": False, "feedback_noise": 0.0},
    }

    def test_a_file_of_version_0_2_keeps_its_meaning(self, tmp_path: Path) -> None:
        saved = make_config(num_heads=2, initialization=Initialization(rates=0.5)).to_dict()
        memories = {"memory_heads": 0, "memory_rates": None, "memory_delta": 1.0}
        saved |= self.OF_0_2 | {"initialization": saved["initialization"] | memories}
        loaded = loaded_from(tmp_path, saved)
        assert loaded.make_mixer(0).initialization == Initialization(rates=0.5)
        assert not self.OF_0_2.keys() & loaded.to_dict().keys()

    @pytest.mark.parametrize("name", [*OF_0_2, "memory_heads"])
    def test_a_file_with_a_removed_option_names_the_version_that_reads_it(
        self, name: str, tmp_path: Path
    ) -> None:
        saved = make_config(initialization=Initialization()).to_dict() | self.OF_0_2
        (saved["initialization"] if name == "memory_heads" else saved)[name] = 3
        message = rf"{name} must be .*: version 0\.2\.0 of bedouin is the last one that has it"
        with pytest.raises(ValueError, match=message):
            loaded_from(tmp_path, saved)

    def test_objects_survive_a_file(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {
            "solver": Picard(1e-3, patience=2),
            "adjoint": ImplicitAdjoint(Jacobi(1e-2)),
            "max_steps": GammaCap(3.0, limit=7),
            "mixer": LowRank(3),
        }
        names = {"backend": "reference", "on_unconverged": "ignore"}
        config = make_config(**options, **names)
        assert config.solver == {"type": "Picard", **vars(options["solver"])}
        assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
        BedouinForCausalLM(config).save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        layer = mixers(loaded)[1]
        for name, value in (options | names).items():
            assert repr(getattr(layer, name)) == repr(value), name
        other = transformers.AutoConfig.from_pretrained(tmp_path, solver=Jacobi())
        assert other.make_mixer(0).solver == Jacobi()
        part = make_config(solver={"type": "Picard", "rtol": 1e-3})
        assert part.make_mixer(0).solver == Picard(1e-3)

    @pytest.mark.parametrize("mixer", MIXERS, ids=repr)
    def test_every_mixer_survives_a_file(self, mixer: ChannelMixer, tmp_path: Path) -> None:
        model = BedouinForCausalLM(make_config(mixer=mixer)).eval()
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert repr(mixers(loaded)) == repr(mixers(model))
        ids = torch.arange(6).unsqueeze(0)
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)

    def test_a_class_of_a_user_is_saved_by_the_name_of_its_module(self, tmp_path: Path) -> None:
        config = make_config(mixer=Scale(0.3, (1, 2)), solver=Patient(1e-3))
        config.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert saved["mixer"] == {"type": f"{__name__}.Scale", "factor": 0.3, "more": [1, 2]}
        loaded = transformers.AutoConfig.from_pretrained(tmp_path).make_mixer(0)
        assert type(loaded.mixer) is Scale and loaded.mixer.factor == 0.3
        assert loaded.solver == Patient(1e-3) and type(loaded.solver) is Patient

    def test_every_option_of_a_layer_is_one_of_the_configuration(self) -> None:
        names = {field.name for field in fields(BedouinConfig)}
        known = inspect.signature(Bedouin).parameters
        for name in set(known) - {"layer_idx", "device"}:
            assert BedouinConfig.attribute_map.get(name, name) in names, name

    def test_names(self) -> None:
        assert BedouinConfig(vocab_size=VOCAB, d_state=6).state_size == 6
        assert make_config(d_conv=4).conv_kernel == 4
        for name in ("n_layer", "n_layers", "num_layers"):
            assert BedouinConfig(vocab_size=VOCAB, **{name: 3}).num_hidden_layers == 3
            with pytest.raises(ValueError, match=f"{name} is another name of num_hidden_layers"):
                make_config(**{name: 3})
        assert make_config(nheads=2).make_mixer(0).num_heads == 2

    def test_what_transformers_and_files_add_is_an_attribute(self) -> None:
        config = make_config(attn_implementation="eager", num_labels=3, torch_dtype="float64")
        assert config.num_labels == 3
        file = config.to_dict() | {"of_another_tool": 1}
        assert BedouinConfig.from_dict(file).of_another_tool == 1


class TestLayer:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            *(("tracking", TrackingDeltaNet), ("GatedDeltaNet", GatedDeltaNet)),
            *(("Tracker", Tracker), ("rnn", FixedPointRNN)),
        ],
    )
    def test_every_option_survives_a_file(self, name: str, kind: Any, tmp_path: Path) -> None:
        loaded = loaded_from(tmp_path, make_config(layer=name, rms_norm_eps=1e-3))
        assert repr(loaded.make_mixer(1)) == repr(kind(8, layer_idx=1, norm_eps=1e-3))
        known = set(inspect.signature(kind).parameters) | {"type"}
        elsewhere = {"d_model", "layer_idx", "norm_eps", "device", "dtype", "read_size"}
        assert set(loaded.layer) == known - elsewhere
        assert loaded.layer["type"] == kind.__name__
        assert make_config(layer=kind.__name__).layer == make_config(layer=name).layer

    def test_the_default_has_a_short_name(self) -> None:
        assert make_config(layer="bedouin").to_dict() == make_config(layer="Bedouin").to_dict()

    @pytest.mark.parametrize(
        ("name", "make"), [("paper", Bedouin.from_paper), ("rnn", FixedPointRNN)]
    )
    def test_objects_survive_a_file(self, name: str, make: Any, tmp_path: Path) -> None:
        options = {"solver": Picard(1e-3), "adjoint": ImplicitAdjoint(Jacobi(1e-2))}
        options |= {"max_steps": GammaCap(3.0)}
        config = make_config(layer={"type": name, **options})
        loaded = loaded_from(tmp_path, config)
        assert loaded.layer == config.layer
        mixer = loaded.make_mixer(0)
        assert repr(mixer) == repr(make(8, layer_idx=0, **options))
        assert {option: getattr(mixer, option) for option in options} == options


class TestAttention:
    def test_options_are_completed_and_survive_a_file(self, tmp_path: Path) -> None:
        config = make_config(num_hidden_layers=3, attn_layers=(0, 2), attn={"num_heads": 2})
        whole = {"num_heads": 2, "num_kv_heads": 2, "window": None, "rope_theta": 1e4}
        assert config.attn == whole
        assert config.layer_types == ["full_attention", "bedouin", "full_attention"]
        loaded = loaded_from(tmp_path, config)
        assert (loaded.attn_layers, loaded.attn) == ([0, 2], whole)


class TestPreset:
    @pytest.mark.parametrize("name", ["60m", "130m", "370m"])
    def test_parameters_are_those_of_the_table(self, name: str) -> None:
        lines = str(BedouinConfig.preset.__doc__).splitlines()
        row = next(v for v in lines if f'"{name}"' in v).split("|")[2:-1]
        found = []
        for layer in ("tracking", "bedouin", "paper", "rnn"):
            with torch.device("meta"):
                model = BedouinForCausalLM(BedouinConfig.preset(name, layer=layer))
            found.append(round(sum(p.numel() for p in model.parameters()) / 1e6, 1))
        c = model.config
        sizes = [c.hidden_size, c.num_hidden_layers, c.intermediate_size, *found]
        assert [v.strip() for v in row] == [str(v) for v in sizes]
        assert model.lm_head.weight is model.model.embed_tokens.weight

    def test_fields_replace_those_of_the_preset(self) -> None:
        config = BedouinConfig.preset(
            "130m", n_layer=2, vocab_size=VOCAB, tie_word_embeddings=False
        )
        assert (config.hidden_size, config.num_hidden_layers) == (768, 2)
        assert config.rescale_prenorm_residual
        with torch.device("meta"):
            assert repr(config.make_mixer(0)) == repr(TrackingDeltaNet(768))
        assert config.vocab_size == VOCAB and not config.tie_word_embeddings
        with pytest.raises(ValueError, match="name must be one of 60m, 130m, 370m, got '1b'"):
            BedouinConfig.preset("1b")

    @pytest.mark.parametrize("options", [HYBRID | {"attn": {"num_heads": 4}}, TRACKING])
    def test_output_projections_are_scaled_by_depth(self, options: dict[str, Any]) -> None:
        """By the root of the number of residual additions, two for each layer."""
        sizes = {"hidden_size": 64, "intermediate_size": 64}
        usual, scaled = (
            BedouinForCausalLM(make_config(**options | sizes, rescale_prenorm_residual=rescales))
            for rescales in (False, True)
        )
        depth, outputs = 2 * usual.config.num_hidden_layers, []
        for (name, value), other in zip(usual.named_parameters(), scaled.parameters(), strict=True):
            factor = depth**-0.5 if name.endswith(("o_proj.weight", "out_proj.weight")) else 1.0
            outputs += [name] if factor < 1 else []
            if name.endswith("proj.weight") and value.numel() > 200 and value.any():
                ratio = (other.std() / value.std()).item()
                assert ratio == pytest.approx(factor, rel=0.15), name
        # of each layer the mixer's and the MLP's, or those of both parts of the mixer
        assert len(outputs) == depth + 2 * (options is TRACKING)

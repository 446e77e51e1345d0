"""bedouin.integrations.hf: losses, weights and training, also with PEFT and Trainer."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.16")

from tests.integrations.hf_models import (  # noqa: E402
    HYBRID,
    PAD,
    TRACKING,
    VOCAB,
    make_config,
    make_model,
    mixers,
    with_noise,
)
from tests.integrations.mixings import same  # noqa: E402

from bedouin import GatedDeltaNet, Initialization  # noqa: E402
from bedouin.integrations.hf import (  # noqa: E402
    BedouinForCausalLM,
    BedouinForSequenceClassification,
    BedouinForTokenClassification,
)

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::bedouin.solvers.ConvergenceWarning"),
]


def training(folder: Path, **options: Any) -> Any:
    quiet: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    return transformers.TrainingArguments(output_dir=str(folder), **quiet, **options)


class TestHeads:
    def test_a_row_is_read_at_its_last_token(self, ids: Tensor) -> None:
        model = BedouinForSequenceClassification(make_config(num_labels=3, **HYBRID)).eval()
        padded = torch.cat([ids, torch.full((3, 2), PAD)], 1)
        mask = padded != PAD
        found = model(padded, attention_mask=mask, labels=torch.tensor([0, 1, 2]))
        expected = model.score(model.model(ids).last_hidden_state[:, -1])
        torch.testing.assert_close(found.logits, expected)
        loss = torch.nn.functional.cross_entropy(expected, torch.tensor([0, 1, 2]))
        torch.testing.assert_close(found.loss, loss)

    @pytest.mark.parametrize(
        "kind", [BedouinForSequenceClassification, BedouinForTokenClassification]
    )
    def test_trainer(self, kind: type[Any], tmp_path: Path) -> None:
        """It would give num_items_in_batch to a loss that takes any option."""
        of_tokens = kind is BedouinForTokenClassification
        rows = torch.randint(1, VOCAB, (8, 5)).tolist()
        labels = [[v % 3 for v in row] if of_tokens else row[-1] % 3 for row in rows]
        data = [{"input_ids": r, "labels": v} for r, v in zip(rows, labels, strict=True)]
        arguments = training(tmp_path, max_steps=30, learning_rate=3e-2)
        model = kind(make_config(num_labels=3, hidden_size=16))
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        assert trainer.evaluate()["eval_loss"] < 0.8 * before


class TestFusedLoss:
    @pytest.fixture
    def fused(self, model: BedouinForCausalLM) -> BedouinForCausalLM:
        model.config.fuse_linear_cross_entropy = "torch"
        model.train()
        return model

    @pytest.mark.parametrize(
        "given",
        [
            {},
            {"num_items_in_batch": 5},
            {"num_items_in_batch": torch.tensor(7)},
            {"ignore_index": 3},
            {"shift_labels": torch.arange(21).reshape(3, 7)},
        ],
    )
    def test_it_is_the_loss_of_transformers(
        self, fused: BedouinForCausalLM, ids: Tensor, given: dict[str, Any]
    ) -> None:
        labels = ids.where(torch.rand(ids.shape) > 0.3, given.get("ignore_index", -100))
        found = fused(ids, labels=labels, **given)
        expected = fused(ids, labels=labels, skip_logits=False, **given)
        assert found.logits is None and found.past_key_values is None
        assert expected.logits.shape == (3, 7, VOCAB)
        parameters = list(fused.parameters())
        grads = [torch.autograd.grad(each.loss, parameters) for each in (found, expected)]
        for one, two in zip((found.loss, *grads[0]), (expected.loss, *grads[1]), strict=True):
            # transformers computes it in float32
            torch.testing.assert_close(one.float(), two.float(), rtol=1e-5, atol=1e-6)

    def test_evaluation_and_calls_that_ask_for_them_have_logits(
        self, fused: BedouinForCausalLM, ids: Tensor
    ) -> None:
        assert fused(ids).logits is not None
        loss, hidden = fused(ids, labels=ids, output_hidden_states=True, return_dict=False)
        assert loss.ndim == 0 and len(hidden) == 1 + fused.config.num_hidden_layers
        fused.eval()
        assert fused(ids, labels=ids).logits.shape == (3, 7, VOCAB)
        output = fused(ids, labels=ids, skip_logits=True)
        torch.testing.assert_close(output.loss, loss)
        assert output.logits is None

    @pytest.mark.parametrize("t", [1, 4])
    def test_no_labels_give_zero(self, fused: BedouinForCausalLM, ids: Tensor, t: int) -> None:
        loss = fused(ids[:, :t], labels=torch.full((3, t), -100)).loss
        loss.backward()
        assert loss == 0 and not torch.stack([p.grad.norm() for p in fused.parameters()]).any()

    def test_the_kernel_of_auto_is_told(
        self, ids: Tensor, fused: BedouinForCausalLM, caplog: pytest.LogCaptureFixture
    ) -> None:
        fused.config.fuse_linear_cross_entropy = True
        logger = transformers.utils.logging.get_logger("bedouin.integrations.hf.models")
        logger.warning_once.cache_clear()
        fused(ids, labels=ids)
        assert caplog.messages == ["fuse_linear_cross_entropy=True: torch computes the loss"]

    def test_hooks_on_the_head_run(self, fused: BedouinForCausalLM, ids: Tensor) -> None:
        loss, seen = fused(ids, labels=ids).loss, []
        fused.lm_head.register_forward_hook(lambda *_: seen.append(True))
        found = fused(ids, labels=ids)
        assert seen and found.logits is not None
        torch.testing.assert_close(found.loss, loss, rtol=1e-5, atol=1e-6, check_dtype=False)
        with pytest.raises(ValueError, match="nn.Linear as lm_head .* no hooks on the head"):
            fused(ids, labels=ids, skip_logits=True)

    def test_what_cannot_be_fused(
        self, fused: BedouinForCausalLM, ids: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(ValueError, match="skip_logits=True needs labels .* no labels"):
            fused(ids, skip_logits=True)
        adapted = transformers.AutoModelForCausalLM.from_config(fused.config)
        adapted.lm_head = torch.nn.Sequential(adapted.lm_head)
        with pytest.raises(ValueError, match="needs an nn.Linear as lm_head .* Sequential"):
            adapted.train()(ids, labels=ids)
        monkeypatch.setattr(fused, "_loss_function", lambda **_: None, raising=False)
        with pytest.raises(ValueError, match="fuse_linear_cross_entropy = False"):
            fused(ids, labels=ids)
        fused.config.fuse_linear_cross_entropy = False
        with pytest.raises(ValueError, match="got False and labels"):
            fused(ids, labels=ids, skip_logits=True)


LOADING = """
import sys, torch, transformers

assert "bedouin" not in sys.modules
expected, load = torch.load("expected"), getattr(transformers, sys.argv[1]).from_pretrained
for folder in ("saved", "again"):
    model = load(folder, trust_remote_code=True).eval()
    torch.testing.assert_close(model(expected["ids"]).logits, expected["logits"])
    model.save_pretrained("again")
"""


class TestWeights:
    @pytest.mark.parametrize("tied", [True, False])
    def test_safetensors_round_trip(
        self, mixing: dict[str, Any], ids: Tensor, tied: bool, tmp_path: Path
    ) -> None:
        model = BedouinForCausalLM(make_config(tie_word_embeddings=tied, **mixing)).eval()
        model.save_pretrained(tmp_path)
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True
        )
        assert not any(report[name] for name in ("missing_keys", "unexpected_keys"))
        assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied

    @pytest.mark.parametrize("kind", ["CausalLM", "SequenceClassification", "TokenClassification"])
    def test_a_process_loads_a_folder_by_transformers_alone(
        self, kind: str, ids: Tensor, tmp_path: Path
    ) -> None:
        """Also one that such a process has saved."""
        name = f"AutoModelFor{kind}"
        model = getattr(transformers, name).from_config(make_config(**HYBRID)).eval()
        model.save_pretrained(tmp_path / "saved")
        torch.save({"ids": ids, "logits": model(ids).logits.detach()}, tmp_path / "expected")
        environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
        command = [sys.executable, "-P", "-c", LOADING, name]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True)
        for folder in ("saved", "again"):
            files = {path.name for path in (tmp_path / folder).glob("*.py")}
            assert files == {"modeling_bedouin.py"}

    @pytest.mark.parametrize("options", [{"num_heads": 1}, TRACKING])
    def test_quantizers_leave_the_feedback_alone(
        self, options: dict[str, Any], tmp_path: Path
    ) -> None:
        """transformers' list of what they skip, which in float16 also names float32 modules."""
        model = BedouinForCausalLM(make_config(**options)).eval()
        from transformers.quantizers.base import HfQuantizer

        skipped = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        assert "y_proj" in skipped and "x_proj" not in skipped
        model.save_pretrained(tmp_path)
        loaded = BedouinForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
        kept = {n for n, p in loaded.named_parameters() if p.dtype == torch.float32}
        assert len(kept) == 2 and all(name.endswith("y_proj.weight") for name in kept)
        ids = torch.randint(1, VOCAB, (2, 5))
        expected = model(ids).logits
        torch.testing.assert_close(loaded(ids).logits.float(), expected, rtol=1e-2, atol=1e-2)

    def test_layers_on_disk_decode_as_in_memory(
        self, model: BedouinForCausalLM, ids: Tensor, tmp_path: Path
    ) -> None:
        pytest.importorskip("accelerate")
        model.save_pretrained(tmp_path)
        offload: dict[str, Any] = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "disk"}
        loaded = BedouinForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, **offload)
        assert all(p.is_meta for p in mixers(loaded)[0].parameters())
        same(loaded(ids).logits, model(ids).logits)
        options = {"max_new_tokens": 3, "do_sample": False}
        assert torch.equal(loaded.generate(ids, **options), model.generate(ids, **options))

    def test_a_missing_part_is_initialized_and_the_rest_loaded(
        self, mixing: dict[str, Any], tmp_path: Path
    ) -> None:
        model = BedouinForCausalLM(make_config(**mixing))
        model.save_pretrained(tmp_path)
        path = tmp_path / "model.safetensors"
        from safetensors.torch import load_file, save_file

        weights = load_file(path)
        parts = "A_log", "conv.weight"
        removed = [n for n in weights if ".0." in n and n.endswith(parts) or "_extra_state" in n]
        save_file({n: w for n, w in weights.items() if n not in removed}, path, {"format": "pt"})
        loaded = BedouinForCausalLM.from_pretrained(tmp_path)
        found = dict(loaded.named_parameters())
        for name, parameter in model.named_parameters():
            owner = loaded.get_submodule(name.rpartition(".")[0])
            if name.endswith("conv.weight") and name in removed:
                assert 0.1 < found[name].abs().max() <= 3**-0.5
            elif isinstance(owner, GatedDeltaNet) and name in removed:
                assert not torch.equal(found[name], parameter) and found[name].exp().max() <= 0.16
            else:
                assert torch.equal(found[name], parameter), name

    @pytest.mark.parametrize(
        "options", [{}, {"conv_kernel": 4, "initialization": Initialization(0)}, TRACKING]
    )
    def test_initialization_is_that_of_the_layer(self, options: dict[str, Any]) -> None:
        """Constants and zeros exactly, random values in their range."""
        config = make_config(hidden_size=64, **options)
        found = mixers(BedouinForCausalLM(config))[0].named_parameters()
        for (name, value), expected in zip(found, config.make_mixer(0).parameters(), strict=True):
            assert torch.equal(value == 0, expected == 0), name
            size = expected.abs().max()
            assert 0.8 * size <= value.abs().max() <= 1.25 * size, name
            if name.endswith(("D", "A_log", "erase_bias")) and not name.startswith("memory."):
                assert torch.equal(value, expected), name
            assert vars(value).keys() >= vars(expected).keys(), name


class TestTraining:
    def gradients(self, model: BedouinForCausalLM, ids: Tensor) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(0)  # of the noise
        model(ids, labels=ids).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_gradient_checkpointing(
        self, mixing: dict[str, Any], ids: Tensor, use_reentrant: bool
    ) -> None:
        model = make_model(**with_noise(mixing))
        expected = self.gradients(model.train(), ids)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        for found, gradient in zip(self.gradients(model, ids), expected, strict=True):
            same(found, gradient)
        with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
            model(ids, past_key_values=transformers.DynamicCache(config=model.config))

    @pytest.mark.parametrize("name", ["seq_idx", "position_ids"])
    def test_trainer_keeps_the_documents_of_a_data_set(
        self, mixing: dict[str, Any], name: str, tmp_path: Path
    ) -> None:
        """It drops columns without a name in `forward`, and a row would be one document."""
        model = BedouinForCausalLM(make_config(initializer_range=0.5, **mixing))
        row = torch.randint(1, VOCAB, (6,)).tolist()
        where = {"seq_idx": [0, 0, 1, 1, 1, 1], "position_ids": [0, 1, 0, 1, 2, 3]}
        arguments = training(tmp_path)
        data = [{"input_ids": row, "labels": row, name: where[name]}]
        found = transformers.Trainer(model, arguments, eval_dataset=data).evaluate()["eval_loss"]
        ids = torch.tensor([row])
        logits = torch.cat([model(part).logits for part in (ids[:, :2], ids[:, 2:])], 1)
        expected = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
        assert found == pytest.approx(expected.item(), rel=1e-5)

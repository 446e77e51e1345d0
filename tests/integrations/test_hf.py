"""bedouin.integrations.hf against the installed transformers and PEFT."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.16")

from bedouin import Initialization  # noqa: E402
from bedouin.integrations.hf import (  # noqa: E402
    BedouinCacheLayer,
    BedouinConfig,
    BedouinForCausalLM,
    BedouinForSequenceClassification,
    BedouinForTokenClassification,
)
from bedouin.integrations.hf.attention import BedouinAttention, attention_options  # noqa: E402

# The warnings of other libraries are no failures of this one.
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::bedouin.solvers.ConvergenceWarning"),
]

PAD, VOCAB = 0, 31

CONVOLVED: dict[str, Any] = {
    "projection": "input",
    "conv_kernel": 3,
    "erase": 1.0,
    "num_heads": 2,
    "num_householder": 0,
    "input_scale": "delta",
    "feedback": ["delta", "x"],
    "initialization": Initialization(0.5, (8, 0.001)),
}
"""The options of `Bedouin.recall`, other rates among them."""

HYBRID: dict[str, Any] = CONVOLVED | {
    "num_hidden_layers": 3,
    "attn_layers": [1],
    "attn": {"num_heads": 4, "num_kv_heads": 2},
}
WINDOWED: dict[str, Any] = HYBRID | {"attn": {"num_heads": 2, "window": 3}}


def make_config(**options: Any) -> BedouinConfig:
    sizes = {"vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 4}
    return BedouinConfig(**(sizes | {"pad_token_id": PAD, "intermediate_size": 12} | options))


@pytest.fixture(
    params=[{}, CONVOLVED, HYBRID, WINDOWED], ids=["defaults", "convolved", "hybrid", "windowed"]
)
def mixing(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of the mixers."""
    found: dict[str, Any] = request.param
    return found


@pytest.fixture
def model(mixing: dict[str, Any]) -> BedouinForCausalLM:
    """In evaluation and float64, in which greedy choices are the same whatever the path."""
    model = BedouinForCausalLM(make_config(initializer_range=0.5, **mixing))
    model.double().eval()
    return model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, VOCAB, (3, 7))


def mixers(model: BedouinForCausalLM) -> list[Any]:
    return [block.mixer for block in model.model.layers]


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def left_padded(ids: Tensor, pads: list[int]) -> tuple[Tensor, Tensor]:
    """Row i of the ids after pads[i] tokens of padding, cut on the right, and the mask."""
    rows, t = [], ids.shape[1] + max(pads)
    mask = torch.ones(len(ids), t, dtype=torch.long)
    for i, count in enumerate(pads):
        padding = torch.full((count,), PAD)
        rows.append(torch.cat([padding, ids[i], ids[i]])[:t])
        mask[i, :count] = 0
    return torch.stack(rows), mask


class TestGenerate:
    def test_greedy_is_the_argmax_of_whole_sequences(
        self, model: BedouinForCausalLM, ids: Tensor
    ) -> None:
        expected = ids
        for _ in range(5):
            best = model(expected, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            expected = torch.cat([expected, best], 1)
        for options in ({}, {"prefill_chunk_size": 3}, {"cache_implementation": "static"}):
            found = model.generate(ids, max_new_tokens=5, do_sample=False, **options)
            assert torch.equal(found, expected), options

    @pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "top_k": 5}])
    def test_beams_and_samples_are_the_same_without_a_cache(
        self, model: BedouinForCausalLM, ids: Tensor, options: dict[str, Any]
    ) -> None:
        found = []
        for use_cache in (True, False):
            torch.manual_seed(1)
            found.append(model.generate(ids, max_new_tokens=6, use_cache=use_cache, **options))
        assert torch.equal(*found)

    @pytest.mark.parametrize("chunk", [None, 2])
    def test_left_padding_has_no_influence(
        self, model: BedouinForCausalLM, ids: Tensor, chunk: int | None
    ) -> None:
        pads = [3, 0, 1]
        padded, mask = left_padded(ids, pads)
        options = {"max_new_tokens": 4, "do_sample": False}
        found = model.generate(padded, attention_mask=mask, prefill_chunk_size=chunk, **options)
        for i, count in enumerate(pads):
            alone = model.generate(padded[i : i + 1, count:], **options)
            assert torch.equal(found[i : i + 1, count:], alone)

    def test_a_conversation_goes_on_from_its_cache(
        self, model: BedouinForCausalLM, ids: Tensor
    ) -> None:
        cache = transformers.DynamicCache(config=model.config)
        model.generate(ids[:, :4], max_new_tokens=1, past_key_values=cache)
        assert cache.get_seq_length() == 4
        found = model.generate(ids, max_new_tokens=3, do_sample=False, past_key_values=cache)
        assert torch.equal(found, model.generate(ids, max_new_tokens=3, do_sample=False))

    def test_a_state_cannot_be_taken_back(self, model: BedouinForCausalLM, ids: Tensor) -> None:
        with pytest.raises(ValueError, match="assisted generation is not supported"):
            model.generate(ids[:1], max_new_tokens=2, assistant_model=model)

    @pytest.mark.parametrize("name", ["seq_idx", "cu_seq_lens_q"])
    def test_a_packed_prompt_goes_on_from_its_last_document(
        self, model: BedouinForCausalLM, ids: Tensor, name: str
    ) -> None:
        where = {
            "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1]]),
            "cu_seq_lens_q": torch.tensor([0, 3, 7]),
        }
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
        found = model.generate(ids[:1], **{name: where[name]}, **options)
        assert torch.equal(found[:, 3:], model.generate(ids[:1, 3:], **options))

    def test_decoding_takes_the_step(
        self, model: BedouinForCausalLM, ids: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mixer, calls = mixers(model)[0], []
        step = mixer.step

        def recording(x: Tensor, state: Any) -> Any:
            calls.append(x.shape)
            return step(x, state)

        monkeypatch.setattr(mixer, "step", recording)
        padded, mask = left_padded(ids, [0, 1, 2])
        for options in ({"attention_mask": mask}, {"attention_mask": torch.ones_like(mask)}, {}):
            model.generate(padded, **options, max_new_tokens=4, do_sample=False)
            assert calls == [(3, 8)] * 3
            calls.clear()


class TestCache:
    def test_layout(self, model: BedouinForCausalLM, ids: Tensor) -> None:
        cache = model(ids).past_key_values
        mixer = mixers(model)[0]
        _, d, n = mixer.init_state(1).ssm.shape
        assert type(cache) is transformers.DynamicCache
        assert cache.layers[-1].recurrent_states[0].shape == (3, d, n)
        assert cache.layers[-1].conv_states[0].shape == (3, d, 1)
        window = cache.layers[-1].conv_states[1]
        if model.config.conv_kernel is None:
            assert window is None
        else:
            block: Any = model.model.layers[0]
            u, sizes = block.norm(model.model.embed_tokens(ids[:, -2:])), mixer.projected_sizes
            x, _, B, C, *_ = mixer.in_proj(u).split(list(sizes.values()), -1)
            convolved = torch.cat([x, B, C], -1).mT
            assert window.shape == convolved.shape
            same(cache.layers[0].conv_states[1], convolved)
        assert cache.has_previous_state() and not cache.is_compileable
        assert cache.get_seq_length() == 7 and cache.layers[0].get_max_length() == -1
        if model.config.attn_layers and "cache" not in vars(model(ids)):
            return  # before transformers 5.24, keys that are reset become zeros, and remain
        cache.reset()
        assert cache.layers[-1].state is None and cache.get_seq_length() == 0
        same(model(ids, past_key_values=cache).logits, model(ids).logits)
        assert cache.get_seq_length() == 7

    def test_state_is_float32_in_a_bfloat16_model(
        self, mixing: dict[str, Any], ids: Tensor
    ) -> None:
        model = BedouinForCausalLM(make_config(**mixing)).to(torch.bfloat16).eval()
        cache = model(ids).past_key_values
        assert {v.dtype for v in cache.layers[0].state.tensors} == {torch.float32}
        assert model(ids[:, :1], past_key_values=cache).logits.dtype == torch.bfloat16

    def test_samples_are_selected_and_repeated(
        self, model: BedouinForCausalLM, ids: Tensor
    ) -> None:
        cache = model(ids).past_key_values
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([1, 5]))
        cache.reorder_cache(torch.tensor([1, 0]))
        token = torch.tensor([[3], [4]])
        whole = torch.cat([ids[[2, 0]], token], 1)
        found = model(token, past_key_values=cache).logits
        same(found, model(whole).logits[:, -1:])

    def test_gradients_flow_through_chunks(self, model: BedouinForCausalLM, ids: Tensor) -> None:
        cache = transformers.DynamicCache(config=model.config)
        chunks = [model(part, past_key_values=cache).logits for part in ids.split([3, 1, 3], dim=1)]
        weight = model.model.embed_tokens.weight
        (found,) = torch.autograd.grad(torch.cat(chunks, 1).square().sum(), weight)
        (expected,) = torch.autograd.grad(model(ids).logits.square().sum(), weight)
        same(found, expected)

    @pytest.mark.parametrize("width", [1, 9])
    def test_windows_of_any_width(self, ids: Tensor, width: int) -> None:
        """None at all for width 1; for 9, more tokens than a chunk has."""
        options = {"initializer_range": 0.5, "conv_kernel": width, "projection": "input"}
        model = BedouinForCausalLM(make_config(**options))
        model.double().eval()
        cache = transformers.DynamicCache(config=model.config)
        chunks = [model(part, past_key_values=cache).logits for part in ids.split([3, 1, 3], dim=1)]
        assert cache.layers[0].conv_states[1].shape == (3, 24, width - 1)
        same(torch.cat(chunks, 1), model(ids).logits)
        found = model.generate(ids, max_new_tokens=4, do_sample=False, num_beams=2)
        options = {"max_new_tokens": 4, "do_sample": False, "use_cache": False}
        assert torch.equal(found, model.generate(ids, num_beams=2, **options))

    def test_the_cache_has_two_names(self, model: BedouinForCausalLM, ids: Tensor) -> None:
        first, last = (model.model(ids[:, :4]).past_key_values for _ in range(2))
        found = model(ids[:, 4:], past_key_values=first).logits
        assert torch.equal(found, model(ids[:, 4:], cache=last).logits)
        with pytest.raises(ValueError, match="give one of them"):
            model(ids, past_key_values=first, cache=last)

    def test_another_cache_is_refused(self, model: BedouinForCausalLM, ids: Tensor) -> None:
        with pytest.raises(TypeError, match="DynamicCache\\(config=model.config\\)"):
            model(ids, past_key_values=transformers.DynamicCache())
        with pytest.raises(TypeError, match="no keys and values"):
            BedouinCacheLayer().update(ids, ids)


class TestAttention:
    @pytest.mark.parametrize("window", [None, 3])
    def test_what_a_token_sees(self, ids: Tensor, window: int | None) -> None:
        """The tokens so far, or those of the window, of its own document."""
        attn = {"num_heads": 4, "num_kv_heads": 2, "window": window}
        model = BedouinForCausalLM(make_config(**HYBRID | {"attn": attn}))
        layer: Any = mixers(model)[1]
        assert type(layer) is BedouinAttention and layer.k_proj.out_features == 4
        x = torch.randn(1, 7, 8, requires_grad=True)
        seq_idx = torch.tensor([[5, 5, 2, 2, 2, 2, 2]])
        options = attention_options(model.config, model.model.rotary_emb, x, None, seq_idx, None)
        (gradient,) = torch.autograd.grad(layer(x, **options)[0][0, 5].sum(), x)
        first = 2 if window is None else 3
        assert gradient[0].any(-1).tolist() == [first <= i <= 5 for i in range(7)]

    def test_positions_turn_keys_by_the_base(self, ids: Tensor) -> None:
        """Of the same tokens in another order, and with another base, the outputs differ."""
        x, found = torch.randn(1, 7, 8), []
        for theta in (1e4, 1e2):
            torch.manual_seed(0)
            attn = {"num_heads": 2, "rope_theta": theta}
            model = BedouinForCausalLM(make_config(**HYBRID | {"attn": attn}))
            for v in (x, x[:, [2, 0, 1, 3, 4, 5, 6]]):
                options = attention_options(
                    model.config, model.model.rotary_emb, v, None, None, None
                )
                found.append(mixers(model)[1](v, **options)[0][:, -1])
        assert all((a - b).abs().max() > 1e-6 for a, b in zip(found, found[1:], strict=False))

    def test_the_first_and_the_last_layer_may_attend(self, ids: Tensor) -> None:
        attn = {"attn_layers": [0, 2], "attn": {"num_heads": 2}, "num_hidden_layers": 3}
        model = BedouinForCausalLM(make_config(initializer_range=0.5, **attn))
        model.double().eval()
        padded, mask = left_padded(ids, [3, 0, 1])
        options = {"max_new_tokens": 4, "do_sample": False, "num_beams": 2}
        found = model.generate(padded, attention_mask=mask, **options)
        assert torch.equal(found[:1, 3:], model.generate(padded[:1, 3:], **options))

    def test_chunks_of_documents_and_padding(self, ids: Tensor) -> None:
        """A later chunk need not say which tokens before it were real, or of which document."""
        model = BedouinForCausalLM(make_config(initializer_range=0.5, **HYBRID))
        model.double().eval()
        # of the two documents the second ends after the third chunk; padding is between and inside
        seq_idx = torch.tensor([[0, 0, 7, 1, 1, 1, 7, 1, 1, 1]])
        mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1, 1, 1]])
        row = torch.cat([ids[:1], ids[1:2, :3]], 1)
        for options in ({}, {"cache_implementation": "static"}):
            kind = transformers.StaticCache if options else transformers.DynamicCache
            sizes: dict[str, Any] = {"max_cache_len": 12} if options else {}
            cache = kind(config=model.config, **sizes)
            for part in (slice(0, 5), slice(5, 8)):
                where = {"attention_mask": mask[:, part], "seq_idx": seq_idx[:, part]}
                model(row[:, part], past_key_values=cache, **where)
            found = model(row[:, 8:], past_key_values=cache).logits
            document = row[:, [3, 4, 5, 7, 8, 9]]
            same(found, model(document).logits[:, -2:])
        with pytest.raises(ValueError, match="must be of 2 rows, as the ids, got 1"):
            model(ids[:2], past_key_values=cache)
        with pytest.raises(
            ValueError, match=r"seq_idx must have shape .* = \(3, 7\), got \(1, 10\)"
        ):
            model(ids, seq_idx=seq_idx)


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
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=30,
            learning_rate=3e-2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        model = kind(make_config(num_labels=3, hidden_size=16))
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        assert trainer.evaluate()["eval_loss"] < 0.8 * before


class TestForward:
    @pytest.mark.parametrize("right", [False, True])
    def test_padded_rows_equal_rows_alone(
        self, model: BedouinForCausalLM, ids: Tensor, right: bool
    ) -> None:
        mask = torch.arange(7).expand(3, 7) >= torch.tensor([[0], [2], [4]])
        mask = mask.flip(1) if right else mask
        found = model(ids, attention_mask=mask).logits
        for row, kept, real in zip(ids, found, mask, strict=True):
            same(kept[real], model(row[real].unsqueeze(0)).logits[0])

    def test_packed_documents_equal_documents_alone(
        self, model: BedouinForCausalLM, ids: Tensor
    ) -> None:
        batch = transformers.DataCollatorWithFlattening(
            return_flash_attn_kwargs=True, return_seq_idx=True
        )([{"input_ids": row.tolist()} for row in (ids[0], ids[1, :2], ids[2, :4])])
        alone = [model(row.unsqueeze(0)).logits for row in (ids[0], ids[1, :2], ids[2, :4])]
        flattened = batch.pop("input_ids"), batch.pop("labels")
        for names in (["seq_idx"], ["cu_seq_lens_q"], ["position_ids"], list(batch)):
            found = model(flattened[0], **{name: batch[name] for name in names})
            same(found.logits, torch.cat(alone, 1))
        # padding, here before the documents, is in none of them
        padded = torch.cat([ids[:1, :3], flattened[0]], 1)
        real = torch.arange(padded.shape[1]).unsqueeze(0) >= 3
        seq_idx = torch.cat([torch.full((1, 3), 2), batch["seq_idx"]], 1)
        found = model(padded, attention_mask=real.long(), seq_idx=seq_idx)
        same(found.logits[:, 3:], torch.cat(alone, 1))
        # the cache goes on from the last document
        token = ids[2:, 4:5]
        after = model(token, past_key_values=found.past_key_values).logits
        same(after, model(ids[2:, :5]).logits[:, -1:])

    def test_loss_and_kept_logits(self, model: BedouinForCausalLM, ids: Tensor) -> None:
        labels = ids.clone()
        labels[:, :3] = -100
        output = model(ids, labels=labels, output_hidden_states=True)
        logits = output.logits[:, 2:-1].flatten(0, 1)
        # transformers computes it in float32
        expected = torch.nn.functional.cross_entropy(logits.float(), ids[:, 3:].flatten())
        torch.testing.assert_close(output.loss, expected)
        same(model(ids, logits_to_keep=2).logits, output.logits[:, -2:])
        assert len(output.hidden_states) == len(model.model.layers) + 1
        loss, found, *_ = model(ids, labels=labels, return_dict=False)
        same(found, output.logits)

    def test_embeddings_instead_of_ids(self, model: BedouinForCausalLM, ids: Tensor) -> None:
        embeds = model.get_input_embeddings()(ids)
        same(model(inputs_embeds=embeds).logits, model(ids).logits)
        found = model.generate(inputs_embeds=embeds, max_new_tokens=3, do_sample=False)
        assert torch.equal(found, model.generate(ids, max_new_tokens=3, do_sample=False)[:, 7:])

    def test_errors(self, model: BedouinForCausalLM, ids: Tensor) -> None:
        with pytest.raises(ValueError, match="exactly one of input_ids"):
            model()
        with pytest.raises(TypeError, match="did you mean 'position_ids'"):
            model(ids, position_idx=ids)
        with pytest.raises(ValueError, match=r"attention_mask must have shape .*\(3, 7\)"):
            model(ids, attention_mask=torch.ones(3, 1, 7, 7))
        with pytest.raises(TypeError, match="did you mean 'attention_mask'"):
            model(ids, attention_maks=ids)
        with pytest.raises(ValueError, match="no attention"):
            model(ids, output_attentions=True)
        model.set_attn_implementation("eager")  # transformers refuses it beside sdpa
        model.config.output_attentions = True
        with pytest.raises(ValueError, match="no attention"):
            model(ids)
        model.config.output_attentions = False
        with pytest.raises(ValueError, match="single row"):
            model(ids, cu_seq_lens_q=torch.tensor([0, 7]))
        with pytest.raises(ValueError, match=r"ascend from 0 to t = 7, got \[0, 5\]"):
            model(ids[:1], cu_seq_lens_q=torch.tensor([0, 5]))


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
        with pytest.raises(ValueError, match="fuse_linear_cross_entropy must be one of"):
            make_config(fuse_linear_cross_entropy="trition")

    @pytest.mark.gpu
    def test_peak_memory_at_a_large_vocabulary(self) -> None:
        """Below what the logits alone would take, in float32 as transformers' loss has them."""
        config = make_config(vocab_size=2**17, hidden_size=256, fuse_linear_cross_entropy="torch")
        model = BedouinForCausalLM(config).cuda().bfloat16().train()
        ids = torch.randint(1, 2**17, (4, 1024), device="cuda")
        peaks = []
        for skips in (True, False):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(ids, labels=ids, skip_logits=skips).loss.backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            model.zero_grad()
        assert peaks[0] < 4 * ids.numel() * 2**17 < peaks[1]


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

    @pytest.mark.parametrize(
        "auto", ["CausalLM", "SequenceClassification", "TokenClassification"], ids=str
    )
    def test_a_process_loads_a_folder_by_transformers_alone(
        self, ids: Tensor, auto: str, tmp_path: Path
    ) -> None:
        name = f"AutoModelFor{auto}"
        model = getattr(transformers, name).from_config(make_config(**HYBRID)).eval()
        model.save_pretrained(tmp_path / "saved")
        torch.save({"ids": ids, "logits": model(ids).logits.detach()}, tmp_path / "expected")
        lines = f"""
            import torch, transformers
            load = transformers.{name}.from_pretrained
            expected = torch.load("expected")
            for folder in ("saved", "again"):
                model = load(folder, trust_remote_code=True).eval()
                torch.testing.assert_close(model(expected["ids"]).logits, expected["logits"])
                model.save_pretrained("again")
        """
        command = [sys.executable, "-P", "-c", "if True:" + lines]
        environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
        run = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        for folder in ("saved", "again"):
            files = {path.name for path in (tmp_path / folder).glob("*.py")}
            assert files == {"modeling_bedouin.py"}

    def test_quantizers_leave_the_feedback_alone(self, tmp_path: Path) -> None:
        """transformers' list of what they skip, which in float16 also names float32 modules."""
        model = BedouinForCausalLM(make_config(num_heads=1)).eval()
        from transformers.quantizers.base import HfQuantizer

        skipped = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        assert "y_proj" in skipped and "x_proj" not in skipped
        model.save_pretrained(tmp_path)
        loaded = BedouinForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
        kept = {n for n, p in loaded.named_parameters() if p.dtype == torch.float32}
        assert kept == {f"model.layers.{i}.mixer.y_proj.weight" for i in range(2)}
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
        parts = ("0.mixer.A_log", "0.mixer.conv.weight", "_extra_state")
        removed = [n for n in weights if n.endswith(parts)]
        save_file({n: w for n, w in weights.items() if n not in removed}, path, {"format": "pt"})
        loaded = BedouinForCausalLM.from_pretrained(tmp_path)
        found = dict(loaded.named_parameters())
        for name, parameter in model.named_parameters():
            if name.endswith("conv.weight") and name in removed:
                assert 0.1 < found[name].abs().max() <= 3**-0.5
            else:
                assert torch.equal(found[name], parameter), name

    def test_initialization_of_a_convolution_is_that_of_the_layer(self) -> None:
        options = {"conv_kernel": 4, "projection": "input", "initialization": Initialization(0)}
        mixer = mixers(BedouinForCausalLM(make_config(hidden_size=64, **options)))[1]
        assert 0.4 < mixer.conv.weight.abs().max() <= 0.5
        assert not mixer.in_proj.weight[mixer.d_inner : 2 * mixer.d_inner].any()

    def test_initialization_is_that_of_the_layer(self) -> None:
        mixer = mixers(BedouinForCausalLM(make_config(hidden_size=64)))[0]
        same(mixer.A_log.exp(), torch.arange(1, 5.0).expand(mixer.d_inner, -1))
        # uniform within 1 / sqrt(inputs), and W^y scaled down
        assert 0.12 < mixer.in_proj.weight.abs().max() <= 0.125
        assert mixer.y_proj.weight.abs().max() < 0.1 * mixer.x_proj.weight.abs().max() * 1.1
        assert mixer.D._no_weight_decay and mixer.dt_bias._no_reinit


class TestTraining:
    def gradients(self, model: BedouinForCausalLM, ids: Tensor) -> list[Tensor]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_gradient_checkpointing(
        self, model: BedouinForCausalLM, ids: Tensor, use_reentrant: bool
    ) -> None:
        expected = self.gradients(model.train(), ids)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        for found, gradient in zip(self.gradients(model, ids), expected, strict=True):
            same(found, gradient)
        with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
            model(ids, past_key_values=transformers.DynamicCache(config=model.config))

    def test_trainer_resumes(self, mixing: dict[str, Any], tmp_path: Path) -> None:
        rows = torch.randint(1, VOCAB, (16, 6)).tolist()
        data = [{"input_ids": row, "labels": row} for row in rows]

        def train(steps: int, resume: bool) -> tuple[BedouinForCausalLM, list[float]]:
            torch.manual_seed(0)
            model = BedouinForCausalLM(make_config(**mixing))
            arguments = transformers.TrainingArguments(
                output_dir=str(tmp_path / str(steps if not resume else "cut")),
                max_steps=4,
                save_steps=2,
                logging_steps=1,
                per_device_train_batch_size=4,
                learning_rate=1e-2,
                lr_scheduler_type="constant",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                gradient_checkpointing=True,
                max_grad_norm=1.0,
            )
            trainer = transformers.Trainer(model, arguments, train_dataset=data)
            cut = str(tmp_path / "4" / "checkpoint-2")
            trainer.train(resume_from_checkpoint=cut if resume else None)
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            return model, losses

        whole, losses = train(4, resume=False)
        resumed, again = train(4, resume=True)
        assert losses[-1] < losses[0] and again == losses
        for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("name", ["seq_idx", "position_ids"])
    def test_trainer_keeps_the_documents_of_a_data_set(
        self, mixing: dict[str, Any], name: str, tmp_path: Path
    ) -> None:
        """It drops columns without a name in `forward`, and a row would be one document."""
        model = BedouinForCausalLM(make_config(initializer_range=0.5, **mixing))
        row = torch.randint(1, VOCAB, (6,)).tolist()
        where = {"seq_idx": [0, 0, 1, 1, 1, 1], "position_ids": [0, 1, 0, 1, 2, 3]}
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True
        )
        data = [{"input_ids": row, "labels": row, name: where[name]}]
        found = transformers.Trainer(model, arguments, eval_dataset=data).evaluate()["eval_loss"]
        ids = torch.tensor([row])
        logits = torch.cat([model(part).logits for part in (ids[:, :2], ids[:, 2:])], 1)
        expected = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
        assert found == pytest.approx(expected.item(), rel=1e-5)

    # of several heads, x_proj and y_proj have weights that PEFT adapts as parameters only
    @pytest.mark.parametrize(
        ("targets", "options", "adapted_a_block"),
        [
            ("all-linear", {}, 6),
            ("all-linear", {"num_heads": 2}, 6),
            (["x_proj", "y_proj"], {}, 2),
            (["in_proj", "y_proj"], {"projection": "input", "conv_kernel": 3}, 3),
        ],
    )
    def test_lora_trains_and_merges(
        self, ids: Tensor, targets: Any, options: dict[str, Any], adapted_a_block: int
    ) -> None:
        peft = pytest.importorskip("peft")
        model = BedouinForCausalLM(make_config(**options)).double()
        parameters = ["x_proj.weight", "y_proj.weight"] if "num_heads" in options else None
        lora = peft.LoraConfig(
            task_type="CAUSAL_LM", r=2, target_modules=targets, target_parameters=parameters
        )
        adapted = peft.get_peft_model(model, lora)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.train()(input_ids=ids, labels=ids).loss.backward()
        trained = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in trained.values())
        # two matrices an adapter, two blocks
        assert len(trained) == 2 * 2 * adapted_a_block
        adapted.eval()
        logits, tokens = adapted(ids).logits, adapted.generate(ids, max_new_tokens=3)
        merged = adapted.merge_and_unload()
        same(merged(ids).logits, logits)
        assert torch.equal(merged.generate(ids, max_new_tokens=3), tokens)

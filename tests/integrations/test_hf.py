"""bedouin.integrations.hf: generation, caches, hybrid models and calls."""

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.16")

from tests.integrations.hf_models import (  # noqa: E402
    HYBRID,
    left_padded,
    make_config,
    make_model,
    mixers,
    with_noise,
)
from tests.integrations.mixings import same  # noqa: E402
from tests.messages import of, of_kind, refused  # noqa: E402

from bedouin.integrations.hf import BedouinCacheLayer, BedouinForCausalLM  # noqa: E402
from bedouin.integrations.hf.models import BedouinAttention, attention_options  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::bedouin.solvers.ConvergenceWarning"),
]


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

    @pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"use_cache": False}], ids=str)
    def test_training_mode_has_no_noise(
        self, mixing: dict[str, Any], ids: Tensor, options: dict[str, Any]
    ) -> None:
        model = make_model(**with_noise(mixing)).train()
        options = {"max_new_tokens": 8, "do_sample": False, **options}
        found = model.generate(ids, **options)
        is_random = not torch.equal(model(ids).logits, model(ids).logits)
        assert is_random == (with_noise(mixing) != mixing)
        assert model.training and torch.equal(found, model.eval().generate(ids, **options))

    @pytest.mark.parametrize(
        ("name", "where"), [("seq_idx", [[0, 0, 0, 1, 1, 1, 1]]), ("cu_seq_lens_q", [0, 3, 7])]
    )
    def test_a_packed_prompt_goes_on_from_its_last_document(
        self, model: BedouinForCausalLM, ids: Tensor, name: str, where: list[Any]
    ) -> None:
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
        found = model.generate(ids[:1], **{name: torch.tensor(where)}, **options)
        assert torch.equal(found[:, 3:], model.generate(ids[:1, 3:], **options))

    def test_decoding_takes_the_step(self, model: BedouinForCausalLM, ids: Tensor) -> None:
        mixer, (padded, mask) = mixers(model)[0], left_padded(ids, [0, 1, 2])
        for options in ({"attention_mask": mask}, {"attention_mask": torch.ones_like(mask)}, {}):
            with patch.object(mixer, "step", wraps=mixer.step) as step:
                model.generate(padded, **options, max_new_tokens=4, do_sample=False)
            assert [call.args[0].shape for call in step.mock_calls] == [(3, 8)] * 3


class TestCache:
    def test_layout(self, model: BedouinForCausalLM, ids: Tensor) -> None:
        cache = model(ids).past_key_values
        block: Any = model.model.layers[0]
        assert type(cache) is transformers.DynamicCache
        _, state = block.mixer(block.norm(model.model.embed_tokens(ids)), return_state=True)
        kept = cache.layers[0].recurrent_states
        assert type(cache.layers[0].state) is type(state) and len(kept) == len(state.tensors)
        for i, tensor in enumerate(state.tensors):
            assert torch.equal(kept[i], tensor)
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

    @torch.no_grad()
    @pytest.mark.parametrize("records", [False, True])
    def test_tokens_cannot_be_removed(
        self, model: BedouinForCausalLM, ids: Tensor, records: bool
    ) -> None:
        cache = transformers.DynamicCache(config=model.config)
        if records:
            cache.activate_past_recording()
        first = model(ids[:, :4], past_key_values=cache).logits
        kept = copy.deepcopy(cache)
        for removed in (-2, -4, 3):
            with pytest.raises(ValueError, match=f"got {removed} after 4 tokens: a recurrent stat"):
                cache.layers[0].crop(removed)
        with pytest.raises(ValueError, match="a recurrent state cannot be taken back"):
            cache.crop(-2)
        for layer in kept.layers:
            if isinstance(layer, BedouinCacheLayer):
                layer.crop(0)
                layer.crop(4)
        assert not cache.is_croppable
        rest = model(ids[:, 4:], past_key_values=kept).logits
        same(torch.cat([first, rest], 1), model(ids).logits)

    def test_gradients_flow_through_chunks(self, model: BedouinForCausalLM, ids: Tensor) -> None:
        cache = transformers.DynamicCache(config=model.config)
        chunks = [model(part, past_key_values=cache).logits for part in ids.split([3, 1, 3], dim=1)]
        weight = model.model.embed_tokens.weight
        (found,) = torch.autograd.grad(torch.cat(chunks, 1).square().sum(), weight)
        (expected,) = torch.autograd.grad(model(ids).logits.square().sum(), weight)
        same(found, expected)

    def test_the_cache_has_two_names(self, model: BedouinForCausalLM, ids: Tensor) -> None:
        first, last = (model.model(ids[:, :4]).past_key_values for _ in range(2))
        found = model(ids[:, 4:], past_key_values=first).logits
        assert torch.equal(found, model(ids[:, 4:], cache=last).logits)


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

    def test_chunks_of_documents_and_padding(self, ids: Tensor) -> None:
        """A later chunk need not say which tokens before it were real, or of which document. Here
        the first and the last layer attend."""
        model = make_model(**HYBRID | {"attn_layers": [0, 2]})
        # of the two documents the second ends after the third chunk; padding is between and inside
        seq_idx = torch.tensor([[0, 0, 7, 1, 1, 1, 7, 1, 1, 1]])
        mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1, 1, 1]])
        row = torch.cat([ids[:1], ids[1:2, :3]], 1)
        for cache in (
            transformers.DynamicCache(config=model.config),
            transformers.StaticCache(config=model.config, max_cache_len=12),
        ):
            for part in (slice(0, 5), slice(5, 8)):
                where = {"attention_mask": mask[:, part], "seq_idx": seq_idx[:, part]}
                model(row[:, part], past_key_values=cache, **where)
            found = model(row[:, 8:], past_key_values=cache).logits
            document = row[:, [3, 4, 5, 7, 8, 9]]
            same(found, model(document).logits[:, -2:])
        with pytest.raises(ValueError, match="must be of 2 rows, as the ids, got 1"):
            model(ids[:2], past_key_values=cache)


class TestForward:
    def test_padded_rows_equal_rows_alone(self, model: BedouinForCausalLM, ids: Tensor) -> None:
        places = [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0]]
        mask = torch.tensor(places).bool()
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


MODEL, ROWS = make_model(), torch.ones(3, 7, dtype=torch.long)
CACHE: Any = transformers.DynamicCache(config=MODEL.config)
WITH_WEIGHTS = make_model(attn_implementation="eager", output_attentions=True)
REFUSED = of_kind(ValueError, [
    (of(MODEL), "exactly one of input_ids"),
    (of(MODEL, ROWS, attention_mask=torch.ones(3, 1, 7, 7)),
     "attention_mask must have shape ...(3, 7)"),
    (of(MODEL, ROWS, output_attentions=True), "no attention"),
    (of(WITH_WEIGHTS, ROWS), "no attention"),
    (of(MODEL, ROWS, cu_seq_lens_q=torch.tensor([0, 7])), "single row"),
    (of(MODEL, ROWS[:1], cu_seq_lens_q=torch.tensor([0, 5])), "from 0 to t = 7, got [0, 5]"),
    (of(MODEL, ROWS, seq_idx=ROWS[:1]), "seq_idx must have shape ... = (3, 7), got (1, 7)"),
    (of(MODEL, ROWS, past_key_values=CACHE, cache=CACHE), "give one of them"),
    *((of(MODEL.generate, ROWS[:1], max_new_tokens=2, **proposed),
       "assisted generation is not supported")
      for proposed in ({"assistant_model": MODEL}, {"prompt_lookup_num_tokens": 2})),
]) + of_kind(TypeError, [
    (of(MODEL, ROWS, position_idx=ROWS), "did you mean 'position_ids'"),
    (of(MODEL, ROWS, past_key_values=transformers.DynamicCache()),
     "DynamicCache(config=model.config)"),
    (of(BedouinCacheLayer().update, ROWS, ROWS), "no keys and values"),
])  # fmt: skip

test_calls_that_do_not_fit = refused(REFUSED)

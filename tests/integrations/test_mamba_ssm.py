"""bedouin.integrations.mamba_ssm against the installed mamba-ssm, with or without its extension."""

import sys
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.integrations.mixings import NOISY, OTHERS, VOCAB, same, sized
from torch import nn

from bedouin.integrations.mamba_ssm import BedouinMixer

STUB = "selective_scan_cuda"
missing = find_spec(STUB) is None
if missing:
    # the extension, which mamba-ssm imports and can be built without; nothing here calls it
    sys.modules[STUB] = ModuleType(STUB)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("mamba_ssm")
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
    from mamba_ssm.modules.block import Block
    from mamba_ssm.utils.generation import InferenceParams
    from mamba_ssm.utils.hf import load_state_dict_hf
if missing:
    del sys.modules[STUB]

pytestmark = pytest.mark.filterwarnings("default")

# Kernels of mamba-ssm's own that need a GPU.
PLAIN = {"fused_add_norm": False, "rms_norm": False}


CONVOLVED: dict[str, Any] = {"d_conv": 3, "feedback": ("delta",)}
MIXINGS: list[dict[str, Any]] = [{"num_heads": 1}, {"num_heads": 2}, CONVOLVED, *OTHERS]
mixings = pytest.mark.parametrize("mixing", MIXINGS)
noisy = pytest.mark.parametrize("mixing", NOISY)


def with_mixers(model: MambaLMHeadModel, **options: Any) -> MambaLMHeadModel:
    """The model with a `BedouinMixer` in each block."""
    for i, block in enumerate(model.backbone.layers):
        block.mixer = BedouinMixer(model.config.d_model, layer_idx=i, **options)
    return model


def make_model(**options: Any) -> MambaLMHeadModel:
    config = MambaConfig(d_model=8, n_layer=2, vocab_size=VOCAB, **PLAIN)
    return with_mixers(MambaLMHeadModel(config), **sized(options)).double()


class TestBlock:
    def test_mixer_cls(self) -> None:
        mixer_cls = partial(BedouinMixer, layer_idx=3, d_state=4, dtype=torch.float64)
        block = Block(8, mixer_cls, nn.Identity, partial(nn.LayerNorm, dtype=torch.float64))
        x = torch.randn(2, 5, 8, dtype=torch.float64)
        hidden, residual = block(x)
        assert hidden.shape == x.shape and torch.equal(residual, x)
        states = block.allocate_inference_cache(2, 100, dtype=torch.bfloat16)
        assert [tuple(s.shape) for s in states] == [(2, 16, 4), (2, 16)]
        assert all(s.dtype == torch.float64 for s in states)

    @mixings
    def test_documents_pass_through_the_block(self, mixing: dict[str, Any]) -> None:
        block = Block(8, partial(BedouinMixer, **sized(mixing)), nn.Identity).double()
        x = torch.randn(1, 6, 8, dtype=torch.float64)
        alone = torch.cat([block(x[:, :2])[0], block(x[:, 2:])[0]], 1)
        same(block(x, seq_idx=torch.tensor([[0, 0, 1, 1, 1, 1]]))[0], alone)
        same(block(x, cu_seqlens=torch.tensor([0, 2, 6]))[0], alone)

    @mixings
    def test_step_is_in_place_and_equals_the_call(self, mixing: dict[str, Any]) -> None:
        mixer = BedouinMixer(8, **sized(mixing)).double()
        x = torch.randn(2, 5, 8, dtype=torch.float64)
        states = mixer.allocate_inference_cache(2, 5)
        addresses = [s.data_ptr() for s in states]
        outputs = []
        for token in x.split(1, dim=1):
            output, *after = mixer.step(token, *states)
            assert [s.data_ptr() for s in after] == addresses
            outputs.append(output)
        same(torch.cat(outputs, 1), mixer(x))
        # the last token's gradient is not spoiled by the states that were overwritten
        outputs[-1].sum().backward()

    def test_the_order_of_mamba(self) -> None:
        mixer = BedouinMixer(8, 4, 3, 1.5)
        assert mixer.layer.conv is not None
        assert (mixer.layer.conv.width, mixer.layer.d_inner) == (3, 12)
        states = mixer.allocate_inference_cache(2, 100)
        assert [tuple(s.shape) for s in states] == [(2, 12, 4), (2, 12), (2, 2, 12)]


class TestModels:
    @mixings
    def test_forward_and_gradients(self, mixing: dict[str, Any]) -> None:
        model = make_model(**mixing)
        assert all(isinstance(block.mixer, BedouinMixer) for block in model.backbone.layers)
        ids = torch.randint(VOCAB, (2, 6))
        assert model(ids).logits.shape == (2, 6, VOCAB)
        model(ids).logits.square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())

    @mixings
    def test_a_file_has_the_weights(self, mixing: dict[str, Any], tmp_path: Path) -> None:
        model, ids = make_model(**mixing), torch.randint(VOCAB, (2, 6))
        model.save_pretrained(str(tmp_path))
        found = make_model(**mixing)
        found.load_state_dict(load_state_dict_hf(str(tmp_path)))
        assert torch.equal(found(ids).logits, model(ids).logits)

    @mixings
    def test_generate_equals_whole_sequences(
        self, mixing: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # a dummy without CUDA, whose methods `generate` calls only for timing
        monkeypatch.setattr(torch.cuda, "Event", lambda **options: None)
        model, ids = make_model(**mixing), torch.randint(VOCAB, (2, 4))
        expected = ids
        for _ in range(5):
            best = model(expected).logits[:, -1].argmax(-1, keepdim=True)
            expected = torch.cat([expected, best], 1)
        assert torch.equal(model.generate(ids, max_length=9), expected)

    @mixings
    def test_chunks_and_parts_of_a_batch(self, mixing: dict[str, Any]) -> None:
        model, ids = make_model(**mixing), torch.randint(VOCAB, (3, 7))
        params = InferenceParams(max_seqlen=7, max_batch_size=3)
        params.key_value_memory_dict = model.allocate_inference_cache(3, 7)
        found = []
        for rows in (slice(0, 1), slice(1, 3)):
            params.batch_size_offset, params.seqlen_offset = rows.start, 0
            chunks = []
            for chunk in ids[rows].split([3, 1, 3], dim=1):
                chunks.append(model(chunk, inference_params=params).logits)
                params.seqlen_offset += chunk.shape[1]
            found.append(torch.cat(chunks, 1))
        same(torch.cat(found), model(ids).logits)

    def test_a_cache_is_used_again(self) -> None:
        model, ids = make_model(), torch.randint(VOCAB, (2, 4))
        params = InferenceParams(max_seqlen=4, max_batch_size=2)
        first = model(ids, inference_params=params).logits
        params.reset(4, 2)
        assert torch.equal(model(ids, inference_params=params).logits, first)

    @mixings
    def test_a_new_sequence_may_be_a_larger_batch(self, mixing: dict[str, Any]) -> None:
        model, ids = make_model(**mixing), torch.randint(VOCAB, (5, 6))
        params = InferenceParams(max_seqlen=6, max_batch_size=5)
        # the last is a batch in two parts, of which the second makes the states longer
        for parts in ([1], [3], [2], [2, 3]):
            batch, first = ids[: sum(parts)], []
            params.batch_size_offset = params.seqlen_offset = 0
            for part in batch[:, :5].split(parts):
                first.append(model(part, inference_params=params).logits)
                params.batch_size_offset += len(part)
            params.batch_size_offset, params.seqlen_offset = 0, 5
            last = model(batch[:, 5:], inference_params=params).logits
            same(torch.cat([torch.cat(first), last], 1), model(batch).logits)

    def test_a_sequence_goes_on_with_its_batch(self) -> None:
        mixer = BedouinMixer(8, layer_idx=0)
        params = InferenceParams(max_seqlen=6, max_batch_size=5)
        mixer(torch.randn(2, 3, 8), inference_params=params)
        params.seqlen_offset = 3
        for t in (1, 2):
            with pytest.raises(ValueError, match="must have at most 2 rows.* layer 0 .* got 3: a"):
                mixer(torch.randn(3, t, 8), inference_params=params)

    @noisy
    def test_generation_has_no_noise_in_training_mode(self, mixing: dict[str, Any]) -> None:
        model, ids = make_model(**mixing), torch.randint(VOCAB, (2, 4))
        assert model.training and not torch.equal(model(ids).logits, model(ids).logits)
        params = InferenceParams(max_seqlen=4, max_batch_size=2)
        chunks = []
        for chunk in ids.split([2, 1, 1], dim=1):
            chunks.append(model(chunk, inference_params=params).logits)
            params.seqlen_offset += chunk.shape[1]
        same(torch.cat(chunks, 1), model.eval()(ids).logits)

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("mixing", [{"num_heads": 2}, CONVOLVED, *OTHERS])
    def test_graphs_generate_the_same_tokens(
        self, mixing: dict[str, Any], dtype: torch.dtype
    ) -> None:
        config = MambaConfig(d_model=64, n_layer=2, vocab_size=VOCAB)
        model = with_mixers(MambaLMHeadModel(config), **mixing).to("cuda", dtype)
        ids = torch.randint(VOCAB, (2, 8), device="cuda")
        plain = model.generate(ids, max_length=24)
        assert torch.equal(model.generate(ids, max_length=24, cg=True), plain)


class TestErrors:
    def test_messages(self) -> None:
        mixer, x = BedouinMixer(8), torch.randn(1, 2, 8)
        params = InferenceParams(max_seqlen=4, max_batch_size=1)
        with pytest.raises(ValueError, match=r"partial\(BedouinMixer, layer_idx=i\)"):
            mixer(x, inference_params=params)
        with pytest.raises(ValueError, match="cu_seqlens must be None with inference_params"):
            mixer(x, inference_params=params, cu_seqlens=torch.tensor([0, 2]))
        with pytest.raises(ValueError, match=r"\(b, 1, m\), got \(1, 2, 8\)"):
            mixer.step(x, *mixer.allocate_inference_cache(1, 1))
        with pytest.raises(ValueError, match="d_conv must be"):
            BedouinMixer(8, d_conv=0)
        with pytest.raises(ValueError, match=r"layer must be one of \('Bedouin', .*got 'Mamba'"):
            BedouinMixer(8, layer="Mamba")
        with pytest.raises(TypeError, match="TrackingDeltaNet has no option 'd_state'"):
            BedouinMixer(8, 16, layer="TrackingDeltaNet")

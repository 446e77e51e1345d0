"""bedouin.integrations.fla against the installed flash-linear-attention."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.mixings import NOISY, OTHERS, VOCAB, same, sized
from torch import Tensor, nn

from bedouin.integrations.fla import BedouinLayer

pytest.importorskip("transformers")
from safetensors.torch import load_model  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("fla")
    from fla.models import GLAConfig, GLAForCausalLM
    from fla.models.utils import Cache

pytestmark = pytest.mark.filterwarnings("default")

CONVOLVED: dict[str, Any] = {"use_short_conv": True, "conv_size": 3, "feedback": ("delta",)}
MIXINGS: list[dict[str, Any]] = [{}, {"num_heads": 2}, CONVOLVED, *OTHERS]
mixings = pytest.mark.parametrize("mixing", MIXINGS)
noisy = pytest.mark.parametrize("mixing", NOISY)


def with_layers(model: GLAForCausalLM, **options: Any) -> GLAForCausalLM:
    """The model with a `BedouinLayer` in each block."""
    for i, block in enumerate(model.model.layers):
        block.attn = BedouinLayer(model.config.hidden_size, layer_idx=i, **options)
    return model


def make_model(**options: Any) -> GLAForCausalLM:
    """With torch's modules in place of FLA's kernels, which need a GPU."""
    plain = dict.fromkeys(("fuse_norm", "fuse_swiglu", "fuse_cross_entropy"), False)
    config = GLAConfig(
        hidden_size=8, num_hidden_layers=2, num_heads=2, vocab_size=VOCAB, pad_token_id=0, **plain
    )
    return with_layers(GLAForCausalLM(config), **sized(options)).double().eval()


def make_layer(**options: Any) -> BedouinLayer:
    return BedouinLayer(8, layer_idx=0, **sized(options)).double()


@pytest.fixture
def plain_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """SwiGLU in torch: FLA's kernel, which no option replaces, does not take tensors of a CPU."""
    monkeypatch.setattr("fla.modules.mlp.swiglu", lambda x, y: nn.functional.silu(x) * y)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 6, 8, dtype=torch.float64)


class TestLayer:
    @mixings
    def test_chunks_and_tokens_equal_the_whole(self, x: Tensor, mixing: dict[str, Any]) -> None:
        layer, cache = make_layer(**mixing), Cache()
        whole, attentions, none = layer(x)
        assert attentions is None and none is None
        found = []
        for chunk in x.split([3, 1, 1, 1], dim=1):
            output, _, cache = layer(chunk, past_key_values=cache, use_cache=True)
            found.append(output)
        same(torch.cat(found, 1), whole)
        assert cache.get_seq_length(0) == 6
        _, state = layer.layer(x, return_state=True)
        for kept, tensor in zip(cache[0]["recurrent_state"], state.tensors, strict=True):
            same(kept, tensor)

    def test_the_cache_changes_with_use_cache_only(self, x: Tensor) -> None:
        layer, cache = make_layer(), Cache()
        layer(x, past_key_values=cache, use_cache=False)
        assert len(cache) == 0

    @mixings
    def test_mask_in_prefill_and_decoding(self, x: Tensor, mixing: dict[str, Any]) -> None:
        layer, cache = make_layer(**mixing), Cache()
        mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
        prefill, _, _ = layer(x[:, :5], mask[:, :5], cache, use_cache=True)
        # as in generation, the mask also covers the tokens before
        last, _, _ = layer(x[:, 5:], mask, cache, use_cache=True)
        found = torch.cat([prefill, last], 1)
        for row, output, real in zip(x, found, mask.bool(), strict=True):
            same(output[real], layer(row[real].unsqueeze(0))[0][0])
            assert not output[~real].any()
        alone = Cache()
        layer(x[1:, :5], past_key_values=alone, use_cache=True)
        kept, expected = layer._read(cache), layer._read(alone)
        assert kept is not None and expected is not None
        for tensor, state in zip(kept.tensors, expected.tensors, strict=True):
            same(tensor[1:], state)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @mixings
    def test_documents_have_states_of_their_own(
        self, x: Tensor, mixing: dict[str, Any], dtype: torch.dtype
    ) -> None:
        layer, cache = make_layer(**mixing), Cache()
        cu_seqlens = torch.tensor([0, 2, 6], dtype=dtype)
        parts = x[:1, :2], x[:1, 2:]
        for _ in range(2):
            found, _, _ = layer(x[:1], past_key_values=cache, use_cache=True, cu_seqlens=cu_seqlens)
        twice = [layer(part.repeat(1, 2, 1))[0][:, part.shape[1] :] for part in parts]
        same(found, torch.cat(twice, 1))
        real = torch.tensor([[1, 0, 0, 1, 1, 1]])
        padded, _, _ = layer(x[:1], real, cu_seqlens=cu_seqlens)
        same(padded[:, 3:], layer(x[:1, 3:])[0])

    @mixings
    def test_beams(self, x: Tensor, mixing: dict[str, Any]) -> None:
        layer, cache = make_layer(**mixing), Cache()
        layer(x[:, :5], past_key_values=cache, use_cache=True)
        cache.reorder_cache(torch.tensor([1, 0]))
        found, _, _ = layer(x[:, 5:].flip(0), past_key_values=cache, use_cache=True)
        same(found.flip(0), layer(x)[0][:, 5:])

    def test_errors(self, x: Tensor) -> None:
        layer = make_layer()
        with pytest.raises(ValueError, match=r"attention_mask must have shape .*got \(2, 6, 6\)"):
            layer(x, torch.ones(2, 6, 6))
        with pytest.raises(ValueError, match="no attention"):
            layer(x, output_attentions=True)
        with pytest.raises(ValueError, match="layer_idx must be an int"):
            BedouinLayer(8).double()(x, past_key_values=Cache())
        with pytest.raises(ValueError, match="mode must be one of"):
            BedouinLayer(8, mode="parallel")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="use_short_conv must be True or False"):
            BedouinLayer(8, use_short_conv=4)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"layer must be one of \('Bedouin', .*got 'Mamba'"):
            BedouinLayer(8, layer="Mamba")
        with pytest.raises(TypeError, match="TrackingDeltaNet has no option 'expand'"):
            BedouinLayer(8, layer="TrackingDeltaNet", expand=2)
        with pytest.raises(ValueError, match="got d_conv=3 and use_short_conv=True"):
            BedouinLayer(8, layer="GatedDeltaNet", use_short_conv=True, d_conv=3)


@pytest.mark.usefixtures("plain_activation")
class TestModel:
    def test_packed_rows_equal_a_batch(self) -> None:
        model, ids = make_model(), torch.randint(1, VOCAB, (2, 6))
        cu_seqlens = torch.tensor([0, 6, 12])
        packed = model(ids.view(1, 12), cu_seqlens=cu_seqlens, use_cache=False).logits
        same(packed.view(2, 6, VOCAB), model(ids).logits)

    @mixings
    def test_generate_left_padded(self, mixing: dict[str, Any]) -> None:
        model = make_model(**mixing)
        ids = torch.randint(1, VOCAB, (2, 5))
        padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], 1)
        mask = torch.ones_like(padded)
        mask[0, :3] = 0
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
        found = model.generate(padded, attention_mask=mask, **options)
        assert torch.equal(found[:1, 3:], model.generate(ids[:1], **options))
        unpadded = model.generate(padded[1:], attention_mask=mask[1:], **options)
        assert torch.equal(found[1:], unpadded)

    @noisy
    def test_generation_has_no_noise_in_training_mode(self, mixing: dict[str, Any]) -> None:
        model, ids = make_model(**mixing).train(), torch.randint(1, VOCAB, (2, 5))
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
        options |= {"return_dict_in_generate": True, "output_logits": True}
        assert not torch.equal(model(ids).logits, model(ids).logits)
        found = model.generate(ids, **options).logits
        same(torch.stack(found), torch.stack(model.eval().generate(ids, **options).logits))

    @noisy
    def test_training_with_a_cache_has_noise(self, mixing: dict[str, Any]) -> None:
        layer, x = make_layer(**mixing), torch.randn(2, 6, 8, dtype=torch.float64)
        first, second = (layer(x, past_key_values=Cache(), use_cache=True)[0] for _ in range(2))
        assert not torch.equal(first, second)

    @mixings
    def test_a_file_has_the_weights(self, mixing: dict[str, Any], tmp_path: Path) -> None:
        model, ids = make_model(**mixing), torch.randint(1, VOCAB, (2, 6))
        model.save_pretrained(tmp_path)
        found = make_model(**mixing)
        load_model(found, tmp_path / "model.safetensors")
        assert torch.equal(found(ids).logits, model(ids).logits)

    @mixings
    def test_training(self, mixing: dict[str, Any]) -> None:
        model, ids = make_model(**mixing).train(), torch.randint(1, VOCAB, (2, 6))
        model(ids, labels=ids).loss.backward()
        assert all(p.grad is not None for n, p in model.named_parameters() if ".attn." in n)


@pytest.mark.gpu
def test_a_model_with_the_kernels_of_fla() -> None:
    config = GLAConfig(
        hidden_size=64, num_hidden_layers=2, num_heads=2, vocab_size=VOCAB, pad_token_id=0
    )
    model = with_layers(GLAForCausalLM(config), num_heads=2).to("cuda", torch.bfloat16)
    ids = torch.randint(1, VOCAB, (2, 40), device="cuda")
    cu_seqlens = torch.tensor([0, 40, 80], device="cuda")
    model.eval()
    packed = model(ids.view(1, 80), cu_seqlens=cu_seqlens, use_cache=False).logits
    # both are rounded to bfloat16 after each of two layers
    torch.testing.assert_close(packed.view(2, 40, VOCAB), model(ids).logits, rtol=0.1, atol=0.05)
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

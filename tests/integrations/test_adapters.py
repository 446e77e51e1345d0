"""bedouin.integrations.fla and .mamba_ssm against the installed packages, mamba-ssm with or without
its extension: the laws of both adapters, then what each has of its own."""

import sys
import warnings
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.integrations.mixings import NOISY, OTHERS, VOCAB, same, sized
from tests.messages import of, of_kind, refused
from torch import Tensor, nn

from bedouin.integrations.fla import BedouinLayer
from bedouin.integrations.mamba_ssm import BedouinMixer

pytestmark = pytest.mark.filterwarnings("default")

CONVOLVED: dict[str, Any] = {"d_conv": 3, "feedback": ("delta",)}
MIXINGS: list[dict[str, Any]] = [{}, {"num_heads": 2}, CONVOLVED, *OTHERS]
mixings = pytest.mark.parametrize("mixing", MIXINGS)
noisy = pytest.mark.parametrize("mixing", NOISY)
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}


def imported(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(name.partition(".")[0])
        return import_module(name)


class Fla:
    """Its GLA with a `BedouinLayer` in each block, and the calls that the laws make."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("transformers")
        self.models, self.Cache = imported("fla.models"), imported("fla.models.utils").Cache
        # SwiGLU in torch: FLA's kernel, which no option replaces, does not take tensors of a CPU
        patch.setattr("fla.modules.mlp.swiglu", lambda x, y: nn.functional.silu(x) * y)

    def model(self, hidden_size: int = 8, *, plain: bool = True, **options: Any) -> Any:
        """With torch's modules in place of FLA's kernels, which need a GPU, if plain."""
        fused = dict.fromkeys(("fuse_norm", "fuse_swiglu", "fuse_cross_entropy"), not plain)
        sizes = {"hidden_size": hidden_size, "num_hidden_layers": 2, "num_heads": 2}
        ends = {"pad_token_id": 0, "eos_token_id": None}
        config = self.models.GLAConfig(**sizes, **fused, **ends, vocab_size=VOCAB)
        model = self.models.GLAForCausalLM(config)
        for i, block in enumerate(model.model.layers):
            block.attn = BedouinLayer(hidden_size, layer_idx=i, **options)
        return model

    def layer(self, **options: Any) -> BedouinLayer:
        return BedouinLayer(8, layer_idx=0, **options)

    def call(self, layer: BedouinLayer, x: Tensor, **where: Any) -> Any:
        return layer(x, **where)[0]

    def chunks(self, model: Any, ids: Tensor, sizes: list[int]) -> Tensor:
        cache, found = self.Cache(), []
        for chunk in ids.split(sizes, 1):
            output = model(chunk, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            found.append(output.logits)
        return torch.cat(found, 1)

    def load(self, model: Any, folder: Path) -> None:
        imported("safetensors.torch").load_model(model, folder / "model.safetensors")


class MambaSsm:
    """Its MambaLMHeadModel with a `BedouinMixer` in each block, and the same calls."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        stub = "selective_scan_cuda"
        if find_spec(stub) is None:
            # the extension, which mamba-ssm imports and can be built without; nothing calls it
            patch.setitem(sys.modules, stub, ModuleType(stub))
        self.simple = imported("mamba_ssm.models.mixer_seq_simple")
        self.Params = imported("mamba_ssm.utils.generation").InferenceParams
        self.Block = imported("mamba_ssm.modules.block").Block
        if not torch.cuda.is_available():
            # a dummy, whose methods `generate` calls only for timing
            patch.setattr(torch.cuda, "Event", lambda **options: None)

    def model(self, d_model: int = 8, *, plain: bool = True, **options: Any) -> Any:
        """Without mamba-ssm's own kernels, which need a GPU, if plain."""
        fused = dict.fromkeys(("fused_add_norm", "rms_norm"), not plain)
        config = self.simple.MambaConfig(d_model=d_model, n_layer=2, vocab_size=VOCAB, **fused)
        model = self.simple.MambaLMHeadModel(config)
        for i, block in enumerate(model.backbone.layers):
            block.mixer = BedouinMixer(d_model, layer_idx=i, **options)
        return model

    def layer(self, **options: Any) -> BedouinMixer:
        return BedouinMixer(8, layer_idx=0, **options)

    def call(self, layer: BedouinMixer, x: Tensor, **where: Any) -> Any:
        return layer(x, **where)

    def chunks(self, model: Any, ids: Tensor, sizes: list[int]) -> Tensor:
        params, found = self.Params(max_seqlen=ids.shape[1], max_batch_size=len(ids)), []
        for chunk in ids.split(sizes, 1):
            found.append(model(chunk, inference_params=params).logits)
            params.seqlen_offset += chunk.shape[1]
        return torch.cat(found, 1)

    def load(self, model: Any, folder: Path) -> None:
        model.load_state_dict(imported("mamba_ssm.utils.hf").load_state_dict_hf(str(folder)))


@pytest.fixture(params=[Fla, MambaSsm])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return request.param(monkeypatch)


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Fla:
    return Fla(monkeypatch)


@pytest.fixture
def mamba(monkeypatch: pytest.MonkeyPatch) -> MambaSsm:
    return MambaSsm(monkeypatch)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, VOCAB, (2, 6))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 6, 8, dtype=torch.float64)


@mixings
def test_chunks_and_tokens_equal_the_whole(
    library: Any, mixing: dict[str, Any], ids: Tensor
) -> None:
    model = library.model(**sized(mixing)).double().eval()
    same(library.chunks(model, ids, [3, 1, 1, 1]), model(ids).logits)


@noisy
def test_generation_has_no_noise_in_training_mode(
    library: Any, mixing: dict[str, Any], ids: Tensor
) -> None:
    model = library.model(**mixing).double().train()
    assert not torch.equal(model(ids).logits, model(ids).logits)
    with torch.no_grad():
        found = library.chunks(model, ids, [4, 1, 1])
    same(found, model.eval()(ids).logits)


@mixings
def test_documents_are_what_each_is_alone(library: Any, mixing: dict[str, Any], x: Tensor) -> None:
    layer = library.layer(**sized(mixing)).double()
    alone = torch.cat([library.call(layer, x[:1, :2]), library.call(layer, x[:1, 2:])], 1)
    for dtype in (torch.int32, torch.int64):
        bounds = torch.tensor([0, 2, 6], dtype=dtype)
        same(library.call(layer, x[:1], cu_seqlens=bounds), alone)


@mixings
def test_a_model_trains_and_a_file_has_its_weights(
    library: Any, mixing: dict[str, Any], ids: Tensor, tmp_path: Path
) -> None:
    model, found = (library.model(**sized(mixing)).double() for _ in range(2))
    model(ids).logits.square().mean().backward()
    parts = [m for m in model.modules() if isinstance(m, BedouinLayer | BedouinMixer)]
    assert len(parts) == 2
    assert all(p.grad is not None for part in parts for p in part.parameters())
    model.eval().save_pretrained(str(tmp_path))
    library.load(found, tmp_path)
    assert torch.equal(found.eval()(ids).logits, model(ids).logits)


X, MIXER = torch.randn(1, 2, 8), BedouinMixer(8)
test_calls_that_do_not_fit = refused(of_kind(ValueError, [
    (of(BedouinLayer(8), X, torch.ones(1, 2, 2)),
     "attention_mask must have shape ...got (1, 2, 2)"),
    (of(BedouinLayer(8), X, output_attentions=True), "no attention"),
    (of(BedouinLayer(8), X, past_key_values=()), "layer_idx must be an int"),
    (of(BedouinLayer, 8, mode="parallel"), "mode must be one of"),
    (of(BedouinLayer, 8, layer="GatedDeltaNet", use_short_conv=True, d_conv=3),
     "got d_conv=3 and use_short_conv=True"),
    (of(MIXER, X, inference_params=()), "partial(BedouinMixer, layer_idx=i)"),
    (of(MIXER, X, inference_params=(), cu_seqlens=torch.tensor([0, 2])),
     "cu_seqlens must be None with inference_params"),
    (of(MIXER.step, X, *MIXER.allocate_inference_cache(1, 1)), "(b, 1, m), got (1, 2, 8)"),
]) + of_kind(TypeError, [
    (of(BedouinLayer, 8, use_short_conv=4), "use_short_conv must be True or False"),
]))  # fmt: skip


class TestFla:
    def test_a_convolution_by_its_options(self) -> None:
        assert BedouinLayer(8, use_short_conv=True, conv_size=3).layer.conv.width == 3

    @mixings
    def test_the_cache_has_the_state(self, fla: Fla, x: Tensor, mixing: dict[str, Any]) -> None:
        layer, cache = fla.layer(**sized(mixing)).double(), fla.Cache()
        layer(x, past_key_values=cache, use_cache=False)
        assert len(cache) == 0
        _, attentions, cache = layer(x, past_key_values=cache, use_cache=True)
        assert attentions is None and cache.get_seq_length(0) == 6
        _, state = layer.layer(x, return_state=True)
        for kept, tensor in zip(cache[0]["recurrent_state"], state.tensors, strict=True):
            same(kept, tensor)

    @mixings
    def test_mask_in_prefill_and_decoding(
        self, fla: Fla, x: Tensor, mixing: dict[str, Any]
    ) -> None:
        layer, cache, alone = fla.layer(**sized(mixing)).double(), fla.Cache(), fla.Cache()
        mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
        prefill, _, _ = layer(x[:, :5], mask[:, :5], cache, use_cache=True)
        # as in generation, the mask also covers the tokens before
        last, _, _ = layer(x[:, 5:], mask, cache, use_cache=True)
        found = torch.cat([prefill, last], 1)
        for row, output, real in zip(x, found, mask.bool(), strict=True):
            same(output[real], layer(row[real].unsqueeze(0))[0][0])
            assert not output[~real].any()
        layer(x[1:, :5], past_key_values=alone, use_cache=True)
        kept, expected = (v[0]["recurrent_state"] for v in (cache, alone))
        for tensor, state in zip(kept, expected, strict=True):
            same(tensor[1:], state)

    @mixings
    def test_documents_have_states_of_their_own(
        self, fla: Fla, x: Tensor, mixing: dict[str, Any]
    ) -> None:
        layer, cache = fla.layer(**sized(mixing)).double(), fla.Cache()
        where, parts = {"cu_seqlens": torch.tensor([0, 2, 6])}, (x[:1, :2], x[:1, 2:])
        for _ in range(2):
            found, _, _ = layer(x[:1], past_key_values=cache, use_cache=True, **where)
        twice = [layer(part.repeat(1, 2, 1))[0][:, part.shape[1] :] for part in parts]
        same(found, torch.cat(twice, 1))
        padded, _, _ = layer(x[:1], torch.tensor([[1, 0, 0, 1, 1, 1]]), **where)
        same(padded[:, 3:], layer(x[:1, 3:])[0])

    @mixings
    def test_beams(self, fla: Fla, x: Tensor, mixing: dict[str, Any]) -> None:
        layer, cache = fla.layer(**sized(mixing)).double(), fla.Cache()
        layer(x[:, :5], past_key_values=cache, use_cache=True)
        cache.reorder_cache(torch.tensor([1, 0]))
        found, _, _ = layer(x[:, 5:].flip(0), past_key_values=cache, use_cache=True)
        same(found.flip(0), layer(x)[0][:, 5:])

    @mixings
    def test_generate_left_padded(self, fla: Fla, ids: Tensor, mixing: dict[str, Any]) -> None:
        model = fla.model(**sized(mixing)).double().eval()
        padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], 1)
        mask = torch.ones_like(padded)
        mask[0, :3] = 0
        found = model.generate(padded, attention_mask=mask, **GREEDY)
        assert torch.equal(found[:1, 3:], model.generate(ids[:1], **GREEDY))
        alone = model.generate(padded[1:], attention_mask=mask[1:], **GREEDY)
        assert torch.equal(found[1:], alone)

    @noisy
    def test_training_with_a_cache_has_noise(
        self, fla: Fla, x: Tensor, mixing: dict[str, Any]
    ) -> None:
        layer = fla.layer(**mixing).double()
        outputs = (layer(x, past_key_values=fla.Cache(), use_cache=True)[0] for _ in range(2))
        assert not torch.equal(*outputs)

    @pytest.mark.gpu
    def test_a_model_with_the_kernels_of_fla(self, fla: Fla) -> None:
        model = fla.model(64, plain=False, num_heads=2).to("cuda", torch.bfloat16).eval()
        ids = torch.randint(1, VOCAB, (2, 40), device="cuda")
        cu_seqlens = torch.tensor([0, 40, 80], device="cuda")
        packed = model(ids.view(1, 80), cu_seqlens=cu_seqlens, use_cache=False).logits
        # both are rounded to bfloat16 after each of two layers
        expected = model(ids).logits
        torch.testing.assert_close(packed.view(2, 40, VOCAB), expected, rtol=0.1, atol=0.05)
        model.train()(ids, labels=ids).loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


class TestMambaSsm:
    def test_mixer_cls_and_the_order_of_mamba(self, mamba: MambaSsm) -> None:
        mixer_cls = partial(BedouinMixer, layer_idx=3, d_state=4, dtype=torch.float64)
        block = mamba.Block(8, mixer_cls, nn.Identity, partial(nn.LayerNorm, dtype=torch.float64))
        x = torch.randn(2, 5, 8, dtype=torch.float64)
        hidden, residual = block(x)
        assert hidden.shape == x.shape and torch.equal(residual, x)
        states = block.allocate_inference_cache(2, 100, dtype=torch.bfloat16)
        assert [tuple(s.shape) for s in states] == [(2, 16, 4), (2, 16)]
        assert all(s.dtype == torch.float64 for s in states)
        mixer = BedouinMixer(8, 4, 3, 1.5)
        assert (mixer.layer.conv.width, mixer.layer.d_inner) == (3, 12)
        states = mixer.allocate_inference_cache(2, 100)
        assert [tuple(s.shape) for s in states] == [(2, 12, 4), (2, 12), (2, 2, 12)]

    @mixings
    def test_documents_pass_through_the_block(
        self, mamba: MambaSsm, mixing: dict[str, Any], x: Tensor
    ) -> None:
        block = mamba.Block(8, partial(BedouinMixer, **sized(mixing)), nn.Identity).double()
        alone = torch.cat([block(x[:1, :2])[0], block(x[:1, 2:])[0]], 1)
        same(block(x[:1], seq_idx=torch.tensor([[0, 0, 1, 1, 1, 1]]))[0], alone)

    @mixings
    def test_step_is_in_place_and_equals_the_call(self, mixing: dict[str, Any], x: Tensor) -> None:
        mixer, outputs = BedouinMixer(8, **sized(mixing)).double(), []
        states = mixer.allocate_inference_cache(2, 6)
        addresses = [s.data_ptr() for s in states]
        for token in x.split(1, dim=1):
            output, *after = mixer.step(token, *states)
            assert [s.data_ptr() for s in after] == addresses
            outputs.append(output)
        same(torch.cat(outputs, 1), mixer(x))
        # the last token's gradient is not spoiled by the states that were overwritten
        outputs[-1].sum().backward()

    @mixings
    def test_a_new_sequence_may_be_a_larger_batch_in_parts(
        self, mamba: MambaSsm, mixing: dict[str, Any]
    ) -> None:
        model, ids = mamba.model(**sized(mixing)).double(), torch.randint(VOCAB, (5, 6))
        params = mamba.Params(max_seqlen=6, max_batch_size=5)
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

    @mixings
    def test_generate_equals_whole_sequences(
        self, mamba: MambaSsm, mixing: dict[str, Any], ids: Tensor
    ) -> None:
        model, expected = mamba.model(**sized(mixing)).double(), ids
        for _ in range(5):
            best = model(expected).logits[:, -1].argmax(-1, keepdim=True)
            expected = torch.cat([expected, best], 1)
        assert torch.equal(model.generate(ids, max_length=11), expected)

    def test_a_sequence_goes_on_with_its_batch(self, mamba: MambaSsm) -> None:
        mixer, params = mamba.layer(), mamba.Params(max_seqlen=4, max_batch_size=1)
        mixer(torch.randn(2, 3, 8), inference_params=params)
        params.seqlen_offset = 3
        for t in (1, 2):
            with pytest.raises(ValueError, match="must have at most 2 rows.* layer 0 .* got 3: a"):
                mixer(torch.randn(3, t, 8), inference_params=params)

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("mixing", [{"num_heads": 2}, CONVOLVED, *OTHERS])
    def test_graphs_generate_the_same_tokens(
        self, mamba: MambaSsm, mixing: dict[str, Any], dtype: torch.dtype
    ) -> None:
        model = mamba.model(64, plain=False, **mixing).to("cuda", dtype)
        ids = torch.randint(VOCAB, (2, 8), device="cuda")
        plain = model.generate(ids, max_length=24)
        assert torch.equal(model.generate(ids, max_length=24, cg=True), plain)

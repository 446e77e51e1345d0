"""PEFT's adapters on the projections: all train and are saved; merging them changes nothing.

Letters: b batch, t time.
"""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.layer_cases import in_steps
from torch import Tensor, nn

from bedouin import Bedouin, FixedPointRNN, SequenceModel

FLOAT64: dict[str, Any] = {"dtype": torch.float64}
# PEFT looks for Hugging Face's configuration, which a plain module has not
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def make_model(kind: Any, num_heads: int) -> SequenceModel:
    return SequenceModel(7, 4, [kind(4, num_heads=num_heads, **FLOAT64)], mlp_expand=1, **FLOAT64)


def adapt(model: nn.Module, **options: Any) -> Any:
    """The model with adapters in float64 that are not zero."""
    config = peft.LoraConfig(r=2, init_lora_weights=False, **options)
    adapt_model: Any = peft.get_peft_model
    return adapt_model(model, config).double()


def decode(model: SequenceModel, tokens: Tensor) -> Tensor:
    return in_steps(model, tokens, model.init_state(len(tokens)))[0]


ONE_HEAD: list[dict[str, Any]] = [
    {"target_modules": "all-linear"},
    {"target_modules": ["x_proj", "y_proj"]},
    {"target_modules": ["in_proj", "out_proj", "y_proj"], "use_dora": True},
]
OF_HEADS: dict[str, Any] = {"target_parameters": ["x_proj.weight", "y_proj.weight"]}
"""PEFT adapts HeadLinear's weight, which has an axis of heads, as it does those of experts."""
TWO_HEADS: list[dict[str, Any]] = [
    OF_HEADS,
    OF_HEADS | {"target_modules": "all-linear"},
    OF_HEADS | {"target_modules": ["in_proj"], "use_rslora": True},
]


@pytest.mark.parametrize("kind", [Bedouin, FixedPointRNN])
@pytest.mark.parametrize(
    ("num_heads", "options"),
    [*((1, options) for options in ONE_HEAD), *((2, options) for options in TWO_HEADS)],
)
def test_every_adapter_trains_is_saved_and_merges(
    kind: Any, num_heads: int, options: Any, tmp_path: Path
) -> None:
    model, tokens = make_model(kind, num_heads), torch.randint(7, (2, 4))
    base = copy.deepcopy(model)
    plain = base(tokens)
    adapted = adapt(model, **options)
    logits = adapted(tokens)
    logits.square().mean().backward()
    adapters = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert len(adapters) >= 4 and all("lora" in name for name in adapters)
    assert any("x_proj" in name for name in adapters) or "use_dora" in options
    assert any("y_proj" in name for name in adapters)
    assert all(p.grad is not None and p.grad.any() for p in adapters.values())
    assert (logits - plain).abs().max() > 1e-3
    adapted.save_pretrained(tmp_path)
    load: Any = peft.PeftModel.from_pretrained
    # PEFT makes the adapters that it loads in float32
    torch.testing.assert_close(load(base, tmp_path)(tokens), logits, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(decode(model, tokens), logits)
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(tokens), logits)
        torch.testing.assert_close(decode(merged, tokens), logits)


def test_a_trained_copy_of_the_norm_is_in_use() -> None:
    model, tokens = make_model(Bedouin, 1), torch.randint(7, (2, 4))
    plain = model(tokens)
    adapted = adapt(model, target_modules=["in_proj"], modules_to_save=["norm"])
    kept = [p for n, p in adapted.named_parameters() if "mixer.norm.modules_to_save" in n]
    before = adapted(tokens)
    before.square().mean().backward()
    assert len(kept) == 1 and kept[0].grad is not None and kept[0].grad.any()
    with torch.no_grad():
        kept[0].mul_(2)
    assert (adapted(tokens) - before).abs().max() > 1e-3
    with adapted.disable_adapter():
        torch.testing.assert_close(adapted(tokens), plain)


def test_tuning_of_norms_is_refused_with_a_remedy() -> None:
    wrap: Any = peft.get_peft_model
    adapted = wrap(make_model(Bedouin, 1), peft.LNTuningConfig(target_modules=["norm"]))
    with pytest.raises(TypeError, match="norm must be .*LNTuningLayer: .*PEFT's modules_to_save"):
        adapted(torch.randint(7, (2, 4)))


def test_an_adapter_around_the_whole_layer_trains_and_must_be_merged_for_steps() -> None:
    model, tokens = make_model(Bedouin, 1), torch.randint(7, (2, 4))
    adapted = adapt(model, target_modules=[], target_parameters=["A_log"])
    logits = adapted(tokens)
    logits.square().mean().backward()
    adapters = [p for p in adapted.parameters() if p.requires_grad]
    assert len(adapters) == 2 and all(p.grad is not None and p.grad.any() for p in adapters)
    with pytest.raises(TypeError, match="ParamWrapper has no init_state.*merge an adapter around"):
        model.init_state(2)
    with torch.no_grad():
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(decode(merged, tokens), logits)

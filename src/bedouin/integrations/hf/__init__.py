"""Bedouin models for transformers: configuration, backbone, heads, cache.

    from bedouin.integrations.hf import BedouinConfig, BedouinForCausalLM
    model = BedouinForCausalLM(BedouinConfig(vocab_size=256, hidden_size=128, num_hidden_layers=2))
    model.generate(ids, max_new_tokens=20)

    BedouinConfig.preset("130m")                                           # "60m", "130m", "370m"
    BedouinConfig.preset("130m", layer="rnn")             # "bedouin", "paper", "rnn" or "tracking"
    BedouinConfig.preset("130m", attn_layers=[3, 7], attn={"num_heads": 12})            # a hybrid

The import registers them with AutoConfig, AutoModel, AutoModelForCausalLM and the Auto classes for
the classification of sequences and tokens. A process without it, as lm_eval, loads a folder by:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    lm_eval --model hf --model_args pretrained=FOLDER,trust_remote_code=True --tasks lambada_openai

Requires transformers 5.16 or newer (pip install ".[hf]" in a clone).

Letters: b batch, t time, m hidden_size, d d_inner, n state_size, w conv_kernel, v vocab_size.
"""

try:
    import transformers

    from bedouin.integrations.hf.cache import BedouinCacheLayer
    from bedouin.integrations.hf.configuration import BedouinConfig
    from bedouin.integrations.hf.models import (
        BedouinBlock,
        BedouinForCausalLM,
        BedouinForSequenceClassification,
        BedouinForTokenClassification,
        BedouinModel,
        BedouinPreTrainedModel,
    )
except ImportError as error:
    raise ImportError(
        "bedouin.integrations.hf needs transformers 5.16 or newer: pip install "
        '"transformers>=5.16,<6"',
        name="transformers",
    ) from error

__all__ = [
    "BedouinBlock",
    "BedouinCacheLayer",
    "BedouinConfig",
    "BedouinForCausalLM",
    "BedouinForSequenceClassification",
    "BedouinForTokenClassification",
    "BedouinModel",
    "BedouinPreTrainedModel",
]

transformers.AutoConfig.register(BedouinConfig.model_type, BedouinConfig, exist_ok=True)
for _auto, _model in (
    (transformers.AutoModel, BedouinModel),
    (transformers.AutoModelForCausalLM, BedouinForCausalLM),
    (transformers.AutoModelForSequenceClassification, BedouinForSequenceClassification),
    (transformers.AutoModelForTokenClassification, BedouinForTokenClassification),
):
    _auto.register(BedouinConfig, _model, exist_ok=True)

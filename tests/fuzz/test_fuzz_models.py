"""A law of whole models for random mixers, baselines among them, and layouts.

Letters: b batch, t time.
"""

from collections.abc import Callable
from typing import Any

import hypothesis
import torch
from fuzz_cases import CASES, FEW, Draw, make_tests
from hypothesis import strategies as st
from torch import Tensor, nn

from bedouin import (
    Bedouin,
    FixedPointRNN,
    HouseholderProduct,
    LowRank,
    SequenceModel,
)
from bedouin.baselines import LSTM, Attention, DeltaNet, DeltaProduct, Mamba
from bedouin.testing import assert_close

M, VOCABULARY, RTOL = 8, 7, 1e-9
"""The growth of rounding in a few tokens of the default layers is far below RTOL / 1e-16."""


def draw_mixer(draw: Draw) -> nn.Module:
    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    kind = one(Bedouin, FixedPointRNN, LSTM, Mamba, DeltaNet, DeltaProduct, Attention)
    options: dict[str, Any] = {"dtype": torch.float64}
    if kind in (Bedouin, FixedPointRNN):
        options |= {"num_heads": one(1, 2, 4), "mixer": one(HouseholderProduct(2), LowRank(2))}
    elif kind in (Mamba, LSTM):
        options["expand"] = one(1, 2)
    elif kind is DeltaNet:
        options["gated"] = one(True, False)
    mixer: nn.Module = kind(M, **options)
    return mixer


@st.composite
def models(draw: Draw) -> SequenceModel:
    torch.manual_seed(draw(st.integers(0, 2**16)))
    mixers = [draw_mixer(draw) for _ in range(draw(st.integers(1, 2)))]
    model = SequenceModel(
        VOCABULARY, M, mixers, dtype=torch.float64,
        mlp_expand=draw(st.sampled_from([None, 2.0])), tie_embeddings=draw(st.booleans()),
    )  # fmt: skip
    hypothesis.note(f"{model}")
    return model.train(draw(st.booleans()))


def draw_mask(draw: Draw, tokens: Tensor) -> Tensor:
    b, t = tokens.shape
    rows = st.lists(st.booleans(), min_size=t, max_size=t)
    values = draw(st.lists(rows, min_size=b, max_size=b))
    hypothesis.note(f"mask={values}")
    return torch.tensor(values, dtype=torch.bool).view(b, t)


def law_documents(model: SequenceModel, draw: Draw) -> None:
    """Documents of one row are what each is alone."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    hypothesis.note(f"lengths={lengths}")
    tokens = torch.randint(VOCABULARY, (1, sum(lengths)))
    documents = tokens.split(lengths, 1)
    expected = torch.cat([model(document) for document in documents], 1)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    assert_close("cu_seqlens", model(tokens, cu_seqlens=ends), expected, RTOL)
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).unsqueeze(0)
    assert_close("seq_idx", model(tokens, seq_idx=index), expected, RTOL)
    # with padding between and in them
    mask = draw_mask(draw, tokens)
    pieces = [
        model(d[m].unsqueeze(0)) for d, m in zip(documents, mask.split(lengths, 1), strict=True)
    ]
    expected = torch.zeros_like(expected)
    expected[mask] = torch.cat(pieces, 1)[0]
    assert_close("masked cu_seqlens", model(tokens, cu_seqlens=ends, mask=mask), expected, RTOL)
    index = torch.where(mask, index, torch.randint(9, index.shape))
    assert_close("masked seq_idx", model(tokens, seq_idx=index, mask=mask), expected, RTOL)


def check(law: Callable[[SequenceModel, Draw], None], model: SequenceModel, draw: Draw) -> None:
    law(model, draw)


test_law_of_models, test_law_of_models_at_length = make_tests(
    globals(), models(), FEW // 2, CASES // 5, check
)

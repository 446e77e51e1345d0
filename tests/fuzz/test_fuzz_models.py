"""Laws of whole models and of `Bidirectional` for random mixers, baselines among them, and layouts.

Letters: b batch, t time, m d_model.
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
    Bidirectional,
    Decoder,
    FixedPointRNN,
    HouseholderProduct,
    LowRank,
    SequenceModel,
    diagnose,
)
from bedouin.baselines import LSTM, Attention, DeltaNet, DeltaProduct, Mamba
from bedouin.layers.fixed_point import FixedPointLayer
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


def draw_tokens(draw: Draw, least: int = 0) -> Tensor:
    b, t = draw(st.integers(least, 3)), draw(st.integers(least, 7))
    return torch.randint(VOCABULARY, (b, t))


def draw_mask(draw: Draw, tokens: Tensor) -> Tensor:
    b, t = tokens.shape
    rows = st.lists(st.booleans(), min_size=t, max_size=t)
    values = draw(st.lists(rows, min_size=b, max_size=b))
    hypothesis.note(f"mask={values}")
    return torch.tensor(values, dtype=torch.bool).view(b, t)


def law_chunks_and_steps(model: SequenceModel, draw: Draw) -> None:
    """Chunks, and then single tokens, give the logits of one call."""
    tokens = draw_tokens(draw)
    t = tokens.shape[1]
    first, second = sorted((draw(st.integers(0, t)), draw(st.integers(0, t))))
    expected = model(tokens)
    found, state = model(tokens[:, :first], return_state=True)
    more, state = model(tokens[:, first:second], state, return_state=True)
    parts = [found, more]
    for token in tokens[:, second:].unbind(1):
        logits, state = model.step(token, state)
        parts.append(logits.unsqueeze(1))
    assert_close("logits", torch.cat(parts, 1), expected, RTOL)


def law_masks(model: SequenceModel, draw: Draw) -> None:
    """Padding changes nothing, neither now nor for what follows; its logits are zero."""
    tokens = draw_tokens(draw)
    mask = draw_mask(draw, tokens)
    following = torch.randint(VOCABULARY, (len(tokens), 2))
    logits, state = model(tokens, return_state=True, mask=mask)
    after = model(following, state)
    assert not logits[~mask].any()
    for i, row in enumerate(mask):
        alone = model(torch.cat([tokens[i][row], following[i]]).unsqueeze(0))[0]
        assert_close("logits", torch.cat([logits[i][row], after[i]]), alone, RTOL)


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


def law_generate(model: SequenceModel, draw: Draw) -> None:
    """Greedy tokens, of generate and of a Decoder, are those of the full forward."""
    prompt, count = draw_tokens(draw, 1), draw(st.integers(0, 4))
    mask = draw_mask(draw, prompt) if draw(st.booleans()) else None
    if mask is not None:
        mask[:, -1] = True
    found = model.generate(prompt, count, mask=mask)
    assert torch.equal(found[:, : prompt.shape[1]], prompt)
    for i, row in enumerate(found):
        real = torch.ones(len(row), dtype=torch.bool)
        if mask is not None:
            real[: prompt.shape[1]] = mask[i]
        logits = model(row[real].unsqueeze(0))[0]
        top = logits[-count - 1 : -1]
        chosen = top.gather(1, row[len(row) - count :].unsqueeze(1)).squeeze(1)
        # rounding may decide between equals
        assert_close("best logits", chosen, top.amax(1), RTOL)
    if all(isinstance(mixer, FixedPointLayer) for mixer in model.mixers):
        decoder = Decoder(model, batch_size=len(prompt))
        with torch.no_grad():
            logits = torch.stack([decoder(token) for token in prompt.unbind(1)], 1)
        assert_close("decoder", logits, model(prompt), RTOL)


def law_bidirectional(model: SequenceModel, draw: Draw) -> None:
    """The sum of a layer and of one on the reversed real tokens."""
    forwards, backwards = model.mixers[0], model.mixers[-1]
    layer = Bidirectional(forwards, backwards)
    tokens = draw_tokens(draw)
    mask = draw_mask(draw, tokens)
    x = torch.randn(*tokens.shape, M, dtype=torch.float64)
    y = layer(x, mask=mask)
    assert not y[~mask].any()
    for i, row in enumerate(mask):
        u = x[i][row].unsqueeze(0)
        assert_close("y", y[i][row], (forwards(u) + backwards(u.flip(1)).flip(1))[0], RTOL)


def law_diagnose(model: SequenceModel, draw: Draw) -> None:
    """Every layer can be diagnosed, whatever its options."""
    mixer: Any = model.mixers[0]
    hypothesis.assume(isinstance(mixer, FixedPointLayer))
    x = torch.randn(*draw_tokens(draw, 1).shape, M).to(torch.float64)
    mixer(x)
    stats = mixer.stats
    found = diagnose(mixer, x)
    assert mixer.stats is stats and found.bias == 0 and found.decode_gap < RTOL
    for run in found.runs:
        if run.converged == 1:
            assert run.error <= 1e3 * found.rtol * max(1.0, found.growth.max().exp().item())
    assert "smallest pivot" in str(found)


def check(law: Callable[[SequenceModel, Draw], None], model: SequenceModel, draw: Draw) -> None:
    law(model, draw)


test_law_of_models, test_law_of_models_at_length = make_tests(
    globals(), models(), FEW // 2, CASES // 5, check
)

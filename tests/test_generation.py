"""Whole models: padding and documents, a decoder, generated tokens, both directions of time."""

import math
from typing import Any

import pytest
import torch
from tests.layer_cases import assert_all_close, make
from tests.messages import Row, of, refused
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bedouin import Bedouin, Decoder, FixedPointRNN, SequenceModel
from bedouin.baselines import Mamba
from bedouin.generation import Sampling
from bedouin.testing import assert_close

VOCAB = 7


def make_model(**options: Any) -> SequenceModel:
    """With layers of every class and several paths."""
    names = ("heads", "mamba", "attention", "vector", "convolution", "lstm", "delta product")
    mixers = [make(name) for name in (*names, "tracking")]
    like: dict[str, Any] = {"dtype": torch.float64}
    return SequenceModel(VOCAB, 4, mixers, mlp_expand=1, **like, **options)


def ids(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape)


@torch.no_grad()
def test_padding_in_a_model() -> None:
    """On the left, in the middle and on the right; padding may be no id at all."""
    model = make_model()
    tokens = ids(3, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 0, 1, 1, 0, 0], [0] * 6]).bool()
    padded = tokens.masked_fill(~mask, -100)
    logits, state = model(padded, return_state=True, mask=mask)
    assert not logits[~mask].any()
    assert_close("without state", model(padded, mask=mask), logits, 1e-12)
    following = model.step(tokens[:, 0], state)[0]
    for i in range(2):
        alone, after = model(tokens[i][mask[i]].unsqueeze(0), return_state=True)
        assert_close(f"row {i}", logits[i][mask[i]], alone[0], 1e-11)
        assert_close("next", following[i], model.step(tokens[i : i + 1, 0], after)[0][0], 1e-11)
    unread = model.step(tokens[2:, 0], model.init_state(1))[0]
    assert_close("a row of padding", following[2], unread[0], 1e-11)


@torch.no_grad()
def test_documents_in_a_model() -> None:
    model = make_model()
    tokens, cu_seqlens = ids(1, 7), torch.tensor([0, 3, 3, 7])
    _, before = model(ids(3, 2), return_state=True)
    first, _, third = (tuple(s[i : i + 1] for s in before) for i in range(3))
    logits, state = model(tokens, before, return_state=True, cu_seqlens=cu_seqlens)
    alone = model(tokens[:, :3], first), model(tokens[:, 3:], third)
    assert_close("documents", logits, torch.cat(alone, 1), 1e-11)
    assert model.step(ids(3), state)[0].shape == (3, VOCAB)
    seq_idx = torch.tensor([[4, 4, 4, 2, 2, 2, 2]])
    indexed, last = model(tokens, first, return_state=True, seq_idx=seq_idx)
    fresh, after = model(tokens[:, 3:], return_state=True)
    assert_close("indexed", indexed, torch.cat([alone[0], fresh], 1), 1e-11)
    token = ids(1)
    assert_close("next", model.step(token, last)[0], model.step(token, after)[0], 1e-11)
    # padding between documents and in them, whose indices begin none
    real = torch.tensor([[1, 0, 1, 0, 1, 0, 1]]).bool()
    parts = [model(tokens[:, a:b][real[:, a:b]].unsqueeze(0)) for a, b in ((0, 3), (3, 7))]
    of_indices = model(tokens, mask=real, seq_idx=seq_idx.where(real, 9))
    for padded in (model(tokens, mask=real, cu_seqlens=cu_seqlens), of_indices):
        assert_close("padded", padded[real], torch.cat(parts, 1)[0], 1e-11)
        assert not padded[~real].any()


@torch.no_grad()
def test_a_decoder_of_a_model_gives_what_one_call_gives() -> None:
    model = make_model()
    tokens = ids(2, 7)
    whole, last = model(tokens, return_state=True)
    _, state = model(tokens[:, :3], return_state=True)
    decoder = Decoder(model, 2, state=state)
    for t in range(3, 7):
        assert_close(f"token {t}", decoder(tokens[:, t]), whole[:, t], 1e-11)
    assert_all_close(tree_leaves(decoder.state), tree_leaves(last), 1e-11)
    decoder.reset()
    assert_close("reset", decoder(tokens[:, 0]), whole[:, 0], 1e-11)
    for v in tree_leaves(decoder.state):
        v.zero_()  # of a copy
    assert_close("next", decoder(tokens[:, 1]), whole[:, 1], 1e-11)


def check_decoder_in_one_graph(model: SequenceModel, tokens: Tensor, rtol: float) -> None:
    """A decoder whose tokens are runs of one graph, but where there are hooks."""

    def check_next(tokens: Tensor) -> None:  # (b,)
        expected, _ = model.step(tokens, decoder.state)
        assert_close("next", decoder(tokens), expected, rtol)

    whole = model(tokens)
    _, state = model(tokens[:, :2], return_state=True)
    decoder: Any = Decoder(model, len(tokens), state=state)
    for t in range(2, 4):
        assert_close(f"token {t}", decoder(tokens[:, t]), whole[:, t], rtol)
    _, expected = model(tokens[:, :4], return_state=True)
    found = decoder.state
    assert_all_close(tree_leaves(found), tree_leaves(expected), rtol)
    assert all(bool(stats.converged.all()) for stats in model.stats)
    # hooks run: without a graph
    calls: list[Any] = []
    with model.head.register_forward_hook(lambda *call: calls.append(call)):
        check_next(tokens[:, 0])
        assert len(calls) == 2 and decoder._graph is None
    decoder.reset(found)
    check_next(tokens[:, 4])
    assert decoder._graph is not None


@torch.no_grad()
def test_a_whole_model_is_one_graph(graphs: list[Tensor]) -> None:
    """On a CPU, with a run in place of a replay."""
    like: dict[str, Any] = {"dtype": torch.float64}
    mixers = [Bedouin(4, num_heads=2, **like), FixedPointRNN(4, d_conv=3, **like)]
    model = SequenceModel(VOCAB, 4, mixers, mlp_expand=1, **like)
    check_decoder_in_one_graph(model, ids(2, 6), 1e-11)


@pytest.mark.gpu
@torch.no_grad()
def test_a_whole_model_is_one_graph_on_a_gpu(no_synchronization: Any) -> None:
    mixers = [Bedouin(64, num_heads=2, device="cuda"), Bedouin(64, d_conv=4, device="cuda")]
    model = SequenceModel(VOCAB, 64, mixers, mlp_expand=1, device="cuda")
    tokens = ids(2, 6).cuda()
    # float32, in sums of other orders
    check_decoder_in_one_graph(model, tokens, 1e-3)
    decoder: Any = Decoder(model, 2)
    first = decoder(tokens[:, 0])
    with no_synchronization():
        again = decoder(tokens[:, 1])
    # one buffer; a model with a baseline is decoded layer by layer
    assert again is first and decoder._graph is not None
    mixed = SequenceModel(VOCAB, 64, [*mixers, Mamba(64, device="cuda")], device="cuda")
    decoder, whole = Decoder(mixed, 2), mixed(tokens)
    for t in range(3):
        assert_close(f"mixed {t}", decoder(tokens[:, t]), whole[:, t], 1e-3)
    assert decoder._graph is None


@torch.no_grad()
def test_greedy_tokens_are_those_of_the_full_forward() -> None:
    model, prompt = make_model(), ids(3, 4)
    expected = prompt
    for _ in range(6):
        expected = torch.cat([expected, model(expected)[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(prompt, max_new_tokens=6), expected)
    assert torch.equal(model.generate(prompt, 6, temperature=0.5, top_k=1), expected)
    assert torch.equal(model.generate(prompt, 6, temperature=1e-39), expected)
    assert torch.equal(model.generate(prompt, 6, temperature=0.5, top_p=1e-9), expected)
    assert torch.equal(model.generate(prompt, 0), prompt)
    assert model.generate(prompt.int(), 2).dtype == torch.int32
    assert model.generate(ids(0, 4), 2).shape == (0, 6)
    eos = int(expected[0, 5])
    for row, found in zip(
        expected.tolist(), model.generate(prompt, 6, eos=eos).tolist(), strict=True
    ):
        end = row.index(eos, 4) if eos in row[4:] else len(row)
        assert found == row[:end] + [eos] * (len(row) - end)


@torch.no_grad()
def test_a_token_is_one_step() -> None:
    """After the prompt the model sees each token once, by itself."""
    model, seen = make_model(), []
    model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.generate(ids(2, 9), 4)
    assert [v.shape[:-1] for v in seen] == [(2, 9), (2,), (2,), (2,)]


@torch.no_grad()
def test_padded_prompts_generate_what_they_do_alone() -> None:
    model = make_model()
    prompt = ids(3, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1] * 5]).bool()
    found = model.generate(prompt, 4, mask=mask)
    assert torch.equal(found[:, :5], prompt)
    for i in range(3):
        alone = model.generate(prompt[i][mask[i]].unsqueeze(0), 4)
        assert torch.equal(found[i, 5:], alone[0, -4:])


@torch.no_grad()
def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).expand(20_000, -1)
    generator = torch.Generator().manual_seed(0)

    def frequencies(**options: Any) -> Tensor:
        chosen = Sampling(generator=generator, **options).choose(logits)
        return chosen.bincount(minlength=4) / len(logits)

    def expected(*kept: int, temperature: float = 1.0) -> Tensor:
        scaled = torch.full((4,), -torch.inf)
        scaled[list(kept)] = logits[0, list(kept)] / temperature
        return scaled.softmax(0)

    # five standard deviations of a frequency of 20,000 draws
    near: dict[str, Any] = {"rtol": 0.0, "atol": 0.018}
    torch.testing.assert_close(frequencies(temperature=1.0), expected(0, 1, 2), **near)
    warm = expected(0, 1, 2, temperature=2.0)
    torch.testing.assert_close(frequencies(temperature=2.0), warm, **near)
    torch.testing.assert_close(frequencies(temperature=1, top_k=2), expected(1, 2), **near)
    # the probabilities are 0.09, 0.24 and 0.67
    torch.testing.assert_close(frequencies(temperature=1.0, top_p=0.7), expected(1, 2), **near)
    torch.testing.assert_close(frequencies(temperature=1.0, top_p=0.6), expected(2), **near)
    assert (frequencies(temperature=1.0, top_k=9) > 0).tolist() == [True, True, True, False]


def test_top_k_keeps_no_more_than_k_of_equal_logits() -> None:
    for k in (1, 2):
        sampling = Sampling(1.0, top_k=k, generator=torch.Generator().manual_seed(0))
        chosen = sampling.choose(torch.tensor([[1.0, 2.0, 2.0, 2.0]]).expand(200, -1))
        assert len(chosen.unique()) == k and chosen.min() > 0


def test_equal_generators_give_equal_tokens() -> None:
    model, prompt = make_model(), ids(2, 3)
    first, second = (
        model.generate(prompt, 5, temperature=1.0, generator=torch.Generator().manual_seed(seed))
        for seed in (3, 3)
    )
    assert torch.equal(first, second)


GENERATE: list[Row] = [
    ({"prompt": [[1]]}, TypeError, "prompt must be a tensor (b, t), got list"),
    ({"prompt": torch.zeros(3).long()}, ValueError, "prompt must have shape (b, t) with at least"),
    ({"prompt": torch.zeros(2, 0).long()}, ValueError, "prompt must have shape (b, t) with at"),
    ({"prompt": torch.zeros(2, 2)}, TypeError, "tokens must be int64 or int32 ids"),
    ({"max_new_tokens": -1}, ValueError, "max_new_tokens must be an int >= 0, got -1"),
    ({"mask": torch.tensor([[False, False], [False, True]])}, ValueError,
     "mask must be True for at least one token of each row of the prompt"),
    ({"temperature": math.inf}, ValueError, "temperature must be a finite number, got inf"),
    ({"temperature": -1.0}, ValueError, "temperature must lie in [0, inf], got -1.0"),
    ({"temperature": 1.0, "top_k": 0}, ValueError, "top_k must be None or an int >= 1, got 0"),
    ({"temperature": 1.0, "top_p": 0.0}, ValueError, "top_p must lie in (0, 1], got 0.0"),
    ({"top_k": 2}, ValueError, "top_k must be None with temperature=0"),
    ({"generator": 0}, TypeError, "generator must be None or a torch.Generator, got int"),
    ({"eos": -1}, ValueError, "eos must be None or an int >= 0, got -1"),
    ({"eos": VOCAB}, ValueError, f"eos must be an id below vocab_size = {VOCAB}, got {VOCAB}"),
]  # fmt: skip


MODEL = SequenceModel(VOCAB, 8, [Bedouin(8)])
test_errors_of_generate = refused(GENERATE, of(MODEL.generate, prompt=ids(2, 2), max_new_tokens=2))

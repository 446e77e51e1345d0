"""Padded rows and packed documents in every baseline: each sequence gives what it gives alone."""

from typing import Any

import pytest
import torch
from tests.baselines.kinds import every_kind
from torch import Tensor

from bedouin.baselines import Attention, AttentionState, PaddedAttentionState
from bedouin.testing import assert_close


def check(
    layer: Any,
    x: Tensor,  # (b, t, m)
    pieces: list[Tensor],  # l masks (b, t)
    before: Any,  # the state of l samples
    **call: Tensor,
) -> None:
    """Outputs, the outputs of a next token from the returned state, and gradients."""
    u = x.clone().requires_grad_()
    output, state = layer(u, before, return_state=True, **call)
    x_next = torch.randn(len(pieces), layer.d_model, dtype=x.dtype)
    following, _ = layer.step(x_next, state)
    inputs = [u, *layer.parameters()]
    found = torch.autograd.grad(output.square().sum() + following.square().sum(), inputs)
    expected, loss = torch.zeros_like(output), torch.zeros((), dtype=x.dtype)
    for i, piece in enumerate(pieces):
        y, after = layer(u[piece].unsqueeze(0), before[i : i + 1], return_state=True)
        y_next, _ = layer.step(x_next[i : i + 1], after)
        expected[piece] = y[0]
        assert_close(f"next token of {i}", following[i], y_next[0], 1e-12)
        assert_close(f"conv {i}", state.conv[i], after.conv[0], 1e-12)
        loss = loss + y.square().sum() + y_next.square().sum()
    assert_close("output", output, expected, 1e-12)
    grads = torch.autograd.grad(loss, inputs)
    for i, (a, e) in enumerate(zip(found, grads, strict=True)):
        assert_close(f"gradient {i}", a, e, 1e-11)


def earlier_state(layer: Any, b: int) -> Any:
    x = torch.randn(b, 2, layer.d_model, dtype=torch.float64)
    return layer(x, return_state=True)[1].detach()


@every_kind
def test_padded_rows_are_the_rows_without_padding(kind: Any) -> None:
    layer = kind(8, dtype=torch.float64)
    mask = torch.tensor(
        [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]
    ).bool()
    x = torch.randn(5, 5, 8, dtype=torch.float64)
    x[~mask] = torch.nan
    pieces = [mask & (torch.arange(5) == i).unsqueeze(1) for i in range(5)]
    check(layer, x, pieces, earlier_state(layer, 5), mask=mask)
    assert not layer(x, mask=mask)[~mask].any()


@every_kind
def test_padded_chunks(kind: Any) -> None:
    """A second padded chunk, and one token, from the state after a padded one."""
    layer = kind(8, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1]]).bool()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    whole = layer(x, mask=mask)
    _, state = layer(x[:, :3], return_state=True, mask=mask[:, :3])
    check(
        layer, x[:, 3:], [mask[:, 3:] & (torch.arange(2) == i).unsqueeze(1) for i in range(2)],
        state.detach(), mask=mask[:, 3:],
    )  # fmt: skip
    assert_close("output", layer(x[:, 3:], state, mask=mask[:, 3:]), whole[:, 3:], 1e-12)


@every_kind
@pytest.mark.parametrize("padded", [False, True])
def test_documents_are_what_each_is_alone(kind: Any, padded: bool) -> None:
    layer = kind(8, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 0, 0, 1, 0, 1, 1]]).bool() | (not padded)
    cu_seqlens = torch.tensor([0, 0, 3, 4, 4, 9], dtype=torch.int32)
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    bounds = cu_seqlens.tolist()
    place = torch.arange(9).unsqueeze(0)
    pieces = [
        (start <= place) & (place < stop) & mask
        for start, stop in zip(bounds, bounds[1:], strict=False)
    ]
    x[~mask] = torch.nan
    check(layer, x, pieces, earlier_state(layer, 5), cu_seqlens=cu_seqlens, mask=mask)


@every_kind
def test_indexed_documents_begin_anew(kind: Any) -> None:
    layer = kind(8, dtype=torch.float64)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    seq_idx = torch.tensor([[0, 0, 1, 1, 1], [3, 3, 3, 3, 3]])
    before = earlier_state(layer, 2)
    # padding before, within and after documents changes nothing
    wide, indices = torch.full((2, 8, 8), torch.nan, dtype=torch.float64), torch.full((2, 8), 9)
    mask = torch.tensor([[1, 1, 0, 1, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1, 0, 1]]).bool()
    wide[mask], indices[mask] = x.flatten(0, 1), seq_idx.flatten()
    output, state = layer(wide, before, return_state=True, seq_idx=indices, mask=mask)
    assert not output[~mask].any()
    output = output[mask].view_as(x)
    plain, _ = layer(x, before, return_state=True, seq_idx=seq_idx)
    assert_close("without padding", output, plain, 1e-12)
    first = layer(x[:1, :2], before[:1])
    second, after = layer(x[:1, 2:], return_state=True)
    assert_close("first row", output[:1], torch.cat([first, second], 1), 1e-12)
    whole, last = layer(x[1:], before[1:], return_state=True)
    assert_close("second row", output[1:], whole, 1e-12)
    x_next = torch.randn(2, 8, dtype=torch.float64)
    steps = [layer.step(x_next[i : i + 1], v)[0] for i, v in enumerate((after, last))]
    assert_close("next token", layer.step(x_next, state)[0], torch.cat(steps), 1e-12)


def test_states_of_different_lengths_join() -> None:
    layer = Attention(8, dtype=torch.float64)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    states = [layer(x[i : i + 1, : 2 + i], return_state=True)[1] for i in range(2)]
    joined = AttentionState.cat(states)
    assert isinstance(joined, PaddedAttentionState) and joined.lengths.tolist() == [2, 3]
    x_t = torch.randn(2, 8, dtype=torch.float64)
    steps = [layer.step(x_t[i : i + 1], state)[0] for i, state in enumerate(states)]
    assert_close("step", layer.step(x_t, joined)[0], torch.cat(steps), 1e-12)
    singles = PaddedAttentionState.stack([joined[1], joined[0]])
    assert_close("stack", layer.step(x_t, singles[[1, 0]])[0], torch.cat(steps), 1e-12)
    half = joined.to(torch.float16)
    assert half.keys.dtype == torch.float16 and half.lengths.dtype == torch.int64
    with pytest.raises(ValueError, match=r"state.lengths must be int64 of shape \(2,\), got "):
        layer.step(x_t, joined._replace(lengths=joined.lengths[:1]))

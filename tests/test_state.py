"""The recurrent state: what test_every_layer.py leaves out, what type checkers say of it, and that
no memory is kept after a call."""

import gc
from collections.abc import Iterator
from typing import assert_type

import pytest
import torch
from tests.layer_cases import PAIRS
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from bedouin import Bedouin, BedouinState, FixedPointRNN, SequenceModel
from bedouin.baselines import LSTM, Attention
from bedouin.baselines.lstm import LSTMState
from bedouin.solvers import Adjoint, Picard, Solver


@torch.no_grad()
def test_a_step_is_exact_whatever_the_solver() -> None:
    loose = Bedouin(4, solver=Picard(rtol=0.5), dtype=torch.float64)
    exact = Bedouin(4, dtype=torch.float64)
    exact.load_state_dict(loose.state_dict())
    x_t, state = torch.randn(2, 4, dtype=torch.float64), loose.init_state(2)
    assert torch.equal(loose.step(x_t, state)[0], exact.step(x_t, state)[0])
    assert loose.stats is not None and loose.stats.residual.max() < 1e-14


@torch.no_grad()
def test_the_places_of_a_padded_cache_keep_their_dtype() -> None:
    layer, x = Attention(8), torch.randn(2, 3, 8)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    _, state = layer(x, return_state=True, mask=mask)
    cast = state._replace(keys=state.keys.bfloat16(), values=state.values.bfloat16())
    expected = layer(x, cast._replace(keys=cast.keys.float(), values=cast.values.float()))
    assert torch.equal(layer(x, cast), expected)


def test_a_state_is_a_node_with_its_fields_as_children() -> None:
    """Of torch's trees, in which a path names a field."""
    state = BedouinState(torch.randn(2, 3, 4), torch.randn(2, 3))
    paths = {keystr(path): leaf for path, leaf in tree_flatten_with_path((state,))[0]}
    assert list(paths) == ["[0].ssm", "[0].y"] and paths["[0].y"] is state.y
    doubled = tree_map(lambda v: 2 * v, state)
    assert isinstance(doubled, BedouinState) and torch.equal(doubled.ssm, 2 * state.ssm)
    assert list(state._asdict()) == ["ssm", "y"] and state._replace(y=state.y).ssm is state.ssm


def test_calls_without_and_with_a_state() -> None:
    """The runtime checks what a type checker was told."""
    x, mask = torch.zeros(1, 2, 4), torch.ones(1, 2, dtype=torch.bool)
    layer, rnn = Bedouin(4), FixedPointRNN(4)
    for output in (
        assert_type(layer(x), Tensor),
        assert_type(layer(x, mask=mask), Tensor),
        assert_type(rnn(x, rnn.init_state(1), cu_seqlens=torch.tensor([0, 2])), Tensor),
        assert_type(LSTM(4)(x, seq_idx=mask.int()), Tensor),
        assert_type(SequenceModel(5, 4, [layer])(mask.long()), Tensor),
    ):
        assert isinstance(output, Tensor) and output.shape[:2] == (1, 2)
    found = assert_type(layer(x, return_state=True), tuple[Tensor, BedouinState])
    lstm = assert_type(LSTM(4)(x, return_state=True, mask=mask), tuple[Tensor, LSTMState])
    assert type(found[1]) is BedouinState and type(lstm[1]) is LSTMState


def test_an_index_of_a_state_is_a_state() -> None:
    """Although the fields of a state are those of a named tuple."""
    state = Bedouin(4).init_state(3)
    sample = assert_type(state[0], BedouinState)
    assert_type(state[[1, 2]], BedouinState)
    assert_type(state[:2].ssm, Tensor)
    h, y = state
    assert_type(h, Tensor)
    assert sample.ssm.shape == h.shape[1:] and sample.y.shape == y.shape[1:]
    assert type(assert_type(BedouinState.stack([sample]), BedouinState)) is BedouinState


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Hides from the collector what exists already, of which there is a lot after other tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


@pytest.mark.parametrize(("solver", "adjoint"), PAIRS)
def test_no_tensor_outlives_a_call(solver: Solver, adjoint: Adjoint | None) -> None:
    layer = Bedouin(6, solver=solver, adjoint=adjoint, on_unconverged="ignore")
    x = torch.randn(2, 5, 6)

    def call(backward: bool) -> None:
        y, state = layer(x, return_state=True)
        if backward:
            (y.sum() + state.ssm.sum()).backward()

    call(True)
    before = _live_tensors()
    # a call without a backward follows, because a backward frees what the call before it kept
    for backward in (True, True, False, False):
        call(backward)
    assert _live_tensors() <= before

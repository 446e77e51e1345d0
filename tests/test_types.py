"""What type checkers say about calls, which `make types` compares with the types named here."""

from typing import assert_type

import torch
from torch import Tensor

from bedouin import Bedouin, BedouinState, FixedPointRNN, SequenceModel
from bedouin.baselines import LSTM
from bedouin.baselines.lstm import LSTMState


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

"""LSTM: equal to the recurrence written out."""

import pytest
import torch
from tests.baselines.kinds import assert_written_out
from torch import Tensor
from torch.nn import functional as F

from bedouin.baselines import LSTM, LSTMState


def recurrence(layer: LSTM, x: Tensor, state: LSTMState) -> Tensor:
    """The outputs (b, t, m) of inputs (b, t, m), token by token."""
    W, U, b, b_U = layer.lstm.parameters()
    x = x if layer.conv.width is None else F.silu(layer.conv(x, state.conv)[0])
    h, c = state.h, state.c
    outputs = []
    for x_t in x.unbind(1):
        i, f, g, o = (x_t @ W.T + b + h @ U.T + b_U).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h @ layer.out_proj.weight.T)
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("d_conv", [None, 3])
def test_equals_the_recurrence(d_conv: int | None) -> None:
    layer = LSTM(4, expand=1.5, d_conv=d_conv, dtype=torch.float64)
    assert layer.d_inner == 6
    assert_written_out(layer, recurrence, (2, 7, 4))


def test_a_call_does_not_move_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP puts gathered weights in the place of others, and gathers into the same memory again."""
    moved: list[torch.nn.LSTM] = []
    monkeypatch.setattr(torch.nn.LSTM, "flatten_parameters", lambda self: moved.append(self))
    layer, x = LSTM(4), torch.randn(2, 3, 4)
    other, moves = LSTM(4), len(moved)
    assert moves
    layer.lstm.weight_hh_l0 = other.lstm.weight_hh_l0
    y = layer(x)
    torch.func.functional_call(layer, dict(other.named_parameters()), x)
    assert len(moved) == moves
    torch.testing.assert_close(y, recurrence(layer, x, layer.init_state(2)))
    layer.double()
    assert len(moved) > moves

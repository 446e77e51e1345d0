"""Published layers of the table that nothing but its runs needs, in plain PyTorch."""

from research.rivals.m2rnn import M2RNN, M2RNNState
from research.rivals.recurrent_delta_net import RecurrentDeltaNet, RecurrentDeltaState

__all__ = ["M2RNN", "M2RNNState", "RecurrentDeltaNet", "RecurrentDeltaState"]

"""Published layers of the table that nothing but its runs needs, in plain PyTorch."""

from research.rivals.key_decay import GatedDeltaNet2, KimiDeltaAttention
from research.rivals.m2rnn import M2RNN, M2RNNState
from research.rivals.mamba3 import Mamba3
from research.rivals.recurrent_delta_net import RecurrentDeltaNet, RecurrentDeltaState

__all__ = [
    "M2RNN",
    "GatedDeltaNet2",
    "KimiDeltaAttention",
    "M2RNNState",
    "Mamba3",
    "RecurrentDeltaNet",
    "RecurrentDeltaState",
]

"""Other mixing layers with the interface of `Bedouin`, for comparisons."""

from bedouin.baselines.attention import Attention, AttentionState, PaddedAttentionState
from bedouin.baselines.lstm import LSTM, LSTMState
from bedouin.baselines.m2rnn import M2RNN, M2RNNState
from bedouin.baselines.mamba import Mamba, MambaState
from bedouin.baselines.recurrent_delta_net import RecurrentDeltaNet, RecurrentDeltaState
from bedouin.layers.delta_net import DeltaNet
from bedouin.layers.delta_product import DeltaProduct, DeltaState

__all__ = [
    "LSTM",
    "M2RNN",
    "Attention",
    "AttentionState",
    "DeltaNet",
    "DeltaProduct",
    "DeltaState",
    "LSTMState",
    "M2RNNState",
    "Mamba",
    "MambaState",
    "PaddedAttentionState",
    "RecurrentDeltaNet",
    "RecurrentDeltaState",
]

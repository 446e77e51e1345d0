"""Other mixing layers with the interface of `Bedouin`, for comparisons."""

from bedouin.baselines.attention import Attention, AttentionState, PaddedAttentionState
from bedouin.baselines.lstm import LSTM, LSTMState
from bedouin.baselines.mamba import Mamba, MambaState
from bedouin.layers.delta_net import DeltaNet, DeltaProduct, DeltaState

__all__ = [
    "LSTM",
    "Attention",
    "AttentionState",
    "DeltaNet",
    "DeltaProduct",
    "DeltaState",
    "LSTMState",
    "Mamba",
    "MambaState",
    "PaddedAttentionState",
]

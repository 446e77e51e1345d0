"""Published layers of the table that nothing but its runs needs, in plain PyTorch, on whole
sequences; `state_size` is the number of values that one would keep of a sample."""

from research.rivals.key_decay import GatedDeltaNet2, KimiDeltaAttention
from research.rivals.m2rnn import M2RNN
from research.rivals.mamba3 import Mamba3
from research.rivals.recurrent_delta_net import RecurrentDeltaNet

__all__ = ["M2RNN", "GatedDeltaNet2", "KimiDeltaAttention", "Mamba3", "RecurrentDeltaNet"]

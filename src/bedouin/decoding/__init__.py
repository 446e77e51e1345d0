"""Decoding: one token at a time on buffers at fixed addresses, as a CUDA graph on a GPU."""

from bedouin.decoding.decoder import Decoder
from bedouin.decoding.graphs import StepGraphs
from bedouin.decoding.parts import may_replay, takes_graph

__all__ = ["Decoder", "StepGraphs", "may_replay", "takes_graph"]

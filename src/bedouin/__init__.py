"""Bedouin: sequence layers defined as a fixed point of Householder mixing and a diagonal scan."""

from bedouin.bedouin_layer import Bedouin
from bedouin.bidirectional import Bidirectional
from bedouin.decoding import Decoder
from bedouin.diagnosis import Diagnosis, diagnose
from bedouin.layers.gated_delta_net import GatedDeltaNet
from bedouin.layers.tracker import Tracker
from bedouin.layers.tracking import TrackingDeltaNet
from bedouin.mixers import (
    ChannelMixer,
    HouseholderProduct,
    Kronecker,
    LowRank,
    Monarch,
    NoMixing,
    StructuredMixer,
    WYForm,
)
from bedouin.model import SequenceModel
from bedouin.optimization import param_groups
from bedouin.parameterization import Initialization
from bedouin.rnn_layer import FixedPointRNN
from bedouin.state import BedouinState

__version__ = "0.3.0"

__all__ = [
    "Bedouin",
    "BedouinState",
    "Bidirectional",
    "ChannelMixer",
    "Decoder",
    "Diagnosis",
    "FixedPointRNN",
    "GatedDeltaNet",
    "HouseholderProduct",
    "Initialization",
    "Kronecker",
    "LowRank",
    "Monarch",
    "NoMixing",
    "SequenceModel",
    "StructuredMixer",
    "Tracker",
    "TrackingDeltaNet",
    "WYForm",
    "diagnose",
    "param_groups",
]

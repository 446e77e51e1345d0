"""Bedouin: sequence layers defined as a fixed point of Householder mixing and a diagonal scan."""

from bedouin.decode import Decoder
from bedouin.diagnosis import Diagnosis, diagnose
from bedouin.layers.bedouin import Bedouin, FixedPointRNN
from bedouin.layers.common import param_groups
from bedouin.layers.delta_net import GatedDeltaNet
from bedouin.layers.mixers import (
    ChannelMixer,
    HouseholderProduct,
    Kronecker,
    LowRank,
    Monarch,
    NoMixing,
    StructuredMixer,
    WYForm,
)
from bedouin.layers.options import Initialization
from bedouin.layers.tracking import Tracker, TrackingDeltaNet
from bedouin.model import Bidirectional, SequenceModel
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

"""The layers of the table, with equal numbers of parameters, by name.

Every model has 0.75 to 0.83 million parameters at d_model 256, in one layer or in two together, by
its inner width, and a short convolution of width 4, which Mamba-3 does without. Names end with the
number of layers, except for those of this library. At another d_model the number of heads
grows in proportion.

Letters: m d_model.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bedouin import Bedouin, GatedDeltaNet, Initialization, Tracker, TrackingDeltaNet
from bedouin.baselines import LSTM, Attention, DeltaNet, DeltaProduct
from research.rivals import (
    M2RNN,
    GatedDeltaNet2,
    KimiDeltaAttention,
    Mamba3,
    RecurrentDeltaNet,
)

Layer = Callable[[int], nn.Module]
"""A layer for a d_model, a multiple of 256."""

WIDTH, CONVOLUTION = 256, 4


def heads(kind: Callable[..., nn.Module], number: int, **options: Any) -> Layer:
    """A layer of `kind` with so many heads at d_model 256."""
    return lambda m: kind(m, num_heads=number * m // WIDTH, d_conv=CONVOLUTION, **options)


def delta_product(number: int, *, gated: bool) -> Layer:
    """Four steps a token with eigenvalues in [-1, 1]."""
    size = {"head_dim": 68, "expand_v": 1}
    options = {"num_householder": 4, "eigenvalues": "full", "gated": gated}
    return heads(DeltaProduct, number, **size, **options)


def gated_delta_net(number: int, head_dim: int = 64) -> Layer:
    """Eigenvalues in [-1, 1]."""
    return heads(DeltaNet, number, head_dim=head_dim, gated=True, eigenvalues="full")


def slow_gated_delta_net(m: int, head_dim: int) -> nn.Module:
    """Gated DeltaNet with three heads, whose decay rates begin with a hundredth of the usual ones,
    as those of the memory of `TrackingDeltaNet`."""
    layer = gated_delta_net(3, head_dim)(m)
    with torch.no_grad():
        layer.get_parameter("A_log").sub_(math.log(100))
    return layer


def lstm(units: int) -> Layer:
    """An LSTM with so many units at d_model 256."""
    return partial(LSTM, expand=units / WIDTH, d_conv=CONVOLUTION)


def lstm_with_forget_bias(m: int) -> nn.Module:
    """An LSTM whose forget gates have a bias of 1 at first (Jozefowicz et al., An Empirical
    Exploration of Recurrent Network Architectures, 2015)."""
    layer = lstm(312)(m)
    with torch.no_grad():
        # torch adds two biases; each has four parts, of which the forget gate's is the second
        for name, value in (("lstm.bias_ih_l0", 1.0), ("lstm.bias_hh_l0", 0.0)):
            layer.get_parameter(name).chunk(4)[1].fill_(value)
    return layer


class _NoFeedback(nn.Module):
    """Zeros in place of W_y norm(y_{t-1})."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, v: Tensor) -> Tensor:  # (..., c) -> (..., rows)
        return v.new_zeros(*v.shape[:-1], self.rows)


def tracking_without_feedback(m: int) -> nn.Module:
    """A `TrackingDeltaNet` whose tracker does not read itself."""
    layer = TrackingDeltaNet(m)
    tracker: Any = layer.tracker
    tracker.y_proj = _NoFeedback(3 * tracker.tracker_dim)
    return layer


def tracking_with_positive_eigenvalues(m: int) -> nn.Module:
    """A `TrackingDeltaNet` whose memory has eigenvalues in [0, 1]."""
    layer = TrackingDeltaNet(m)
    layer.memory.eigenvalues = "positive"
    return layer


WIDER = 2.3125
"""`expand_v` of a memory with the parameters of a tracker's read besides."""


def tracking_without_read(m: int) -> nn.Module:
    """A `TrackingDeltaNet` whose tracker does not read the memory, which is larger instead."""
    layer = TrackingDeltaNet(m, expand_v=WIDER)
    layer.tracker = Tracker(m)
    return layer


SLOW = Initialization(rates=0.01)

MODELS: dict[str, tuple[Layer, ...]] = {
    "bedouin": (heads(Bedouin, 4, expand=1.75),),
    "bedouin_states": (heads(Bedouin, 8, d_state=64),),
    "bedouin_slow": (heads(Bedouin, 8, d_state=64, initialization=SLOW),),
    "tracking": (TrackingDeltaNet,),
    "tracking_no_feedback": (tracking_without_feedback,),
    "tracking_no_read": (tracking_without_read,),
    "tracking_positive": (tracking_with_positive_eigenvalues,),
    "tracking_blocks": (partial(GatedDeltaNet, expand_v=WIDER), Tracker),
    "deltaproduct_l1": (delta_product(4, gated=False),),
    "deltaproduct_l1_gated": (delta_product(4, gated=True),),
    "deltaproduct_l2": (delta_product(2, gated=False),) * 2,
    "deltaproduct_l2_gated": (delta_product(2, gated=True),) * 2,
    "gated_deltanet_l1": (gated_delta_net(6),),
    "gated_deltanet_l1_large": (gated_delta_net(3, head_dim=128),),
    "gated_deltanet_l1_slow": (partial(slow_gated_delta_net, head_dim=128),),
    "lstm_l1": (lstm(312),),
    "lstm_l1_forget": (lstm_with_forget_bias,),
    "attention_l2": (heads(Attention, 8, head_dim=48),) * 2,
    "attention_l2_nope": (heads(Attention, 8, head_dim=48, rope_base=None),) * 2,
    "rdn_l1": (heads(RecurrentDeltaNet, 14, head_dim=64, expand_v=0.5),),
    "rdn_l1_slow": (heads(RecurrentDeltaNet, 14, head_dim=64, expand_v=0.5, feedback_init=0.1),),
    "m2rnn_l1": (heads(M2RNN, 17, head_dim=64, expand_v=0.25),),
    "m2rnn_l1_square": (heads(M2RNN, 19, head_dim=32, expand_v=1),),
    "gdn2_l1": (heads(GatedDeltaNet2, 7, head_dim=64),),
    "gdn2_l1_slow": (heads(GatedDeltaNet2, 7, head_dim=64, rate_scale=0.01),),
    "kda_l1": (heads(KimiDeltaAttention, 10, head_dim=64),),
    "kda_l1_slow": (heads(KimiDeltaAttention, 10, head_dim=64, rate_scale=0.01),),
    "mamba3_l1": (partial(Mamba3, expand=3.5),),
    "hybrid_l2": (gated_delta_net(3), lstm(192)),
    "hybrid_l2_lstm_first": (lstm(192), gated_delta_net(3)),
    "hybrid_l2_slow": (partial(slow_gated_delta_net, head_dim=64), lstm(192)),
}
"""The layers of every model, from the input on."""

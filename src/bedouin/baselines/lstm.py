"""LSTM as a mixing layer.

Letters: b batch, t time, m d_model, d hidden units, w convolution width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.baselines.interface import Baseline, Sizes, each
from bedouin.baselines.options import expanded
from bedouin.baselines.short_convolution import ShortConvolution
from bedouin.parameters import factory_options


class LSTMState(NamedTuple):
    """conv: (b, w - 1, m), the last inputs of the convolution; h, c: (b, d); at least float32."""

    conv: Tensor
    h: Tensor
    c: Tensor

    def detach(self) -> "LSTMState":
        """The state without its gradient history: truncated back-propagation through time."""
        return LSTMState(*each(self, Tensor.detach))

    def to(self, *args: Any, **options: Any) -> "LSTMState":
        """Every tensor through `Tensor.to`."""
        return LSTMState(*each(self, lambda v: v.to(*args, **options)))

    def __getitem__(self, index: Any) -> "LSTMState":  # type: ignore[override]
        """Samples of the batch: state[2:5], state[mask]; state[i] is one, without batch axis."""
        return LSTMState(*each(self, lambda v: v[index]))


class LSTM(Baseline[LSTMState]):
    """torch.nn.LSTM, which is cuDNN's on a GPU, and an output projection (b, t, m) -> (b, t, m).

        i, f, g, o = W x_t + U h_{t-1} + bias
        c_t = sigmoid(f) * c_{t-1} + sigmoid(i) * tanh(g),   h_t = sigmoid(o) * tanh(c_t)

    torch.compile breaks its graph at torch.nn.LSTM unless torch._dynamo.config.allow_rnn is set.
    Source: Long Short-Term Memory (Hochreiter and Schmidhuber, 1997).

    Args:
        expand: hidden units for each input channel; 2 gives the width that Bedouin has.
        d_conv: width of a short convolution with SiLU before the LSTM, as xLSTM (arXiv 2405.04517)
            has it; None (the default): no convolution.
        conv_bias: whether that convolution has a bias.
    """

    state_type = LSTMState

    def __init__(
        self,
        d_model: int,
        *,
        expand: float = 2,
        d_conv: int | None = None,
        conv_bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, dtype)
        factory = factory_options(device, dtype)
        self.d_inner = expanded("expand", expand, "d_model", d_model)
        self.conv = ShortConvolution(d_model, d_conv, bias=conv_bias, **factory)
        self.lstm = nn.LSTM(d_model, self.d_inner, batch_first=True, **factory)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False, **factory)

    def reset_parameters(self) -> None:
        for module in (self.conv, self.lstm, self.out_proj):
            module.reset_parameters()

    def _state_sizes(self) -> Sizes:
        return {"conv": self.conv.window_size, "h": (self.d_inner,), "c": (self.d_inner,)}

    def _run(
        self,
        x: Tensor,  # (b, t, m)
        state: LSTMState,
    ) -> tuple[Tensor, LSTMState]:  # (b, t, m)
        x, window = self.conv(x, state.conv)
        if self.conv.width is not None:
            x = F.silu(x)
        h, c = (v.to(x.dtype).unsqueeze(0) for v in (state.h, state.c))
        hidden, (h, c) = self.lstm(x, (h, c))
        h, c = (v.squeeze(0).to(self.state_dtype, copy=True) for v in (h, c))
        return self.out_proj(hidden), LSTMState(window, h, c)

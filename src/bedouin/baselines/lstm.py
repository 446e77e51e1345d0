"""LSTM as a mixing layer.

Letters: b batch, t time, m d_model, d hidden units, w convolution width.
"""

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bedouin.checks import known_options
from bedouin.layers.common import RecurrentLayer, expanded
from bedouin.layers.convolution import ShortConvolution
from bedouin.state import RecurrentState, StateShapes


class LSTMState(RecurrentState, namedtuple("_LSTMState", "conv h c")):  # type: ignore[misc]
    """conv: (b, w - 1, m), the last inputs of the convolution; h, c: (b, d); at least float32."""

    __slots__ = ()
    axes = (2, 1, 1)


class _LSTM(nn.LSTM):
    """torch.nn.LSTM, whose calls leave the memory of its weights as it is: torch moves new weights
    into one buffer for cuDNN, and FSDP then gathers into memory that they no longer have."""

    _is_running = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._is_running = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._is_running = False

    def flatten_parameters(self) -> None:
        if not self._is_running:
            super().flatten_parameters()


class LSTM(RecurrentLayer[LSTMState]):
    """torch.nn.LSTM, which is cuDNN's on a GPU, and an output projection (b, t, m) -> (b, t, m).

        i, f, g, o = W x_t + U h_{t-1} + bias
        c_t = sigmoid(f) * c_{t-1} + sigmoid(i) * tanh(g),   h_t = sigmoid(o) * tanh(c_t)

    torch.compile breaks its graph at torch.nn.LSTM unless torch._dynamo.config.allow_rnn is set.
    With a mask or documents, return_state=True makes the host read their lengths.
    Source: Long Short-Term Memory (Hochreiter and Schmidhuber, 1997).

    Args:
        expand: hidden units for each input channel; 2 gives the width that Bedouin has.
        d_conv: width of a short convolution with SiLU before the LSTM, as xLSTM (arXiv 2405.04517)
            has it, with a bias; None: no convolution.
    """

    state_type = LSTMState

    @known_options
    def __init__(
        self,
        d_model: int,
        *,
        expand: float = 2,
        d_conv: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, dtype)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_inner = expanded("expand", expand, "d_model", d_model)
        self.conv = ShortConvolution(d_model, d_conv, bias=True, **factory)
        self.lstm = _LSTM(d_model, self.d_inner, batch_first=True, **factory)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False, **factory)

    def _state_sizes(self) -> StateShapes:
        return {"conv": self.conv.window_size, "h": (self.d_inner,), "c": (self.d_inner,)}

    def _run(
        self, x: Tensor, state: LSTMState, lengths: Tensor | None
    ) -> tuple[Tensor, LSTMState]:  # (b, t, m), (b,) -> (b, t, m)
        x, window = self.conv(x, state.conv, lengths)
        if self.conv.width is not None:
            x = F.silu(x)
        before = tuple(v.to(x.dtype).unsqueeze(0) for v in (state.h, state.c))
        if lengths is None:
            hidden, after = self.lstm(x, before)
        else:
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ValueError(
                    "mask with return_state=True must be None during the capture of a CUDA graph, "
                    "since torch.nn.LSTM reads lengths on the host: call without return_state"
                )
            # torch packs no empty sequence
            options: Any = {"batch_first": True, "enforce_sorted": False}
            packed = pack_padded_sequence(x, lengths.clamp(min=1).cpu(), **options)
            output, after = self.lstm(packed, before)
            hidden, _ = pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])
            pairs, some = zip(after, before, strict=True), (lengths > 0).unsqueeze(-1)
            after = [torch.where(some, v, v0) for v, v0 in pairs]
        h, c = (v.squeeze(0).to(self.state_dtype, copy=True) for v in after)
        return self.out_proj(hidden), LSTMState(window, h, c)

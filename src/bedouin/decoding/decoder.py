"""`Decoder`: generation with a layer, one token at a time.

Letters: b batch, m d_model.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.checks import check_batch_size
from bedouin.decoding.graphs import Captured, StepGraphs, graph_key
from bedouin.decoding.token import DecodedLayer, has_graph, may_replay, takes_fused_step
from bedouin.state import BedouinState, check_state


class Decoder:
    """A layer with the state of b samples, which every call updates in place.

        decoder = Decoder(layer, batch_size=1)
        for _ in range(100):
            x_t = head(decoder(x_t))

    Computes the same numbers as `layer.step`, without copying the state between two tokens, and is
    not differentiable. On a GPU a call replays a CUDA graph and returns a buffer that the next call
    overwrites: clone outputs that you keep. Where `step` has no fused kernel (on a CPU, a mixer
    without kernels, backend="reference", on_unconverged="raise") a call runs `step`.

    Args:
        layer: a Bedouin or FixedPointRNN.
        batch_size: number of samples b that are decoded side by side.
        state: the initial state, for instance from `layer(prompt, return_state=True)`; None: zeros.

    Raises TypeError for a layer or state of another type, and ValueError for a batch_size that is
    not an int >= 0 or a state of the wrong shape, dtype or device.
    """

    def __init__(
        self, layer: DecodedLayer, batch_size: int, *, state: BedouinState | None = None
    ) -> None:
        if not isinstance(getattr(layer, "graphs", None), StepGraphs):
            raise TypeError(f"layer must be a Bedouin or FixedPointRNN, got {type(layer).__name__}")
        check_batch_size(batch_size)
        self.layer, self.batch_size = layer, batch_size
        self._captured: tuple[tuple[Any, ...], Captured] | None = None
        self.reset(state)

    def reset(self, state: BedouinState | None = None) -> None:
        """Restart from `state`, or from zeros. Raises the errors of `step` for an invalid state."""
        layer, b = self.layer, self.batch_size
        if state is None:
            state = layer.init_state(b)
        state = check_state(state, b, layer.d_inner, layer.d_state, layer.init_state(0).y)
        self._state: BedouinState | None = state.detach()

    @property
    def state(self) -> BedouinState:
        """A copy of the state after the last token."""
        if self._state is not None:
            return BedouinState(self._state.ssm.clone(), self._state.y.clone())
        assert self._captured is not None
        return self._captured[1].copies(self.layer)

    @torch.no_grad()
    def __call__(
        self,
        x_t: Tensor,  # (b, m)
    ) -> Tensor:  # (b, m)
        """The output at the next token. Raises the errors of `step`."""
        layer = self.layer
        if self._captured is not None and may_replay(layer, x_t):
            if self._captured[0] == graph_key(x_t) and not self._captured[1].is_stale():
                return self._run(self._captured[1], x_t)
        layer.check_input(x_t, rank=2)
        if x_t.shape[0] != self.batch_size:
            raise ValueError(f"x must have batch_size = {self.batch_size} rows, got {len(x_t)}")
        # the second condition holds on a CPU only in Triton's interpreter, which captures nothing
        if not has_graph(layer, x_t) and (x_t.is_cuda or not takes_fused_step(layer, x_t)):
            output, self._state = layer.step(x_t, self.state)
            return output
        return self._run(self._find(x_t), x_t)

    def _run(
        self,
        captured: Captured,
        x_t: Tensor,  # (b, m)
    ) -> Tensor:  # (b, m)
        if self._state is not None:
            captured.load(self.layer, self._state)
            self._state = None
        return captured.run(self.layer, x_t)

    def _find(
        self,
        x_t: Tensor,  # (b, m)
    ) -> Captured:
        """The captured token for inputs like x_t; captures it if there is none or it is stale."""
        key = graph_key(x_t)
        if self._captured is None or self._captured[0] != key or self._captured[1].is_stale():
            self._state = self.state
            self._captured = key, Captured(self.layer, x_t)
        return self._captured[1]

"""A layer that generates, one token at a time.

Letters: b batch, m d_model.
"""

from typing import Any

import torch
from torch import Tensor

from bedouin.checks import check_batch_size
from bedouin.decoding.graphs import Capture, Captured, StepGraphs, capture_graph, graph_key
from bedouin.decoding.token import DecodedLayer, has_graph, may_replay
from bedouin.state import BedouinState, check_state


class Decoder:
    """A layer that generates: the state of b samples, moved on in place by every call.

        decoder = Decoder(layer, batch_size=1)
        for _ in range(100):
            x_t = head(decoder(x_t))

    The same numbers as `layer.step`, without copies of the state between two tokens. On a GPU a
    call replays a CUDA graph, and the output it returns is overwritten by the next call: clone
    what must stay. Never differentiable. Where `step` has no fused path (a CPU, a mixer without
    kernels, backend="reference", on_unconverged="raise") it is `step`.

    Args:
        layer: a Bedouin or FixedPointRNN.
        batch_size: samples decoded side by side.
        state: where to start, for instance from `layer(prompt, return_state=True)`; None: zeros.

    Raises TypeError for a layer or state of another kind, ValueError for a batch_size that is no
    int >= 0 and a state that does not fit.
    """

    def __init__(
        self,
        layer: DecodedLayer,
        batch_size: int,
        *,
        state: BedouinState | None = None,
        capture: Capture = capture_graph,
    ) -> None:
        if not isinstance(getattr(layer, "graphs", None), StepGraphs):
            raise TypeError(f"layer must be a Bedouin or FixedPointRNN, got {type(layer).__name__}")
        check_batch_size(batch_size)
        self.layer, self.batch_size, self._capture = layer, batch_size, capture
        self._captured: tuple[tuple[Any, ...], Captured] | None = None
        self.reset(state)

    def reset(self, state: BedouinState | None = None) -> None:
        """Start anew from `state`, or from zeros. Raises as `step` does for a state that does not
        fit."""
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
    def __call__(self, x_t: Tensor) -> Tensor:
        """(b, m) -> (b, m): one token. Raises as `step` does."""
        layer = self.layer
        if self._captured is not None and may_replay(layer, x_t):
            if self._captured[0] == graph_key(x_t) and not self._captured[1].is_stale():
                return self._run(self._captured[1], x_t)
        layer.check_input(x_t, rank=2)
        if x_t.shape[0] != self.batch_size:
            raise ValueError(f"x must have batch_size = {self.batch_size} rows, got {len(x_t)}")
        if not has_graph(layer, x_t) and self._capture is capture_graph:
            output, self._state = layer.step(x_t, self.state)
            return output
        return self._run(self._find(x_t), x_t)

    def _run(self, captured: Captured, x_t: Tensor) -> Tensor:
        if self._state is not None:
            captured.load(self.layer, self._state)
            self._state = None
        return captured.run(self.layer, x_t)

    def _find(self, x_t: Tensor) -> Captured:
        key = graph_key(x_t)
        if self._captured is None or self._captured[0] != key or self._captured[1].is_stale():
            self._state = self.state
            self._captured = key, Captured(self.layer, x_t, self._capture)
        return self._captured[1]

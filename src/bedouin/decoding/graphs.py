"""Capture and replay: one token, of a layer or of a whole model, as a CUDA graph.

Launches that the output does not wait for are branches of the graph (bedouin.kernels.branches). The
graph reads the parameters at their addresses, so a change in place affects the next token. If a
parameter, module or storage is replaced, the token is captured again.
Letters: b batch, m d_model, d d_inner, n d_state.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bedouin.decoding.parts import DecodedLayer, decodes_by_step, make_part
from bedouin.kernels.backend import autocast_dtype
from bedouin.kernels.branches import branched
from bedouin.state import BedouinState
from bedouin.wrapped import ReplacementWatch

MAX_GRAPHS = 8
"""Graphs that a layer keeps, one for each batch size, dtype, autocast dtype and stream; the least
recently used one is dropped first."""

WARMUP_RUNS = 2
"""Runs before a capture, so that Triton compiles and cuBLAS allocates its workspace outside it."""

Run = Callable[[], Tensor]
Compute = Callable[[Tensor, Sequence[Callable[[Tensor], Tensor]]], Tensor]
"""From an input, and functions (b, m) -> (b, m) of the layers, to the output."""


class Captured:
    """One token on buffers at fixed addresses, ready to be replayed."""

    def __init__(
        self,
        module: Any,
        layers: Sequence[Any],
        x_t: Tensor,  # (b, m), or tokens (b,)
        compute: Compute,
    ) -> None:
        """module: what is computed, with `layers` in it; compute: how, from what each does."""
        device, dtype = x_t.device.type, autocast_dtype(x_t)
        # Tensors made in inference mode cannot be written outside it. The cache of autocast is off
        # because its casts of the weights would become constants of the graph.
        cast = torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False)
        with torch.cuda.device_of(x_t), torch.inference_mode(False), torch.no_grad(), cast:
            self.parts = [make_part(layer, x_t) for layer in layers]
            pairs = zip(self.parts, layers, strict=True)
            each = [partial(part.advance, layer) for part, layer in pairs]
            self.x = x_t.clone(memory_format=torch.contiguous_format)
            make_replay = capture_graph if x_t.is_cuda else rerun
            self.replay, self.output = make_replay(lambda: compute(self.x, each))
            for part in self.parts:
                part.start()
        self._watch = ReplacementWatch(module)

    def is_stale(self) -> bool:
        """Whether a module, parameter or storage was replaced since the capture."""
        return self._watch.has_changed()

    def load(self, layers: Sequence[Any], states: Sequence[Any]) -> None:
        """Copy the states of the layers into the buffers, as `FixedPointPart.load`."""
        for part, layer, state in zip(self.parts, layers, states, strict=True):
            part.load(layer, state)

    def run(
        self,
        layers: Sequence[Any],
        x_t: Tensor,  # (b, m), or tokens (b,)
    ) -> Tensor:  # (b, m), or logits (b, v)
        """One token from the states in the buffers; the output is a buffer, too."""
        for part, layer in zip(self.parts, layers, strict=True):
            part.begin(layer)
        self.x.copy_(x_t)
        self.replay()
        for part, layer in zip(self.parts, layers, strict=True):
            part.end(layer)
        return self.output

    def copies(self, layers: Sequence[Any]) -> tuple[Any, ...]:
        """Copies of the states after the last token; also sets the layers' `stats`."""
        return tuple(part.copies(layer) for part, layer in zip(self.parts, layers, strict=True))


def replay_step(
    captured: Captured,
    layer: DecodedLayer,
    x_t: Tensor,  # (b, m)
    state: BedouinState,  # (b, d, n), (b, d)
) -> tuple[Tensor, BedouinState]:  # (b, m)
    """One token of a single layer; the results share no memory with the buffers."""
    captured.load([layer], [state])
    output, after = captured.run([layer], x_t).clone(), captured.parts[0].copies(layer)
    assert isinstance(after, BedouinState)  # other layers are replayed by a Decoder alone
    return output, after


def capture_graph(run: Run) -> tuple[Callable[[], object], Tensor]:
    """(replay, output): a CUDA graph of `run`, and the buffer to which a replay writes the result.

    `run` is first called a few times on a side stream.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_RUNS):
            with branched():
                run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # capture_error_mode: other threads may use the device during the capture
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), branched():
        output = run()
    return graph.replay, output


def rerun(run: Run) -> tuple[Callable[[], object], Tensor]:
    """What `capture_graph` returns, for a CPU: the replay calls `run` again."""
    output = run()
    return lambda: output.copy_(run()), output


def is_decoded(layer: Any) -> bool:
    """Whether a `Decoder` captures the layer: a Bedouin, a FixedPointRNN, or one whose `step` may
    be in a graph."""
    return isinstance(getattr(layer, "graphs", None), StepGraphs) or decodes_by_step(layer)


class StepGraphs:
    """The graphs of one layer. A copy of the layer starts without any."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], Captured] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["StepGraphs"], tuple[()]]:
        return StepGraphs, ()  # for copies and pickles

    def __len__(self) -> int:
        return len(self._entries)

    def step(
        self,
        layer: DecodedLayer,
        x_t: Tensor,  # (b, m)
        state: BedouinState,  # (b, d, n), (b, d)
    ) -> tuple[Tensor, BedouinState]:  # (b, m)
        """One token, captured if there is no graph for x_t; the results own their memory.

        Raises TypeError or ValueError for an invalid state.
        """
        with self._lock:
            key = graph_key(x_t)
            captured = self._kept(key)
            if captured is None:
                captured = Captured(layer, [layer], x_t, lambda u, each: each[0](u))
                self._entries[key] = captured
                if len(self._entries) > MAX_GRAPHS:
                    del self._entries[next(iter(self._entries))]
            return replay_step(captured, layer, x_t, state)

    def replay(
        self,
        layer: DecodedLayer,
        x_t: Tensor,  # (b, m)
        state: BedouinState,  # (b, d, n), (b, d)
    ) -> tuple[Tensor, BedouinState] | None:  # (b, m)
        """`step` if there is a graph for inputs like x_t, else None. x_t needs no other check: an
        input with the same key was checked when the graph was made."""
        with self._lock:
            captured = self._kept(graph_key(x_t))
            return None if captured is None else replay_step(captured, layer, x_t, state)

    def _kept(self, key: tuple[Any, ...]) -> Captured | None:
        """The graph for a key, now the most recently used; None if there is none or it is stale."""
        captured = self._entries.pop(key, None)
        if captured is None or captured.is_stale():
            return None
        self._entries[key] = captured
        return captured


def graph_key(
    x_t: Tensor,  # (b, m), or tokens (b,)
) -> tuple[Any, ...]:
    """The properties of an input for which a graph is valid: shape, dtypes, device and stream."""
    if not x_t.is_cuda:
        return x_t.shape, x_t.dtype, autocast_dtype(x_t)
    device = x_t.get_device()
    # torch.cuda.current_stream makes an object around this number at every call
    stream = torch._C._cuda_getCurrentRawStream(device)
    return x_t.shape, x_t.dtype, autocast_dtype(x_t), device, stream

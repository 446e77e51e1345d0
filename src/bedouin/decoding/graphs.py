"""Tokens as CUDA graphs: captured once for each kind of input, replayed, and captured anew.

The graph reads the parameters themselves, so a change in place is seen by the next token; a
parameter, module or storage that is replaced makes a new graph. Letters: b batch, m d_model.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bedouin.decoding.token import DecodedLayer, advance, make_buffers
from bedouin.kernels.backend import autocast_dtype
from bedouin.state import BedouinState

MAX_GRAPHS = 8
"""Graphs that a layer keeps, one for each batch size, dtype, autocast dtype and stream; the one
unused for longest goes first."""

LOOK_EVERY = 32
"""Tokens between two asynchronous looks at whether all of them were solved."""

WARMUP = 2

Run = Callable[[], Tensor]
Capture = Callable[[Run], tuple[Callable[[], object], Tensor]]
"""Turns a function into (replay, what it returns, at a fixed place)."""


class Watch:
    """Notices when a module, parameter or storage below a layer is replaced.

    A change in place needs no notice: a graph reads the parameters where they lie.
    """

    def __init__(self, layer: DecodedLayer) -> None:
        self._held: list[tuple[dict[str, Any], str, object]] = []
        self._placed: list[tuple[dict[str, Any], str, Tensor, int]] = []
        for module in layer.modules():
            self._held += [(module._modules, *item) for item in module._modules.items()]
            for owner in (module._parameters, module._buffers):
                for name, tensor in owner.items():
                    if tensor is not None:
                        self._placed.append((owner, name, tensor, tensor.data_ptr()))

    def has_changed(self) -> bool:
        for owner, name, module in self._held:
            if owner.get(name) is not module:
                return True
        for owner, name, tensor, pointer in self._placed:
            if owner.get(name) is not tensor or tensor.data_ptr() != pointer:
                return True
        return False


class Captured:
    """`advance` on fixed places, ready to be replayed."""

    def __init__(self, layer: DecodedLayer, x_t: Tensor, capture: Capture) -> None:
        device, dtype = x_t.device.type, autocast_dtype(x_t)
        # tensors born in inference mode could not be written outside it; without the cache of
        # autocast, whose casts of the weights would be frozen into the graph
        cast = torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False)
        with torch.cuda.device_of(x_t), torch.inference_mode(False), torch.no_grad(), cast:
            self.buffers = make_buffers(layer, x_t)
            self.x = torch.zeros_like(x_t, memory_format=torch.contiguous_format)
            self.replay, self.output = capture(lambda: advance(layer, self.x, self.buffers))
            self.buffers.all_converged.fill_(1)
        self._watch = Watch(layer)
        self._tokens = 0
        self._last: tuple[Tensor, Tensor, int] | None = None

    def is_stale(self) -> bool:
        return self._watch.has_changed()

    def load(self, layer: DecodedLayer, state: BedouinState) -> None:
        """Take a state in, unless it is the one that the last token left behind."""
        last = self._last
        if last is not None and isinstance(state, BedouinState):
            if state.ssm is last[0] and state.y is last[1] and last[0]._version == last[2]:
                return
        self.buffers.load(state, layer.feedback_norm_eps)

    def run(self, layer: DecodedLayer, x_t: Tensor) -> Tensor:
        """One token from the state in the buffers; the output stays in its place."""
        layer.deferred.flush()
        if layer.training:
            layer.draws.next(layer.solve_options.cap)
        self.x.copy_(x_t)
        self.replay()
        self._last = None
        self._tokens += 1
        if self._tokens % LOOK_EVERY == 0 and layer.solve_options.on_unconverged == "warn":
            subject = type(layer).__name__
            if not layer.deferred.is_pending(subject):
                layer.deferred.schedule(self.buffers.take_stats(), subject)
        return self.output

    def step(
        self, layer: DecodedLayer, x_t: Tensor, state: BedouinState
    ) -> tuple[Tensor, BedouinState]:
        """One token; nothing that comes out shares memory with what is kept."""
        self.load(layer, state)
        return self.run(layer, x_t).clone(), self.copies(layer)

    def copies(self, layer: DecodedLayer) -> BedouinState:
        """The state after the last token; the layer gets its statistics."""
        state, vars(layer)["stats"] = self.buffers.copies()
        self._last = state.ssm, state.y, state.ssm._version
        return state


def capture_graph(run: Run) -> tuple[Callable[[], object], Tensor]:
    """A CUDA graph of `run`, after a few runs on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # other threads may use the device meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = run()
    return graph.replay, output


class StepGraphs:
    """The graphs of one layer. A copy of the layer starts without any."""

    def __init__(self, capture: Capture = capture_graph) -> None:
        self._capture = capture
        self._entries: dict[tuple[Any, ...], Captured] = {}
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepGraphs":
        return StepGraphs(self._capture)

    def __reduce__(self) -> tuple[type["StepGraphs"], tuple[()]]:
        return StepGraphs, ()

    def __len__(self) -> int:
        return len(self._entries)

    def step(
        self, layer: DecodedLayer, x_t: Tensor, state: BedouinState
    ) -> tuple[Tensor, BedouinState]:
        """One token, from a graph that is made if need be; results have memory of their own."""
        with self._lock:
            key = graph_key(x_t)
            captured = self._kept(key)
            if captured is None:
                captured = self._entries[key] = Captured(layer, x_t, self._capture)
                if len(self._entries) > MAX_GRAPHS:
                    del self._entries[next(iter(self._entries))]
            return captured.step(layer, x_t, state)

    def replay(
        self, layer: DecodedLayer, x_t: Tensor, state: BedouinState
    ) -> tuple[Tensor, BedouinState] | None:
        """`step` if there is a graph for x_t; it was checked when that was made."""
        with self._lock:
            captured = self._kept(graph_key(x_t))
            return None if captured is None else captured.step(layer, x_t, state)

    def _kept(self, key: tuple[Any, ...]) -> Captured | None:
        """The graph for a key, which becomes the last to go; None where there is none that fits."""
        captured = self._entries.pop(key, None)
        if captured is None or captured.is_stale():
            return None
        self._entries[key] = captured
        return captured


def graph_key(x_t: Tensor) -> tuple[Any, ...]:
    """What a graph is made for: an x_t with the same key needs no check but that."""
    if not x_t.is_cuda:
        return x_t.shape, x_t.dtype, autocast_dtype(x_t)
    device = x_t.get_device()
    # what torch.cuda.current_stream wraps, without the object
    stream = torch._C._cuda_getCurrentRawStream(device)
    return x_t.shape, x_t.dtype, autocast_dtype(x_t), device, stream

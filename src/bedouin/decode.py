"""Decoding: one token at a time from buffers that stay where they are, as a CUDA graph on a GPU.

A token is five launches: three products, the feedback's product, and one kernel for the rest.
The graph reads the parameters themselves, so a change in place is seen by the next token; a
parameter, module or storage that is replaced makes a new graph. Letters: b batch, m d_model,
d d_inner, n d_state, r raw values.
"""

import threading
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.checks import check_batch_size
from bedouin.kernels.backend import (
    autocast_dtype,
    interpreter_is_on,
    is_transformed,
    without_autocast,
)
from bedouin.kernels.decode import (
    StepOperands,
    StepOptions,
    StepParameters,
    decode_token,
    unsupported_token,
)
from bedouin.kernels.direct import ROUNDING
from bedouin.kernels.direct.reference import normalize_feedback
from bedouin.solvers.solution import BackwardStats, SolveStats
from bedouin.state import BedouinState, check_state

if TYPE_CHECKING:
    from bedouin.layer import FixedPointLayer

MAX_GRAPHS = 8
"""Graphs that a layer keeps, one for each batch size, dtype, autocast dtype and stream; the one
unused for longest goes first."""

LOOK_EVERY = 32
"""Tokens between two asynchronous looks at whether all of them were solved."""

WARMUP = 2

Run = Callable[[], Tensor]
Capture = Callable[[Run], tuple[Callable[[], object], Tensor]]
"""Turns a function into (replay, what it returns, at a fixed place)."""


class TokenStats(SolveStats):
    """Statistics of one token: cut out of a copied block when somebody asks, not at every token."""

    def __init__(self, num_steps: Tensor, block: Tensor, at: int) -> None:
        # past the frozen dataclass, whose other fields are properties here
        self.__dict__.update(num_steps=num_steps, _source=(block, at), _backward=BackwardStats())

    @cached_property
    def _cut(self) -> tuple[Tensor, Tensor, Tensor]:
        block, at = self.__dict__["_source"]
        return cut_statistics(block, at, len(self.num_steps))

    @property
    def residual(self) -> Tensor:
        return self._cut[0]

    @property
    def conditioning(self) -> Tensor:
        return self._cut[1]

    @property
    def converged(self) -> Tensor:
        return self._cut[2].view(torch.bool)


def cut_statistics(block: Tensor, at: int, b: int) -> tuple[Tensor, Tensor, Tensor]:
    """residual, pivot (b,) and converged (b,) uint8, which stand in a block from `at` on."""
    end = at + 2 * b
    return block[at : at + b], block[at + b : end], block[end:].view(torch.uint8)[:b]


class Buffers:
    """State and statistics of b samples at fixed places, in one block that is copied at once."""

    def __init__(self, layer: "FixedPointLayer", b: int, low: torch.dtype) -> None:
        d, n = layer.d_inner, layer.d_state
        state = layer.init_state(0).y
        self.shape, self.like = (b, n, d), state
        self._end = b * n * d + b * d
        self.block = state.new_zeros(self._end + 2 * b + -(-b // state.element_size()))
        h, self.y = self._state(self.block)
        self.h = h.mT
        self.residual, self.pivot, self.converged = cut_statistics(self.block, self._end, b)
        self.normed = torch.zeros(b, d, dtype=low, device=state.device)
        self.held = torch.ones(b, dtype=torch.uint8, device=state.device)
        self.num_steps = torch.ones(b, dtype=torch.int64, device=state.device)

    def _state(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """h (b, d, n), which lies state-major, and y (b, d) in a block."""
        b, n, d = self.shape
        h = block.as_strided((b, d, n), (n * d, 1, d))
        return h, block.as_strided((b, d), (d, 1), b * n * d)

    def load(self, state: BedouinState, norm_eps: float | None) -> None:
        """Take a state in; raises TypeError or ValueError where it does not fit."""
        b, n, d = self.shape
        state = check_state(state, b, d, n, self.like)
        self.h.copy_(state.ssm.mT)
        self.y.copy_(state.y)
        self.normed.copy_(normalize_feedback(self.y, norm_eps))

    def copies(self) -> tuple[BedouinState, SolveStats]:
        """State and statistics, in one new block."""
        # outside inference mode tensors count their changes, so a state that comes back unchanged
        # need not be copied in again
        with torch._C._InferenceMode(False):
            block = self.block.clone()
            h, y = self._state(block)
        return BedouinState(h, y), TokenStats(self.num_steps, block, self._end)

    def stats_since_last_look(self) -> SolveStats:
        """Converged says whether all tokens since the last call were solved."""
        held = self.held.bool()
        self.held.fill_(1)
        return SolveStats(self.num_steps, self.residual.clone(), held, self.pivot.clone())


def unsupported_step(layer: "FixedPointLayer") -> str | None:
    """What the fused path does not cover, in words."""
    if not vars(type(layer)).get("_has_fused_step", False):
        return "subclasses"
    return unsupported_token(layer.d_inner, layer.d_state, layer._layout())


def asks_for_fused_step(layer: "FixedPointLayer") -> bool:
    """Whether this call may take the fused path, whatever the layer and its input.

    Not where a gradient may be asked for, nor where the host must see every outcome.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
        return False
    return layer.backend != "reference" and layer.on_unconverged != "raise"


def takes_fused_step(layer: "FixedPointLayer", x_t: Tensor) -> bool:
    """Whether `step` may take the fused path for x_t (b, m)."""
    if not asks_for_fused_step(layer) or not len(x_t):
        return False
    if x_t.is_cuda:
        # float64 is for checking numbers, which is the plain path's task
        return layer.D.dtype != torch.float64 and unsupported_step(layer) is None
    return layer.backend == "triton" and interpreter_is_on() and unsupported_step(layer) is None


def advance(layer: "FixedPointLayer", u: Tensor, buffers: Buffers) -> Tensor:
    """One token: u (b, m) -> (b, m); the buffers move on by it."""
    d, options = layer.d_inner, step_options(layer)
    projected = layer.in_proj(u)
    x = projected[:, :d]
    raw = F.linear(x, layer.x_proj.weight)
    with without_autocast(u.device):
        fed = None
        if layer.y_proj is not None:
            fed = F.linear(buffers.normed, layer.y_proj.weight.to(buffers.normed.dtype))
        drive = layer._drive(x.to(buffers.h.dtype)) if layer._has_drive else x
        hidden = torch.empty(len(u), d, dtype=u.dtype, device=u.device)
        operands = StepOperands(
            x,
            drive,
            projected[:, d:] if layer.output == "norm" else None,
            raw,
            fed,
            buffers.h,
            buffers.y,
            buffers.normed,
            hidden,
            buffers.residual,
            buffers.pivot,
            buffers.converged,
            buffers.held,
        )
        decode_token(operands, step_parameters(layer), options, backend=layer.backend)
    output: Tensor = layer.out_proj(hidden)
    return output


def step_options(layer: "FixedPointLayer") -> StepOptions:
    """The layer's options as the kernel takes them."""
    layout = layer._layout()
    assert layout is not None
    fed = {name: name in layer.feedback for name in layer.components}
    first = next(iter(fed.values()))
    return StepOptions(
        layout,
        layer.input_scale,
        layer.eigenvalues,
        layer._decay_parameter()[0],
        layer._decay_parameter()[1],
        (first, fed.get("B", False), fed.get("C", False), fed["mixer"]),
        layer._norm_eps,
        None if layer.norm is None else layer.norm.eps,
        ROUNDING,
    )


def step_parameters(layer: "FixedPointLayer") -> StepParameters:
    """The layer's parameters as the kernel takes them."""
    weight = None if layer.norm is None else layer.norm.weight
    return StepParameters(
        layer._decay_parameter()[2], layer.dt_bias, layer.raw_bias, layer.D, weight
    )


def fused_step(
    layer: "FixedPointLayer", x_t: Tensor, state: BedouinState
) -> tuple[Tensor, BedouinState]:
    """One token without a graph of its own: in a capture of the caller's, or interpreted."""
    buffers = _buffers(layer, x_t)
    buffers.load(state, layer._norm_eps)
    output = advance(layer, x_t, buffers)
    layer._next_draw()
    new_state, layer.stats = buffers.copies()
    return output, new_state


def _buffers(layer: "FixedPointLayer", x_t: Tensor) -> Buffers:
    low = autocast_dtype(x_t) or layer.x_proj.weight.dtype
    return Buffers(layer, len(x_t), low)


class Watch:
    """Notices when a module, parameter or storage below a layer is replaced.

    A change in place needs no notice: a graph reads the parameters where they lie.
    """

    def __init__(self, layer: nn.Module) -> None:
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

    def __init__(self, layer: "FixedPointLayer", x_t: Tensor, capture: Capture) -> None:
        device, dtype = x_t.device.type, autocast_dtype(x_t)
        # tensors born in inference mode could not be written outside it; without the cache of
        # autocast, whose casts of the weights would be frozen into the graph
        cast = torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False)
        with torch.cuda.device_of(x_t), torch.inference_mode(False), torch.no_grad(), cast:
            self.buffers = _buffers(layer, x_t)
            self.x = torch.zeros_like(x_t, memory_format=torch.contiguous_format)
            self.replay, self.output = capture(lambda: advance(layer, self.x, self.buffers))
            self.buffers.held.fill_(1)
        self._watch = Watch(layer)
        self._tokens = 0
        self._last: tuple[Tensor, Tensor, int] | None = None

    def is_stale(self) -> bool:
        return self._watch.has_changed()

    def load(self, layer: "FixedPointLayer", state: BedouinState) -> None:
        """Take a state in, unless it is the one that the last token left behind."""
        last = self._last
        if last is not None and isinstance(state, BedouinState):
            if state.ssm is last[0] and state.y is last[1] and last[0]._version == last[2]:
                return
        self.buffers.load(state, layer._norm_eps)

    def run(self, layer: "FixedPointLayer", x_t: Tensor) -> Tensor:
        """One token from the state in the buffers; the output stays in its place."""
        layer._deferred.flush()
        if layer.training:
            layer._draws.next(layer.cap)
        self.x.copy_(x_t)
        self.replay()
        self._last = None
        self._tokens += 1
        if self._tokens % LOOK_EVERY == 0 and layer.on_unconverged == "warn":
            subject = type(layer).__name__
            if not layer._deferred.is_pending(subject):
                layer._deferred.schedule(self.buffers.stats_since_last_look(), subject)
        return self.output

    def step(
        self, layer: "FixedPointLayer", x_t: Tensor, state: BedouinState
    ) -> tuple[Tensor, BedouinState]:
        """One token; nothing that comes out shares memory with what is kept."""
        self.load(layer, state)
        return self.run(layer, x_t).clone(), self.copies(layer)

    def copies(self, layer: "FixedPointLayer") -> BedouinState:
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
        self, layer: "FixedPointLayer", x_t: Tensor, state: BedouinState
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
        self, layer: "FixedPointLayer", x_t: Tensor, state: BedouinState
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


def may_replay(layer: "FixedPointLayer", x_t: Tensor) -> bool:
    """Whether this call replays a graph if there is one for x_t."""
    if not isinstance(x_t, Tensor) or not x_t.is_cuda or not asks_for_fused_step(layer):
        return False
    return not torch.cuda.is_current_stream_capturing()


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
        layer: "FixedPointLayer",
        batch_size: int,
        *,
        state: BedouinState | None = None,
        capture: Capture = capture_graph,
    ) -> None:
        if not hasattr(layer, "_graphs"):
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
        layer._check_input(x_t, rank=2)
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


def has_graph(layer: "FixedPointLayer", x_t: Tensor) -> bool:
    """Whether a token of x_t (b, m) is the replay of a graph, which may have to be made first."""
    return may_replay(layer, x_t) and takes_fused_step(layer, x_t)

"""TrackingDeltaNet: memories by the delta rule, and trackers that read them at the same token.

Letters: b batch, t time, m d_model, h heads of the memory, p key channels and v value channels of a
head, H trackers, c channels of a tracker, n states of a channel, w convolution width, r read_size.
Between the projections a tracker has H b folded samples, each a head (kernels/heads.py).
"""

import math
from collections import namedtuple
from typing import Any

import torch
from torch import Tensor, nn

from bedouin.checks import check_layer_idx, check_tensor, known_options
from bedouin.kernels.backend import Backend, autocast_dtype, check_backend, without_autocast
from bedouin.kernels.checks import check_number, positive_int
from bedouin.kernels.delta_rule import DeltaBackend, kernel_backend
from bedouin.kernels.operands import CLOSED, closed_value
from bedouin.kernels.track import TrackInputs, track
from bedouin.layers import common
from bedouin.layers.convolution import ShortConvolution
from bedouin.layers.delta_net import DeltaState, GatedDeltaNet
from bedouin.layers.heads import make_linear
from bedouin.layers.options import FEEDBACK_NORM_EPS
from bedouin.packing import find_packing, last_token, tokens_before
from bedouin.state import RecurrentState, StateShapes
from bedouin.wrapped import effective_weight, side_by_side

# Factors on W_y's usual initial values, and on the usual decay rates 1 .. n: with 0.3 and 1, or
# with 1 and 1, some seeds do not learn S5 (examples/results/tracking-trials).
FEEDBACK_INIT, FIRST_RATE = 0.5, 4
# beta^e begins near 0.05: from 0.5 recall is learned less well (examples/results/history).
ERASE_BIAS = -3.0
WIDE_STATE, NARROW_STATE, WIDE_FROM = 128, 64, 256  # a channel's states, by d_model


class TrackerState(RecurrentState, namedtuple("_TrackerState", "conv ssm y")):  # type: ignore[misc]
    """conv: (b, w - 1, H (c + 2 n)), the last inputs of the convolution; ssm: (b, H c, n), the
    memory h; y: (b, H c), the output of the recurrence at the last token; at least float32."""

    __slots__ = ()
    axes = (2, 2, 1)


class Tracker(common.RecurrentLayer[TrackerState]):
    """A recurrence with feedback that keeps a state, (b, t, m) -> (b, t, m).

        x, B, C = SiLU(conv(W u));   Delta, beta^e, gate = W u
        x^_t    = SiLU(conv(W u)_t + W_r read_t) + W_y norm(y_{t-1})
        Delta_t = softplus(Delta + W_r read_t + W_y norm(y_{t-1}) + dt_bias)
        h_t     = exp(-exp(A_log) Delta_t) * h_{t-1} (I - beta^e_t B_t B_t^T) + (Delta_t x^_t) B_t^T
        y_t     = h_t C_t
        out     = out_proj(SiLU(gate_t + W_y norm(y_{t-1})) * norm(y_t + D * x_t))

    B and C have unit length, beta^e = sigmoid(raw), and norm is an RMSNorm over the channels of a
    head. Each of the H trackers reads its own output alone. W_r begins at zero.

    Args:
        num_trackers, tracker_dim: H, and c, the channels of a tracker.
        tracker_state: n, the states of a channel; None: 128 from a d_model of 256 on, else 64.
        d_conv: width of the short convolution; None: no convolution, SiLU stays.
        feedback_noise: standard deviation of the noise on x^ and on the raw Delta in training calls
            of `forward`; `step`, `Decoder` and `generate` draw none. 0: none.
        read_size: r, the values that a call gets as `read`; 0: it gets none.
        norm_eps: of the norm of the output.
        backend: "auto": Triton kernels on a GPU where they fit (c <= 64, n <= 128), which is told
            once where they do not, else plain torch; "triton"; "reference": plain torch.
        layer_idx: kept as an attribute, as users of transformers expect.

    Raises TypeError or ValueError for options of another type or out of range.
    """

    state_type = TrackerState
    settable_options = ("backend", "feedback_noise", "layer_idx")
    saved_options = ("norm_eps",)
    shown_options = ("num_trackers", "tracker_dim", "tracker_state", "read_size", "feedback_noise")
    none_for_zeros = ("ssm", "y")
    captures_step = True

    @known_options
    def __init__(
        self,
        d_model: int,
        *,
        num_trackers: int = 1,
        tracker_dim: int = 64,
        tracker_state: int | None = None,
        d_conv: int | None = 4,
        feedback_noise: float = 0.0,
        read_size: int = 0,
        norm_eps: float = 1e-5,
        backend: Backend = "auto",
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, dtype)
        if tracker_state is None:
            tracker_state = WIDE_STATE if d_model >= WIDE_FROM else NARROW_STATE
        H = self.num_trackers = positive_int("num_trackers", num_trackers)
        c = self.tracker_dim = positive_int("tracker_dim", tracker_dim)
        n = self.tracker_state = positive_int("tracker_state", tracker_state, " or None")
        check_number("feedback_noise", feedback_noise, 0, 1e3, open_low=False)
        check_backend(backend)
        self.feedback_noise, self.backend = float(feedback_noise), backend
        is_zero = read_size == 0 and not isinstance(read_size, bool)
        self.read_size = 0 if is_zero else positive_int("read_size", read_size, " or 0")
        self.norm_eps = common.positive_number("norm_eps", norm_eps)
        self.layer_idx = check_layer_idx(layer_idx)

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.projected_sizes = {"x": H * c, "B": H * n, "C": H * n}
        self.projected_sizes |= {"delta": H * c, "erase": H, "gate": H * c}
        self.in_proj = nn.Linear(d_model, sum(self.projected_sizes.values()), bias=False, **factory)
        self.conv = ShortConvolution(H * (c + 2 * n), d_conv, bias=False, **factory)
        self.read_proj = None
        if self.read_size:
            self.read_proj = make_linear(1, read_size, 2 * H * c, ((..., 0.0),), **factory)
        self.y_proj = make_linear(H, c, 3 * c, ((..., FEEDBACK_INIT),), **factory)
        self.A_log = nn.Parameter(torch.empty(H * c, n, **factory))
        self.dt_bias = nn.Parameter(torch.empty(H * c, **factory))
        self.erase_bias = nn.Parameter(torch.empty(H, **factory))
        self.D = nn.Parameter(torch.empty(H * c, **factory))
        self.norm_weight = nn.Parameter(torch.empty(H * c, **factory))
        self.out_proj = nn.Linear(H * c, d_model, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            states = torch.arange(1, self.tracker_state + 1, device=self.A_log.device)
            self.A_log.copy_((FIRST_RATE * states).log().expand_as(self.A_log))
            self.erase_bias.fill_(ERASE_BIAS)
            self.D.fill_(1.0)
            self.norm_weight.fill_(1.0)
        common.reset_dt_bias(self.dt_bias)
        self._mark_parameters()

    def _mark_parameters(self) -> None:
        undecayed = "A_log", "dt_bias", "erase_bias", "D", "norm_weight"
        common.mark(self, "_no_weight_decay", *undecayed)
        common.mark(self, "_no_reinit", "dt_bias")

    def _state_sizes(self) -> StateShapes:
        d = self.num_trackers * self.tracker_dim
        return {"conv": self.conv.window_size, "ssm": (d, self.tracker_state), "y": (d,)}

    def forward(
        self,
        x: Tensor,  # (b, t, m)
        state: TrackerState | None = None,
        return_state: bool = False,
        *,
        read: Tensor | None = None,  # (b, t, r)
        mask: Tensor | None = None,  # (b, t)
        **documents: Tensor | None,
    ) -> Any:
        """(b, t, m) -> (b, t, m), or with `return_state` the pair (output, TrackerState). read:
        what the tracker reads at the same token, in the dtype of x; needed with a read_size, and
        only then. The other arguments and errors are those of `Bedouin`."""
        self.check_input(x, 3)
        packing = find_packing(x, mask, **documents)
        return self._call(self._joined(x, read), state, return_state, packing)

    def step(
        self, x_t: Tensor, state: TrackerState, *, read: Tensor | None = None
    ) -> tuple[Tensor, TrackerState]:  # (b, m), (b, r) -> (b, m)
        """One token, without noise. Raises as `forward` does, and TypeError for no state."""
        self.check_input(x_t, 2)
        return self._step(self._joined(x_t, read), state)

    def _joined(self, x: Tensor, read: Tensor | None) -> Tensor:  # (..., m), (..., r)
        """x with `read` beside it; TypeError or ValueError for one that does not fit."""
        if (read is None) == bool(self.read_size):
            got = "None" if read is None else f"one of {type(read).__name__}"
            raise ValueError(
                f"read must be given for a tracker with read_size > 0, and only then, got {got} "
                f"with read_size={self.read_size}"
            )
        if read is None:
            return x
        check_tensor("read", read, "(b, t, read_size)")
        if read.shape != (shape := (*x.shape[:-1], self.read_size)):
            raise ValueError(f"read must have shape {shape}, got {tuple(read.shape)}")
        if read.dtype != x.dtype or read.device != x.device:
            raise ValueError(
                f"read must have the dtype and device of x, {x.dtype} on {x.device}, got "
                f"{read.dtype} on {read.device}: use read.to(x)"
            )
        return torch.cat([x, read], -1)

    def _run(
        self, x: Tensor, state: TrackerState, lengths: Tensor | None
    ) -> tuple[Tensor, TrackerState]:  # (b, t, m + r), (b,) -> (b, t, m)
        u, read = x.split([self.d_model, self.read_size], -1)
        return self.track(u, read, state, lengths)

    def track(
        self, u: Tensor, read: Tensor, state: TrackerState, lengths: Tensor | None
    ) -> tuple[Tensor, TrackerState]:  # (b, t, m), (b, t, r), (b,) -> (b, t, m)
        """The outputs, and the state after the last token."""
        H, c, n = self.num_trackers, self.tracker_dim, self.tracker_state
        sizes = [self.conv.channels, H * c, H, H * c]
        joined = side_by_side(u, [self.in_proj])
        projected, delta, erase, gate, _ = joined.split([*sizes, joined.shape[-1] - sum(sizes)], -1)
        of_x = None
        if self.read_proj is not None:
            of_x, of_delta = self.read_proj(read).chunk(2, -1)
            delta = delta + of_delta
        before = state.conv, lengths, of_x
        acted, window = self.conv.activated(projected, *before, backend=self.backend)
        # The skip is without what is read: the memory that is read has an output of its own, and
        # with a second one through D associative recall is learned late, if at all.
        skip, B, C, fed = acted.split([H * c, H * n, H * n, acted.shape[-1] - H * (c + 2 * n)], -1)
        x = skip if of_x is None else fed
        with without_autocast(u.device):
            inputs = self._inputs((x, B, C, delta, erase, gate, skip), state, lengths)
            found = track(inputs, FEEDBACK_NORM_EPS, self.norm_eps, backend=self.backend)
            y = found.y
            # a copy, since a view would keep the outputs of all tokens with the state
            last = y[:, -1].clone() if lengths is None else last_token(y, lengths, state.y)
        output: Tensor = self.out_proj(found.hidden)
        return output, TrackerState(window, found.h, last)

    def _inputs(
        self, rows: tuple[Tensor, ...], state: TrackerState, lengths: Tensor | None
    ) -> TrackInputs:
        """The recurrence's inputs of the rows (b, t, ...), with noise and closed padding."""
        H, c = self.num_trackers, self.tracker_dim
        x, B, C, delta, erase, gate, skip = rows
        if common.draws_noise(self):
            drawn = torch.randn(2, *x.shape, dtype=x.dtype, device=x.device)
            of_x, of_delta = (self.feedback_noise * drawn).unbind()
            x, delta = x + of_x, delta + of_delta
        if lengths is not None:
            padded = ~tokens_before(lengths, x.shape[1]).unsqueeze(-1)
            delta, erase = (
                v.masked_fill(padded, closed_value(-CLOSED, v.dtype)) for v in (delta, erase)
            )
        weight = effective_weight("y_proj", self.y_proj, c, self.D, H).view(H, 3 * c, c)
        parameters = self.dt_bias, self.erase_bias, self.A_log, self.D, self.norm_weight, weight
        return TrackInputs(x, B, C, delta, erase, gate, skip, *parameters, state.ssm, state.y)


_TrackingFields = namedtuple("_TrackingFields", "memory_conv memory tracker_conv ssm y")


class TrackingState(RecurrentState, _TrackingFields):  # type: ignore[misc]
    """memory_conv: (b, w - 1, h (2 p + v)) and memory: (b, h, p, v), of the memory; tracker_conv:
    (b, w - 1, H (c + 2 n)), ssm: (b, H c, n) and y: (b, H c), of the trackers; at least float32."""

    __slots__ = ()
    axes = (2, 3, 2, 2, 1)


class TrackingDeltaNet(common.RecurrentLayer[TrackingState]):
    """A layer that tracks a state and recalls what a sequence contains, (b, t, m) -> (b, t, m).

        layer = TrackingDeltaNet(d_model)
        out, state = layer(u, return_state=True)          # continue with layer(later, state)
        out_t, state = layer.step(u_t, state)             # one token, (b, m) -> (b, m)

    It is Gated DeltaNet, read at the same token by a small recurrence with feedback. Nothing in it
    is implicit: it has no solver and no statistics.

        memory   S_t = e^{g_t} (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,  o_t = S_t^T q_t
        tracker  h_t = lambda_t * h_{t-1} (I - beta^e_t B_t B_t^T) + (Delta_t x^_t) B_t^T,
                 y_t = h_t C_t; x^_t and Delta_t depend on the input, on o_t and on y_{t-1}
        output   that of the memory + that of the tracker

    `memory` is a `GatedDeltaNet`, which the input alone writes and reads; `tracker` is a `Tracker`,
    which reads what the memory recalls, without a norm, so that what is not found is small.

    Size:
        d_model: m, the width of input and output.
        num_heads, head_dim, expand_v: of the memory, as in `GatedDeltaNet`.
        num_trackers, tracker_dim, tracker_state: of the tracker, as in `Tracker`.

    Recurrence:
        d_conv: width of both short convolutions; None: no convolution, SiLU stays.
        feedback_noise: of training calls of `forward`, as in `Tracker`.

    Precision:
        dtype, device: of the parameters; the state is at least float32.
        norm_eps: of the norms of both outputs.
        backend: "auto": Triton kernels on a GPU where they fit, else plain torch; "torch" or
            "reference": plain torch; "triton"; "fla": the memory by flash-linear-attention.
        layer_idx: kept as an attribute, as users of transformers expect.

    Raises TypeError or ValueError for options of another type or out of range.
    """

    state_type = TrackingState
    none_for_zeros = ("memory", "ssm", "y")
    captures_step = True
    settable_options = ("layer_idx",)

    @known_options
    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 2,
        num_trackers: int = 1,
        tracker_dim: int = 64,
        tracker_state: int | None = None,
        d_conv: int | None = 4,
        feedback_noise: float = 0.0,
        norm_eps: float = 1e-5,
        backend: DeltaBackend = "auto",
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, dtype)
        self.layer_idx, self.backend = check_layer_idx(layer_idx), backend
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        shared: dict[str, Any] = {"d_conv": d_conv, "norm_eps": norm_eps, **factory}
        sizes: dict[str, Any] = {"num_heads": num_heads, "head_dim": head_dim, "expand_v": expand_v}
        self.memory = GatedDeltaNet(d_model, **sizes, backend=backend, **shared)
        sizes = {"num_trackers": num_trackers, "tracker_dim": tracker_dim}
        sizes |= {"tracker_state": tracker_state, "feedback_noise": feedback_noise}
        sizes |= {"read_size": self.memory.num_heads * self.memory.value_dim}
        self.tracker = Tracker(d_model, **sizes, backend=kernel_backend(backend), **shared)

    @property
    def out_proj(self) -> nn.Linear:  # type: ignore[override]
        """That of the memory."""
        return self.memory.out_proj

    def _state_sizes(self) -> StateShapes:
        parts = *self.memory._state_sizes().values(), *self.tracker._state_sizes().values()
        return dict(zip(TrackingState._fields, parts, strict=True))

    def _run(
        self, x: Tensor, state: TrackingState, lengths: Tensor | None
    ) -> tuple[Tensor, TrackingState]:  # (b, t, m), (b,) -> (b, t, m)
        of_memory = DeltaState(state.memory_conv, state.memory)
        of_tracker = TrackerState(state.tracker_conv, state.ssm, state.y)
        x = x.to(autocast_dtype(x) or x.dtype)  # once for all projections
        projected = self.memory.project(x)
        recalled, after = self.memory.recall(projected, of_memory, lengths)
        read = (math.sqrt(self.memory.head_dim) * recalled).flatten(-2)
        tracked, of_tracker = self.tracker.track(x, read, of_tracker, lengths)
        output = self.memory.output(recalled, projected.gate) + tracked
        return output, TrackingState(*after, *of_tracker)

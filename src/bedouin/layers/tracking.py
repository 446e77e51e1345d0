"""TrackingDeltaNet: memories by the delta rule, and trackers that read them at the same token.

Letters: b batch, t time, m d_model, h heads of the memory, p key channels and v value channels of a
head, H trackers, c channels of a tracker, n states of a channel, w convolution width.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bedouin.checks import check_layer_idx, known_options
from bedouin.kernels.backend import autocast_dtype
from bedouin.kernels.delta_rule import DeltaBackend, kernel_backend
from bedouin.layers.delta_product import DeltaState
from bedouin.layers.gated_delta_net import GatedDeltaNet
from bedouin.layers.recurrent import RecurrentLayer, StateShapes
from bedouin.layers.tracker import Tracker, TrackerState
from bedouin.state import RecurrentState


class _TrackingFields(NamedTuple):
    memory_conv: Tensor
    memory: Tensor
    tracker_conv: Tensor
    ssm: Tensor
    y: Tensor


class TrackingState(RecurrentState, _TrackingFields):  # type: ignore[misc]
    """memory_conv: (b, w - 1, h (2 p + v)) and memory: (b, h, p, v), of the memory; tracker_conv:
    (b, w - 1, H (c + 2 n)), ssm: (b, H c, n) and y: (b, H c), of the trackers; at least float32."""

    __slots__ = ()
    axes = (2, 3, 2, 2, 1)


class TrackingDeltaNet(RecurrentLayer[TrackingState]):
    """A layer that tracks a state and recalls what a sequence contains, (b, t, m) -> (b, t, m).

        layer = TrackingDeltaNet(d_model)
        out, state = layer(u, return_state=True)          # continue with layer(later, state)
        out_t, state = layer.step(u_t, state)             # one token, (b, m) -> (b, m)

    It is Gated DeltaNet, read at the same token by a small recurrence with feedback:

        memory   S_t = e^{g_t} (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,  o_t = S_t^T q_t
        tracker  h_t = lambda_t * h_{t-1} (I - beta^e_t B_t B_t^T) + (Delta_t x^_t) B_t^T,
                 y_t = h_t C_t; x^_t and Delta_t depend on the input, on o_t and on y_{t-1}
        output   that of the memory + that of the tracker

    `memory` is a `GatedDeltaNet` of h heads, which the input alone writes and reads. `tracker` is a
    `Tracker`, which reads what the memory recalls at the same token, without a norm, so that what
    is not found is small. Nothing in the layer is implicit: it has no solver and no statistics.

    Size:
        d_model: m, the width of input and output.
        num_heads, head_dim, expand_v: of the memory, as in `GatedDeltaNet`.
        num_trackers, tracker_dim, tracker_state: of the tracker, as in `Tracker`.

    Recurrence:
        d_conv: width of both short convolutions; None: no convolution, SiLU stays.
        feedback_noise: standard deviation of the noise that training calls of `forward` add to what
            the tracker is fed, as in `Tracker`.

    Precision:
        dtype, device: of the parameters; the state is at least float32.
        norm_eps: of the norms of both outputs.
        backend: "auto": Triton kernels on a GPU where they fit, else plain torch; "torch": plain
            torch; "triton"; "fla": the memory by the kernels of flash-linear-attention.
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
        feedback_noise: float = 0.1,
        norm_eps: float = 1e-5,
        backend: DeltaBackend = "auto",
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, dtype)
        self.layer_idx, self.backend = check_layer_idx(layer_idx), backend
        self.memory = GatedDeltaNet(
            d_model,
            num_heads=num_heads,
            head_dim=head_dim,
            expand_v=expand_v,
            d_conv=d_conv,
            norm_eps=norm_eps,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        self.tracker = Tracker(
            d_model,
            num_trackers=num_trackers,
            tracker_dim=tracker_dim,
            tracker_state=tracker_state,
            d_conv=d_conv,
            feedback_noise=feedback_noise,
            read_size=self.memory.num_heads * self.memory.value_dim,
            norm_eps=norm_eps,
            backend=kernel_backend(backend),
            device=device,
            dtype=dtype,
        )

    @property
    def out_proj(self) -> nn.Linear:  # type: ignore[override]
        """That of the memory."""
        return self.memory.out_proj

    def reset_parameters(self) -> None:
        self.memory.reset_parameters()
        self.tracker.reset_parameters()

    def _state_sizes(self) -> StateShapes:
        parts = *self.memory._state_sizes().values(), *self.tracker._state_sizes().values()
        return dict(zip(TrackingState._fields, parts, strict=True))

    def _run(
        self,
        x: Tensor,  # (b, t, m)
        state: TrackingState,
        lengths: Tensor | None,  # (b,)
    ) -> tuple[Tensor, TrackingState]:  # (b, t, m)
        of_memory = DeltaState(state.memory_conv, state.memory)
        of_tracker = TrackerState(state.tracker_conv, state.ssm, state.y)
        x = x.to(autocast_dtype(x) or x.dtype)  # once for all projections
        projected = self.memory.project(x)
        recalled, after = self.memory.recall(projected, of_memory, lengths)
        read = (math.sqrt(self.memory.head_dim) * recalled).flatten(-2)
        tracked, of_tracker = self.tracker.track(x, read, of_tracker, lengths)
        output = self.memory.output(recalled, projected.gate) + tracked
        return output, TrackingState(*after, *of_tracker)

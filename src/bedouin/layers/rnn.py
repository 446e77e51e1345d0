"""FixedPointRNN, the layer with a vector-valued state.

Letters: b' folded samples, t time, d d_inner, n d_state, p head_dim (layers/fixed_point.py).
"""

from collections.abc import Collection
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.checks import known_options
from bedouin.kernels.backend import Backend
from bedouin.kernels.launch import accumulator
from bedouin.kernels.operands import Activation
from bedouin.kernels.scan import Eigenvalues
from bedouin.layers.common import REMOVED, at_least_float32
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.layers.heads import make_linear
from bedouin.layers.mixers import ChannelMixer
from bedouin.layers.options import GRIFFIN_RANGE
from bedouin.solvers import Adjoint, Cap, Solver
from bedouin.solvers.reporting import OnUnconverged
from bedouin.wrapped import apply_projection


class FixedPointRNN(FixedPointLayer):
    """An RNN whose state is a vector: the fixed point of channel mixing and a gated diagonal scan.

        layer = FixedPointRNN(d_model)                    # calls and state are those of Bedouin
        out = layer(u)                                    # (b, t, m) -> (b, t, m)

    With x, z = in_proj(u), the sequence h is the fixed point of

        h_t = lambda_t * h_{t-1} + (1 - lambda_t) * (Q_t (b_t * x_t - h_t) + h_t)

    where b_t = SiLU(W_b x_t), and Q_t depends on x_t and h_{t-1}; the output stage is that of
    Bedouin, with h in the place of y. Source: Fixed-Point RNNs (arXiv 2503.10799), section 4.

    Size:
        d_model, expand: m, and d = expand * m inner channels; a channel has one state.
        num_heads: as in Bedouin; each head has a W_b of its own.

    Recurrence:
        num_householder, beta_max, mixer: Q_t, as in Bedouin.
        decay: "sigmoid": lambda = sigmoid(W x_t); "griffin": lambda = exp(-8 softplus(omega)
            Delta), Delta = sigmoid(W x_t).
        eigenvalues: "positive": the decay is lambda; "full": it is 2 lambda - 1, in [-1, 1].
        d_conv: the width of a causal convolution with SiLU over x; None: no convolution.
        feedback: ("mixer",), or () to switch feedback off.
        feedback_norm, feedback_init: as in Bedouin.

    Solve:
        solver, adjoint, max_steps, on_unconverged, backend: as in Bedouin.

    Precision:
        dtype, device, norm_eps, layer_idx: as in Bedouin.

    Raises TypeError for unknown options and values of the wrong type, ValueError for values that do
    not fit.
    """

    components = ("decay", "mixer")
    fed_names = ("mixer",)
    selective = False
    # sigmoid(r) = exp(-softplus(-r)), so both decays are exp(A Delta)
    delta_activations: ClassVar[dict[str, Activation]] = {
        "sigmoid": "softplus_of_minus",
        "griffin": "sigmoid",
    }
    absent_options: ClassVar[dict[str, str]] = {"projection": REMOVED}

    b_proj: Any
    """W_b: an nn.Linear, or a HeadLinear for several heads."""

    @known_options
    def __init__(
        self,
        d_model: int,
        *,
        expand: float = 2,
        num_heads: int | None = None,
        num_householder: int | None = None,
        beta_max: float | None = None,
        mixer: ChannelMixer | None = None,
        decay: Literal["sigmoid", "griffin"] = "sigmoid",
        eigenvalues: Eigenvalues = "positive",
        feedback: Collection[str] = ("mixer",),
        feedback_norm: bool = True,
        feedback_init: float = 0.1,
        d_conv: int | None = None,
        norm_eps: float = 1e-5,
        solver: Solver | Literal["auto"] = "auto",
        adjoint: Adjoint | None = None,
        max_steps: int | Cap = 100,
        backend: Backend = "auto",
        on_unconverged: OnUnconverged = "warn",
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model,
            d_state=1,
            expand=expand,
            num_heads=num_heads,
            num_householder=num_householder,
            beta_max=beta_max,
            mixer=mixer,
            decay=decay,
            input_scale="one_minus_decay",
            eigenvalues=eigenvalues,
            feedback=feedback,
            feedback_norm=feedback_norm,
            feedback_init=feedback_init,
            d_conv=d_conv,
            norm_eps=norm_eps,
            solver=solver,
            adjoint=adjoint,
            max_steps=max_steps,
            on_unconverged=on_unconverged,
            backend=backend,
            layer_idx=layer_idx,
            device=device,
            dtype=dtype,
        )

    def _make_parameters(self, factory: dict[str, Any]) -> None:
        self.b_proj = make_linear(self.num_heads, self.head_dim, self.head_dim, **factory)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.b_proj.reset_parameters()
        if self.decay == "sigmoid":
            with torch.no_grad():
                decay = torch.empty_like(self.dt_bias).uniform_(*GRIFFIN_RANGE)
                self.dt_bias.copy_(torch.logit(decay))

    def _A(self) -> Tensor:
        if self.decay == "sigmoid":
            return -torch.ones_like(at_least_float32(self.D)).unsqueeze(-1)
        return super()._A()

    def _drive(self, x: Tensor) -> Tensor:  # (b', t, p) -> (b', t, p)
        x = x.to(accumulator(x.dtype))
        return F.silu(apply_projection(self.b_proj, x, self.D.dtype)) * x

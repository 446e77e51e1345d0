"""The fixed-point layers: Bedouin, whose state is a matrix, and FixedPointRNN, whose is a vector.

Letters: b batch, b' folded samples, t time, m d_model, d d_inner, n d_state, p head_dim.
"""

from collections.abc import Collection
from typing import Any, ClassVar, Literal, NoReturn, Self

import torch
from torch import Tensor

from bedouin.checks import known_options
from bedouin.kernels.backend import Backend
from bedouin.kernels.operands import Activation
from bedouin.kernels.scan import Eigenvalues
from bedouin.layers.common import REMOVED, at_least_float32
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.layers.mixers import ChannelMixer, HouseholderProduct
from bedouin.solvers import Adjoint, Cap, OneStepAdjoint, Picard, Solver
from bedouin.solvers.reporting import OnUnconverged

# What `Bedouin.from_paper` fixes beside the mixer.
FIXED_BY_PAPER: dict[str, Any] = {
    "num_heads": 1,
    "decay": "griffin",
    "input_scale": "delta",
    "feedback": ("B", "C", "mixer"),
    "feedback_norm": False,
    "feedback_init": 1.0,
    "d_conv": None,
    "beta_max": 2.0,
    "output": "paper",
    "bias": False,
}


class _Removed:
    """A name of earlier versions, which raises an AttributeError."""

    def __init__(self, message: str) -> None:
        self.__doc__ = message

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(self.__doc__)


class Bedouin(FixedPointLayer):
    """A dense, selective RNN defined as the fixed point of channel mixing and a diagonal scan.

        layer = Bedouin(d_model)                          # in the place of Mamba(d_model)
        out = layer(u)                                    # (b, t, m) -> (b, t, m)
        out, state = layer(u, return_state=True)          # continue with layer(later, state)
        out_t, state = layer.step(u_t, state)             # one token, (b, m) -> (b, m)
        layer.stats                                       # of the last solve, for each sample

    With x, z = in_proj(u), the sequence y is the fixed point of

        x~_t = Q_t (x_t - y_t) + y_t                      mix the channels
        h_t  = lambda_t * h_{t-1} + (s_t * x~_t) B_t^T    scan over time, h: (d, n)
        y_t  = h_t C_t

    where Q, lambda, s, B, C and gate follow from raw_t = W^x x_t + W^y norm(y_{t-1}), and the layer
    returns out_proj(SiLU(gate_t + z_t) * norm(y_t + D * x_t)). Lengths b, t >= 0 are free; `mask`
    marks padding, `cu_seqlens` and `seq_idx` mark packed documents.

    Begin with num_heads (speed), d_state (size of the memory), num_householder (expressivity) and
    solver; d_model alone gives one sweep over time with the exact gradient.

    Source: Fixed-Point RNNs (arXiv 2503.10799), sections 4 and 5. `Bedouin.from_paper` is its
    exact parameterization. The defaults were chosen on the word problem of A5, by the worst seeds;
    the input scale "delta" has the better medians at eight times the length of training
    (examples/results/history).

    Size:
        d_model: m, the width of input and output.
        d_state: n, the states of a channel. Parameters and time grow with it.
        expand: d = expand * m inner channels.
        num_heads: H, a divisor of d. The channels are H groups, each with Q_t, B_t, C_t, gate and
            both norms of its own, projected from its own x and y alone, so that W^x and W^y have
            about 1 / H of the weights. in_proj and out_proj mix the heads. Each head converges by
            itself, and `stats` has the worst of a sample's heads. 1 is the layer of the paper.
            None: as few heads of 32 to 128 channels as divide d, else 1. On a GPU a head of more
            than 128 channels takes a launch and a product with W^y for each token.

    Recurrence:
        num_householder: k, the reflections of Q_t; short for mixer=HouseholderProduct(k, beta_max).
            None: 2; 0: NoMixing().
        beta_max: the largest beta of I - beta u u^T. None: 1; 2 allows eigenvalues down to -1.
        mixer: HouseholderProduct(...), LowRank(...), NoMixing() or another ChannelMixer. Its
            parameters are used in the dtype of the solve, and all heads share them.
        decay: "mamba": Delta = softplus(raw), lambda = exp(-exp(A_log) Delta); "griffin": Delta =
            sigmoid(raw), lambda = exp(-8 softplus(omega) Delta).
        input_scale: s_t = "delta": Delta; "bounded_delta": Delta / (1 + Delta); "one_minus_decay":
            1 - |lambda|. With mamba decay, "delta" and mixing, local systems can become singular in
            training (SolveStats.conditioning), of which the constructor warns unless
            k beta_max <= 0.01. With "bounded_delta", one reflection, beta = 1 and B = C, each token
            multiplies the component of the state along u by (1 + Delta) exp(-A Delta), which
            exceeds 1 for A = exp(A_log) < 1 and small Delta; with "one_minus_decay" by at most 1.
        eigenvalues: "positive": the decay is lambda; "full": it is 2 lambda - 1, in [-1, 1].
        d_conv: the width of a causal convolution over x, with SiLU. 1: SiLU alone. None: neither.
        initialization: other initial values of Delta and the decay rates; None: Initialization().

    Feedback:
        feedback: which of "delta", "B", "C" and "mixer" depend on y_{t-1}, and with any of them the
            gate; () switches all off.
        feedback_norm: whether RMSNorm is applied to y_{t-1} before W^y.
        feedback_init: factor on W^y at initialization.

    Solve:
        solver: a solver such as Picard(rtol=1e-4), or "auto": Direct where the mixer allows it.
        adjoint: the gradient, such as OneStepAdjoint(); None: ImplicitAdjoint(), the exact one.
        max_steps: an int or a Cap. Direct needs none.
        on_unconverged: "warn" issues a ConvergenceWarning at the 1st, 10th, 100th, ... call of this
            layer that does not converge, "raise" raises a ConvergenceError, "ignore" does neither,
            for the forward solve and for that of the backward pass (see ImplicitAdjoint).
        backend: "auto", "triton" or "reference". "auto" warns where a GPU has no kernel.

    Precision:
        dtype, device: of the parameters; the solve and the state are at least float32.
        norm_eps: eps of the output norm.
        layer_idx: stored for callers that keep a cache per layer.

    Raises TypeError for unknown options and wrong types, ValueError for values that do not fit.
    """

    components = fed_names = ("delta", "B", "C", "mixer")
    selective = True
    absent_options: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("output", "bias"), "Bedouin.from_paper makes a layer with the paper's"),
        **dict.fromkeys(("erase", "projection", "bounded_x", "feedback_noise"), REMOVED),
        **dict.fromkeys(("feedback_scope", "feedback_heads", "num_groups"), REMOVED),
    }
    recall = _Removed(f"Bedouin has no recall: {REMOVED}")
    delta_activations: ClassVar[dict[str, Activation]] = {"mamba": "softplus", "griffin": "sigmoid"}

    @classmethod
    def from_paper(
        cls,
        d_model: int,
        *,
        num_householder: int = 1,
        solver: Solver | Literal["auto"] | None = None,
        adjoint: Adjoint | None = None,
        **options: Any,
    ) -> Self:
        """FP-Mamba exactly as in its paper (arXiv 2503.10799, section 5.3).

        It has one head, Griffin decay, input scale Delta, beta = 2 sigmoid(alpha), feedback to B,
        C, mixer and gate but not to Delta, no feedback norm, the output gate * SiLU(y* + D x)
        without norm, and a bias on Delta only. solver None: Picard with the paper's stop rule at
        0.1, which returns the last evaluation. adjoint None: the one-step gradient.

        Its random caps are max_steps=GammaCap(4.0, 1.0, 100), its initialization in the copying
        task (v1, section 4.5) initialization=Initialization(delta_from_x=0.0). `options` are other
        options of Bedouin; one that is fixed above raises TypeError.
        """
        fixed = FIXED_BY_PAPER | {"mixer": HouseholderProduct(num_householder, beta_max=2.0)}
        for name in fixed.keys() & options.keys():
            raise TypeError(
                f"{name} of from_paper is fixed by the paper, here to {fixed[name]!r}, got "
                f"{options[name]!r}: leave it out"
            )
        for name in ("beta_max", "output", "bias"):  # by the mixer and by `layer.output`
            del fixed[name]
        layer = cls.__new__(cls)
        layer.output = "paper"
        layer.__init__(  # type: ignore[misc]
            d_model,
            **fixed,
            solver=Picard(rtol=0.1, stop_rule="paper") if solver is None else solver,
            adjoint=OneStepAdjoint() if adjoint is None else adjoint,
            **options,
        )
        return layer

    def _A(self) -> Tensor:
        mamba = self.decay == "mamba"
        return -torch.exp(at_least_float32(self.A_log)) if mamba else super()._A()


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

    Raises TypeError for unknown options and wrong types, ValueError for values that do not fit.
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
        options: dict[str, Any] = {"d_state": 1, "expand": expand, "num_heads": num_heads}
        options |= {"num_householder": num_householder, "beta_max": beta_max, "mixer": mixer}
        options |= {"decay": decay, "input_scale": "one_minus_decay", "eigenvalues": eigenvalues}
        options |= {"feedback": feedback, "feedback_norm": feedback_norm, "d_conv": d_conv}
        options |= {"feedback_init": feedback_init, "norm_eps": norm_eps, "layer_idx": layer_idx}
        options |= {"solver": solver, "adjoint": adjoint, "max_steps": max_steps}
        options |= {"on_unconverged": on_unconverged, "backend": backend}
        super().__init__(d_model, **options, device=device, dtype=dtype)

    def _A(self) -> Tensor:
        sigmoid = self.decay == "sigmoid"
        return -torch.ones_like(at_least_float32(self.D)).unsqueeze(-1) if sigmoid else super()._A()

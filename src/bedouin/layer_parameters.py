"""Options, sizes and parameters of the layers.

Letters: b batch, t time, m d_model, d d_inner, n d_state, k num_householder, H num_heads,
p = d / H head_dim, r raw values of a head, the first f with feedback. Between the projections from
m to d and back a layer has b' = H b folded samples, each one head of one sample (bedouin.heads).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.checks import (
    check_bool,
    check_device,
    check_dtype,
    check_layer_idx,
    inner_size,
    one_of,
    ordered_subset,
    positive_int,
)
from bedouin.decoding import StepGraphs
from bedouin.fixed_point_map import ScanInputs, split_by_layout
from bedouin.heads import HeadNorm, choose_num_heads, make_linear
from bedouin.kernels.backend import Backend
from bedouin.kernels.operands import NO_LAYOUT, Activation, Parameterization, RawLayout
from bedouin.kernels.padding import CLOSED
from bedouin.kernels.scan import Eigenvalues, InputScale
from bedouin.mixers import ChannelMixer, HouseholderProduct, kernel_gap
from bedouin.parameterization import (
    FEEDBACK_NORM_EPS,
    GRIFFIN_SHARPNESS,
    Initialization,
    OutputStage,
    SolveArguments,
    SolveOption,
    choose_solver,
    split_feedback_weight,
)
from bedouin.parameters import (
    REMOVED,
    SavedLayer,
    at_least_float32,
    factory_options,
    mark,
    type_name,
)
from bedouin.short_convolution import ShortConvolution
from bedouin.solvers import Adjoint, Cap, Solver, SolveStats
from bedouin.solvers.base import check_number
from bedouin.solvers.caps import as_cap
from bedouin.solvers.draws import Draws
from bedouin.solvers.reporting import DeferredWarning, OnUnconverged
from bedouin.solvers.solve import SolveOptions
from bedouin.state import StateSize
from bedouin.wrapped import effective_weight


class LayerParameters(SavedLayer, ABC):
    """Options and parameters of a layer.

    A subclass sets `decay` before it calls the constructor.

    The projections may be wrapped by adapters such as LoRA, parametrized, or be units of FSDP:
    in_proj, x_proj and out_proj are called, and of y_proj the effective matrix is used (see
    bedouin.wrapped, which also says what is refused). Merge adapters before decoding: a step
    computes that matrix anew.
    """

    components: ClassVar[tuple[str, ...]]
    """Names of the raw components, in the order of the fused projection; the first is that of
    Delta, and the gate is last."""

    fed_names: ClassVar[tuple[str, ...]]
    """The names that `feedback` may contain."""

    selective: ClassVar[bool]
    """Whether B and C are raw components; otherwise they are 1."""

    has_drive: ClassVar[bool] = False
    """Whether the input of the mixer is `drive` of x, SiLU(W_b x) * x, instead of x itself."""

    settable_options = (
        *("solver", "adjoint", "max_steps", "on_unconverged", "backend"),
        *("mixer", "initialization", "layer_idx"),
    )

    delta_activations: ClassVar[dict[str, Activation]]
    """How Delta follows from its raw values, for each `decay`."""

    decay: str

    output: OutputStage = "norm"
    """The output stage: "norm" with z and a norm, "paper" without both."""

    has_bias: bool = True
    """Whether the projections of x other than that to Delta have a bias."""

    initialization: Initialization = Initialization()
    """Initial values, of which a subclass may set others before it calls the constructor."""

    omega: nn.Parameter
    """The rates of the decay "griffin" (d, n)."""

    state_size: StateSize
    """The sizes of the state of one sample."""

    x_proj: Any
    """W^x: an nn.Linear, or a HeadLinear for several heads."""

    conv: ShortConvolution | None
    """The convolution of width d_conv; None without one."""

    _stats_have_graph: bool = False
    """Whether the call that `stats` describes recorded gradients."""

    solve_options: SolveOptions
    """The options of the solve. The attributes `solver`, `adjoint`, `cap`, `on_unconverged` and
    `backend` read and set its fields, and so does `max_steps`, the cap or an int."""
    solver = SolveOption[Solver, Solver | Literal["auto"]](
        "solver", lambda layer, value: choose_solver(value, layer.is_structured)
    )
    adjoint = SolveOption[Adjoint | None, Adjoint | None]("adjoint")
    cap = SolveOption[Cap, Cap]("cap")
    max_steps = SolveOption[Cap, int | Cap]("cap", lambda layer, value: as_cap(value))
    on_unconverged = SolveOption[OnUnconverged, OnUnconverged]("on_unconverged")
    backend = SolveOption[Backend, Backend]("backend")

    saved_options: ClassVar[tuple[str, ...]] = (
        "num_heads",
        "input_scale",
        "eigenvalues",
        "feedback",
        "feedback_norm",
        "d_conv",
        "norm_eps",
    )

    record_history: bool = False
    """Whether `stats.history` has the residual at each step, for which no step runs in a kernel."""

    stats: SolveStats | None
    """Statistics of the last call, also of one that raised a ConvergenceError. None before any
    call, and in copies and pickles of a layer whose last call was within a torch.func transform; a
    state_dict contains none, and loading one does not change them. Those of a sample are the worst
    of its heads. The recomputation of non-reentrant checkpointing does not change them. Under
    torch.func transforms they are tensors of the transform: to read them, return them from the
    transformed function. Under torch.compile they are outputs of the graph that are not read, so
    nothing warns or raises, and stats.backward stays None. torch.export leaves them as they
    are."""

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int,
        expand: float,
        num_heads: int | None,
        mixer: ChannelMixer,
        input_scale: InputScale,
        eigenvalues: Eigenvalues,
        feedback: Collection[str],
        feedback_norm: bool,
        feedback_init: float,
        d_conv: int | None,
        norm_eps: float,
        solve: SolveArguments,
        layer_idx: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.d_model, self.d_state = (
            positive_int("d_model", d_model),
            positive_int("d_state", d_state),
        )
        self.d_inner = inner_size(expand, d_model)
        self.num_heads = choose_num_heads(num_heads, self.d_inner)
        self.head_dim = self.d_inner // self.num_heads
        check_bool("feedback_norm", feedback_norm)
        check_dtype(dtype)
        self.feedback = ordered_subset(
            "feedback", feedback, self.fed_names, dict.fromkeys(("erase", "x"), REMOVED)
        )
        self.input_scale = one_of("input_scale", input_scale, get_args(InputScale))
        self.eigenvalues = one_of("eigenvalues", eigenvalues, get_args(Eigenvalues))
        check_number("feedback_init", feedback_init, 0, 1e3, open_low=False)
        check_number("norm_eps", norm_eps, 0, 1, open_low=True)
        self.feedback_norm, self.feedback_init = feedback_norm, float(feedback_init)
        self.mixer, self.layer_idx = mixer, check_layer_idx(layer_idx)
        self.d_conv = d_conv
        self.solve_options = solve.options(mixer, self.head_dim)
        self.stats = None
        self.draws = Draws()
        self.deferred = DeferredWarning()
        self.graphs = StepGraphs()

        d, p, heads = self.d_inner, self.head_dim, self.num_heads
        factory = factory_options(device, dtype)
        own = {"B": d_state, "C": d_state, "mixer": mixer.raw_size(p)}
        self._sizes = {name: own.get(name, p) for name in self.components}
        r = self.raw_size
        of_delta = ..., slice(p), slice(None)
        delta_from_x = ((of_delta, self.initialization.delta_from_x),)
        projected = sum(self.projected_sizes.values())
        self.in_proj = nn.Linear(d_model, projected, bias=False, **factory)
        self.x_proj = make_linear(heads, p, r + p, delta_from_x, **factory)
        self.y_proj = None
        if self.feedback:
            fed = sum(self._sizes[name] for name in self.feedback)
            scales = ((..., self.feedback_init),)
            self.y_proj = make_linear(heads, p, fed + p, scales, **factory)
        self.conv = None
        if d_conv is not None:
            width = None if positive_int("d_conv", d_conv) == 1 else d_conv
            self.conv = ShortConvolution(d, width, bias=True, **factory)
        window = None if self.conv is None else self.conv.window_size
        self.state_size = StateSize(d, d_state, window)
        self.dt_bias = nn.Parameter(torch.empty(d, **factory))
        self.raw_bias = nn.Parameter(torch.empty(heads * r, **factory)) if self.has_bias else None
        self.D = nn.Parameter(torch.empty(d, **factory))
        if self.decay == "griffin":
            self.omega = nn.Parameter(torch.empty(d, d_state, **factory))
        self.norm = HeadNorm(heads, d, norm_eps, **factory) if self.output == "norm" else None
        self.out_proj = nn.Linear(d, d_model, bias=False, **factory)
        check_device(mixer, self.D.device)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "mixer" and isinstance(value, ChannelMixer) and "_sizes" in vars(self):
            size, made = value.raw_size(self.head_dim), self._sizes["mixer"]
            if size != made:
                owner = type(self).__name__
                raise ValueError(
                    f"mixer must have {made} raw values a token and head, for which the layer's "
                    f"projections were made, got {value} with {size}: make a new layer, "
                    f"{owner}(..., mixer=...)"
                )
        super().__setattr__(name, value)

    # -- how raw values are read

    @property
    def activation(self) -> Activation:
        """How Delta follows from its raw values."""
        return self.delta_activations[self.decay]

    def layout(self) -> RawLayout | None:
        """A description of `_split` and the mixer for kernels; None if they cannot compute it."""
        mixer = self.mixer
        if isinstance(mixer, HouseholderProduct) and kernel_gap(mixer) is None:
            return self._layout(mixer.num_householder, mixer.beta_max)
        return None

    def _layout(self, num_householder: int = 0, beta_max: float = 1.0) -> RawLayout:
        return RawLayout(self.activation, self.selective, num_householder, beta_max)

    def _split(self, raw: Tensor) -> ScanInputs:  # raw: (..., r)
        """Raw values converted to the inputs of the scan."""
        return split_by_layout(self._layout(), (self.head_dim, self.d_state), raw)

    @abstractmethod
    def _A(self) -> Tensor:
        """A (d, n), with which the decay is exp(A Delta); here that of the decay "griffin"."""
        return -GRIFFIN_SHARPNESS * F.softplus(at_least_float32(self.omega))

    @property
    def _raw_without_delta(self) -> float:
        """A value of the first raw component for which Delta is 0."""
        return CLOSED if self.activation == "softplus_of_minus" else -CLOSED

    def drive(
        self,
        x: Tensor,  # (b', t, p)
    ) -> Tensor:  # (b', t, p)
        """The input of the mixer."""
        return x

    # -- options

    @property
    def is_structured(self) -> bool:
        """Whether the mixer has the form (e, U, M), which Direct, Jacobi and the exact adjoint
        need."""
        return self.mixer.is_structured(self.head_dim)

    @property
    def projected_sizes(self) -> dict[str, int]:
        """The parts of in_proj's output in their order."""
        return {"x": self.d_inner} | ({} if self.output == "paper" else {"z": self.d_inner})

    # -- parameters

    @property
    def raw_size(self) -> int:
        """r, the number of raw values per token and head, without the gate."""
        return sum(self._sizes.values())

    @property
    def norm_eps(self) -> float | None:
        """The eps of the output norm; None without one."""
        return getattr(self.norm, "eps", None)

    def number_options(self) -> dict[str, Any]:
        """Those of the mixer are among them."""
        mixer: Any = self.mixer
        of_mixer = {name: getattr(mixer, name) for name in getattr(mixer, "saved_options", ())}
        return super().number_options() | {"mixer": type_name(mixer)} | of_mixer

    @property
    def feedback_norm_eps(self) -> float | None:
        return FEEDBACK_NORM_EPS if self.feedback_norm else None

    def parameterization(self) -> Parameterization:
        """The options of the map for its kernels."""
        scales = self.input_scale, self.eigenvalues
        return Parameterization(
            self.layout(),
            *scales,
            self.feedback_norm_eps,
            without_layout=kernel_gap(self.mixer) or NO_LAYOUT,
        )

    def reset_parameters(self) -> None:
        """Draw all parameters anew, except those of the mixer."""
        self._mark_parameters()
        for module in (self.in_proj, self.x_proj, self.conv, self.out_proj, self.y_proj):
            if module is not None:
                module.reset_parameters()
        with torch.no_grad():
            if self.raw_bias is not None:
                bound = 1 / math.sqrt(self.head_dim)
                self.raw_bias.uniform_(-bound, bound)
            self.D.fill_(1.0)
        if self.norm is not None:
            self.norm.reset_parameters()

    def _mark_parameters(self) -> None:
        # plain look-ups, because setting the first parameter calls this, too
        mark(self._parameters.get("dt_bias"), "_no_reinit")
        for name in ("D", "A_log", "omega"):
            mark(self._parameters.get(name), "_no_weight_decay")

    def _feedback_weights(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """W^y of the loop (f, p) or (H, f, p) and of the gate (p, p) or (H, p, p); None without
        feedback, and for the loop if only components without raw values have it."""
        if self.y_proj is None:
            return None, None
        p = self.head_dim
        weight = effective_weight("y_proj", self.y_proj, p, self.D, self.num_heads)
        return split_feedback_weight(weight.to(dtype), self.feedback, self._sizes, p)

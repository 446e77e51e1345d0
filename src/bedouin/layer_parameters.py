"""Options, sizes and parameters of the layers.

Letters: b batch, t time, m d_model, d d_inner, n d_state, k num_householder, H num_heads,
p = d / H head_dim, r raw values of a head, the first f with feedback. Between the projections from
m to d and back a layer has b' = H b folded samples, each one head of one sample (bedouin.heads).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from itertools import accumulate
from typing import Any, ClassVar, Literal, cast, get_args

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
from bedouin.heads import (
    HeadNorm,
    InitialScales,
    choose_fed_heads,
    choose_num_groups,
    choose_num_heads,
    make_linear,
)
from bedouin.kernels.backend import Backend
from bedouin.kernels.checks import check_number
from bedouin.kernels.operands import NO_LAYOUT, Activation, Parameterization, RawLayout
from bedouin.kernels.padding import CLOSED
from bedouin.kernels.projection import GATE, Part
from bedouin.kernels.projection import X as X_PART
from bedouin.kernels.scan import Eigenvalues, InputScale
from bedouin.mixers import ChannelMixer, HouseholderProduct, kernel_gap
from bedouin.parameterization import (
    FEEDBACK_NORM_EPS,
    GRIFFIN_SHARPNESS,
    FeedbackScope,
    Initialization,
    OutputStage,
    Projection,
    SolveArguments,
    SolveOption,
    X,
    choose_solver,
    split_feedback_weight,
)
from bedouin.parameters import SavedLayer, at_least_float32, factory_options, mark, type_name
from bedouin.short_convolution import ShortConvolution
from bedouin.solvers import Adjoint, Cap, Solver
from bedouin.solvers.caps import as_cap
from bedouin.solvers.draws import Draws
from bedouin.solvers.reporting import DeferredWarning, OnUnconverged
from bedouin.solvers.solve import SolveOptions
from bedouin.state import StateSize
from bedouin.wrapped import effective_weight

KEYS = ("B", "C")
"""The raw components that heads of a group share."""


class LayerParameters(SavedLayer, ABC):
    """Options and parameters of a layer.

    A subclass sets `decay`, and `erase` if it has one, before it calls the constructor.

    The projections may be wrapped by adapters such as LoRA, parametrized, or be units of FSDP:
    in_proj, x_proj and out_proj are called, and of y_proj the effective matrix is used (see
    bedouin.wrapped, which also says what is refused). Merge adapters before decoding: a step
    computes that matrix anew.
    """

    components: ClassVar[tuple[str, ...]]
    """Names of the raw components, in the order of the fused projection; the first is that of
    Delta, and the gate is last."""

    projected_components: ClassVar[tuple[str, ...]]
    """The raw components in the order of in_proj's output with projection="input"."""

    fed_names: ClassVar[tuple[str, ...]]
    """The names that `feedback` may contain."""

    selective: ClassVar[bool]
    """Whether B and C are raw components; otherwise they are 1."""

    has_drive: ClassVar[bool] = False
    """Whether the input of the mixer is `drive` of x, SiLU(W_b x) * x, instead of x itself."""

    settable_options = (
        *("solver", "adjoint", "max_steps", "on_unconverged", "backend"),
        *("mixer", "feedback_noise", "initialization", "layer_idx"),
    )

    delta_activations: ClassVar[dict[str, Activation]]
    """How Delta follows from its raw values, for each `decay`."""

    decay: str

    erase: float = 0.0
    """The largest beta^e; with 0 there is no raw value of it."""

    initialization: Initialization = Initialization()
    """Initial values, of which a subclass may set others before it calls the constructor."""

    omega: nn.Parameter
    """The rates of the decay "griffin" (d, n)."""

    state_size: StateSize
    """The sizes of the state of one sample."""

    x_proj: Any
    """W^x: an nn.Linear, or a HeadLinear for several heads; None with projection="input"."""

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
        "erase",
        "feedback",
        "feedback_norm",
        "bounded_x",
        "d_conv",
        "norm_eps",
    )

    record_history: bool = False
    """Whether `stats.history` has the residual at each step, for which no step runs in a kernel."""

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
        feedback_scope: FeedbackScope,
        feedback_heads: int | None,
        num_groups: int | None,
        bounded_x: bool,
        feedback_noise: float,
        d_conv: int | None,
        projection: Projection,
        norm_eps: float,
        output: OutputStage,
        bias: bool,
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
        check_bool("bounded_x", bounded_x)
        check_bool("bias", bias)
        check_dtype(dtype)
        self.feedback = ordered_subset("feedback", feedback, self.fed_names)
        self.feedback_scope = one_of("feedback_scope", feedback_scope, get_args(FeedbackScope))
        self.fed_heads = choose_fed_heads(feedback_heads, self.num_heads, self.feedback)
        if bounded_x and X not in self.feedback:
            raise ValueError(
                f'bounded_x needs feedback of "x", got bounded_x=True and feedback='
                f'{self.feedback}: add "x" to feedback, or leave bounded_x out'
            )
        self.bounded_x = bounded_x
        check_number("feedback_noise", feedback_noise, 0, 1e3, open_low=False)
        if feedback_noise and not self.feedback:
            raise ValueError(
                f"feedback_noise must be 0 with feedback=(), got {feedback_noise}: give feedback, "
                "or leave feedback_noise out"
            )
        self.feedback_noise = float(feedback_noise)
        self.projection = one_of("projection", projection, get_args(Projection))
        self.num_groups = choose_num_groups(
            num_groups, self.num_heads, self.fed_heads, self.projection
        )
        self.input_scale = one_of("input_scale", input_scale, get_args(InputScale))
        self.eigenvalues = one_of("eigenvalues", eigenvalues, get_args(Eigenvalues))
        self.output = one_of("output", output, get_args(OutputStage))
        check_number("feedback_init", feedback_init, 0, 1e3, open_low=False)
        check_number("norm_eps", norm_eps, 0, 1, open_low=True)
        self.feedback_norm, self.feedback_init = feedback_norm, float(feedback_init)
        self.mixer, self.layer_idx = mixer, check_layer_idx(layer_idx)
        self.d_conv = d_conv
        self.solve_options = solve.options(mixer, self.head_dim)
        self.draws = Draws()
        self.deferred = DeferredWarning()
        self.graphs = StepGraphs()

        d, p, heads = self.d_inner, self.head_dim, self.num_heads
        factory = factory_options(device, dtype)
        own = {"B": d_state, "C": d_state, "mixer": mixer.raw_size(p)}
        own["erase"] = 1 if self.erase else 0
        self._sizes = {name: own.get(name, p) for name in self.components}
        if "erase" in self.feedback and not self.erase:
            raise ValueError(
                f'feedback of "erase" needs erase > 0, got erase={self.erase} and feedback='
                f"{self.feedback}: give erase, or leave the name out"
            )
        r, from_input = self.raw_size, self.projection == "input"
        delta_from_x = self.initialization.delta_from_x
        scales = ((slice(d, 2 * d), delta_from_x),) if from_input else ()
        projected = sum(self.projected_sizes.values())
        self.in_proj = cast(nn.Linear, make_linear(1, d_model, projected, scales, **factory))
        self.x_proj = None
        if not from_input:
            of_delta = ..., slice(p), slice(None)
            self.x_proj = make_linear(heads, p, r + p, ((of_delta, delta_from_x),), **factory)
        self.y_proj = None
        if self.feedback:
            fed = sum(p if name == X else self._sizes[name] for name in self.feedback)
            sizes = self.fed_heads, self.fed_channels, fed + p
            self.y_proj = make_linear(*sizes, self._feedback_scales(), **factory)
        self.conv = None
        if d_conv is not None:
            width = None if positive_int("d_conv", d_conv) == 1 else d_conv
            size = sum(self._convolved_sizes().values())
            self.conv = ShortConvolution(size, width, bias=not from_input, **factory)
        window = None if self.conv is None else self.conv.window_size
        self.state_size = StateSize(d, d_state, window)
        self.dt_bias = nn.Parameter(torch.empty(d, **factory))
        biases = sum(self._biased_sizes().values()) if from_input else r
        has_bias = bias and (biases > 0 or not from_input)
        self.raw_bias = nn.Parameter(torch.empty(heads * biases, **factory)) if has_bias else None
        self._parts = self._make_parts() if from_input and not self.has_drive else ()
        self.D = nn.Parameter(torch.empty(d, **factory))
        if self.decay == "griffin":
            self.omega = nn.Parameter(torch.empty(d, d_state, **factory))
        self.norm = HeadNorm(heads, d, norm_eps, **factory) if output == "norm" else None
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
        return RawLayout(self.activation, self.selective, num_householder, beta_max, self.erase)

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
    def fed_channels(self) -> int:
        """The channels of y_{t-1} that W^y of a head reads."""
        return self.head_dim if self.feedback_scope == "head" else self.d_inner

    @property
    def num_keys(self) -> int:
        """How many heads and groups have B and C of their own."""
        return self.num_heads if self.num_groups is None else self.fed_heads + self.num_groups

    @property
    def projected_sizes(self) -> dict[str, int]:
        """The parts of in_proj's output in their order: x and z, or with projection="input" x, that
        of W_b if there is one, the raw values of all heads, and the gate."""
        if self.projection == "inner":
            return {"x": self.d_inner} | ({} if self.output == "paper" else {"z": self.d_inner})
        raw = {name: self.num_heads * self._sizes[name] for name in self.projected_components}
        if self.num_groups is not None:
            raw |= dict.fromkeys(KEYS, self.num_keys * self.d_state)
        drive = {"b": self.d_inner} if self.has_drive else {}
        return {"x": self.d_inner, **drive, **raw, "gate": self.d_inner}

    def _convolved_sizes(self) -> dict[str, int]:
        """The parts that the convolution acts on."""
        n = self.num_keys * self.d_state
        more = dict.fromkeys(KEYS, n) if self.selective and self.projection == "input" else {}
        return {"x": self.d_inner, **more}

    def _biased_sizes(self) -> dict[str, int]:
        """With projection="input", how many values of a head have a bias, the last of their
        component, in the order of the raw values; Delta's is dt_bias."""
        return {"mixer": self.mixer.bias_size, "erase": 1 if self.erase else 0}

    def _make_parts(self) -> tuple[Part, ...]:
        """The parts of the projected input, for `split_projection`."""
        places = dict(zip(self._sizes, accumulate(self._sizes.values(), initial=0), strict=False))
        places |= {"x": X_PART, "gate": GATE}
        convolved = {} if self.conv is None else self._convolved_sizes()
        biased = {next(iter(self._sizes)): self.head_dim}
        if self.raw_bias is not None:
            biased |= self._biased_sizes()
        return tuple(
            Part(
                self._sizes.get(name, self.head_dim),
                places[name],
                name in convolved,
                biased.get(name, 0),
            )
            for name in self.projected_sizes
        )

    # -- parameters

    @property
    def raw_size(self) -> int:
        """r, the number of raw values per token and head, without the gate."""
        return sum(self._sizes.values())

    @property
    def reads_others(self) -> bool:
        """Whether heads with feedback read the outputs of heads without it."""
        return self.feedback_scope == "layer" and 0 < self.fed_heads < self.num_heads

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
            feeds_x=X in self.feedback,
            bounded_heads=self.fed_heads if self.bounded_x else 0,
            without_layout=kernel_gap(self.mixer) or NO_LAYOUT,
        )

    def reset_parameters(self) -> None:
        """Draw all parameters anew, except those of the mixer."""
        self._mark_parameters()
        for module in (self.in_proj, self.x_proj, self.conv, self.out_proj, self.y_proj):
            if module is not None:
                module.reset_parameters()
        with torch.no_grad():
            if self.raw_bias is not None and self.projection == "input":
                self.raw_bias.zero_()
            elif self.raw_bias is not None:
                bound = 1 / math.sqrt(self.head_dim)
                self.raw_bias.uniform_(-bound, bound)
            self.D.fill_(1.0)
        if self.norm is not None:
            self.norm.reset_parameters()

    def _feedback_scales(self) -> InitialScales:
        """Those of W^y, of which the heads that begin as memories read nothing at first."""
        scales: InitialScales = ((..., self.feedback_init),)
        if self.reads_others:
            own = self.fed_heads * self.head_dim
            more = math.sqrt(self.d_inner / own)
            scales += ((..., slice(own)), more), ((..., slice(own, None)), 0.0)
        first = self.num_heads - self.initialization.memory_heads
        return (*scales, (slice(first, None), 0.0)) if first < self.fed_heads else scales

    def _mark_parameters(self) -> None:
        # plain look-ups, because setting the first parameter calls this, too
        mark(self._parameters.get("dt_bias"), "_no_reinit")
        for name in ("D", "A_log", "omega"):
            mark(self._parameters.get(name), "_no_weight_decay")
        if self.__dict__.get("projection") == "input":
            for name in ("dt_bias", "raw_bias"):
                mark(self._parameters.get(name), "_no_weight_decay")

    def _feedback_weights(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """W^y of the loop (f, c) or (H, f, c) and of the gate (p, c) or (H, p, c), where c is p or
        with feedback_scope="layer" d; None without feedback, and for the loop if only components
        without raw values have it. Where not all heads have feedback, H is the number of those that
        have."""
        if self.y_proj is None:
            return None, None
        weight = effective_weight("y_proj", self.y_proj, self.fed_channels, self.D, self.fed_heads)
        if self.fed_heads < self.num_heads:
            weight = weight.view(self.fed_heads, *weight.shape[-2:])
            if self.reads_others:
                own_width = self.fed_heads * self.head_dim
                own, others = weight.split([own_width, self.d_inner - own_width], -1)
                weight = torch.cat([own, others * (self.fed_heads / self.num_heads)], -1)
        known = self.feedback, self._sizes, self.head_dim
        return split_feedback_weight(weight.to(dtype), *known)

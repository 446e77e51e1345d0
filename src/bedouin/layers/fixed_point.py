"""What Bedouin and FixedPointRNN share: options, parameters, and a call as the solve of a map.

Letters: b batch, t time, m d_model, d d_inner, n d_state, H num_heads, p = d / H head_dim, r raw
values of a head. b' = H b are folded samples (layers/heads.py).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F

from bedouin import checks
from bedouin.graphed import Graphed
from bedouin.kernels.backend import Backend, autocast_dtype, without_autocast
from bedouin.kernels.direct.layout import activate_delta
from bedouin.kernels.heads import apply_weight
from bedouin.kernels.householder import unit
from bedouin.kernels.launch import accumulator
from bedouin.kernels.operands import NO_LAYOUT, Activation, Parameterization, RawLayout
from bedouin.kernels.scan import Eigenvalues, InputScale
from bedouin.layers import common, options
from bedouin.layers.convolution import ShortConvolution
from bedouin.layers.heads import HeadNorm, make_linear
from bedouin.layers.map import FixedPointMap, MapOfHeads, ScanInputs, of_all_heads
from bedouin.layers.mixers import ChannelMixer, kernel_gap
from bedouin.layers.options import Decay, Initialization, SolveOption
from bedouin.layers.stages import gated, project, solving, state_after, state_before
from bedouin.packing import find_packing
from bedouin.solvers import Adjoint, Cap, Direct, ImplicitAdjoint, Solver, SolveStats
from bedouin.solvers.caps import as_cap
from bedouin.solvers.draws import Draws
from bedouin.solvers.reporting import DeferredWarning, OnUnconverged, Outcome
from bedouin.solvers.solve import SolveOptions
from bedouin.state import BedouinState, SequenceCall, StateShapes, check_state, zero_state
from bedouin.wrapped import effective_weight, is_plain, is_untouched, read_parameter


class FixedPointLayer(nn.Module, ABC):
    """The base class of Bedouin, which has all of its options, and FixedPointRNN. Adapters such as
    LoRA, parametrizations and FSDP may wrap the projections: in_proj, x_proj and out_proj are
    called, and of y_proj the effective matrix is used (bedouin.wrapped). Merge adapters before
    decoding: a step computes that matrix anew."""

    components: ClassVar[tuple[str, ...]]  # of raw values in x_proj's order, Delta first
    fed_names: ClassVar[tuple[str, ...]]  # what `feedback` may contain
    selective: ClassVar[bool]  # whether B and C are raw components; otherwise they are 1
    delta_activations: ClassVar[dict[str, Activation]]  # Delta of raw values, for each `decay`

    settable_options: ClassVar[tuple[str, ...]] = (
        *("solver", "adjoint", "max_steps", "on_unconverged", "backend"),
        *("mixer", "initialization", "layer_idx"),
    )
    saved_options: ClassVar[tuple[str, ...]] = (
        *("num_heads", "input_scale", "eigenvalues", "feedback", "feedback_norm"),
        *("d_conv", "norm_eps"),
    )
    """Attributes in the extra state. Not solver, adjoint, cap and backend, between which
    `load_state_dict` works without a warning."""
    state_type = BedouinState
    captures_step = True

    output: Literal["norm", "paper"] = "norm"
    """The output stage: "norm" has z and a norm; "paper" neither, and a bias of Delta alone."""
    x_proj: Any  # W^x: an nn.Linear, or a HeadLinear for several heads
    b_proj: Any  # W_b where B is not selective, as x_proj
    A_log: nn.Parameter  # (d, n), the rates of the decay "mamba"
    omega: nn.Parameter  # (d, n), those of "griffin"

    solve_options: SolveOptions
    """Its fields are also attributes of the layer, and the cap, or an int, is `max_steps`."""
    solver = SolveOption[Solver, Solver | Literal["auto"]](
        "solver", lambda layer, value: options.choose_solver(value, layer.is_structured)
    )
    adjoint = SolveOption[Adjoint | None, Adjoint | None]("adjoint")
    cap = SolveOption[Cap, Cap]("cap")
    max_steps = SolveOption[Cap, int | Cap]("cap", lambda layer, value: as_cap(value))
    on_unconverged = SolveOption[OnUnconverged, OnUnconverged]("on_unconverged")
    backend = SolveOption[Backend, Backend]("backend")

    record_history = False  # whether `stats.history` has each step, of which none is in a kernel
    _outcome: Outcome | None = None  # of the last call
    _stats_have_graph = False  # whether that call recorded gradients

    __setstate__, _apply = common.set_state, common.apply_to_parameters
    _load_from_state_dict = common.load_parameters
    get_extra_state, set_extra_state = common.save_options, common.load_options

    @checks.known_options
    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        expand: float = 2,
        num_heads: int | None = None,
        num_householder: int | None = None,
        beta_max: float | None = None,
        mixer: ChannelMixer | None = None,
        decay: Decay = "mamba",
        input_scale: InputScale = "bounded_delta",
        eigenvalues: Eigenvalues = "positive",
        d_conv: int | None = None,
        feedback: Collection[str] = ("delta", "B", "C", "mixer"),
        feedback_norm: bool = True,
        feedback_init: float = 0.1,
        norm_eps: float = 1e-5,
        solver: Solver | Literal["auto"] = "auto",
        adjoint: Adjoint | None = None,
        max_steps: int | Cap = 100,
        backend: Backend = "auto",
        on_unconverged: OnUnconverged = "warn",
        initialization: Initialization | None = None,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.decay = checks.one_of("decay", decay, tuple(self.delta_activations))
        self.activation = self.delta_activations[self.decay]  # how Delta follows from raw values
        self.initialization = options.check_initialization(initialization, self.decay)
        mixer = self.mixer = options.make_mixer(mixer, num_householder, beta_max)
        self.d_model = checks.positive_int("d_model", d_model)
        self.d_state = checks.positive_int("d_state", d_state)
        d = self.d_inner = options.inner_size(expand, d_model)
        H = self.num_heads = options.choose_num_heads(num_heads, d)
        p = self.head_dim = d // H
        checks.check_bool("feedback_norm", feedback_norm)
        checks.check_dtype(dtype)
        gone = dict.fromkeys(("erase", "x"), common.REMOVED)
        self.feedback = options.ordered_subset("feedback", feedback, self.fed_names, gone)
        self.input_scale = checks.one_of("input_scale", input_scale, get_args(InputScale))
        self.eigenvalues = checks.one_of("eigenvalues", eigenvalues, get_args(Eigenvalues))
        checks.check_number("feedback_init", feedback_init, 0, 1e3, open_low=False)
        checks.check_number("norm_eps", norm_eps, 0, 1, open_low=True)
        self.feedback_norm, self.feedback_init = feedback_norm, float(feedback_init)
        self.feedback_norm_eps = options.FEEDBACK_NORM_EPS if feedback_norm else None
        self.layer_idx = checks.check_layer_idx(layer_idx)
        self.d_conv = None if d_conv is None else checks.positive_int("d_conv", d_conv)
        chosen, cap = options.choose_solver(solver, self.is_structured), as_cap(max_steps)
        solve = SolveOptions(chosen, adjoint, cap, on_unconverged, backend)
        self.solve_options = options.check_structure(mixer, p, solve)
        options.warn_of_singular_systems(mixer, self.decay, self.input_scale)
        self.draws, self.deferred = Draws(), DeferredWarning()

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        sizes = {"B": d_state, "C": d_state, "mixer": mixer.raw_size(p)}
        self._sizes = {name: sizes.get(name, p) for name in self.components}
        self.raw_size = sum(self._sizes.values())  # r, of a token and head, without the gate
        rows_of_delta, scale = (..., slice(p), slice(None)), self.initialization.delta_from_x
        self.in_proj = nn.Linear(d_model, sum(self.projected_sizes.values()), bias=False, **factory)
        self.x_proj = make_linear(H, p, self.raw_size + p, ((rows_of_delta, scale),), **factory)
        self.y_proj = self.conv = self.raw_bias = self.norm = None
        if self.feedback:
            fed = sum(self._sizes[name] for name in self.feedback)
            self.y_proj = make_linear(H, p, fed + p, ((..., self.feedback_init),), **factory)
        if d_conv is not None:
            self.conv = ShortConvolution(d, None if d_conv == 1 else d_conv, bias=True, **factory)
        self.dt_bias = nn.Parameter(torch.empty(d, **factory))
        if self.output == "norm":
            self.raw_bias = nn.Parameter(torch.empty(H * self.raw_size, **factory))
        self.D = nn.Parameter(torch.empty(d, **factory))
        if self.decay == "griffin":
            self.omega = nn.Parameter(torch.empty(d, d_state, **factory))
        if self.output == "norm":
            self.norm = HeadNorm(H, d, norm_eps, **factory)
        self.out_proj = nn.Linear(d, d_model, bias=False, **factory)
        if self.decay == "mamba":
            self.A_log = nn.Parameter(torch.empty(d, d_state, **factory))
        if not self.selective:
            self.b_proj = make_linear(H, p, p, **factory)
        for name, parameter in mixer.named_parameters():
            if parameter.device != self.D.device:
                raise ValueError(
                    f"mixer must be on the layer's device {self.D.device}, got {name} on "
                    f"{parameter.device}: make it there, or move the whole layer with to(device) "
                    "once it is made"
                )
        self.reset_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "mixer" and isinstance(value, ChannelMixer) and "_sizes" in vars(self):
            size, made = value.raw_size(self.head_dim), self._sizes["mixer"]
            if size != made:
                raise ValueError(
                    f"mixer must have {made} raw values a token and head, for which the layer's "
                    f"projections were made, got {value} with {size}: make a new layer, "
                    f"{type(self).__name__}(..., mixer=...)"
                )
        common.set_attribute(self, name, value)

    def forward(
        self,
        x: Tensor,  # (b, t, m)
        state: BedouinState | None = None,
        return_state: bool = False,
        *,
        mask: Tensor | None = None,  # (b, t)
        cu_seqlens: Tensor | None = None,  # (documents + 1,)
        seq_idx: Tensor | None = None,  # (b, t)
        one_token: bool = False,
    ) -> Any:
        """(b, t, m) -> (b, t, m), or with `return_state` the pair (output, BedouinState).

        A sequence in chunks, each with the state after the previous one, gives the same output as a
        single call, up to rounding. A state of a lower floating dtype is converted to that of
        `init_state`. What x contains:

        mask: bool, True for real tokens, padding anywhere. Padding has no influence, even if NaN:
            its output is 0, state and `stats` are those of the real tokens alone.
        cu_seqlens: int32 or int64, where each document of the row x (1, t, m) begins, and t last.
            States and `stats` have one entry for each document. The host reads it once.
        seq_idx: int32 or int64; a new document begins wherever it changes. `state` enters the first
            document of each row, the state after the last one is returned; `stats` have one entry
            for each document, in order. The host reads two numbers.
        A mask goes with either of the others. Padding is in no document then: a document continues
        after it, and its seq_idx may be anything. A row without real tokens is an empty document.
        one_token: t is 1, and the token is solved exactly, as `step` does.

        Gradients of parameters are sums over samples: one that is not finite makes them NaN, even
        if the loss leaves it out. Those of each sample: torch.func.vmap over torch.func.grad of a
        function that calls torch.func.functional_call(layer, parameters, x.unsqueeze(0)).

        Raises TypeError for a dtype that the layer cannot take, ValueError for wrong shapes,
        devices and states, ConvergenceError if on_unconverged="raise".
        """
        self.check_input(x, rank=3)
        packing = find_packing(x, mask, cu_seqlens, seq_idx)
        before, lengths = state_before(self, state, packing), packing.padded_lengths()
        solve = self.solve_options
        if one_token and self.is_structured:
            solve = replace(solve, solver=Direct())
        projected = project(self, packing.take(x), before, lengths)  # x, z and F of raw
        with without_autocast(x.device):
            y = solve.solve(projected.f, *solving(self, projected.f, solve)).value
            hidden = gated(self, projected, y)  # SiLU(gate + z) * norm(y + D * x)
        output = packing.put(self.out_proj(hidden), x.shape)
        if not return_state:
            return output
        with without_autocast(x.device):
            return output, packing.after(state_after(self, projected, y))

    if TYPE_CHECKING:
        __call__: SequenceCall[BedouinState]  # torch's is a Callable[..., Any]

    def step(self, x_t: Tensor, state: BedouinState) -> tuple[Tensor, BedouinState]:
        """One token: (b, m) -> (b, m), solved exactly, but by the layer's own solver with a mixer
        that is not of the form (e, U, M). Hooks on the layer run, as in a call. On a GPU a
        `Decoder` replays steps as CUDA graphs, which takes less time. Raises as `forward` does."""
        run: Any = self.forward
        if is_untouched(self):
            self.check_input(x_t, rank=2)
        else:
            # FSDP gathers parameters in hooks, and accelerate loads them in a `forward` of its own
            run = self
            checks.check_tensor("x", x_t, "(b, m)")
        if state is None:
            raise TypeError("state must not be None: make one with init_state(batch_size)")
        output, after = run(x_t.unsqueeze(1), state, True, one_token=True)
        return output.squeeze(1), after

    def init_state(self, batch_size: int) -> BedouinState:
        """The state before the first token: zeros in at least float32 on the layer's device."""
        checks.check_batch_size(batch_size)
        return zero_state(BedouinState, self._state_sizes(), batch_size, self._like)

    def _state_sizes(self) -> StateShapes:
        sizes: StateShapes = {"ssm": (self.d_inner, self.d_state), "y": (self.d_inner,)}
        return sizes if self.conv is None else sizes | {"conv": self.conv.window_size}

    @property
    def _like(self) -> Tensor:  # (0,), with the dtype and device of the state
        D = read_parameter(self, "D")
        # not D.new_empty, which is sharded where D is
        return torch.empty(0, dtype=accumulator(D.dtype), device=D.device)

    def checked_state(self, state: Any, b: int) -> BedouinState:
        """`state` with a batch axis, at least in float32; an error where it does not fit."""
        return check_state(state, BedouinState, self._state_sizes(), b, self._like)

    def map(self, x: Tensor) -> FixedPointMap | MapOfHeads:  # x: (b, t, m)
        """The map F that a call with x solves: y (b, t, d) -> F(y), differentiable in y, x and the
        parameters, for `bedouin.solvers.solve(layer.map(x), y0, solver, time_dim=1)` with any
        solver and gradient. Raises the errors of a call."""
        self.check_input(x, rank=3)
        return of_all_heads(project(self, x, None, None).f, self.num_heads)

    def graphed(self, sample: Tensor) -> Graphed:  # sample: (b, t, m)
        """The layer as a callable for inputs like `sample`, on a GPU, without states and masks: its
        forward and backward passes are captured now as CUDA graphs, which a call replays. A call
        raises where it would differ: for another shape, dtype, device, mode, autocast or parameter,
        or a backward pass after the next call. Raises TypeError or ValueError for a sample that
        does not fit, is empty or on no CUDA device, and for a random cap in training."""
        return Graphed(self, sample)

    def _feedback_weights(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """W^y of the loop and of the gate; None without feedback."""
        if self.y_proj is None:
            return None, None
        p = self.head_dim
        weight = effective_weight("y_proj", self.y_proj, p, self.D, self.num_heads)
        return options.split_feedback_weight(weight.to(dtype), self.feedback, self._sizes, p)

    @abstractmethod
    def _A(self) -> Tensor:
        """A (d, n), with which the decay is exp(A Delta); here that of the decay "griffin"."""
        return -options.GRIFFIN_SHARPNESS * F.softplus(common.at_least_float32(self.omega))

    def _drive(self, x: Tensor) -> Tensor:  # (b', t, p) -> (b', t, p)
        """The input of the mixer: x, or where B is not selective b * x."""
        if self.selective:
            return x
        x = x.to(accumulator(x.dtype))
        if is_plain(self.b_proj):
            raw = apply_weight(x, self.b_proj.weight.to(x.dtype))
        else:
            raw = self.b_proj(x.to(self.D.dtype)).to(x.dtype)
        return F.silu(raw) * x

    def layout(self) -> RawLayout | None:
        """A description of `_split` and the mixer for kernels; None if they cannot compute it."""
        if kernel_gap(self.mixer) is not None:
            return None
        mixer: Any = self.mixer
        return RawLayout(self.activation, self.selective, mixer.num_householder, mixer.beta_max)

    def _split(self, raw: Tensor) -> ScanInputs:  # raw: (..., r)
        """Raw values converted to the inputs of the scan; those behind C are the mixer's."""
        p, n = self.head_dim, self.d_state
        before = [p, n, n] if self.selective else [p]
        delta, *BC, mixer_raw = raw.split([*before, raw.shape[-1] - sum(before)], -1)
        B, C = map(unit, BC) if BC else (torch.ones_like(raw[..., :1]),) * 2
        return ScanInputs(activate_delta(self.activation, delta), B, C, mixer_raw)

    def parameterization(self) -> Parameterization:
        """The options of the map for its kernels."""
        options = self.input_scale, self.eigenvalues, self.feedback_norm_eps
        gap = kernel_gap(self.mixer) or NO_LAYOUT
        return Parameterization(self.layout(), *options, without_layout=gap)

    @property
    def is_structured(self) -> bool:
        """Whether the mixer has the form (e, U, M)."""
        return self.mixer.is_structured(self.head_dim)

    @property
    def projected_sizes(self) -> dict[str, int]:
        """The parts of in_proj's output in their order."""
        return dict.fromkeys(("x",) if self.output == "paper" else ("x", "z"), self.d_inner)

    @property
    def norm_eps(self) -> float | None:
        """The eps of the output norm; None without one."""
        return getattr(self.norm, "eps", None)

    def number_options(self) -> dict[str, Any]:
        """The options in the extra state; those of the mixer are among them."""
        mixer: Any = self.mixer
        of_mixer = {name: getattr(mixer, name) for name in getattr(mixer, "saved_options", ())}
        return common.number_options(self) | {"mixer": common.type_name(mixer)} | of_mixer

    @property
    def stats(self) -> SolveStats | None:
        """Statistics of the last call, also of one that raised a ConvergenceError; None before any.
        A sample's are the worst of its heads, reduced when they are first read. Neither loading,
        nor the recomputation of checkpointing, nor torch.export changes them. Under torch.func
        transforms they are tensors of the transform; copies and pickles have None then."""
        return None if self._outcome is None else self._outcome.stats

    @property
    def num_calls(self) -> int:
        """The number of training calls, on which random caps depend."""
        return self.draws.count

    @num_calls.setter
    def num_calls(self, value: int) -> None:
        self.draws.count = value

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, without statistics of a torch.func transform."""
        state = dict(vars(self))
        measured = None if self._outcome is None else self._outcome.measured
        if measured is not None and is_functorch_wrapped_tensor(measured.defect):
            state["_outcome"] = None
        return state

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
            if self.decay == "mamba":
                shape = self.num_heads, self.head_dim
                self.A_log.copy_(self.initialization.A_log(*shape, self.A_log))
                common.reset_dt_bias(self.dt_bias)
            elif self.decay == "griffin":
                # the decay at Delta = 1, exp(-8 softplus(omega)), is uniform in [0.9, 0.999]
                decay = torch.empty_like(self.omega).uniform_(*options.GRIFFIN_RANGE)
                self.omega.copy_(common.inverse_softplus(-decay.log() / options.GRIFFIN_SHARPNESS))
                self.dt_bias.zero_()
        if self.norm is not None:
            self.norm.reset_parameters()
        if not self.selective:
            self.b_proj.reset_parameters()
        if self.decay == "sigmoid":
            with torch.no_grad():
                decay = torch.empty_like(self.dt_bias).uniform_(*options.GRIFFIN_RANGE)
                self.dt_bias.copy_(torch.logit(decay))

    def _mark_parameters(self) -> None:
        common.mark(self, "_no_reinit", "dt_bias")
        common.mark(self, "_no_weight_decay", "D", "A_log", "omega")

    def check_input(self, x: Tensor, rank: int) -> None:
        """Raise unless x has shape (b, t, m) for rank 3 or (b, m) for rank 2, and a valid dtype."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise RuntimeError(
                f"{type(self).__name__} cannot be recorded by torch.jit.trace, which knows neither "
                "loops over tokens nor sizes: use torch.compile or torch.export, and "
                "torch.onnx.export(..., dynamo=True) for ONNX"
            )
        # without the call where there is nothing to load
        D = read_parameter(self, "D") if self.D.is_meta else self.D
        if isinstance(x, Tensor) and x.dtype != D.dtype and not autocast_dtype(x):
            dtype = getattr(getattr(self.in_proj, "weight", None), "dtype", None)
            if x.dtype == dtype:
                raise TypeError(
                    f"the parameter D must have the dtype of the layer's projections {dtype}, got "
                    f"{D.dtype}: convert the whole layer with to({dtype}), or keep all of it in "
                    f"{D.dtype} and use torch.autocast"
                )
        checks.check_layer_input(x, rank, self.d_model, D)

    def extra_repr(self) -> str:
        names = "d_inner", "d_state", "num_heads", "input_scale", "eigenvalues", "feedback"
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        solve = f"solver={self.solver}, adjoint={self.adjoint or ImplicitAdjoint()}"
        return f"{self.d_model}, {shown}, {solve}"

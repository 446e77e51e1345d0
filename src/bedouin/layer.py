"""The base class of the layers: parameters, projections, the fixed point, the output stage.

Letters: b batch, t time, m d_model, d d_inner, n d_state, k num_householder, H num_heads,
p = d / H head_dim, r raw values of a head, the first f with feedback. Between the projections from
m to d and back a layer has b' = H b folded samples, each one head of one sample (bedouin.heads).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack, get_args, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.checks import (
    check_batch_size,
    check_bool,
    check_device,
    check_dtype,
    check_layer_input,
    check_projection_dtype,
    inner_size,
    one_of,
    ordered_subset,
    positive_int,
)
from bedouin.compiled_map import choose_map
from bedouin.decoding import StepGraphs, may_replay, takes_graph
from bedouin.fixed_point_map import FixedPointMap, ScanInputs
from bedouin.gated_stage import GatedStage
from bedouin.graphed import GraphedLayer
from bedouin.heads import by_head, choose_num_heads, fold_pair, make_linear, unfold_state
from bedouin.joined_heads import JoinedHeads
from bedouin.kernels.backend import Backend, autocast_dtype, choose_backend, without_autocast
from bedouin.kernels.heads import fold, per_sample, unfold
from bedouin.kernels.launch import accumulator
from bedouin.kernels.operands import Operands, Parameterization, RawLayout
from bedouin.kernels.padding import CLOSED
from bedouin.kernels.projection import GATE, Part, split_projection, takes_split
from bedouin.kernels.projection import X as X_PART
from bedouin.kernels.scan import Eigenvalues, InputScale
from bedouin.layer_state import Call, incoming_state
from bedouin.mixers import ChannelMixer
from bedouin.packing import Packing, find_packing, hold_memory
from bedouin.parameterization import (
    FEEDBACK_NORM_EPS,
    ChosenSolver,
    FeedbackScope,
    MaxSteps,
    OutputStage,
    Projection,
    SolveArguments,
    SolveOption,
    X,
    split_feedback_weight,
)
from bedouin.parameters import factory_options, mark
from bedouin.projection import project_raw, split_projected
from bedouin.short_convolution import ShortConvolution
from bedouin.solvers import Adjoint, Cap, Direct, ImplicitAdjoint, SolveStats
from bedouin.solvers.base import check_number
from bedouin.solvers.draws import Draws, is_recomputation
from bedouin.solvers.reporting import DeferredWarning, OnUnconverged
from bedouin.solvers.solution import StepRecorder
from bedouin.solvers.solve import Caller, SolveOptions
from bedouin.state import BedouinState, Places, StateSize, zero_state
from bedouin.wrapped import (
    effective_weight,
    is_plain,
    is_untouched,
    read_parameter,
    refuse_mixer,
)


class FixedPointLayer(GraphedLayer, ABC):
    """The base class of the layers: one fused projection, the solve, the output stage, the state.

    A call consists of `_project`, the solve with `solve_options`, and `_output`. A subclass defines
    the components of the raw values and how these become the inputs of the scan.

    The projections may be wrapped by adapters such as LoRA, parametrized, or be units of FSDP:
    in_proj, x_proj and out_proj are called, and of y_proj the effective matrix is used (see
    bedouin.wrapped, which also says what is refused). Merge adapters before decoding: a step
    computes that matrix anew.
    """

    components: ClassVar[tuple[str, ...]]
    """Names of the raw components, in the order of the fused projection; the gate is last."""

    has_drive: ClassVar[bool] = False
    """Whether `drive` changes its argument."""

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
    solver = ChosenSolver()
    adjoint = SolveOption[Adjoint | None]()
    cap = SolveOption[Cap]()
    max_steps = MaxSteps()
    on_unconverged = SolveOption[OnUnconverged]()
    backend = SolveOption[Backend]()

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
        feedback_scope: FeedbackScope,
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
        check_bool("bias", bias)
        check_dtype(dtype)
        if isinstance(layer_idx, bool) or not isinstance(layer_idx, int | None):
            raise TypeError(f"layer_idx must be None or an int, got {layer_idx!r}")
        self.feedback = ordered_subset("feedback", feedback, self.fed_names)
        self.feedback_scope = one_of("feedback_scope", feedback_scope, get_args(FeedbackScope))
        self.projection = one_of("projection", projection, get_args(Projection))
        self.input_scale = one_of("input_scale", input_scale, get_args(InputScale))
        self.eigenvalues = one_of("eigenvalues", eigenvalues, get_args(Eigenvalues))
        self.output = one_of("output", output, get_args(OutputStage))
        check_number("feedback_init", feedback_init, 0, 1e3, open_low=False)
        check_number("norm_eps", norm_eps, 0, 1, open_low=True)
        self.feedback_norm, self.feedback_init = feedback_norm, float(feedback_init)
        self.mixer, self.layer_idx = mixer, layer_idx
        self.solve_options = solve.options(mixer, self.head_dim)
        self.stats = None
        self.draws = Draws()
        self.deferred = DeferredWarning()
        self.graphs = StepGraphs()

        d, p, heads = self.d_inner, self.head_dim, self.num_heads
        factory = factory_options(device, dtype)
        self._sizes = self._component_sizes()
        self._check_feedback()
        r, from_input = self.raw_size, self.projection == "input"
        self.in_proj = nn.Linear(d_model, sum(self.projected_sizes.values()), bias=False, **factory)
        self.x_proj = None if from_input else make_linear(heads, p, r + p, **factory)
        self.y_proj = None
        if self.feedback:
            fed = sum(p if name == X else self._sizes[name] for name in self.feedback)
            self.y_proj = make_linear(heads, self.fed_channels, fed + p, **factory)
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
        self.D = nn.Parameter(torch.empty(d, **factory))
        self.norm = nn.RMSNorm(d, eps=norm_eps, **factory) if output == "norm" else None
        self.out_proj = nn.Linear(d, d_model, bias=False, **factory)
        check_device(mixer, self.D.device)

    # -- methods of subclasses

    @abstractmethod
    def _component_sizes(self) -> dict[str, int]:
        """Sizes of the raw components of a head in the order of `components`; the first has size
        p."""

    @abstractmethod
    def _split(
        self,
        raw: Tensor,  # (..., r)
    ) -> ScanInputs:
        """Raw values converted to the inputs of the scan."""

    @abstractmethod
    def _A(self) -> Tensor:
        """A (d, n), with which the decay is exp(A Delta)."""

    @abstractmethod
    def layout(self) -> RawLayout | None:
        """A description of `_split` and the mixer for kernels; None if they cannot compute it."""

    @property
    def _raw_without_delta(self) -> float:
        """A value of the first raw component for which Delta is 0."""
        return -CLOSED

    def drive(
        self,
        x: Tensor,  # (b', t, p)
    ) -> Tensor:  # (b', t, p)
        """The input of the mixer."""
        return x

    # -- options

    @property
    def fed_names(self) -> tuple[str, ...]:
        """The names that `feedback` may contain."""
        return self.components

    def _check_feedback(self) -> None:
        """Raise ValueError for feedback of a component that the layer's options leave out."""

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
    def _erases(self) -> bool:
        """Whether the last raw value is that of beta^e."""
        return False

    @property
    def projected_sizes(self) -> dict[str, int]:
        """The parts of in_proj's output in their order: x and z, or with projection="input" x, the
        raw values of all heads, and the gate."""
        if self.projection == "inner":
            return {"x": self.d_inner} | ({} if self.output == "paper" else {"z": self.d_inner})
        raw = {name: self.num_heads * self._sizes[name] for name in self._projected_names()}
        return {"x": self.d_inner, **raw, "gate": self.d_inner}

    def _projected_names(self) -> tuple[str, ...]:
        """The raw components in the order of in_proj's output."""
        return self.components

    def _convolved_sizes(self) -> dict[str, int]:
        """The parts that the convolution acts on."""
        return {"x": self.d_inner}

    def _biased_sizes(self) -> dict[str, int]:
        """With projection="input", how many values of a head have a bias, the last of their
        component, in the order of the raw values; Delta's is dt_bias."""
        return {"mixer": self.mixer.bias_size}

    # -- parameters

    @property
    def raw_size(self) -> int:
        """r, the number of raw values per token and head, without the gate."""
        return sum(self._sizes.values())

    @property
    def feedback_norm_eps(self) -> float | None:
        return FEEDBACK_NORM_EPS if self.feedback_norm else None

    def parameterization(self) -> Parameterization:
        """The options of the map for its kernels."""
        scales = self.input_scale, self.eigenvalues
        feeds_x = X in self.feedback
        return Parameterization(self.layout(), *scales, self.feedback_norm_eps, feeds_x=feeds_x)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, except those of the mixer."""
        self._mark_parameters()
        for module in (self.in_proj, self.x_proj, self.conv, self.out_proj):
            if module is not None:
                module.reset_parameters()
        with torch.no_grad():
            if self.y_proj is not None:
                self.y_proj.reset_parameters()
                self.y_proj.weight.mul_(self.feedback_init)
            if self.raw_bias is not None and self.projection == "input":
                self.raw_bias.zero_()
            elif self.raw_bias is not None:
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
        if self.__dict__.get("projection") == "input":
            for name in ("dt_bias", "raw_bias"):
                mark(self._parameters.get(name), "_no_weight_decay")

    def _x_bias(self) -> Tensor:
        """The bias of W^x (r + p,) or (H, r + p), which begins with that of Delta and ends with the
        gate's."""
        of_delta = by_head(self.dt_bias, self.num_heads)
        if self.raw_bias is None:
            return F.pad(of_delta, (0, self.raw_size))
        return torch.cat([of_delta, by_head(self.raw_bias, self.num_heads)], -1)

    def _feedback_weights(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """W^y of the loop (f, c) or (H, f, c) and of the gate (p, c) or (H, p, c), where c is p or
        with feedback_scope="layer" d; None without feedback, and for the loop if only components
        without raw values have it."""
        if self.y_proj is None:
            return None, None
        weight = effective_weight("y_proj", self.y_proj, self.fed_channels, self.D, self.num_heads)
        known = self.feedback, self._sizes, self.head_dim
        return split_feedback_weight(weight.to(dtype), *known)

    # -- calls

    @overload
    def forward(
        self,
        x: Tensor,
        state: BedouinState | None = None,
        return_state: Literal[False] = False,
        **places: Unpack[Places],
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        state: BedouinState | None = None,
        *,
        return_state: Literal[True],
        **places: Unpack[Places],
    ) -> tuple[Tensor, BedouinState]: ...

    @overload
    def forward(
        self,
        x: Tensor,
        state: BedouinState | None = None,
        return_state: bool = False,
        *,
        one_token: bool = False,
        **places: Unpack[Places],
    ) -> Any: ...

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
        single call, up to rounding. x may be described by these (bedouin.packing):

        mask: bool, True for real tokens, padding anywhere. Padding has no influence, even if NaN:
            its output is 0, state and `stats` are those of the real tokens alone.
        cu_seqlens: int32 or int64, where each document of the row x (1, t, m) begins, and t last.
            States and `stats` have one entry for each document. The host reads it once.
        seq_idx: int32 or int64; a new document begins wherever it changes. `state` enters the first
            document of each row, the state after the last one is returned; `stats` have one entry
            for each document, in order. The host reads two numbers.
        A mask goes with either of the others. Padding is in no document then: a document continues
        after it, and its seq_idx may be anything. A row without real tokens is an empty document.
        one_token: `step` of a layer with hooks, which torch runs in calls alone.

        Gradients of parameters are sums over samples: one that is not finite makes them NaN, even
        if the loss leaves it out.

        Raises TypeError for a dtype that the layer cannot take, ValueError for wrong shapes,
        devices and states, ConvergenceError if on_unconverged="raise".
        """
        if one_token:
            self.check_input(x, rank=2)
            given: Any = state  # None is refused
            return self._one_token(x, given)
        self.check_input(x, rank=3)
        packing = find_packing(x, mask, cu_seqlens, seq_idx)
        call = self._project(x, state, self.solve_options, packing, wants_state=return_state)
        with without_autocast(x.device):
            solution = self.solve_options.solve(call.f, call.start, 1, self._caller(packing))
        output, after = self._output(call, solution.value, return_state)
        new_state = None if after is None else unfold_state(after, self.num_heads)
        if packing is not None:
            output, new_state = packing.put(output, x.shape), packing.after(new_state)
        return (output, new_state) if return_state else output

    if TYPE_CHECKING:
        __call__ = forward  # torch's is a Callable[..., Any]

    def step(self, x_t: Tensor, state: BedouinState) -> tuple[Tensor, BedouinState]:
        """One token: (b, m) -> (b, m), solved exactly with any solver of the layer.

        If the mixer is not of the form (e, U, M), the layer's solver is used with its tolerance.
        On a GPU without gradients, a token is a replay of a CUDA graph (bedouin.decoding), which
        the first call with a batch size and dtype captures. Hooks on the layer run, as in a call.
        Raises the same errors as `forward`.
        """
        replays = may_replay(self, x_t)
        if replays:
            found = self.graphs.replay(self, x_t, state)
            if found is not None:
                return found
        if not is_untouched(self):
            # FSDP gathers parameters in hooks, and accelerate loads them in a `forward` of its own
            output, after = self(x_t, state, one_token=True)
            return output, after
        self.check_input(x_t, rank=2)
        if replays and takes_graph(self, x_t):
            return self.graphs.step(self, x_t, state)
        return self._one_token(x_t, state)

    def _one_token(self, x_t: Tensor, state: BedouinState) -> tuple[Tensor, BedouinState]:
        """`step` without a graph."""
        options = self.token_options
        call = self._project(x_t.unsqueeze(1), state, options)
        output, after, _ = self._solve_token(call, options, self._caller())
        return output, unfold_state(after, self.num_heads)

    def advance(
        self,
        x_t: Tensor,  # (b, m)
        before: BedouinState,  # of folded samples
    ) -> tuple[Tensor, BedouinState, SolveStats]:
        """A token for decoding: (b, m) -> (b, m), the state of the folded samples after it, and
        statistics of `num_parts` parts of each sample, about which nothing is reported."""
        options = replace(self.token_options, on_unconverged="ignore")
        call = self._call(self.in_proj(x_t.unsqueeze(1)), None, before, options, None)
        return self._solve_token(call, options, Caller(type(self).__name__, self.deferred))

    def _solve_token(
        self, call: Call, options: SolveOptions, caller: Caller
    ) -> tuple[Tensor, BedouinState, SolveStats]:
        with without_autocast(call.start.device):
            solution = options.solve(call.f, call.start, 1, caller)
        output, after = self._output(call, solution.value, True)
        assert after is not None
        return output.squeeze(1), after, solution.stats

    @property
    def token_options(self) -> SolveOptions:
        """The options of the solve of one token."""
        options = self.solve_options
        return replace(options, solver=Direct()) if self.is_structured else options

    @property
    def num_parts(self) -> int:
        """Parts of a sample that converge by themselves."""
        return self.num_heads if self.feedback_scope == "head" else 1

    def init_state(self, batch_size: int) -> BedouinState:
        """The state before the first token: zeros in at least float32 on the layer's device."""
        check_batch_size(batch_size)
        like = read_parameter(self, "D")
        dtype = accumulator(like.dtype)
        return zero_state(batch_size, self.state_size, dtype, like.device)

    def _project(
        self,
        u: Tensor,  # (b, t, m)
        state: BedouinState | None,
        options: SolveOptions,
        packing: Packing | None = None,
        *,
        wants_state: bool = True,
    ) -> Call:
        """Everything before the solve: projections, weights, the map and the initial y.

        wants_state: whether the call is asked for its state after the last token.
        """
        if not is_untouched(self.mixer) and self.layout() is not None:
            refuse_mixer(self.mixer)
        self.deferred.flush()
        u = u if packing is None else packing.take(u)
        joins = self._joins_weights(u)
        projected = F.linear(u, self.in_proj.weight[: self.d_inner]) if joins else self.in_proj(u)
        before = incoming_state(state, projected, self.state_size, packing, self.num_heads)
        given = projected, u if joins else None, before, options, packing
        return self._call(*given, wants_state=wants_state)

    def _call(
        self,
        projected: Tensor,  # (b, t, sum of projected_sizes), or (b, t, d) with u
        u: Tensor | None,  # (b, t, m), if `projected` is x and its product with W^x is to be joined
        before: BedouinState | None,  # of folded samples
        options: SolveOptions,
        packing: Packing | None,
        *,
        wants_state: bool = True,
    ) -> Call:
        window = None
        if self.conv is not None:
            if not self._splits_at_once(projected):
                projected, window = self._convolve(self.conv, projected, before, packing)
            elif wants_state:
                window = self._last_window(self.conv, projected, before, packing)
        gemm_dtype = autocast_dtype(projected) or self.D.dtype
        given = projected, u, before, options, gemm_dtype, packing
        return Call(*self._map_and_stage(*given), before, window)

    def _convolve(
        self,
        conv: ShortConvolution,
        projected: Tensor,  # (b, t, sum of projected_sizes)
        before: BedouinState | None,
        packing: Packing | None,
    ) -> tuple[Tensor, Tensor]:  # as projected, (b, w - 1, c)
        """SiLU(conv(v)) in place of the parts v that the convolution acts on, and its window after
        the last token."""
        window = _window(conv, projected, before)
        if not projected.numel():
            return projected, window
        sizes, convolved = self.projected_sizes, self._convolved_sizes()
        parts = dict(zip(sizes, projected.split(list(sizes.values()), -1), strict=True))
        joined = torch.cat([parts[name] for name in convolved], -1)
        lengths = None if packing is None else packing.padded_lengths()
        acted, window = conv(joined, window, lengths)
        acted = F.silu(acted).split(list(convolved.values()), -1)
        parts |= dict(zip(convolved, acted, strict=True))
        return torch.cat(list(parts.values()), -1), window

    def _splits_at_once(
        self,
        projected: Tensor,  # (b, t, sum of projected_sizes)
    ) -> bool:
        """Whether a kernel convolves, splits and folds the projected input in one pass."""
        if self.projection != "input" or self.has_drive or not projected.numel():
            return False
        if self.conv is not None and not is_untouched(self.conv):
            return False
        device, dtype = projected.device, projected.dtype
        if dtype == torch.float64 or choose_backend(self.backend, device, dtype) != "triton":
            return False
        width = 1 if self.conv is None else self.conv.width or 1
        return takes_split(self._parts(), width, len(projected))

    def _last_window(
        self,
        conv: ShortConvolution,
        projected: Tensor,  # (b, t, sum of projected_sizes)
        before: BedouinState | None,
        packing: Packing | None,
    ) -> Tensor:  # (b, w - 1, c)
        """The convolution's window after the last token."""
        window = _window(conv, projected, before)
        count, lengths = window.shape[1], None if packing is None else packing.padded_lengths()
        if lengths is None:
            last = self._convolved(projected[:, max(0, projected.shape[1] - count) :])
            return torch.cat([window[:, last.shape[1] :], last.to(window.dtype)], 1)
        places = (lengths.unsqueeze(1) + torch.arange(-count, 0, device=window.device)).unsqueeze(2)
        columns = places.clamp(min=0).expand(-1, -1, projected.shape[2])
        found = self._convolved(projected.gather(1, columns)).to(window.dtype)
        earlier = window.gather(1, (places + count).clamp(max=count - 1).expand(window.shape))
        return torch.where(places < 0, earlier, found)

    def _convolved(
        self,
        projected: Tensor,  # (b, t, sum of projected_sizes)
    ) -> Tensor:  # (b, t, c)
        """The parts that the convolution acts on, side by side."""
        sizes = self.projected_sizes
        parts = dict(zip(sizes, projected.split(list(sizes.values()), -1), strict=True))
        return torch.cat([parts[name] for name in self._convolved_sizes()], -1)

    def _map_and_stage(
        self,
        projected: Tensor,  # (b, t, sum of projected_sizes), or (b, t, d) with u
        u: Tensor | None,  # (b, t, m), if `projected` is x and its product with W^x is to be joined
        before: BedouinState | None,
        options: SolveOptions,
        gemm_dtype: torch.dtype,
        packing: Packing | None,
    ) -> tuple[FixedPointMap | JoinedHeads, Tensor, GatedStage]:
        """The map, where its solve starts, and the output stage."""
        dtype = accumulator(projected.dtype)
        low = dtype if dtype == torch.float64 else gemm_dtype
        drive, z, gate = None, None, None
        if self.projection == "input":
            x, raw, drive, z = self._split_projected(projected, before)
            if self.output == "paper":
                z, gate = None, z
        elif u is not None:
            x = fold(projected, self.num_heads)
            raw, gate, z = self._project_joined(u)
        else:
            paired, heads = self.output == "norm", self.num_heads
            x, z = fold_pair(projected, heads) if paired else (fold(projected, heads), None)
            raw, gate = self._project_x(x, low)
        with without_autocast(x.device):
            W_y, W_gate = self._feedback_weights(gemm_dtype)
            f = self._map(x, raw, drive, W_y, before, packing)
            stage = GatedStage(x, z, gate, W_gate, f.operands.y0, low)
            if self.feedback_scope == "layer" and self.num_heads > 1:
                joined = JoinedHeads(f, self.num_heads)
                return joined, torch.zeros_like(unfold(x, self.num_heads), dtype=dtype), stage
            if isinstance(options.solver, Direct):
                start = x.new_empty((), dtype=dtype).expand(x.shape)
            else:
                start = torch.zeros_like(x, dtype=dtype, requires_grad=False)
        return f, start, stage

    def _split_projected(
        self,
        projected: Tensor,  # (b, t, sum of projected_sizes)
        before: BedouinState | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """x (b', t, p), the raw values (b', t, r), the mixer's input (b', t, p) if it is not x, and
        the gate (b', t, p), from one product of the input, whose parts have been convolved unless
        `_splits_at_once`."""
        sizes, heads = self.projected_sizes, self.num_heads
        if self._splits_at_once(projected):
            weight, window = None if self.conv is None else self.conv.weight, None
            if self.conv is not None and weight is not None:
                window = _window(self.conv, projected, before).float()
            bias = self._input_bias().reshape(heads, -1)
            x, raw, gate = split_projection(projected, bias, weight, window, self._parts())
            return x, raw, None, gate
        split = projected.split(list(sizes.values()), -1)
        parts = {name: fold(v, heads) for name, v in zip(sizes, split, strict=True)}
        raw = torch.cat([parts[name] for name in self.components], -1)
        bias = self._input_bias().to(raw.dtype)
        if heads > 1:
            bias = per_sample(bias, heads * projected.shape[0]).unsqueeze(1)
        raw = raw + bias
        return parts["x"], raw, self._input_drive(parts), parts["gate"]

    def _parts(self) -> tuple[Part, ...]:
        """The parts of the projected input, for `split_projection`."""
        places = dict(zip(self._sizes, accumulate(self._sizes.values(), initial=0), strict=False))
        places |= {"x": X_PART, "gate": GATE}
        convolved = {} if self.conv is None else self._convolved_sizes()
        sizes = self.projected_sizes.items()
        return tuple(
            Part(size // self.num_heads, places[name], name in convolved) for name, size in sizes
        )

    def _input_bias(self) -> Tensor:  # (r,) or (H, r)
        """The bias of the raw values with projection="input"."""
        heads, first = self.num_heads, next(iter(self._sizes))
        values = {first: by_head(self.dt_bias, heads)}
        if self.raw_bias is not None:
            biased = {name: size for name, size in self._biased_sizes().items() if size}
            parts = by_head(self.raw_bias, heads).split(list(biased.values()), -1)
            values |= dict(zip(biased, parts, strict=True))
        zeros, padded = self.dt_bias.new_zeros(self.raw_size), []
        for name, size in self._sizes.items():
            # no empty parts, for which autograd would launch operations
            bias = values.get(name)
            missing = size if bias is None else size - bias.shape[-1]
            if missing:
                padded.append(zeros[:missing].expand(*values[first].shape[:-1], -1))
            if bias is not None:
                padded.append(bias)
        return torch.cat(padded, -1)

    def _input_drive(self, parts: dict[str, Tensor]) -> Tensor | None:
        """The mixer's input from the parts (b', t, ...) of the projection; None: x."""
        return None

    def _project_x(
        self,
        x: Tensor,  # (b', t, p)
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """W^x x: the raw values (b', t, r) and the gate (b', t, p), in `dtype` if kernels read
        them."""
        for_kernels = choose_backend(self.backend, x.device, x.dtype) == "triton"
        bias = self._x_bias()
        options: dict[str, Any] = {"r": self.raw_size, "dtype": dtype if for_kernels else None}
        if not is_plain(self.x_proj):
            return split_projected(self.x_proj(x), bias, **options)
        return project_raw(x, self.x_proj.weight, bias, **options)

    def _joins_weights(
        self,
        u: Tensor,  # (b, t, m)
    ) -> bool:
        """Whether W^x x takes fewer operations if W^x is first multiplied by the weight W of x, as
        it does if m < d and there are many tokens; on a CPU, and not in low precision, where the
        rounded product of the weights would be less accurate."""
        if self.num_heads > 1 or u.device.type != "cpu" or torch.compiler.is_compiling():
            return False
        if self.x_proj is None or self.conv is not None:
            return False
        rows, (m, d) = u.shape[:-1].numel(), (self.d_model, self.d_inner)
        if rows * (d - m) <= d * m:
            return False
        if autocast_dtype(u) is not None or accumulator(u.dtype) != u.dtype:
            return False
        if not (is_plain(self.in_proj) and is_plain(self.x_proj)):
            return False
        return choose_backend(self.backend, u.device, u.dtype) == "reference"

    def _project_joined(
        self,
        u: Tensor,  # (b, t, m)
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The raw values (b, t, r), the gate and z (b, t, d), from (W^x W) u instead of W^x (W u).

        With feedback the result has z with the gate's part added, and no gate; the output stage of
        the paper has a gate and no z.
        """
        W_x, (of_x, *others) = self.x_proj.weight, self.in_proj.weight.split(self.d_inner)
        adds = bool(others) and self.y_proj is not None
        weight = W_x @ of_x
        if adds:
            weight = weight + F.pad(others[0], (0, 0, self.raw_size, 0))
        raw, gate = project_raw(u, weight, self._x_bias(), r=self.raw_size, dtype=None)
        if adds:
            return raw, None, gate
        return raw, gate, F.linear(u, others[0]) if others else None

    def _map(
        self,
        x: Tensor,  # (b', t, p)
        raw: Tensor,  # (b', t, r)
        drive: Tensor | None,  # (b', t, p); None: that of x
        W_y: Tensor | None,  # (f, c) or (H, f, c)
        before: BedouinState | None,  # of folded samples
        packing: Packing | None = None,
    ) -> FixedPointMap:
        dtype = accumulator(x.dtype)
        if drive is None:
            drive = self.drive(x.to(dtype)) if self.has_drive else x
        A = by_head(self._A().to(dtype), self.num_heads)
        start = (None, None) if before is None else (before.ssm, before.y)
        lengths = None
        if packing is not None and packing.real is not None:
            lengths = packing.padded_lengths(self.num_heads)
            sizes = self.num_heads, self.head_dim
            raw = hold_memory(raw, packing.real, *sizes, self._raw_without_delta, self._erases)
        operands = Operands(drive, raw, W_y, A, *start)
        options = self.parameterization(), self.mixer, self._split, self.backend
        return choose_map(self.is_structured)(operands, *options, lengths)

    def _caller(self, packing: Packing | None = None) -> Caller:
        name, draw = type(self).__name__, self.next_draw()
        record = partial(self._keep_stats, packing)
        watch = StepRecorder() if self.record_history else None
        return Caller(name, self.deferred, draw, record, self.num_parts, watch)

    def _keep_stats(self, packing: Packing | None, stats: SolveStats) -> None:
        if packing is not None:
            stats = replace(stats.plain, num_steps=packing.steps(stats.num_steps))
        # A recomputation keeps those of an earlier call with a graph, which get stats.backward.
        if is_recomputation() and self._stats_have_graph:
            return
        # The flag is read itself: in torch 2.11 is_exporting() is also True under torch.compile.
        if not torch.compiler._is_exporting_flag:
            # not by nn.Module's setattr, which looks at all kinds of attributes first
            self.__dict__["stats"] = stats
            self.__dict__["_stats_have_graph"] = torch.is_grad_enabled()

    def _output(
        self,
        call: Call,
        y: Tensor,  # (b', t, p), the fixed point, or (b, t, d) with feedback of all heads
        wants_state: bool,
    ) -> tuple[Tensor, BedouinState | None]:
        """The layer's output (b, t, m), and the state of the folded samples after the last token
        if wanted."""
        with without_autocast(y.device):
            if isinstance(call.f, JoinedHeads):
                y = fold(y, self.num_heads)
            after = call.after(y) if wants_state else None
            hidden = call.stage.gated(self, y)
        output: Tensor = self.out_proj(hidden)
        return output, after

    def next_draw(self) -> int | None:
        """The number of this training call, which a random cap depends on; None in evaluation."""
        # a compiled graph holds the count as a constant and would be recompiled for each call
        counts = self.cap.is_random or not torch.compiler.is_compiling()
        if not (self.training and counts):
            return None
        return self.draws.next(self.cap)

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
        if isinstance(x, Tensor) and x.dtype != D.dtype:
            check_projection_dtype(x, D, self.in_proj)
        check_layer_input(x, rank, self.d_model, D)

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, d_inner={self.d_inner}, d_state={self.d_state}, "
            f"num_heads={self.num_heads}, "
            f"input_scale={self.input_scale!r}, eigenvalues={self.eigenvalues!r}, "
            f"feedback={self.feedback}, feedback_scope={self.feedback_scope!r}, "
            f"projection={self.projection!r}, solver={self.solver}, "
            f"adjoint={self.adjoint or ImplicitAdjoint()}"
        )


def _window(
    conv: ShortConvolution,
    projected: Tensor,  # (b, t, any size)
    before: BedouinState | None,
) -> Tensor:  # (b, w - 1, c)
    """The inputs of the convolution before the first token."""
    if before is None:
        shape = projected.shape[0], *conv.window_size
        return projected.new_zeros(shape, dtype=accumulator(projected.dtype))
    assert before.conv is not None
    return before.conv

"""The layers: parameters, projections, the fixed point, the output stage.

Letters: b batch, t time, m d_model, d d_inner, n d_state, k num_householder, r raw values.
"""

import inspect
import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F

from bedouin.checks import check_batch_size, check_bool, check_dtype, check_tensor, positive_int
from bedouin.decode import StepGraphs, fused_step, may_replay, takes_fused_step
from bedouin.fixed_point_map import FixedPointMap, MapInputs, ScanInputs, StructuredMap
from bedouin.kernels.backend import (
    Backend,
    autocast_dtype,
    check_backend,
    choose_backend,
    without_autocast,
)
from bedouin.kernels.decode import DecayKind
from bedouin.kernels.direct import Activation, RawLayout
from bedouin.kernels.householder import unit
from bedouin.kernels.output import gated_output, shifted_norm
from bedouin.kernels.scan import Eigenvalues, InputScale
from bedouin.mixers import ChannelMixer, HouseholderProduct, StructuredMixer
from bedouin.projection import split_linear
from bedouin.solvers import (
    Adjoint,
    Cap,
    ConvergenceError,
    Direct,
    OneStepAdjoint,
    Picard,
    Solution,
    Solver,
    SolveStats,
    solve,
)
from bedouin.solvers.base import check_number, unknown_option
from bedouin.solvers.caps import as_cap
from bedouin.solvers.deferred import DeferredWarning
from bedouin.solvers.draws import Draws
from bedouin.solvers.recompute import restores_tensors_only
from bedouin.solvers.reporting import OnUnconverged
from bedouin.solvers.solve import check_solve_arguments
from bedouin.state import BedouinState, check_state, zero_state

Decay = Literal["mamba", "griffin"]
RNNDecay = Literal["sigmoid", "griffin"]
OutputStage = Literal["norm", "paper"]

OptionT = TypeVar("OptionT", bound=str)

FEEDBACK_NORM_EPS = 1e-5
DELTA_RANGE = (1e-3, 0.1)
GRIFFIN_RANGE = (0.9, 0.999)
GRIFFIN_SHARPNESS = 8.0


class FixedPointLayer(nn.Module):
    """What the layers share: one fused projection, the solve, the state, the output stage.

    A subclass says which components the raw values have and how they become the scan's inputs.
    """

    components: ClassVar[tuple[str, ...]]
    """Names of the raw components, in the order of the fused projection; the gate is last."""

    _has_fused_step: ClassVar[bool] = False
    """Declared by a class whose `_split`, `_A` and `_drive` are what the decoding kernel does; not
    inherited, since a subclass may change them."""

    _has_drive: ClassVar[bool] = False
    """Whether `_drive` is more than its argument."""

    stats: SolveStats | None
    """Statistics of the last call, None before any; after a ConvergenceError those of the call that
    failed. A recomputation of non-reentrant checkpointing leaves them as they are. Under torch.func
    transforms they are the transform's own tensors: return them from the transformed function to
    read them; copies of the layer do not hold them. Under torch.compile they are outputs of the
    graph, never looked at (no warning, no error), and stats.backward stays None."""

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int,
        expand: float,
        mixer: ChannelMixer,
        input_scale: InputScale,
        eigenvalues: Eigenvalues,
        feedback: Collection[str],
        feedback_norm: bool,
        feedback_init: float,
        norm_eps: float,
        output: OutputStage,
        bias: bool,
        solver: Solver | Literal["auto"],
        adjoint: Adjoint | None,
        max_steps: int | Cap,
        backend: Backend,
        on_unconverged: OnUnconverged,
        layer_idx: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.d_model, self.d_state = (
            positive_int("d_model", d_model),
            positive_int("d_state", d_state),
        )
        self.d_inner = _inner_size(expand, d_model)
        check_bool("feedback_norm", feedback_norm)
        check_bool("bias", bias)
        check_dtype(dtype)
        if isinstance(layer_idx, bool) or not isinstance(layer_idx, int | None):
            raise TypeError(f"layer_idx must be None or an int, got {layer_idx!r}")
        self.feedback = _ordered_subset("feedback", feedback, self.components)
        self.input_scale = _one_of("input_scale", input_scale, get_args(InputScale))
        self.eigenvalues = _one_of("eigenvalues", eigenvalues, get_args(Eigenvalues))
        self.output = _one_of("output", output, get_args(OutputStage))
        check_number("feedback_init", feedback_init, 0, 1e3, open_low=False)
        check_number("norm_eps", norm_eps, 0, 1, open_low=True)
        self.feedback_norm, self.feedback_init = feedback_norm, float(feedback_init)
        self.mixer, self.layer_idx = mixer, layer_idx
        self.solver = choose_solver(solver, mixer)
        check_solve_arguments(self.solver, adjoint, on_unconverged)
        check_backend(backend)
        self.adjoint, self.cap = adjoint, as_cap(max_steps)
        self.backend, self.on_unconverged = backend, on_unconverged
        self.stats = None
        self._draws = Draws()
        self._deferred = DeferredWarning()
        self._graphs = StepGraphs()

        d, factory = self.d_inner, _factory(device, dtype)
        self._sizes = self._component_sizes()
        fed = sum(self._sizes[name] for name in self.feedback)
        branches = 1 if output == "paper" else 2
        self.in_proj = nn.Linear(d_model, branches * d, bias=False, **factory)
        self.x_proj = nn.Linear(d, self.raw_size + d, bias=False, **factory)
        self.y_proj = nn.Linear(d, fed + d, bias=False, **factory) if self.feedback else None
        self.dt_bias = nn.Parameter(torch.empty(d, **factory))
        self.raw_bias = nn.Parameter(torch.empty(self.raw_size, **factory)) if bias else None
        self.D = nn.Parameter(torch.empty(d, **factory))
        self.norm = nn.RMSNorm(d, eps=norm_eps, **factory) if output == "norm" else None
        self.out_proj = nn.Linear(d, d_model, bias=False, **factory)
        _check_device(mixer, self.D.device)

    # -- what a subclass provides

    @abstractmethod
    def _component_sizes(self) -> dict[str, int]:
        """Sizes of the raw components, in the order of `components`; the first has d values."""

    @abstractmethod
    def _split(self, raw: Tensor) -> ScanInputs:
        """Raw values (..., r) as the scan's inputs."""

    @abstractmethod
    def _A(self) -> Tensor:
        """(d, n): the decay is exp(A Delta)."""

    @abstractmethod
    def _decay_parameter(self) -> tuple[DecayKind, float, Tensor | None]:
        """How `_A` comes from which parameter (d, n): kind, sharpness, parameter."""

    @abstractmethod
    def _layout(self) -> RawLayout | None:
        """What `_split` and the mixer do with raw values, if kernels know how to do it."""

    def _drive(self, x: Tensor) -> Tensor:
        """What the mixer sees of x (b, t, d)."""
        return x

    # -- parameters

    @property
    def raw_size(self) -> int:
        """r: raw values a token, without the gate."""
        return sum(self._sizes.values())

    def reset_parameters(self) -> None:
        """Draw all parameters anew, but those of the mixer."""
        self._mark_parameters()
        for module in (self.in_proj, self.x_proj, self.out_proj):
            module.reset_parameters()
        with torch.no_grad():
            if self.y_proj is not None:
                self.y_proj.reset_parameters()
                self.y_proj.weight.mul_(self.feedback_init)
            if self.raw_bias is not None:
                bound = 1 / math.sqrt(self.d_inner)
                self.raw_bias.uniform_(-bound, bound)
            self.D.fill_(1.0)
        if self.norm is not None:
            self.norm.reset_parameters()

    def _mark_parameters(self) -> None:
        """The marks that initializers and optimizers look for: those of Mamba.

        Set with the values, since `to_empty` makes new parameters without them.
        """
        self.dt_bias._no_reinit = True  # type: ignore[attr-defined]
        for parameter in (self.D, self._decay_parameter()[2]):
            if parameter is not None:
                parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def _x_bias(self) -> Tensor:
        """The bias of W^x (r + d,): Delta's own first, that of the gate last."""
        if self.raw_bias is None:
            return F.pad(self.dt_bias, (0, self.raw_size))
        return torch.cat([self.dt_bias, self.raw_bias])

    def _project(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """W^x x: the raw values (b, t, r) and the gate (b, t, d); autocast's `dtype` for kernels.

        For kernels two products, so that each result and its cotangent are whole tensors: a split
        of one result would be joined again by a copy of all of it.
        """
        weight, bias, r = self.x_proj.weight, self._x_bias(), self.raw_size
        if choose_backend(self.backend, x.device, x.dtype) != "triton":
            raw, gate = F.linear(x, weight, bias).split([r, self.d_inner], -1)
            return raw, gate
        # torch adds the bias within the product where x is a matrix, else by a pass of its own
        rows = x.flatten(0, 1)
        raw, gate = split_linear(*(v.to(dtype) for v in (rows, weight, bias)), r=r)
        return raw.unflatten(0, x.shape[:2]), gate.unflatten(0, x.shape[:2])

    def _feedback_weights(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """W^y of the loop (r, d), zero rows where nothing is fed back, and of the gate (d, d)."""
        if self.y_proj is None:
            return None, None
        weight = self.y_proj.weight.to(dtype)
        if self.feedback == self.components:
            loop, gate = weight.split([self.raw_size, self.d_inner])
            return loop, gate
        sizes = [self._sizes[name] for name in self.feedback]
        *fed, gate = weight.split([*sizes, self.d_inner])
        rows = dict(zip(self.feedback, fed, strict=True))
        d = self.d_inner
        blocks = [
            rows[name] if name in rows else gate.new_zeros(size, d)
            for name, size in self._sizes.items()
        ]
        return torch.cat(blocks), gate

    # -- calls

    def forward(
        self, x: Tensor, state: BedouinState | None = None, return_state: bool = False
    ) -> Any:
        """(b, t, m) -> (b, t, m), or with `return_state` the pair (output, BedouinState).

        A sequence fed in chunks, each with the state of the last, gives what one call gives, up to
        rounding. Raises TypeError for integer or foreign dtypes, ValueError for wrong shapes,
        devices and states, ConvergenceError with on_unconverged="raise".
        """
        self._check_input(x, rank=3)
        output, new_state = self._run(x, state, self.solver, return_state)
        return (output, new_state) if return_state else output

    def step(self, x_t: Tensor, state: BedouinState) -> tuple[Tensor, BedouinState]:
        """One token: (b, m) -> (b, m), solved exactly whatever the layer's solver.

        With a mixer that has no form (e, U, M) the layer's own solver is used, to its tolerance.
        On a GPU, without gradients, a token is the replay of a CUDA graph (bedouin.decode), which
        the first call with a batch size and dtype captures. Raises as `forward` does.
        """
        replays = may_replay(self, x_t)
        if replays:
            found = self._graphs.replay(self, x_t, state)
            if found is not None:
                return found
        self._check_input(x_t, rank=2)
        if takes_fused_step(self, x_t):
            return (self._graphs.step if replays else fused_step)(self, x_t, state)
        solver = Direct() if isinstance(self.mixer, StructuredMixer) else self.solver
        output, new_state = self._run(x_t.unsqueeze(1), state, solver, True)
        assert new_state is not None
        return output.squeeze(1), new_state

    def init_state(self, batch_size: int) -> BedouinState:
        """The state before any token: zeros, at least float32, on the layer's device."""
        check_batch_size(batch_size)
        weight = self.x_proj.weight
        dtype = _solve_dtype(weight.dtype)
        return zero_state(batch_size, self.d_inner, self.d_state, dtype, weight.device)

    def _run(
        self, u: Tensor, state: BedouinState | None, solver: Solver, wants_state: bool
    ) -> tuple[Tensor, BedouinState | None]:
        self._deferred.flush()
        projected = self.in_proj(u)
        x, z = projected.chunk(2, -1) if self.output == "norm" else (projected, None)
        dtype, gemm_dtype = _solve_dtype(x.dtype), autocast_dtype(u) or self.x_proj.weight.dtype
        low = dtype if dtype == torch.float64 else gemm_dtype
        raw, gate = self._project(x, low)
        state = self._incoming(state, x, dtype)
        with without_autocast(u.device):
            W_y, W_gate = self._feedback_weights(gemm_dtype)
            f = self._map(x, raw, W_y, state)
            solution = self._solve(f, x, dtype, solver)
            y = solution.value
            new_state = self._outgoing(f, y, state) if wants_state else None
            fed = self._fed_gate(y, state, W_gate)
            hidden = self._output_stage(y, x, gate, fed, z, low)
        output: Tensor = self.out_proj(hidden)
        return output, new_state

    def _fed_gate(
        self, y: Tensor, state: BedouinState | None, W_gate: Tensor | None
    ) -> Tensor | None:
        """W^y norm(y_{t-1}) of the gate, in the dtype of W^y."""
        if W_gate is None or not y.shape[1]:
            return None
        first = None if state is None else state.y
        before = shifted_norm(y, first, self._norm_eps, dtype=W_gate.dtype, backend=self.backend)
        return F.linear(before, W_gate)

    def _output_stage(
        self,
        y: Tensor,
        x: Tensor,
        gate: Tensor,
        fed: Tensor | None,
        z: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """SiLU(gate + z) * norm(y* + D x), or the paper's gate * SiLU(y* + D x), in `dtype`."""
        if self.norm is None:
            return gated_output(y, x, self.D, gate, fed, dtype=dtype, backend=self.backend)
        weight, eps = self.norm.weight, self.norm.eps
        assert eps is not None
        return gated_output(
            y, x, self.D, gate, fed, z, weight, eps=eps, dtype=dtype, backend=self.backend
        )

    @property
    def _norm_eps(self) -> float | None:
        return FEEDBACK_NORM_EPS if self.feedback_norm else None

    def _map(
        self, x: Tensor, raw: Tensor, W_y: Tensor | None, state: BedouinState | None
    ) -> FixedPointMap:
        kind = StructuredMap if isinstance(self.mixer, StructuredMixer) else FixedPointMap
        dtype = _solve_dtype(x.dtype)
        drive = self._drive(x.to(dtype)) if self._has_drive else x
        return kind(
            MapInputs(drive, raw, W_y, self._A().to(dtype), *(state or (None, None))),
            self.mixer,
            self._split,
            input_scale=self.input_scale,
            eigenvalues=self.eigenvalues,
            feedback_norm_eps=self._norm_eps,
            backend=self.backend,
            layout=self._layout(),
        )

    def _solve(self, f: FixedPointMap, x: Tensor, dtype: torch.dtype, solver: Solver) -> Solution:
        choose_backend(self.backend, x.device)
        if isinstance(solver, Direct):
            # which reads no more of it than its shape
            start = x.new_empty((), dtype=dtype).expand(x.shape)
        else:
            start = torch.zeros_like(x, dtype=dtype, requires_grad=False)
        try:
            solution = solve(
                f,
                start,
                solver,
                max_steps=self.cap,
                adjoint=self.adjoint,
                on_unconverged=self.on_unconverged,
                time_dim=1,
                draw=self._next_draw(),
                subject=type(self).__name__,
                deferred=self._deferred,
            )
        except ConvergenceError as error:
            self._keep_stats(error.stats)
            raise
        self._keep_stats(solution.stats)
        return solution

    def _keep_stats(self, stats: SolveStats | None) -> None:
        # of such a recomputation nothing is taken back: stats.backward comes to the first call's
        if not restores_tensors_only():
            self.stats = stats

    def _next_draw(self) -> int | None:
        """The number of this training call, which a random cap depends on; None in evaluation."""
        # a graph that counts would be compiled anew for each call
        counts = self.cap.is_random or not torch.compiler.is_compiling()
        if not (self.training and counts):
            return None
        return self._draws.next(self.cap)

    def _incoming(
        self, state: BedouinState | None, x: Tensor, dtype: torch.dtype
    ) -> BedouinState | None:
        # without tokens it goes out as it came in
        b, d, n = x.shape[0], self.d_inner, self.d_state
        if state is None:
            return None if x.shape[1] else zero_state(b, d, n, dtype, x.device)
        return check_state(state, b, d, n, x.new_empty(0, dtype=dtype))

    def _outgoing(self, f: FixedPointMap, y: Tensor, state: BedouinState | None) -> BedouinState:
        if state is not None and y.shape[1] == 0:
            return state
        # copies: a view would keep all of y alive, and autograd may have saved what it shows
        return BedouinState(f.memory(y).clone(), y[:, -1].clone())

    def _check_input(self, x: Tensor, rank: int) -> None:
        shape = "(b, t, m)" if rank == 3 else "(b, m)"
        check_tensor("x", x, shape)
        if x.dim() != rank:
            raise ValueError(f"x must have shape {shape}, got {tuple(x.shape)}")
        if x.shape[-1] != self.d_model:
            raise ValueError(
                f"x must have shape {shape} with m = d_model = {self.d_model}, got {tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise TypeError(f"x must have a floating dtype, got {x.dtype}: embed tokens first")
        weight = self.x_proj.weight
        if x.device != weight.device:
            raise ValueError(f"x must be on the layer's device {weight.device}, got {x.device}")
        if x.dtype != weight.dtype and not (autocast_dtype(x) and autocast_dtype(weight)):
            wide = torch.float64 in (x.dtype, weight.dtype)
            remedy = " (torch.autocast casts no float64)" if wide else ", or use torch.autocast"
            raise TypeError(
                f"x must have the layer's dtype {weight.dtype}, got {x.dtype}: convert one of "
                f"them{remedy}"
            )

    # -- saving: one always-present counter, whatever the solver, adjoint, cap or backend

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: no statistics that belong to a torch.func transform."""
        state = dict(vars(self))
        if self.stats is not None and is_functorch_wrapped_tensor(self.stats.converged):
            state["stats"] = None
        return state

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self._draws.count)

    def set_extra_state(self, state: Tensor) -> None:
        self._draws.count = int(state)

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, d_inner={self.d_inner}, d_state={self.d_state}, "
            f"input_scale={self.input_scale!r}, eigenvalues={self.eigenvalues!r}, "
            f"feedback={self.feedback}, solver={self.solver}, adjoint={self.adjoint}"
        )


class Bedouin(FixedPointLayer):
    """A dense, selective RNN defined as the fixed point of channel mixing and a diagonal scan.

    Replaces `Mamba(d_model)`: (b, t, m) -> (b, t, m) for any b, t >= 0.

        x, z = in_proj(u);  raw = W^x x_t + W^y norm(y_{t-1}), split into Delta, B, C, mixer, gate
        x~_t = Q_t (x_t - y_t) + y_t
        h_t  = lambda_t * h_{t-1} + (s_t * x~_t) B_t^T;   y_t = h_t C_t
        out  = out_proj(SiLU(gate_t + z_t) * norm(y_t + D * x_t))

    Source: Fixed-Point RNNs (arXiv 2503.10799), sections 4 and 5. `Bedouin.from_paper` is its
    exact parameterization. The defaults were chosen on the word problem of A5, by the accuracy of
    the worst seeds at the training length and the conditioning of the local systems; "delta" has
    the better medians at eight times that length (examples/results/README.md).

    Args:
        d_model: m. d_state: n. expand: d = expand * m.
        num_householder, beta_max: shorthand for mixer=HouseholderProduct(num_householder,
            beta_max); 2 and 1.0 unless given.
        mixer: HouseholderProduct(...), LowRank(...) or another ChannelMixer. Parameters of its own
            are used in the dtype of the solve, at least float32.
        decay: "mamba": Delta = softplus(raw), lambda = exp(-exp(A_log) Delta); "griffin": Delta =
            sigmoid(raw), lambda = exp(-8 softplus(omega) Delta).
        input_scale: s_t = "delta": Delta; "bounded_delta": Delta / (1 + Delta); "one_minus_decay":
            1 - |lambda|. With mamba decay and "delta" the gain is unbounded and local systems can
            become singular in training; see SolveStats.conditioning.
        eigenvalues: of the decay: "positive": lambda; "full": 2 lambda - 1 in [-1, 1].
        feedback: which of "delta", "B", "C", "mixer" see y_{t-1}; () switches feedback off, the
            gate's included.
        feedback_norm: RMSNorm on y_{t-1} before W^y. feedback_init: factor on W^y at the start.
        delta_from_x_init: factor on the weights from x to Delta at the start; with 0, the paper's
            choice for copying, Delta starts as a function of its bias (and of feedback) alone.
        norm_eps: of the output norm.
        solver: a solver object, or "auto": Direct where the mixer has the form (e, U, M), else
            Picard.
        adjoint: a gradient object; None: ImplicitAdjoint(), exact.
        max_steps: an int or a Cap. backend: "auto", "triton" or "reference".
        on_unconverged: "warn" (at the 1st, 10th, 100th, ... call of this layer, see
            ConvergenceWarning), "raise" a ConvergenceError or "ignore", for the forward solve and,
            in the backward pass, for that of the adjoint (see ImplicitAdjoint).
        output: "norm" as above, or "paper": gate * SiLU(y + D * x) without z and norm.
        bias: whether the projections of x other than Delta's have one.
        layer_idx: kept for cache-based callers. device, dtype: of the parameters.

    Raises TypeError for unknown options and values of the wrong type, ValueError for values that do
    not fit.
    """

    components = ("delta", "B", "C", "mixer")
    _has_fused_step = True

    A_log: nn.Parameter
    omega: nn.Parameter

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        expand: float = 2,
        num_householder: int | None = None,
        beta_max: float | None = None,
        mixer: ChannelMixer | None = None,
        decay: Decay = "mamba",
        input_scale: InputScale = "bounded_delta",
        eigenvalues: Eigenvalues = "positive",
        feedback: Collection[str] = ("delta", "B", "C", "mixer"),
        feedback_norm: bool = True,
        feedback_init: float = 0.1,
        norm_eps: float = 1e-5,
        solver: Solver | Literal["auto"] = "auto",
        adjoint: Adjoint | None = None,
        max_steps: int | Cap = 100,
        backend: Backend = "auto",
        on_unconverged: OnUnconverged = "warn",
        output: OutputStage = "norm",
        bias: bool = True,
        delta_from_x_init: float = 1.0,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            _reject(type(self), unknown)
        self.decay = _one_of("decay", decay, get_args(Decay))
        check_number("delta_from_x_init", delta_from_x_init, 0, 1e3, open_low=False)
        self.delta_from_x_init = float(delta_from_x_init)
        super().__init__(
            d_model,
            d_state=d_state,
            expand=expand,
            mixer=_make_mixer(mixer, num_householder, beta_max),
            input_scale=input_scale,
            eigenvalues=eigenvalues,
            feedback=feedback,
            feedback_norm=feedback_norm,
            feedback_init=feedback_init,
            norm_eps=norm_eps,
            output=output,
            bias=bias,
            solver=solver,
            adjoint=adjoint,
            max_steps=max_steps,
            backend=backend,
            on_unconverged=on_unconverged,
            layer_idx=layer_idx,
            device=device,
            dtype=dtype,
        )
        d, n, factory = self.d_inner, self.d_state, _factory(device, dtype)
        name = "A_log" if decay == "mamba" else "omega"
        self.register_parameter(name, nn.Parameter(torch.empty(d, n, **factory)))
        self.reset_parameters()

    @classmethod
    def from_paper(
        cls,
        d_model: int,
        *,
        d_state: int = 16,
        expand: float = 2,
        num_householder: int = 1,
        solver: Solver | Literal["auto"] | None = None,
        adjoint: Adjoint | None = None,
        max_steps: int | Cap = 100,
        delta_from_x_init: float = 1.0,
        **options: Any,
    ) -> Self:
        """The seed paper's FP-Mamba (arXiv 2503.10799, section 5.3), exactly.

        Griffin decay, input scale Delta, beta = 2 sigmoid(alpha), feedback in B, C, mixer and gate
        but not in Delta, no feedback norm, output gate * SiLU(y* + D x) without norm, bias on Delta
        only; solver None: Picard with the paper's stop rule at 0.1, which returns the last
        evaluation; adjoint None: the one-step gradient. Pass max_steps=GammaCap(4.0, 1.0, 100) for
        its random caps, and delta_from_x_init=0.0 for its start in the copying task, where the
        weights from x to Delta are zero (v1, section 4.5). `options` are other options of Bedouin,
        and may not contradict the above (TypeError).
        """
        return cls(
            d_model,
            d_state=d_state,
            expand=expand,
            mixer=HouseholderProduct(num_householder, beta_max=2.0),
            decay="griffin",
            input_scale="delta",
            feedback=("B", "C", "mixer"),
            feedback_norm=False,
            feedback_init=1.0,
            output="paper",
            bias=False,
            solver=Picard(rtol=0.1, stop_rule="paper") if solver is None else solver,
            adjoint=OneStepAdjoint() if adjoint is None else adjoint,
            max_steps=max_steps,
            delta_from_x_init=delta_from_x_init,
            **options,
        )

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.x_proj.weight[: self.d_inner].mul_(self.delta_from_x_init)
            if self.decay == "mamba":
                states = torch.arange(1, self.d_state + 1, device=self.D.device)
                self.A_log.copy_(states.log().expand(self.d_inner, -1))
                self.dt_bias.copy_(_inverse_softplus(_log_uniform(self.dt_bias, *DELTA_RANGE)))
            else:
                self.omega.copy_(_griffin_omega(self.omega))
                self.dt_bias.zero_()

    def _component_sizes(self) -> dict[str, int]:
        d, n = self.d_inner, self.d_state
        return {"delta": d, "B": n, "C": n, "mixer": self.mixer.raw_size(d)}

    def _split(self, raw: Tensor) -> ScanInputs:
        delta, B, C, mixer_raw = raw.split(list(self._sizes.values()), -1)
        delta = F.softplus(delta) if self.decay == "mamba" else torch.sigmoid(delta)
        return ScanInputs(delta, unit(B), unit(C), mixer_raw)

    def _layout(self) -> RawLayout | None:
        activation: Activation = "softplus" if self.decay == "mamba" else "sigmoid"
        return _householder_layout(self.mixer, activation, selective=True)

    def _decay_parameter(self) -> tuple[DecayKind, float, Tensor | None]:
        if self.decay == "mamba":
            return "exp", 1.0, self.A_log
        return "softplus", GRIFFIN_SHARPNESS, self.omega

    def _A(self) -> Tensor:
        if self.decay == "mamba":
            return -torch.exp(_at_least_float32(self.A_log))
        return -GRIFFIN_SHARPNESS * F.softplus(_at_least_float32(self.omega))


class FixedPointRNN(FixedPointLayer):
    """The vector-state version: the fixed point of channel mixing and a gated diagonal recurrence.

        h_t = lambda_t * h_{t-1} + (1 - lambda_t) * (Q_t (b_t * x_t - h_t) + h_t)

    with b_t = SiLU(W_b x_t), Q_t from (x_t, h_{t-1}), and Bedouin's gated, normalized output stage.
    Source: Fixed-Point RNNs (arXiv 2503.10799), section 4. Shapes, calls, state (n = 1) and the
    options not listed here are those of `Bedouin`.

    Args:
        decay: "sigmoid": lambda = sigmoid(W x_t); "griffin": lambda = exp(-8 softplus(omega)
            Delta), Delta = sigmoid(W x_t).
        feedback: ("mixer",), or () to switch feedback off.
    """

    components = ("decay", "mixer")
    _has_fused_step = True
    _has_drive = True

    omega: nn.Parameter

    def __init__(
        self,
        d_model: int,
        *,
        expand: float = 2,
        num_householder: int | None = None,
        beta_max: float | None = None,
        mixer: ChannelMixer | None = None,
        decay: RNNDecay = "sigmoid",
        eigenvalues: Eigenvalues = "positive",
        feedback: Collection[str] = ("mixer",),
        feedback_norm: bool = True,
        feedback_init: float = 0.1,
        norm_eps: float = 1e-5,
        solver: Solver | Literal["auto"] = "auto",
        adjoint: Adjoint | None = None,
        max_steps: int | Cap = 100,
        backend: Backend = "auto",
        on_unconverged: OnUnconverged = "warn",
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            _reject(type(self), unknown)
        self.decay = _one_of("decay", decay, get_args(RNNDecay))
        feedback = _ordered_subset("feedback", feedback, ("mixer",))
        super().__init__(
            d_model,
            d_state=1,
            expand=expand,
            mixer=_make_mixer(mixer, num_householder, beta_max),
            input_scale="one_minus_decay",
            eigenvalues=eigenvalues,
            feedback=feedback,
            feedback_norm=feedback_norm,
            feedback_init=feedback_init,
            norm_eps=norm_eps,
            output="norm",
            bias=True,
            solver=solver,
            adjoint=adjoint,
            max_steps=max_steps,
            backend=backend,
            on_unconverged=on_unconverged,
            layer_idx=layer_idx,
            device=device,
            dtype=dtype,
        )
        d, factory = self.d_inner, _factory(device, dtype)
        self.b_proj = nn.Linear(d, d, bias=False, **factory)
        if decay == "griffin":
            self.omega = nn.Parameter(torch.empty(d, 1, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.b_proj.reset_parameters()
        with torch.no_grad():
            if self.decay == "griffin":
                self.omega.copy_(_griffin_omega(self.omega))
                self.dt_bias.zero_()
            else:
                decay = torch.empty_like(self.dt_bias).uniform_(*GRIFFIN_RANGE)
                self.dt_bias.copy_(torch.logit(decay))

    def _component_sizes(self) -> dict[str, int]:
        return {"decay": self.d_inner, "mixer": self.mixer.raw_size(self.d_inner)}

    def _split(self, raw: Tensor) -> ScanInputs:
        decay_raw, mixer_raw = raw.split(list(self._sizes.values()), -1)
        # sigmoid(r) = exp(-softplus(-r)), so both decays are exp(A Delta)
        sigmoid = self.decay == "sigmoid"
        delta = F.softplus(-decay_raw) if sigmoid else torch.sigmoid(decay_raw)
        ones = torch.ones_like(raw[..., :1])
        return ScanInputs(delta, ones, ones, mixer_raw)

    def _layout(self) -> RawLayout | None:
        activation: Activation = "softplus_of_minus" if self.decay == "sigmoid" else "sigmoid"
        return _householder_layout(self.mixer, activation, selective=False)

    def _decay_parameter(self) -> tuple[DecayKind, float, Tensor | None]:
        if self.decay == "sigmoid":
            return "one", 1.0, None
        return "softplus", GRIFFIN_SHARPNESS, self.omega

    def _A(self) -> Tensor:
        if self.decay == "sigmoid":
            return -torch.ones_like(_at_least_float32(self.D)).unsqueeze(-1)
        return -GRIFFIN_SHARPNESS * F.softplus(_at_least_float32(self.omega))

    def _drive(self, x: Tensor) -> Tensor:
        return F.silu(F.linear(x, self.b_proj.weight.to(x.dtype))) * x


def choose_solver(solver: Solver | str, mixer: ChannelMixer) -> Solver:
    """`solver`, or for "auto": Direct where the mixer has the form (e, U, M), else Picard.

    The choice depends on neither b, t nor the device. Times on an H100
    (examples/results/h100_benchmark.json): with feedback, 16 iterations of Jacobi take 23 ms at
    64 x 256 forward and backward, Direct 11.8 ms. A parallel method needs about 10 iterations on an
    untrained layer and, after 1,000 steps on A5, 12 at 32 and 115 at 128 tokens
    (examples/results/README.md). Without feedback, Jacobi(rtol=1e-5) needs 3 on an untrained layer:
    with the gradient it is slower than Direct at every shape; forward alone it is faster at
    16 x 1024 and 8 x 4096 (4.5 and 8.9 ms, Direct 5.4 and 20.4) and slower at shorter ones. That
    gain is limited to inference, depends on the weights and comes with a tolerance, so request
    Jacobi explicitly.
    """
    if solver == "auto":
        return Direct() if isinstance(mixer, StructuredMixer) else Picard()
    if not isinstance(solver, Solver):
        raise TypeError(
            f"solver must be 'auto' or a solver object such as Direct() or Picard(), got {solver!r}"
        )
    return solver


def _householder_layout(
    mixer: ChannelMixer, activation: Activation, *, selective: bool
) -> RawLayout | None:
    # exactly this class: a subclass may read its raw values in another way
    if type(mixer) is not HouseholderProduct:
        return None
    return RawLayout(activation, selective, mixer.num_householder, mixer.beta_max)


def _make_mixer(
    mixer: ChannelMixer | None, num_householder: int | None, beta_max: float | None
) -> ChannelMixer:
    if mixer is None:
        k = 2 if num_householder is None else num_householder
        return HouseholderProduct(k, 1.0 if beta_max is None else beta_max)
    given = {"num_householder": num_householder, "beta_max": beta_max}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} is shorthand for mixer=HouseholderProduct(...): give it or mixer, not both"
            )
    if not isinstance(mixer, ChannelMixer):
        raise TypeError(f"mixer must be a ChannelMixer such as LowRank(2), got {mixer!r}")
    return mixer


def _check_device(mixer: ChannelMixer, device: torch.device) -> None:
    for name, parameter in mixer.named_parameters():
        if parameter.device != device:
            raise ValueError(
                f"mixer must be on the layer's device {device}, got {name} on {parameter.device}: "
                "make it there, or move the whole layer with to(device) once it is made"
            )


def _reject(cls: type[FixedPointLayer], unknown: dict[str, Any]) -> NoReturn:
    name = next(iter(unknown))
    if name == "d_conv":
        raise TypeError(f"{cls.__name__} has no short convolution: feedback replaces it")
    parameters = inspect.signature(cls.__init__).parameters.values()
    valid = [p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD]
    raise TypeError(unknown_option(cls.__name__, name, valid))


def _factory(device: torch.device | str | None, dtype: torch.dtype | None) -> dict[str, Any]:
    return {"device": device, "dtype": dtype}


def _inner_size(expand: float, d_model: int) -> int:
    check_number("expand", expand, 0, 1e3, open_low=True)
    d = int(expand * d_model)
    if d < 1:
        raise ValueError(f"expand * d_model must be at least 1, got {expand} * {d_model}")
    return d


def _one_of(name: str, value: OptionT, valid: Sequence[str]) -> OptionT:
    if value not in valid:
        raise ValueError(f"{name} must be one of {tuple(valid)}, got {value!r}")
    return value


def _ordered_subset(name: str, values: Collection[str], valid: tuple[str, ...]) -> tuple[str, ...]:
    listed = isinstance(values, Iterable) and not isinstance(values, str | Mapping)
    # an iterator can be read only once
    names = list(values) if listed else [None]
    if not all(v in valid for v in names):
        raise ValueError(f"{name} must be a collection of names from {valid}, got {values!r}")
    return tuple(v for v in valid if v in names)


def _solve_dtype(dtype: torch.dtype) -> torch.dtype:
    """Iterates, states, residuals and k x k solves are at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(_solve_dtype(tensor.dtype))


def _log_uniform(like: Tensor, low: float, high: float) -> Tensor:
    span = math.log(high) - math.log(low)
    return torch.exp(torch.rand_like(like) * span + math.log(low))


def _inverse_softplus(value: Tensor) -> Tensor:
    return value + torch.log(-torch.expm1(-value))


def _griffin_omega(like: Tensor) -> Tensor:
    """omega with exp(-8 softplus(omega)) uniform in [0.9, 0.999]: the decay at Delta = 1."""
    decay = torch.empty_like(like).uniform_(*GRIFFIN_RANGE)
    return _inverse_softplus(-decay.log() / GRIFFIN_SHARPNESS)

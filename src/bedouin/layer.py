"""The base class of the layers: projection, fixed point, output stage.

Letters: b batch, t time, m d_model, d d_inner, n d_state, k num_householder, H num_heads,
p = d / H head_dim, r raw values of a head, the first f with feedback. Between the projections from
m to d and back a layer has b' = H b folded samples, each one head of one sample (bedouin.heads).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.checks import check_batch_size, check_layer_input, check_projection_dtype
from bedouin.decoding import may_replay, takes_graph
from bedouin.fixed_point_map import FixedPointMap, StructuredMap
from bedouin.graphed import Graphed
from bedouin.heads import HeadNorm, by_head, fold_pair, fold_state, unfold_state
from bedouin.input_projection import ProjectedLayer
from bedouin.kernels.backend import (
    autocast_dtype,
    choose_backend,
    is_recomputation,
    without_autocast,
)
from bedouin.kernels.branches import beside, join
from bedouin.kernels.feedback import apply_feedback_weight
from bedouin.kernels.heads import fold, unfold
from bedouin.kernels.launch import accumulator
from bedouin.kernels.operands import Operands
from bedouin.kernels.output import gated_output, shifted_norm
from bedouin.kernels.output.eager import FedOutput, fed_output, takes_one_function
from bedouin.mixers import HouseholderProduct
from bedouin.noise import draws_noise, without_noise
from bedouin.packing import Packing, find_packing, hold_memory, last_token
from bedouin.parameterization import X, split_named
from bedouin.solvers import Direct, ImplicitAdjoint
from bedouin.solvers.reporting import Caller, Measured, Outcome
from bedouin.solvers.solve import SolveOptions
from bedouin.state import BedouinState, SequenceCall, StateSize, check_state, zero_state
from bedouin.wrapped import (
    calls_norm,
    is_untouched,
    norm_parameters,
    read_parameter,
    tell_of_hooks,
)


class Call(NamedTuple):
    """The intermediate values of a call, from its projections to its output stage."""

    f: FixedPointMap
    start: Tensor  # (b', t, p), where the solve starts
    x: Tensor  # (b', t, p)
    z: Tensor | None  # (b', t, p)
    gate: Tensor | None  # (b', t, p), the part that x determines; None: z includes it
    W_gate: Tensor | None  # (p, p), (H, p, p) or (H, p, d), of the heads with feedback
    dtype: torch.dtype  # of the products of the output stage and of its result
    before: BedouinState | None  # of folded samples, before the first token; None: zeros
    window: Tensor | None  # (b, w - 1, c), of the convolution after the last token

    def after(
        self,
        y: Tensor,  # (b', t, p), the fixed point, or (b, t, d) with feedback of all heads
    ) -> BedouinState:
        """The state of the folded samples after the last token, which may share memory with what
        the call has computed."""
        before, f = self.before, self.f
        if before is not None and y.shape[1] == 0:
            return before.clone()
        h, y = f.memory(y), f.folded(y)
        last = y[:, -1] if f.lengths is None else last_token(y, f.lengths, f.operands.y0)
        return BedouinState(h, last, self.window)


class FixedPointLayer(ProjectedLayer):
    """The base class of the layers: one fused projection, the solve, the output stage, the state.

    A call consists of `_project`, the solve with `solve_options`, and `_output`.
    """

    state_type = BedouinState

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
        `init_state`. x may be described by these (bedouin.packing):

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
        if the loss leaves it out. Those of each sample: torch.func.vmap over torch.func.grad of a
        function that calls torch.func.functional_call(layer, parameters, x.unsqueeze(0)).

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
            solution = self.solve_options.solve(call.f, call.start, self._caller())
        output, after = self._output(call, solution.value, return_state)
        new_state = None if after is None else unfold_state(after, self.num_heads)
        if packing is not None:
            output, new_state = packing.put(output, x.shape), packing.after(new_state)
        return (output, new_state) if return_state else output

    if TYPE_CHECKING:
        __call__: SequenceCall[BedouinState]  # torch's is a Callable[..., Any]

    def step(self, x_t: Tensor, state: BedouinState) -> tuple[Tensor, BedouinState]:
        """One token: (b, m) -> (b, m), solved exactly with any solver of the layer.

        If the mixer is not of the form (e, U, M), the layer's solver is used with its tolerance.
        On a GPU without gradients, a token is a replay of a CUDA graph (bedouin.decoding), which
        the first call with a batch size and dtype captures. Hooks on the layer run, as in a call.
        Raises the same errors as `forward`, and TypeError for a state that is None.
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
        if state is None:
            raise TypeError("state must not be None: make one with init_state(batch_size)")
        options = self.token_options
        with without_noise():
            call = self._project(x_t.unsqueeze(1), state, options)
        with without_autocast(call.start.device):
            solution = options.solve(call.f, call.start, self._caller())
        output, after = self._output(call, solution.value, True)
        assert after is not None
        return output.squeeze(1), unfold_state(after, self.num_heads)

    def advance(
        self,
        x_t: Tensor,  # (b, m)
        before: BedouinState,  # of folded samples
        keep: Callable[[BedouinState, Measured], None],
    ) -> Tensor:  # (b, m)
        """A token for decoding. `keep` gets the state of the folded samples after it, for which it
        may give up `before`, and what the solve of `num_parts` parts of each sample measured, about
        which nothing is reported."""
        options = replace(self.token_options, on_unconverged="ignore")
        with without_noise():
            call = self._call(self.in_proj(x_t.unsqueeze(1)), None, before, options, None)
        with without_autocast(x_t.device):
            with beside("gate", call.W_gate):
                fed = self._fed_gate(call, before.y.unsqueeze(1))
            caller = Caller(type(self).__name__, self.deferred)
            solution = options.solve(call.f, call.start, caller)
            join("gate", fed)
            assert solution.outcome.measured is not None
            keep(call.after(solution.value), solution.outcome.measured)
            hidden = self._gated(call, call.f.folded(solution.value), fed)
        output: Tensor = self.out_proj(hidden)
        return output.squeeze(1)

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

    def map(self, x: Tensor) -> FixedPointMap:  # x: (b, t, m)
        """The map F that a call with x solves: y (b, t, d) -> F(y), differentiable in y, x and the
        parameters.

        `bedouin.solvers.solve(layer.map(x), y0, solver, time_dim=1)` finds its fixed point from
        y0 (b, t, d) with any solver and gradient, and torch.autograd.grad(f(y), y, v) is the
        product of v with its Jacobian. Raises the errors of a call.
        """
        self.check_input(x, rank=3)
        f = self._project(x, None, self.solve_options).f
        return f if self.num_parts == 1 else f.joining(self.num_parts)

    def graphed(self, sample: Tensor) -> Graphed:  # sample: (b, t, m)
        """The layer as a callable for inputs like `sample`, on a GPU: its forward and backward
        passes are captured now as CUDA graphs, and a call replays them. The numbers are those of
        the layer, and a call costs the host a few launches.

        A call raises where it would differ: another shape, dtype, device, training mode, autocast
        or replaced parameter, or a backward pass after the next call. States and masks are not
        supported. Raises TypeError or ValueError for a sample that the layer cannot take, that is
        not on a CUDA device or is empty, and for a random cap in training.
        """
        return Graphed(self, sample)

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

        wants_state: whether the state after the last token is returned.
        """
        if not is_untouched(self.mixer) and isinstance(self.mixer, HouseholderProduct):
            tell_of_hooks(self, "mixer", self.mixer)
        self.deferred.flush()
        u = u if packing is None else packing.take(u)
        joins = self._joins_weights(u)
        projected = F.linear(u, self.in_proj.weight[: self.d_inner]) if joins else self.in_proj(u)
        before = _incoming_state(state, projected, self.state_size, packing, self.num_heads)
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
        """The map, where its solve starts, and the output stage."""
        at_once = self._splits_at_once(projected)
        projected, window = self._convolve(
            projected, before, packing, at_once=at_once, wants_state=wants_state
        )
        gemm_dtype = autocast_dtype(projected) or self.D.dtype
        dtype = accumulator(projected.dtype)
        low = dtype if dtype == torch.float64 else gemm_dtype
        drive, z, gate = None, None, None
        if self.projection == "input":
            x, raw, drive, z = self._split_projected(projected, before, at_once=at_once)
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
            with beside("parameters"):
                W_y, W_gate = self._feedback_weights(gemm_dtype)
            join("parameters", W_y, W_gate)
            f = self._map(x, raw, drive, W_y, before, packing)
            (b, t, p), joined = x.shape, f.joined
            shape = b // joined, t, joined * p
            if isinstance(options.solver, Direct):
                start = x.new_empty((), dtype=dtype).expand(shape)
            else:
                start = x.new_zeros(shape, dtype=dtype)
        return Call(f, start, x, z, gate, W_gate, low, before, window)

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
        if draws_noise(self):
            drive, raw = self._with_noise(drive, raw)
        with beside("decay"):
            A = by_head(self._A().to(dtype), self.num_heads)
        join("decay", A)
        start = (None, None) if before is None else (before.ssm, before.y)
        lengths = None
        if packing is not None and packing.real is not None:
            lengths = packing.padded_lengths(self.num_heads)
            sizes = self.num_heads, self.head_dim
            raw = hold_memory(raw, packing.real, *sizes, self._raw_without_delta, self.erase > 0)
        operands = Operands(drive, raw, W_y, A, *start)
        options = self.parameterization(), self.mixer, self._split, self.backend
        joined = self.num_heads if self.feedback_scope == "layer" else 1
        kind = StructuredMap if self.is_structured else FixedPointMap
        fed_heads = self.fed_heads if self.fed_heads < self.num_heads else None
        return kind(operands, *options, lengths, joined, fed_heads)

    def _with_noise(
        self,
        x: Tensor,  # (b', t, p)
        raw: Tensor,  # (b', t, r)
    ) -> tuple[Tensor, Tensor]:  # (b', t, p), (b', t, r)
        """x and the raw values with the noise of feedback_noise."""
        fed = self.fed_heads * (x.shape[0] // self.num_heads)
        sizes = {X: x.shape[-1], **self._sizes}
        noise = raw.new_zeros(*raw.shape[:2], sum(sizes.values()))
        parts = split_named(noise[:fed], sizes)
        for name in self.feedback:
            parts[name].normal_(std=self.feedback_noise)
        of_x, of_raw = noise.split([sizes[X], raw.shape[-1]], -1)
        return x + of_x.to(x.dtype), raw + of_raw

    def _caller(self) -> Caller:
        name, draw = type(self).__name__, self.next_draw()
        given = draw, self._keep_outcome, self.num_parts, self.record_history
        return Caller(name, self.deferred, *given)

    def _keep_outcome(self, outcome: Outcome) -> None:
        # A recomputation keeps those of an earlier call with a graph, which get stats.backward.
        if is_recomputation() and self._stats_have_graph:
            return
        # The flag is read itself: in torch 2.11 is_exporting() is also True under torch.compile.
        if not torch.compiler._is_exporting_flag:
            # not by nn.Module's setattr, which tests all kinds of attributes first
            self.__dict__["_outcome"] = outcome
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
            after = call.after(y) if wants_state else None
            hidden = self._output_stage(call, call.f.folded(y))
            if not hidden.numel():
                f = call.f
                known = f.operands.W_y, f.operands.A, call.W_gate, *f.mixer_values
                hidden = _reaching(hidden, *known)
        output: Tensor = self.out_proj(hidden)
        return output, after

    def _output_stage(
        self,
        call: Call,
        y: Tensor,  # (b', t, p), the fixed point
    ) -> Tensor:  # (b, t, d)
        """SiLU(gate + z) * norm(y + D x), or the paper's gate * SiLU(y + D x), where the gate
        includes its feedback W^y norm(y_{t-1})."""
        if calls_norm(self.norm):
            return self._gated_by_module(call, y, self._fed_gate(call, y))
        found = self._gated_in_one_function(call, y, *norm_parameters(self.norm))
        return self._gated(call, y, self._fed_gate(call, y)) if found is None else found

    def _fed_gate(
        self,
        call: Call,
        y: Tensor,  # (b', t, p), of which the last token is not read
    ) -> Tensor | None:  # (b', t, p)
        """The gate's feedback W^y norm(y_{t-1}), if there is any."""
        W, y0 = call.W_gate, call.f.operands.y0
        if W is None or not y.shape[1]:
            return None
        heads, without = self.num_heads, self.num_heads - self.fed_heads
        samples = y.shape[0] // heads
        if without and self.feedback_scope == "head":
            heads = self.fed_heads
            y, y0 = y[: heads * samples], None if y0 is None else y0[: heads * samples]
        common: dict[str, Any] = {"dtype": W.dtype, "backend": self.backend}
        normed = shifted_norm(y, y0, self.feedback_norm_eps, **common)
        fed = apply_feedback_weight(normed, W, heads)
        return F.pad(fed, (0, 0, 0, 0, 0, without * samples)) if without else fed

    def _gated(
        self,
        call: Call,
        y: Tensor,  # (b', t, p), the fixed point
        fed: Tensor | None,  # (b', t, p), the gate's feedback
    ) -> Tensor:  # (b, t, d)
        """The output stage, given the gate's feedback."""
        weight, norm_eps = norm_parameters(self.norm)
        norm: dict[str, Any] = {}
        if weight is not None:
            norm = {"z": call.z, "weight": by_head(weight, self.num_heads), "eps": norm_eps}
        gate, fed = (fed, None) if call.gate is None else (call.gate, fed)
        if gate is None:
            gate = torch.zeros_like(call.x)
        common: dict[str, Any] = {"dtype": call.dtype, "backend": self.backend}
        return gated_output(y, call.x, by_head(self.D, self.num_heads), gate, fed, **norm, **common)

    def _gated_by_module(
        self,
        call: Call,
        y: Tensor,  # (b', t, p), the fixed point
        fed: Tensor | None,  # (b', t, p), the gate's feedback
    ) -> Tensor:  # (b, t, d)
        """`_gated` where the norm is called, since it has hooks."""
        norm, dtype = self.norm, y.dtype
        weight, _ = norm_parameters(norm)
        assert norm is not None and weight is not None
        if self.num_heads > 1 and not isinstance(norm, HeadNorm):
            raise TypeError(
                "norm must be a bedouin.heads.HeadNorm to be called for its hooks in a layer of "
                f"{self.num_heads} heads, got {type(norm).__name__}: remove the hooks"
            )
        tell_of_hooks(self, "norm", norm)
        x, gate = call.x.to(dtype), torch.zeros_like(y)
        for part in (call.gate, fed, call.z):
            gate = gate if part is None else gate + part
        y, x, gate = (unfold(v, self.num_heads) for v in (y, x, gate))
        normed: Tensor = norm((y + self.D.to(dtype) * x).to(weight.dtype))
        return (F.silu(gate) * normed.to(dtype)).to(call.dtype)

    def _gated_in_one_function(
        self,
        call: Call,
        y: Tensor,  # (b', t, p)
        weight: Tensor | None,  # (d,), of the norm
        eps: float,
    ) -> Tensor | None:  # (b', t, p)
        """The result of `fed_output` if this can compute the stage, else None."""
        z, W = call.z, call.W_gate
        if self.num_heads > 1 or weight is None or z is None or W is None:
            return None
        stage = FedOutput(y, call.f.operands.y0, call.x, self.D, z, W, weight)
        if y.dtype != call.dtype or not takes_one_function(stage):
            return None
        if choose_backend(self.backend, y.device, y.dtype) != "reference":
            return None
        if call.gate is not None:
            stage = stage._replace(gate=call.gate + z)
        return fed_output(stage, self.feedback_norm_eps, eps)

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
            f"fed_heads={self.fed_heads}, num_groups={self.num_groups}, "
            f"bounded_x={self.bounded_x}, "
            f"feedback_noise={self.feedback_noise}, "
            f"projection={self.projection!r}, solver={self.solver}, "
            f"adjoint={self.adjoint or ImplicitAdjoint()}"
        )


def _reaching(
    v: Tensor,  # any shape, without entries
    *tensors: Tensor | None,  # any shapes
) -> Tensor:  # as v
    """v with a graph to all tensors, whose gradients are zeros: solves and kernels leave out what
    has no entries, while data-parallel training waits for a gradient of every parameter."""
    for tensor in tensors:
        if tensor is not None:
            v = v + tensor.sum()
    return v


def _incoming_state(
    state: BedouinState | None,  # of b samples, or of what the arguments of the call say
    x: Tensor,  # (b, t, any size)
    size: StateSize,
    packing: Packing | None,
    num_heads: int,
) -> BedouinState | None:
    """The state of the folded samples before the first token; None: zeros.

    A call without tokens returns it, so it is then not None. Raises TypeError or ValueError for a
    state that does not fit.
    """
    dtype = accumulator(x.dtype)
    if state is None:
        if x.shape[1]:
            return None
        return fold_state(zero_state(x.shape[0], size, dtype, x.device), num_heads)
    rows = x.shape[0] if packing is None else packing.num_states
    state = check_state(state, rows, size, x.new_empty(0, dtype=dtype))
    if packing is not None:
        state = packing.before(state, zero_state(1, size, dtype, x.device))
    return fold_state(state, num_heads)

"""DeltaProduct, DeltaNet and Gated DeltaNet: memories that are written by the delta rule.

Letters: b batch, t time, m d_model, h heads, k num_householder, p key channels and v value channels
of a head, w convolution width.
"""

import math
from collections import namedtuple
from typing import Any, NamedTuple, get_args

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.checks import check_bool, check_layer_idx, known_options, one_of, positive_int
from bedouin.kernels import delta_rule
from bedouin.kernels.backend import without_autocast
from bedouin.kernels.convolution import Groups
from bedouin.kernels.delta_rule import DeltaBackend
from bedouin.kernels.output import gated_norm
from bedouin.kernels.scan import Eigenvalues
from bedouin.layers import common
from bedouin.layers.convolution import ShortConvolution
from bedouin.packing import tokens_before, zero_outside
from bedouin.state import RecurrentState, StateShapes
from bedouin.wrapped import side_by_side

FLA_UNIT_EPS = 1e-6  # under the root of the norm of queries and keys, as in flash-linear-attention
A_MAX = 16.0  # the largest initial exp(A_log) of a gated layer, as in Gated DeltaNet
HEAD_DIM = 128  # most key channels of a head that is not told how many to have
# Factor on the usual initial decay rates: memories that forget less at first learn associative
# recall (examples/results/table).
SLOW_RATES = 0.01


class DeltaState(RecurrentState, namedtuple("_DeltaState", "conv memory")):  # type: ignore[misc]
    """conv: (b, w - 1, h (p + k p + k v)), the last inputs of the convolution; memory:
    (b, h, p, v); at least float32."""

    __slots__ = ()
    axes = (2, 3)


class Projected(NamedTuple):
    """What the projections make of a call's input."""

    qkv: Tensor  # (b, t, h p + k h p + k h v), of query, keys and values
    gate: Tensor | None  # (b, t, h v)
    b: Tensor  # (b, t, k h), raw beta
    a: Tensor | None  # (b, t, h), raw decay


class DeltaProduct(common.RecurrentLayer[DeltaState]):
    """DeltaProduct, (b, t, m) -> (b, t, m): k delta-rule steps a token and head,

        S <- alpha_t S,  then for j = 1 ... k:  S <- (I - beta_j k_j k_j^T) S + beta_j k_j v_j^T
        out = out_proj(norm(S^T q / sqrt(p)) * SiLU(g))

    where q, k, v = SiLU(conv(proj(x))), queries and keys have unit length, and norm is an RMSNorm
    of each head. Source: DeltaProduct (arXiv 2502.10297); projections, options and their defaults
    are those of flash-linear-attention's GatedDeltaProduct, but for the sizes of the heads.

    Args:
        num_householder: k.
        gated: whether there is a decay alpha_t = exp(-exp(A_log) softplus(a_proj(x) + dt_bias)) for
            each head, as in Gated DeltaNet (arXiv 2412.06464).
        eigenvalues: of I - beta k k^T; "positive": beta = sigmoid(b_proj(x)), so in [0, 1];
            "full": beta = 2 sigmoid(b_proj(x)), so in [-1, 1].
        num_heads: h. head_dim: p; None: d_model / num_heads. expand_v: v is expand_v * p.
        output_gate: whether there is a gate SiLU(g), g = g_proj(x).
        d_conv: width of the short convolution; None: no convolution, SiLU stays.
        backend: of the delta rule: "torch" or "reference": plain torch, in chunks; "triton":
            kernels for p of at most 256, without second derivatives, in chunks, too; "fla": the
            kernels of flash-linear-attention, on a GPU in bfloat16 or float16, except on Hopper
            with Triton from 3.4 to before 3.7.1, which miscompiles its backward pass; "auto":
            "triton" on a GPU where it can, else "torch".
    """

    state_type = DeltaState
    none_for_zeros = ("memory",)
    settable_options = ("backend", "layer_idx")
    saved_options = ("num_householder", "num_heads", "head_dim", "eigenvalues", "norm_eps")
    shown_options = "num_householder", "gated", "eigenvalues", "num_heads", "head_dim", "value_dim"

    @known_options
    def __init__(
        self,
        d_model: int,
        *,
        num_householder: int = 2,
        gated: bool = False,
        eigenvalues: Eigenvalues = "full",
        num_heads: int = 4,
        head_dim: int | None = None,
        expand_v: float = 2,
        output_gate: bool = True,
        d_conv: int | None = 4,
        norm_eps: float = 1e-5,
        backend: DeltaBackend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, dtype)
        check_bool("gated", gated)
        check_bool("output_gate", output_gate)
        delta_rule.check_delta_backend(backend)
        self.gated, self.backend = gated, backend
        self.eigenvalues = one_of("eigenvalues", eigenvalues, get_args(Eigenvalues))
        self.norm_eps = common.positive_number("norm_eps", norm_eps)
        k = self.num_householder = positive_int("num_householder", num_householder)
        h = self.num_heads = positive_int("num_heads", num_heads)
        p = common.head_size(d_model, h) if head_dim is None else positive_int("head_dim", head_dim)
        v = common.expanded("expand_v", expand_v, "head_dim", p)
        self.head_dim, self.value_dim = p, v
        self._sizes = [h * p, k * h * p, k * h * v]

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(d_model, size, bias=False, **factory) for size in self._sizes
        )
        self.b_proj = nn.Linear(d_model, k * h, bias=False, **factory)
        self.conv = ShortConvolution(sum(self._sizes), d_conv, bias=False, **factory)
        self.a_proj = nn.Linear(d_model, h, bias=False, **factory) if gated else None
        if gated:
            self.A_log = nn.Parameter(torch.empty(h, **factory))
            self.dt_bias = nn.Parameter(torch.empty(h, **factory))
        self.g_proj = nn.Linear(d_model, h * v, bias=False, **factory) if output_gate else None
        self.norm_weight = nn.Parameter(torch.empty(v, **factory))
        self.out_proj = nn.Linear(h * v, d_model, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.ones_(self.norm_weight)
        if self.gated:
            with torch.no_grad():
                # exp(A_log) is uniform in (0, 16]: rand may be 0, whose logarithm is not finite
                self.A_log.copy_(torch.log(A_MAX * (1 - torch.rand_like(self.A_log))))
            common.reset_dt_bias(self.dt_bias)
        self._mark_parameters()

    def _mark_parameters(self) -> None:
        common.mark(self, "_no_weight_decay", "A_log", "dt_bias", "norm_weight")

    def _state_sizes(self) -> StateShapes:
        memory = self.num_heads, self.head_dim, self.value_dim
        return {"conv": self.conv.window_size, "memory": memory}

    def _run(
        self, x: Tensor, state: DeltaState, lengths: Tensor | None
    ) -> tuple[Tensor, DeltaState]:  # (b, t, m), (b,) -> (b, t, m)
        projected = self.project(x)
        recalled, after = self.recall(projected, state, lengths)
        return self.output(recalled, projected.gate), after

    def project(self, x: Tensor) -> Projected:  # (b, t, m)
        modules = self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.b_proj, self.a_proj
        joined = side_by_side(x, [module for module in modules if module is not None])
        h, has_gate, has_decay = self.num_heads, self.g_proj is not None, self.a_proj is not None
        sizes = [sum(self._sizes), has_gate * h * self.value_dim]
        sizes += [h * self.num_householder, has_decay * h]
        qkv, gate, b, a, _ = joined.split([*sizes, joined.shape[-1] - sum(sizes)], -1)
        return Projected(qkv, gate if has_gate else None, b, a if has_decay else None)

    def recall(
        self, projected: Projected, state: DeltaState, lengths: Tensor | None
    ) -> tuple[Tensor, DeltaState]:  # (b, t, h, v)
        """What the memories hold under the queries, S_t^T q_t / sqrt(p), and the state after."""
        units = Groups((1 + self.num_householder) * self.num_heads, self.head_dim, FLA_UNIT_EPS)
        backend, qkv = delta_rule.kernel_backend(self.backend), projected.qkv
        with without_autocast(qkv.device):
            options: dict[str, Any] = {"groups": units, "backend": backend}
            qkv, window = self.conv.activated(qkv, state.conv, lengths, **options)
            q, k, v = qkv.split(self._sizes, -1)
            heads = {"k": self.num_householder, "h": self.num_heads}
            q = rearrange(q, "b t (h p) -> b t h p", h=self.num_heads)
            k, v = (rearrange(u, "b t (k h p) -> b t k h p", **heads) for u in (k, v))
            scale, a = 2.0 if self.eigenvalues == "full" else 1.0, projected.a
            rates = None if a is None else (a, self.A_log, self.dt_bias)
            beta, decay = delta_rule.delta_rates(projected.b, k, rates, scale, backend=backend)
            if lengths is not None:
                real = tokens_before(lengths, k.shape[1])
                beta = zero_outside(real, beta)
                decay = None if decay is None else zero_outside(real, decay)
            inputs = delta_rule.DeltaInputs(q, k, v, beta, decay)
            recalled, memory = delta_rule.delta_rule(inputs, state.memory, self.backend)
        return recalled, DeltaState(window, memory)

    def output(self, recalled: Tensor, gate: Tensor | None) -> Tensor:
        """out_proj(norm(o) * SiLU(gate)) (b, t, m) of o from `recall` and gate (b, t, h v)."""
        if gate is None:
            normed = F.rms_norm(recalled, (self.value_dim,), None, self.norm_eps)
            hidden = (normed * self.norm_weight).flatten(-2).to(recalled.dtype)
        else:
            backend = delta_rule.kernel_backend(self.backend)
            with without_autocast(gate.device):
                norm = self.norm_weight, self.norm_eps
                hidden = gated_norm(recalled, gate, *norm, backend=backend)
        output: Tensor = self.out_proj(hidden)
        return output


class DeltaNet(DeltaProduct):
    """DeltaNet, (b, t, m) -> (b, t, m): `DeltaProduct` with num_householder = 1, and its options.
    The defaults are those of flash-linear-attention's layers: eigenvalues in [0, 1], and None for
    an expand_v of 1 without output gate, or where `gated` 2 and a gate. Sources: DeltaNet (arXiv
    2406.06484) and, where `gated`, Gated DeltaNet (arXiv 2412.06464)."""

    def __init__(
        self,
        d_model: int,
        *,
        gated: bool = False,
        eigenvalues: Eigenvalues = "positive",
        expand_v: float | None = None,
        output_gate: bool | None = None,
        **options: Any,
    ) -> None:
        check_bool("gated", gated)
        if "num_householder" in options:
            raise TypeError("DeltaNet has no option num_householder, which is 1: use DeltaProduct")
        options["expand_v"] = (2.0 if gated else 1.0) if expand_v is None else expand_v
        options["output_gate"] = gated if output_gate is None else output_gate
        options |= {"gated": gated, "eigenvalues": eigenvalues}
        super().__init__(d_model, num_householder=1, **options)


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet, (b, t, m) -> (b, t, m), with eigenvalues in [-1, 1] and slow initial decay.

        S_t = e^{g_t} (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t / sqrt(p)
        out = out_proj(norm(o) * SiLU(g_proj(x)))

    with q, k, v = SiLU(conv(proj(x))), q and k of unit length, beta = 2 sigmoid(b_proj(x)) and
    g = -exp(A_log) softplus(a_proj(x) + dt_bias) for each head, whose rates exp(A_log) begin at a
    hundredth of the usual ones. Sources: Gated DeltaNet (arXiv 2412.06464), and for eigenvalues
    below 0 Grazzi et al. (2411.12537).

    Args:
        num_heads: h; None: d_model // head_dim.
        head_dim: p; None: d_model // num_heads, or without num_heads min(128, d_model // 2).
        expand_v, d_conv, backend: as in `bedouin.baselines.DeltaProduct`.
        norm_eps: of the norm of each head's outputs.
        layer_idx: kept as an attribute, as users of transformers expect.

    Raises TypeError or ValueError for options of another type or out of range.
    """

    captures_step = True

    @known_options
    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 2,
        d_conv: int | None = 4,
        norm_eps: float = 1e-5,
        backend: DeltaBackend = "auto",
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        positive_int("d_model", d_model)
        if num_heads is not None:
            positive_int("num_heads", num_heads, " or None")
        if head_dim is not None:
            positive_int("head_dim", head_dim, " or None")
        else:
            size = min(HEAD_DIM, d_model // 2) if num_heads is None else d_model // num_heads
            head_dim = max(1, size)
        heads = max(1, d_model // head_dim) if num_heads is None else num_heads
        options: dict[str, Any] = {"gated": True, "eigenvalues": "full", "d_conv": d_conv}
        options |= {"num_heads": heads, "head_dim": head_dim, "expand_v": expand_v}
        options |= {"norm_eps": norm_eps, "backend": backend, "device": device, "dtype": dtype}
        super().__init__(d_model, **options)
        self.layer_idx = check_layer_idx(layer_idx)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.A_log.add_(math.log(SLOW_RATES))

"""The stages of a call of a fixed-point layer: its state, its map F, the solve, its output.

Letters: b batch, t time, m d_model, d d_inner, n d_state, H num_heads, p = d / H head_dim, r raw
values of a head, w width of a convolution. b' = H b are folded samples (layers/heads.py).
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin.kernels import backend
from bedouin.kernels.heads import apply_weight, fold, padding, per_sample, unfold
from bedouin.kernels.launch import accumulator
from bedouin.kernels.operands import CLOSED, Operands, closed_value
from bedouin.kernels.output import gated_output, shifted_norm
from bedouin.layers.heads import HeadNorm, by_head, fold_state, project_heads, unfold_state
from bedouin.layers.map import FixedPointMap, StructuredMap
from bedouin.layers.mixers import HouseholderProduct
from bedouin.packing import Packing, last_token, tokens_before
from bedouin.solvers.reporting import Caller, Outcome
from bedouin.solvers.solve import SolveOptions
from bedouin.state import BedouinState
from bedouin.wrapped import calls_norm, is_plain, is_untouched, norm_parameters, tell_of_hooks

Layer = Any  # a FixedPointLayer, whose module imports this one


class Projected(NamedTuple):
    """What the projections make of a call's input."""

    f: FixedPointMap
    x: Tensor  # (b', t, p)
    z: Tensor | None  # (b', t, p)
    gate: Tensor  # (b', t, p), the part that x determines
    W_gate: Tensor | None  # (p, p) or (H, p, p), the gate's part of W^y
    dtype: torch.dtype  # of the products of the output stage and of its result
    window: Tensor | None  # (b, w - 1, d), of the convolution after the last token


def state_before(layer: Layer, state: BedouinState | None, packing: Packing) -> BedouinState | None:
    """The state of the folded samples before the first token; None: zeros."""
    if state is None:
        return None
    state = layer.checked_state(state, packing.num_states)
    if packing.first is not None:
        state = packing.before(state, layer.init_state(1))
    return fold_state(state, layer.num_heads)


def project(
    layer: Layer, u: Tensor, before: BedouinState | None, lengths: Tensor | None
) -> Projected:  # u: (b, t, m), before: of folded samples, lengths: (b,)
    """x, z = in_proj(u), raw = W^x x_t and the map F with its feedback W^y norm(y_{t-1})."""
    layer.deferred.flush()
    if isinstance(layer.mixer, HouseholderProduct) and not is_untouched(layer.mixer):
        tell_of_hooks(layer, "mixer", layer.mixer)
    H, dtype, window = layer.num_heads, accumulator(u.dtype), None
    x, *z = layer.in_proj(u).split(list(layer.projected_sizes.values()), -1)
    if layer.conv is not None:
        shape = u.shape[0], *layer.conv.window_size
        window = u.new_zeros(shape, dtype=dtype) if before is None else before.conv
        x, window = layer.conv(x, window, lengths)
        x = F.silu(x)
    x, *z = (fold(v, H) for v in (x, *z))
    low = backend.autocast_dtype(x) or layer.D.dtype
    product, (r, p) = _project_x(layer, x), (layer.raw_size, layer.head_dim)
    raw, gate, _ = product.split([r, p, product.shape[-1] - r - p], -1)
    if lengths is not None:
        lengths = lengths.repeat(H)
        # Delta is 0 in the padding: the decay is then 1 and the input scale 0, so that the memory
        # passes, and no gradient reaches the other raw values. One split, because its gradient is
        # one concatenation.
        delta, rest = raw.split([p, r - p], -1)
        closed = CLOSED if layer.activation == "softplus_of_minus" else -CLOSED
        padded = ~tokens_before(lengths, raw.shape[1]).unsqueeze(-1)
        raw = torch.cat([delta.masked_fill(padded, closed_value(closed, raw.dtype)), rest], -1)
    with backend.without_autocast(u.device):
        W_y, W_gate = layer._feedback_weights(low)
        A = by_head(layer._A().to(dtype), H)
        start = (None, None) if before is None else (before.ssm, before.y)
        operands = Operands(layer._drive(x), raw, W_y, A, *start)
        kind = StructuredMap if layer.is_structured else FixedPointMap
        options = layer.parameterization(), layer.mixer, layer._split, layer.backend
        f = kind(operands, *options, lengths)
    return Projected(f, x, z[0] if z else None, gate, W_gate, low, window)


def _project_x(layer: Layer, x: Tensor) -> Tensor:  # (b', t, p) -> (b', t, r + p), or more columns
    """W^x x with its bias, from that of Delta to that of the gate, behind which none may read."""
    bias, spare, is_matrix = by_head(layer.dt_bias, layer.num_heads), 0, is_plain(layer.x_proj)
    if is_matrix and backend.choose_backend(layer.backend, x.device, x.dtype) == "triton":
        # kernels and cuBLAS read rows fast that begin at aligned addresses
        spare = padding(layer.raw_size + layer.head_dim)
    if layer.raw_bias is None:
        bias = F.pad(bias, (0, layer.raw_size + spare))
    else:
        unread = bias.detach()[..., :1].expand(*bias.shape[:-1], spare)
        bias = torch.cat([bias, by_head(layer.raw_bias, layer.num_heads), unread], -1)
    if is_matrix:
        return project_heads(x, layer.x_proj.weight, bias)
    product: Tensor = layer.x_proj(x)
    if product.shape[-1] != bias.shape[-1]:
        raise ValueError(
            f"x_proj must return r + head_dim = {bias.shape[-1]} values for each vector, got "
            f"{tuple(product.shape)}: replace it with a module of that width"
        )
    rows = bias if bias.dim() == 1 else per_sample(bias, product.shape[0]).unsqueeze(1)
    return (product + rows).to(product.dtype)


def solving(layer: Layer, f: FixedPointMap, options: SolveOptions) -> tuple[Tensor, Caller]:
    """What `SolveOptions.solve` takes beside the map: the start (b', t, p) and the caller."""
    x, dtype = f.operands.x, f.operands.A.dtype
    # an exact solve does not read where it starts
    start = x.new_empty((), dtype=dtype).expand(x.shape)
    if not options.solver.is_exact:
        start = torch.zeros_like(start, memory_format=torch.contiguous_format)
    draw, record = None, partial(_keep_outcome, layer)
    # a compiled graph holds the count as a constant and would be recompiled for each call
    if layer.training and (layer.cap.is_random or not torch.compiler.is_compiling()):
        draw = layer.draws.next(layer.cap)
    name, history = type(layer).__name__, layer.record_history
    caller = Caller(name, layer.deferred, draw, record, layer.num_heads, history)
    return start, caller


def _keep_outcome(layer: Layer, outcome: Outcome) -> None:
    # A recomputation keeps those of an earlier call with a graph, which get stats.backward.
    if backend.is_recomputation() and layer._stats_have_graph:
        return
    # The flag is read itself: in torch 2.11 is_exporting() is also True under torch.compile.
    if not torch.compiler._is_exporting_flag:
        # not by nn.Module's setattr, which tests all kinds of attributes first
        layer.__dict__["_outcome"] = outcome
        layer.__dict__["_stats_have_graph"] = torch.is_grad_enabled()


def state_after(layer: Layer, projected: Projected, y: Tensor) -> BedouinState:  # y: as in `gated`
    """The state after the last token, in memory of its own."""
    f = projected.f
    if not y.shape[1]:
        h, last = f.wide.start()
    else:
        h, last = f.memory(y), y[:, -1]
        if f.lengths is not None:
            last = last_token(y, f.lengths, f.operands.y0)
    return unfold_state(BedouinState(h, last, projected.window), layer.num_heads)


def gated(layer: Layer, projected: Projected, y: Tensor) -> Tensor:  # y: (b', t, p) -> (b, t, d)
    """SiLU(gate + z) * norm(y + D x), or the paper's gate * SiLU(y + D x), where the gate
    includes its feedback W^y norm(y_{t-1})."""
    f, x, z, gate, W_gate, dtype, _ = projected
    H, kind, fed = layer.num_heads, layer.backend, None
    if W_gate is not None and y.shape[1]:
        low = W_gate.dtype
        normed = shifted_norm(y, f.operands.y0, layer.feedback_norm_eps, dtype=low, backend=kind)
        fed = apply_weight(normed, W_gate)
    weight, eps = norm_parameters(layer.norm)
    if calls_norm(layer.norm):
        return _gated_by_module(layer, projected, y, fed)
    D, weight = by_head(layer.D, H), None if weight is None else by_head(weight, H)
    hidden = gated_output(y, x, D, gate, fed, z, weight, eps=eps, dtype=dtype, backend=kind)
    if not hidden.numel():
        # Solves and kernels leave out what has no entries, while data-parallel training waits
        # for a gradient of every parameter.
        for v in (f.operands.W_y, f.operands.A, W_gate, *f.mixer_values):
            hidden = hidden if v is None else hidden + v.sum()
    return hidden


def _gated_by_module(layer: Layer, projected: Projected, y: Tensor, fed: Tensor | None) -> Tensor:
    """`gated` where the norm is called, for its hooks; fed: (b', t, p), the gate's feedback."""
    norm: Any = layer.norm
    if layer.num_heads > 1 and not isinstance(norm, HeadNorm):
        raise TypeError(
            f"norm must be a {HeadNorm.__name__} to be called for its hooks in a layer of "
            f"{layer.num_heads} heads, got {type(norm).__name__}: remove the hooks"
        )
    tell_of_hooks(layer, "norm", norm)
    gate = projected.gate.to(y.dtype)
    for part in (fed, projected.z):
        gate = gate if part is None else gate + part
    y, x, gate = (unfold(v.to(y.dtype), layer.num_heads) for v in (y, projected.x, gate))
    normed: Tensor = norm((y + layer.D.to(y.dtype) * x).to(layer.D.dtype))
    return (F.silu(gate) * normed.to(y.dtype)).to(projected.dtype)

"""The functions that are measured: this layer, its scan, and other layers for comparison.

Letters: b batch, t time, m d_model, d d_inner, n d_state, k reflections.
"""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from bedouin import Bedouin, GatedDeltaNet
from bedouin.baselines import Mamba
from bedouin.kernels.scan import selective_scan
from bedouin.solvers import Adjoint, FixedCap, ImplicitAdjoint, Jacobi, Picard
from benchmarks.cost import explicit_cost, layer_cost, lstm_cost, scan_cost
from benchmarks.measure import Numbers, Subject, inputs_of
from benchmarks.setting import Setting, Shape
from benchmarks.timing import Cost

CAP = 16
"""Iterations of the parallel solvers, as many as in the faster timing of the paper's code."""

LINEAR_RTOL = 1e-5
"""Tolerance of the iteration without feedback, near the rounding error of float32 sums."""


def direct(setting: Setting, shape: Shape, **options: Any) -> Subject:
    """The layer with its default solver: exact sweep, exact gradient."""
    return _layer_subject(setting, shape, setting.layer(**options), sequential=True)


def jacobi(setting: Setting, shape: Shape) -> Subject:
    """CAP block-Jacobi iterations, exact gradient."""
    solver = Jacobi(rtol=0.0, atol=0.0)
    layer = setting.layer(solver=solver, max_steps=FixedCap(CAP), adjoint=ImplicitAdjoint())
    return _layer_subject(setting, shape, layer, sequential=False)


def jacobi_without_feedback(setting: Setting, shape: Shape) -> Subject:
    """Block-Jacobi iterations until the defect is below 1e-5 of the scale, exact gradient."""
    solver = Jacobi(rtol=LINEAR_RTOL, atol=0.0)
    layer = setting.layer(solver=solver, feedback=())
    # the host reads the residual to decide when to stop, which a captured call cannot
    return replace(_layer_subject(setting, shape, layer, sequential=False), has_graph=False)


def picard(setting: Setting, shape: Shape, adjoint: Adjoint) -> Subject:
    """CAP Picard iterations; with the one-step gradient the paper's method."""
    solver = Picard(rtol=0.0, atol=0.0)
    layer = setting.layer(solver=solver, max_steps=FixedCap(CAP), adjoint=adjoint)
    return _layer_subject(setting, shape, layer, sequential=False)


def _layer_subject(setting: Setting, shape: Shape, layer: Bedouin, *, sequential: bool) -> Subject:
    cost = partial(layer_cost, fed=fed_values(setting, layer))
    return Subject(
        layer,
        inputs_of(setting, shape),
        tuple(layer.parameters()),
        cost(setting, shape, backward=False),
        cost(setting, shape, backward=True),
        sequential_steps=shape.t if sequential else 0,
        observe=lambda: solve_numbers(layer),
    )


def fed_values(setting: Setting, layer: Bedouin) -> int | None:
    """How many raw values of a token have feedback, in all heads; None: no feedback."""
    # W^y has rows for the gate, too
    return None if layer.y_proj is None else layer.y_proj.weight.numel() // setting.p - setting.d


def solve_numbers(layer: Bedouin) -> Numbers:
    """The worst statistics of the layer's last solve."""
    stats = layer.stats
    if stats is None:
        return {}
    return {
        "residual": float(stats.residual.max()),
        "converged": bool(stats.converged.all()),
        "num_steps": int(stats.num_steps.max()),
    }


def explicit(setting: Setting, shape: Shape, *, kind: type[nn.Module]) -> Subject:
    """A layer that is made from d_model alone, so with its default sizes, in training mode."""
    torch.manual_seed(0)
    layer = kind(setting.m, device=setting.device, dtype=setting.dtype)
    forward, both = (
        explicit_cost(layer, setting, shape, backward=backward) for backward in (False, True)
    )
    steps = 0 if kind in (GatedDeltaNet, Mamba) else shape.t
    draw = inputs_of(setting, shape)
    return Subject(layer, draw, tuple(layer.parameters()), forward, both, sequential_steps=steps)


def lstm(setting: Setting, shape: Shape) -> Subject:
    """cuDNN's LSTM from m to d (torch's own on a CPU)."""
    dtype = setting.gemm_dtype
    torch.manual_seed(0)
    module = nn.LSTM(setting.m, setting.d, batch_first=True, device=setting.device, dtype=dtype)

    def function(x: Tensor) -> Tensor:
        with torch.autocast(setting.device.type, enabled=False):
            output: Tensor = module(x)[0]
        return output

    def draw() -> tuple[Tensor, ...]:
        return (setting.randn(shape.b, shape.t, setting.m, dtype=dtype).requires_grad_(),)

    forward, both = (lstm_cost(setting, shape, backward=backward) for backward in (False, True))
    return Subject(
        function, draw, tuple(module.parameters()), forward, both, sequential_steps=shape.t
    )


def scan_inputs(setting: Setting, shape: Shape) -> tuple[Tensor, ...]:
    """x, Delta (b, t, d), A (d, n), B, C (b, t, n) with Mamba's ranges of values."""
    b, t, d, n, dtype = shape.b, shape.t, setting.d, setting.n, setting.gemm_dtype
    x, B, C = (setting.randn(b, t, size, dtype=dtype) for size in (d, n, n))
    delta = torch.nn.functional.softplus(setting.randn(b, t, d, dtype=dtype) - 2)
    rates = -torch.arange(1, n + 1, device=setting.device, dtype=torch.float32)
    A = repeat(rates, "n -> d n", d=d).contiguous()
    return tuple(tensor.requires_grad_() for tensor in (x, delta, A, B, C))


def scan(setting: Setting, shape: Shape) -> Subject:
    """This library's diagonal scan alone."""

    def function(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        return selective_scan(x, delta, A, B, C, input_scale="delta")[0]

    return _scan_subject(setting, shape, function)


def mamba_scan(setting: Setting, shape: Shape) -> Subject:
    """mamba-ssm's CUDA scan alone, in its layout (b, d, t)."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    def draw() -> tuple[Tensor, ...]:
        x, delta, A, B, C = scan_inputs(setting, shape)
        x, delta, B, C = (
            rearrange(tensor.detach(), "b t c -> b c t").contiguous().requires_grad_()
            for tensor in (x, delta, B, C)
        )
        return x, delta, A, B, C

    forward, both = (scan_cost(setting, shape, backward=backward) for backward in (False, True))
    return Subject(selective_scan_fn, draw, (), forward, both)


def mamba_is_missing(device: torch.device) -> str | None:
    """Why mamba-ssm's scan cannot be measured."""
    for module in ("mamba_ssm", "selective_scan_cuda"):
        if find_spec(module) is None:
            return f"{module} is not installed"
    return None


def _scan_subject(setting: Setting, shape: Shape, function: Any) -> Subject:
    forward, both = (scan_cost(setting, shape, backward=backward) for backward in (False, True))
    return Subject(function, lambda: scan_inputs(setting, shape), (), forward, both)


def gated_delta_product(setting: Setting, shape: Shape) -> Subject:
    """flash-linear-attention's operation, with heads of 64 of the d channels and k reflections."""
    from fla.ops.gated_delta_product import chunk_gated_delta_product

    size, k, dtype = min(64, setting.d), setting.k, setting.gemm_dtype
    b, t, heads = shape.b, shape.t, setting.d // size

    def function(q: Tensor, keys: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        output: Tensor = chunk_gated_delta_product(
            q, keys, v, g.float(), beta, k, use_qk_l2norm_in_kernel=True
        )[0]
        return output

    def draw() -> tuple[Tensor, ...]:
        shapes = ((t, heads, size), (t * k, heads, size), (t * k, heads, size))
        q, keys, v = (setting.randn(b, *rest, dtype=dtype) for rest in shapes)
        g = -torch.rand(b, t, heads, device=setting.device, dtype=dtype)
        beta = torch.rand(b, t * k, heads, device=setting.device, dtype=dtype)
        return tuple(tensor.requires_grad_() for tensor in (q, keys, v, g, beta))

    # reads q, k keys and k values, and writes the output
    moved = dtype.itemsize * shape.tokens * setting.d * (2 + 2 * k)
    cost = Cost(moved, 0)
    return Subject(function, draw, (), cost, cost * 3)


def fla_is_missing(device: torch.device) -> str | None:
    """Why flash-linear-attention cannot be measured."""
    return None if find_spec("fla") is not None else "fla is not installed"

"""The functions that are measured: this layer, its scan, and other layers for comparison.

Letters: b batch, t time, m d_model, d d_inner, n d_state.
"""

from dataclasses import replace

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from bedouin import GatedDeltaNet
from bedouin.baselines import Mamba
from bedouin.kernels.scan import selective_scan
from bedouin.solvers import Adjoint, FixedCap, Jacobi, Picard
from benchmarks.cost import SCAN_BACKWARD, scan_cost
from benchmarks.measure import Subject, layer_subject
from benchmarks.setting import Setting, Shape
from research.rivals import KimiDeltaAttention

CAP = 16
"""Iterations of the parallel solvers, as many as in the faster timing of the paper's code."""

LINEAR_RTOL = 1e-5
"""Tolerance of the iteration without feedback, near the rounding error of float32 sums."""


def direct(setting: Setting, shape: Shape, **options: object) -> Subject:
    """The layer with its default solver: exact sweep, exact gradient."""
    return layer_subject(setting.layer(**options), setting, shape, steps=shape.t)


def capped(setting: Setting, shape: Shape, solver: Jacobi | Picard, adjoint: Adjoint) -> Subject:
    """CAP iterations; those of Picard with the one-step gradient are the paper's method."""
    layer = setting.layer(solver=solver, max_steps=FixedCap(CAP), adjoint=adjoint)
    return layer_subject(layer, setting, shape)


def jacobi_without_feedback(setting: Setting, shape: Shape) -> Subject:
    """Block-Jacobi iterations until the defect is below 1e-5 of the scale, exact gradient."""
    layer = setting.layer(solver=Jacobi(rtol=LINEAR_RTOL, atol=0.0), feedback=())
    # the host reads the residual to decide when to stop, which a captured call cannot
    return replace(layer_subject(layer, setting, shape), has_graph=False)


def explicit(setting: Setting, shape: Shape, *, kind: type[nn.Module]) -> Subject:
    """A layer that is made from d_model alone, so with its default sizes, in training mode."""
    torch.manual_seed(0)
    layer = kind(setting.m, device=setting.device, dtype=setting.dtype)
    steps = 0 if kind in (GatedDeltaNet, Mamba) else shape.t
    return layer_subject(layer, setting, shape, steps=steps)


def lstm(setting: Setting, shape: Shape) -> Subject:
    """cuDNN's LSTM from m to d (torch's own on a CPU)."""
    torch.manual_seed(0)
    options = {"device": setting.device, "dtype": setting.dtype}
    module = nn.LSTM(setting.m, setting.d, batch_first=True, **options)
    subject = layer_subject(module, setting, shape, steps=shape.t)
    return replace(subject, function=lambda x: module(x)[0])


class FlaKimiDeltaAttention(KimiDeltaAttention):
    """Kimi Delta Attention with the kernels of flash-linear-attention."""

    def rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, erase: Tensor, write: Tensor
    ) -> Tensor:
        from fla.ops.kda import chunk_kda

        q, k, v = (u.to(self.out_proj.weight.dtype) for u in (q, k, v))
        o: Tensor = chunk_kda(q, k, v, decay, write.squeeze(-1), scale=1.0)[0]
        return o.float()


def kimi(setting: Setting, kind: type[KimiDeltaAttention] = FlaKimiDeltaAttention) -> nn.Module:
    """Kimi Delta Attention with heads of 64 channels, in all as many channels as the LSTM has."""
    torch.manual_seed(0)
    layer = kind(setting.m, num_heads=setting.d // 64, head_dim=64, d_conv=4)
    return layer.to(setting.device, setting.dtype)


def scan_inputs(setting: Setting, shape: Shape) -> tuple[Tensor, ...]:
    """x, Delta (b, t, d), A (d, n), B, C (b, t, n) with Mamba's ranges of values."""
    b, t, d, n = shape.b, shape.t, setting.d, setting.n
    x, B, C = (setting.randn(b, t, size) for size in (d, n, n))
    delta = torch.nn.functional.softplus(setting.randn(b, t, d) - 2)
    rates = -torch.arange(1, n + 1, device=setting.device, dtype=torch.float32)
    A = repeat(rates, "n -> d n", d=d).contiguous()
    return tuple(tensor.requires_grad_() for tensor in (x, delta, A, B, C))


def scan(setting: Setting, shape: Shape) -> Subject:
    """This library's diagonal scan alone."""

    def function(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        return selective_scan(x, delta, A, B, C, input_scale="delta")[0]

    cost = scan_cost(setting, shape)
    return Subject(function, lambda: scan_inputs(setting, shape), (), cost, SCAN_BACKWARD)


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

    return Subject(selective_scan_fn, draw, (), scan_cost(setting, shape), SCAN_BACKWARD)

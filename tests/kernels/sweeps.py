"""Calls of the direct sweep, by each of its implementations.

"loop" is the loop over tokens with its adjoint, which any coefficients can have; "buffers" the
sweep in plain torch of what a layout describes; "triton" the kernels. "autograd" is the
specification, differentiated by autograd.
Letters: b samples of a head, t time, p channels of a head, n states, k reflections, r raw values.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from bedouin.kernels.direct import Sweep, direct_sweep, direct_sweep_reference
from bedouin.kernels.direct.layout import bind_by_layout
from bedouin.kernels.householder import unit
from bedouin.kernels.launch import Device
from bedouin.kernels.operands import (
    Activation,
    Bind,
    Coefficients,
    Operands,
    Parameterization,
    RawLayout,
)
from bedouin.kernels.scan import Eigenvalues, InputScale
from bedouin.solvers.reporting import Measured
from bedouin.testing import assert_close

How = Literal["loop", "buffers", "triton", "autograd"]
NAMES = (*Operands._fields, "bind parameter")


@dataclass(frozen=True)
class Case:
    """Shapes and options of a sweep; `low` is the dtype of x, raw and W_y."""

    heads: int = 2
    b: int = 2
    t: int = 3
    p: int = 7
    n: int = 3
    k: int = 2
    beta_max: float = 1.0
    activation: Activation = "softplus"
    selective: bool = True
    input_scale: InputScale = "bounded_delta"
    eigenvalues: Eigenvalues = "positive"
    norm_eps: float | None = 1e-5
    feedback: bool = True
    fed: int | None = None  # raw values with feedback; None: all
    starts: bool = True
    has_axis: bool = True  # whether W_y and A have an axis of heads, as several need
    low_rank: bool = False  # whether coefficients are those of `low_rank_bind`, which has no layout
    dtype: torch.dtype = torch.float32
    low: torch.dtype | None = None

    def layout(self) -> RawLayout:
        return RawLayout(self.activation, self.selective, self.k, self.beta_max)

    def options(self) -> Parameterization:
        layout, scales = None if self.low_rank else self.layout(), (self.input_scale,)
        return Parameterization(layout, *scales, self.eigenvalues, self.norm_eps)

    def operands(self, device: str = "cpu") -> Operands:
        generator = torch.Generator().manual_seed(self.b + 10 * self.t)

        def draw(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return values.to(self.dtype)

        H, t, p, n, low = self.heads, self.t, self.p, self.n, self.low or self.dtype
        b, r = H * self.b, self.layout().size(p, n)
        x, raw, W_y = draw(b, t, p), draw(b, t, r), 0.2 * p**-0.5 * draw(H, r, p)
        if self.fed is not None:
            W_y[:, self.fed :] = 0
        A, h0, y0 = -draw(H, p, n).exp(), draw(b, p, n), draw(b, p)
        W_y = W_y if self.feedback else W_y[:, :0]
        start = (h0, y0) if self.starts else (None, None)
        if not self.has_axis:
            W_y, A = W_y.squeeze(0), A.squeeze(0)
        given = (x.to(low), raw.to(low), W_y.to(low) if W_y.numel() else None, A, *start)
        return Operands(*(v if v is None else v.to(device) for v in given))  # type: ignore[arg-type]

    def tensors(self, device: str = "cpu") -> list[Tensor | None]:
        """Of the operands, with gradients, and the parameter of the bind, if it has one."""
        strength = torch.linspace(-1, 1, self.p, dtype=self.dtype, device=device)
        every = [*self.operands(device), *([strength] if self.low_rank else [])]
        return [None if v is None else v.requires_grad_() for v in every]

    def sweep(self, tensors: Sequence[Tensor | None], how: How, **given: Any) -> Sweep:
        """Of `tensors`, by an implementation."""
        operands = Operands(*tensors[:6])  # type: ignore[arg-type]
        options, parameters = self.options(), tuple(tensors[6:])
        bind: Bind | None = low_rank_bind if self.low_rank else None
        if how == "autograd":
            return direct_sweep_reference(operands, options, bind, parameters)  # type: ignore[arg-type]
        if how == "loop":
            bind = bind or bind_by_layout(self.layout(), operands.A)
            options = replace(options, layout=None)
        backend = "triton" if how == "triton" else "reference"
        return direct_sweep(operands, options, bind, parameters, backend=backend, **given)  # type: ignore[arg-type]


def low_rank_bind(raw: Tensor, strength: Tensor) -> Coefficients:
    """A bind of two factors with a parameter, and an e that differs from channel to channel."""
    (p,), k = strength.shape, 2
    n = (raw.shape[-1] - p - k * (p + 1)) // 2
    delta, B, C, u, alpha = raw.split([p, n, n, k * p, k], -1)
    delta = softplus(delta - 1)
    e, M = torch.sigmoid(strength * delta), torch.diag_embed(-torch.sigmoid(alpha))
    U = unit(u.unflatten(-1, (k, p)))
    return Coefficients(delta, unit(B), unit(C), e, U, M)


def cotangents(sweep: Sweep) -> list[Tensor]:
    """Of y and the last h."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(v.shape, generator=generator).to(v) for v in (sweep.y, sweep.h)]


def gradients(sweep: Sweep, tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Of a linear function of y and h."""
    named = {name: v for name, v in zip(NAMES, tensors, strict=False) if v is not None}
    outputs = zip((sweep.y, sweep.h), cotangents(sweep), strict=True)
    # without tokens y depends on nothing
    total = torch.stack([(v * weight).sum() for v, weight in outputs]).sum()
    grads = torch.autograd.grad(total, list(named.values()), materialize_grads=True)
    return {f"gradient of {name}": v for name, v in zip(named, grads, strict=True)}


def values_of(sweep: Sweep) -> dict[str, Tensor]:
    """The values of a sweep, with what a solver reports of it."""
    found = {name: v.detach() for name, v in sweep._asdict().items()}
    if not sweep.defect.numel():
        of_samples = sweep.pivot.unsqueeze(-1).flatten(1)  # of operations (b, t), else (b,)
        return found | {"pivot": pad(of_samples, (0, 1), value=torch.inf).amin(1)}
    norms = (found[name] for name in ("defect", "scale", "pivot", "magnitude"))
    stats: Any = Measured(*norms).statistics()
    reported = {"residual": stats.residual, "converged": stats.converged}
    return found | reported | {"pivot": stats.conditioning}


def run(
    case: Case, how: How, device: str = "cpu", given: Operands | None = None, **known: Any
) -> dict[str, Tensor]:
    """Values, statistics, gradients of a linear function of y and h, and the adjoint's report."""
    tensors = case.tensors(device)
    for i, v in enumerate(given or ()):
        tensors[i] = v if v is None else v.detach().requires_grad_()
    reports: list[Tensor] = []
    if how != "autograd":
        known["report"] = lambda *report: reports.extend(report)
    sweep = case.sweep(tensors, how, **known)
    found = values_of(sweep) | gradients(sweep, tensors)
    return found | {f"report {i}": v for i, v in enumerate(reports)}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, theirs in expected.items():
        if name.startswith(("defect", "report 0")):
            # both are rounding errors of values of the size of the scale, and below it
            size = expected["scale" if name == "defect" else "report 1"]
            scale = size.max().item() if size.numel() else 0.0
            assert actual[name].shape == theirs.shape, name
            assert not theirs.numel() or actual[name].max().item() <= tolerance * (1 + scale), name
        else:
            assert_close(name, actual[name], theirs, tolerance, atol=tolerance)


def shared_memory(size: int) -> AbstractContextManager[Any]:
    """A context in which one program can have so many bytes of shared memory."""
    return patch.object(Device, "of", return_value=Device(None, size))

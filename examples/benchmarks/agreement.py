"""Comparisons of every fast path with the plain reference, made before anything is timed.

Each comparison is made once in float32 with a small d_model, where the bound is tight, and once
with the setting and batch size of the row, so with the kernels that are timed (`checks`). Both use
short sequences, because a sweep treats every token in the same way.

Letters: b batch, t time, m d_model.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bedouin import Decoder
from bedouin.kernels.scan import selective_scan
from bedouin.solvers import Direct, FixedCap, Jacobi, Picard, Solver
from benchmarks.cost import linear_maps
from benchmarks.packed import bounds_of, lengths_of
from benchmarks.setting import Setting, Shape
from benchmarks.subjects import LINEAR_RTOL, kimi, scan_inputs
from research.rivals import KimiDeltaAttention

FLOAT32 = 1e-4
"""Bound of the relative 2-norm: rounding in float32 over TOKENS tokens, with a margin."""
BFLOAT16 = 0.02
"""The same in bfloat16, where rounding gives 0.004 (measured on a CPU)."""
SMALL, TOKENS = 64, 18
"""d_model of the float32 comparison, and tokens of every one: slightly more than a chunk of the
sweep."""


def checks(setting: Setting, shape: Shape) -> tuple[tuple[Setting, Shape], ...]:
    """The settings and shapes of the comparisons for a row."""
    small = replace(setting, m=min(SMALL, setting.m), precision="float32")
    if setting.h > 1:  # two heads of the same size, so that the same kernels run
        small = replace(small, h=2, expand=2, m=setting.p)
    return (small, Shape(3, TOKENS)), (setting, Shape(shape.b, min(shape.t, TOKENS)))


def _tolerance(setting: Setting) -> float:
    return FLOAT32 if setting.dtype == torch.float32 else BFLOAT16


def direct_agrees(setting: Setting, shape: Shape, **options: Any) -> None:
    """The sweep, values and gradients."""
    _layer_agrees(setting, shape, Direct(), gradients=True, **options)


def explicit_agrees(setting: Setting, shape: Shape, *, kind: type[nn.Module]) -> None:
    """A layer without a solver against itself in float64, which no kernel computes, on more than
    two chunks of the delta rule."""
    torch.manual_seed(0)
    layer = kind(setting.m, device=setting.device, dtype=setting.dtype).eval()
    reference = copy.deepcopy(layer).double()
    x = setting.randn(shape.b, 8 * shape.t, setting.m)
    _compare(kind.__name__, setting, _results(layer, x), _results(reference, x.double()))


def kimi_agrees(setting: Setting, shape: Shape) -> None:
    """FLA's kernels against plain PyTorch, in bfloat16 at any precision of the run, because their
    products of float32 are those of TF32."""
    setting = replace(setting, precision="bf16")
    x = setting.randn(shape.b, 8 * shape.t, setting.m)
    reference = kimi(setting, KimiDeltaAttention).float()
    _compare("KDA", setting, _results(kimi(setting), x), _results(reference, x.float()))


def linear_agrees(setting: Setting, shape: Shape) -> None:
    """The sweep without feedback."""
    direct_agrees(setting, shape, feedback=())


def packed_agrees(setting: Setting, shape: Shape, *, even: bool, **options: Any) -> None:
    """The sweep of documents in one row, values and gradients."""
    lengths = lengths_of(setting, shape, even=even)
    bounds, row = bounds_of(lengths), Shape(1, int(lengths.sum()))
    _layer_agrees(setting, row, Direct(), gradients=True, cu_seqlens=bounds, **options)


def jacobi_agrees(setting: Setting, shape: Shape) -> None:
    """Values and gradients after t + 1 steps, when both are exact."""
    cap = FixedCap(shape.t + 1)
    _layer_agrees(setting, shape, Jacobi(rtol=0.0, atol=0.0), gradients=True, max_steps=cap)


def linear_jacobi_agrees(setting: Setting, shape: Shape) -> None:
    """Without feedback, to the tolerance of the benchmark."""
    _layer_agrees(setting, shape, Jacobi(rtol=LINEAR_RTOL, atol=0.0), gradients=True, feedback=())


def picard_agrees(setting: Setting, shape: Shape) -> None:
    """Values only, because the benchmark uses the biased one-step gradient."""
    _layer_agrees(setting, shape, Picard(rtol=1e-6), gradients=False, max_steps=FixedCap(400))


def scan_agrees(setting: Setting, shape: Shape) -> None:
    """The scan alone."""
    torch.manual_seed(0)
    inputs = scan_inputs(setting, shape)
    _, expected = _scan_results(inputs, "reference", torch.float32)
    names, got = _scan_results(inputs, "auto", setting.dtype)
    for name, ours, theirs in zip(names, got, expected, strict=True):
        _close(f"scan, {name}", ours, theirs, _tolerance(setting))


def step_agrees(setting: Setting, shape: Shape) -> None:
    """`step` and `Decoder` token by token against one call on TOKENS tokens."""
    layer, tolerance = setting.layer(), _tolerance(setting)
    x = setting.randn(shape.b, TOKENS, setting.m)
    with torch.inference_mode():
        expected, state = layer(x), layer.init_state(shape.b)
        decoder = Decoder(layer, shape.b)
        for t in range(TOKENS):
            y_t, state = layer.step(x[:, t], state)
            _close(f"step {t}", y_t, expected[:, t], tolerance)
            _close(f"decoder, token {t}", decoder(x[:, t]), expected[:, t], tolerance)


def _scan_results(
    inputs: tuple[Tensor, ...],  # as `scan_inputs` returns them
    backend: Any,
    dtype: torch.dtype,
) -> tuple[list[str], list[Tensor]]:
    """The output and the gradients of the scan, with their names."""
    x, delta, A, B, C = (tensor.detach() for tensor in inputs)
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (x, delta, B, C)]
    x, delta, B, C = leaves
    y, _ = selective_scan(x, delta, A, B, C, input_scale="delta", backend=backend)
    weight = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y).to(y.dtype)
    grads = torch.autograd.grad(y, leaves, weight)
    return ["y", "grad x", "grad Delta", "grad B", "grad C"], [y.detach(), *grads]


def _layer_agrees(
    setting: Setting,
    shape: Shape,
    solver: Solver,
    *,
    gradients: bool,
    cu_seqlens: Tensor | None = None,  # (documents + 1,)
    **options: Any,
) -> None:
    layer = setting.layer(solver=solver, **options).eval()
    reference = copy.deepcopy(layer).float()
    reference.solver, reference.backend = Direct(), "reference"
    torch.manual_seed(1)
    x = setting.randn(shape.b, shape.t, setting.m)
    call: dict[str, Any] = {"gradients": gradients, "cu_seqlens": cu_seqlens}
    got, expected = _results(layer, x, **call), _results(reference, x.float(), **call)
    _compare(str(solver), setting, got, expected)


def _results(
    layer: nn.Module,
    x: Tensor,  # (b, t, m)
    *,
    gradients: bool = True,
    **places: Any,
) -> dict[str, Tensor]:
    """The output, and the gradients of x and of the linear maps."""
    x = x.clone().requires_grad_()
    output: Tensor = layer(x, **places)
    found = {"output": output.detach()}
    if gradients:
        weight = torch.linspace(-1, 1, output.numel(), device=x.device).view_as(output)
        named = {"x": x, **dict(linear_maps(layer))}
        grads = torch.autograd.grad(output, list(named.values()), weight.to(output.dtype))
        found |= {f"grad {name}": grad for name, grad in zip(named, grads, strict=True)}
    return found


def _compare(
    title: str, setting: Setting, got: dict[str, Tensor], expected: dict[str, Tensor]
) -> None:
    """Raise AssertionError unless the output agrees and, with twice its tolerance, gradients do."""
    tolerance = _tolerance(setting)
    for name, value in got.items():
        bound = tolerance if name == "output" else 2 * tolerance
        _close(f"{title}, {setting.precision}, {name}", value, expected[name], bound)


def _close(
    name: str,
    got: Tensor,  # any shape
    expected: Tensor,  # the same shape
    tolerance: float,
) -> None:
    """Raise AssertionError unless the relative 2-norm of the difference is within the tolerance."""
    a, e = got.detach().double(), expected.detach().double()
    error = float((a - e).norm() / e.norm().clamp(min=1e-30))
    if not error <= tolerance:
        raise AssertionError(f"{name}: relative error {error:.1e} > {tolerance:.0e}")

"""Layers without reflections, Q = I, against a reflection whose beta is nearly 0 and a plain scan.

Letters: b batch, t time, d channels, n state per channel, r raw values, H heads.
"""

from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bedouin import Bedouin, BedouinState, FixedPointRNN, NoMixing
from bedouin.kernels.direct import direct_sweep
from bedouin.kernels.direct.layout import bind_by_layout
from bedouin.kernels.operands import Activation, Operands, Parameterization, RawLayout
from bedouin.kernels.scan import Eigenvalues, InputScale, selective_scan
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.solvers import (
    Adjoint,
    Anderson,
    Broyden,
    Direct,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    PhantomAdjoint,
    Picard,
    Solver,
    UnrolledAdjoint,
)
from bedouin.testing import assert_close

PICARD, JACOBI = Picard(rtol=1e-14, atol=1e-300), Jacobi(rtol=1e-14, atol=1e-300)
LAYERS: dict[str, tuple[type[FixedPointLayer], dict[str, Any]]] = {
    "default": (Bedouin, {"d_state": 3}),
    "delta, heads": (Bedouin, {"feedback": ("delta",), "num_heads": 2, "d_state": 3}),
    "no feedback": (Bedouin, {"feedback": (), "d_state": 3}),
    "coupled": (Bedouin, {"input_scale": "one_minus_decay", "eigenvalues": "full", "d_state": 2}),
    "vector state": (FixedPointRNN, {}),
    "vector state, heads": (FixedPointRNN, {"decay": "griffin", "num_heads": 2}),
}
SOLVES: list[tuple[Solver, Adjoint | None]] = [
    (Direct(), None),
    (PICARD, None),
    (JACOBI, None),
    (Anderson(rtol=1e-13, atol=1e-300), None),
    (Broyden(rtol=1e-13, atol=1e-300), None),
    (Direct(), ImplicitAdjoint(JACOBI)),
    (Direct(), OneStepAdjoint()),
    (PICARD, PhantomAdjoint(2, 0.5)),
    (Direct(), UnrolledAdjoint()),
    (JACOBI, UnrolledAdjoint()),
]


def restrict(layer: FixedPointLayer, name: str, value: Tensor) -> Tensor:
    """A parameter of a layer with k = 1, or its gradient, as k = 0 has it: without the p + 1 rows
    of the mixer, which are before the p of the gate."""
    has_rows = name in ("x_proj.weight", "raw_bias") or "mixer" in layer.feedback
    if name not in ("x_proj.weight", "y_proj.weight", "raw_bias") or not has_rows:
        return value
    axis, p = (-1 if name == "raw_bias" else -2), layer.head_dim
    rows = value.view(layer.num_heads, -1) if name == "raw_bias" else value
    before = rows.shape[axis] - p - (p + 1)
    left = torch.cat([rows.narrow(axis, 0, before), rows.narrow(axis, before + p + 1, p)], axis)
    return left.flatten() if name == "raw_bias" else left


def run(layer: FixedPointLayer, x: Tensor, state: BedouinState) -> dict[str, Tensor]:
    """Output, state and all gradients."""
    inputs = {"x": x, "ssm": state.ssm, "y": state.y}
    inputs = {name: v.clone().requires_grad_() for name, v in inputs.items()}
    start = BedouinState(inputs["ssm"], inputs["y"])
    output, after = layer(inputs["x"], start, return_state=True)
    inputs |= dict(layer.named_parameters())
    total = output.sin().sum() + after.ssm.square().sum() + after.y.cos().sum()
    grads = torch.autograd.grad(total, list(inputs.values()), materialize_grads=True)
    found = {f"gradient of {name}": g for name, g in zip(inputs, grads, strict=True)}
    return {"output": output.detach(), "ssm": after.ssm.detach(), "y": after.y.detach(), **found}


@pytest.mark.parametrize(("solver", "adjoint"), SOLVES, ids=lambda v: str(v)[:30])
@pytest.mark.parametrize("name", LAYERS)
def test_it_is_the_limit_of_small_reflections(
    name: str, solver: Solver, adjoint: Adjoint | None
) -> None:
    kind, options = LAYERS[name]
    options = options | {"solver": solver, "adjoint": adjoint, "dtype": torch.float64}
    theirs: FixedPointLayer = kind(3, num_householder=1, beta_max=1e-30, **options)
    ours: FixedPointLayer = kind(3, mixer=NoMixing(), **options)
    saved = {n: v for n, v in theirs.state_dict().items() if n != "_extra_state"}
    ours.load_state_dict({n: restrict(theirs, n, v) for n, v in saved.items()})
    x = torch.randn(2, 18 if isinstance(solver, Direct) else 7, 3, dtype=torch.float64)
    state = BedouinState(
        torch.randn(2, 6, ours.d_state, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    )
    found, expected = run(ours, x, state), run(theirs, x, state)
    for what, value in found.items():
        other = restrict(theirs, what.removeprefix("gradient of "), expected[what])
        scale = max(1.0, float(other.abs().max()))
        assert_close(what, value, other, 1e-12, atol=1e-12 * scale)
    assert ours.stats is not None and bool(ours.stats.converged.all())
    if isinstance(solver, Direct | Jacobi):
        assert ours.stats.conditioning is not None
        assert ours.stats.conditioning.tolist() == [1.0, 1.0]


def draw(
    seed: int, layout: RawLayout, b: int, t: int, *, heads: int, feedback: bool
) -> tuple[Operands, list[Tensor]]:
    """Operands of d = 3 channels and, for a layout that selects, n = 2 states, with gradients."""
    generator = torch.Generator().manual_seed(seed)
    (d, n), lead = (3, 2 if layout.selective else 1), (heads,) * (heads > 1)
    b, r = b * heads, layout.size(d, n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    values: list[Any] = [normal(b, t, d), normal(b, t, r), 0.1 * normal(*lead, r, d)]
    values += [-normal(*lead, d, n).exp(), normal(b, d, n), normal(b, d)]
    leaves = [v.requires_grad_() for v in values]
    if not feedback:
        values[2] = None
    return Operands(*values), [
        v for v, given in zip(leaves, values, strict=True) if given is not None
    ]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 999),
    b=st.integers(1, 2),
    t=st.sampled_from([1, 2, 16, 18]),
    heads=st.integers(1, 2),
    activation=st.sampled_from(get_args(Activation)),
    selective=st.booleans(),
    input_scale=st.sampled_from(get_args(InputScale)),
    eigenvalues=st.sampled_from(get_args(Eigenvalues)),
)
def test_without_feedback_it_is_a_diagonal_scan(
    seed: int,
    b: int,
    t: int,
    heads: int,
    activation: Activation,
    selective: bool,
    input_scale: InputScale,
    eigenvalues: Eigenvalues,
) -> None:
    layout = RawLayout(activation, selective, 0, 1.0)
    operands, leaves = draw(seed, layout, b, t, heads=heads, feedback=False)
    sweep = direct_sweep(operands, Parameterization(layout, input_scale, eigenvalues, None))
    x, raw, _, A, h0, _ = operands
    delta, B, C, *_ = bind_by_layout(layout, A)(raw)
    B, C = (v.expand(*raw.shape[:2], -1) for v in (B, C))
    y, h = selective_scan(x, delta, A, B, C, h0, input_scale=input_scale, eigenvalues=eigenvalues)
    grads = [
        torch.autograd.grad(y.sin().sum() + h.cos().sum(), leaves, materialize_grads=True)
        for y, h in ((sweep.y, sweep.h), (y, h))
    ]
    pairs = [(sweep.y, y), (sweep.h, h), *zip(*grads, strict=True)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    assert bool((sweep.pivot == 1).all()) and not sweep.defect.any()


def test_the_layer_has_no_parameters_of_a_mixer() -> None:
    layer = Bedouin(4, d_state=3, mixer=NoMixing())
    assert layer.raw_size == 8 + 2 * 3 and NoMixing().raw_size(8) == 0
    assert layer.x_proj.weight.shape == (layer.raw_size + 8, 8)
    vector = FixedPointRNN(4, mixer=NoMixing())
    # of the feedback only the gate is left
    assert vector.raw_size == 8 and vector.y_proj is not None
    assert vector.y_proj.weight.shape == (8, 8)
    assert vector._feedback_weights(torch.float32)[0] is None

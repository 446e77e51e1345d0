"""Layers of several heads: H heads are H layers of one head on the slices."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bedouin import BedouinState
from bedouin.layer import FixedPointLayer
from bedouin.solvers import (
    Adjoint,
    Anderson,
    Direct,
    ImplicitAdjoint,
    Jacobi,
    OneStepAdjoint,
    PhantomAdjoint,
    Picard,
    Solver,
    UnrolledAdjoint,
)
from bedouin.testing import assert_close, random_layer

M, D = 4, 8


def slice_of(
    name: str,
    value: Tensor,  # a parameter of a layer of several heads, or its gradient
    num_heads: int,
    j: int,
) -> Tensor:
    """The part of a parameter that belongs to head j, in the shape that one head has."""
    if name == "in_proj.weight":
        return value.unflatten(0, (-1, num_heads, D // num_heads))[:, j].flatten(0, 1)
    if name == "out_proj.weight":
        return value.unflatten(1, (num_heads, -1))[:, j]
    if name in ("x_proj.weight", "y_proj.weight", "b_proj.weight"):
        return value[j]
    return value.unflatten(0, (num_heads, -1))[j]


def make_heads(num_heads: int, seed: int, **fixed: object) -> tuple[FixedPointLayer, list]:
    """A random layer of several heads, and a layer of one head for each of its slices."""
    fixed = {"d_model": M} | fixed
    layer = random_layer(random.Random(seed), num_heads=num_heads, expand=D / M, **fixed)
    parts = []
    for j in range(num_heads):
        expand = D / num_heads / M
        part = random_layer(random.Random(seed), num_heads=1, expand=expand, **fixed)
        own = {n: slice_of(n, v, num_heads, j) for n, v in layer.named_parameters()}
        part.load_state_dict(own, strict=False)
        parts.append(part)
    return layer, parts


def slice_state(state: BedouinState, num_heads: int, j: int) -> BedouinState:
    return BedouinState(*(v.unflatten(1, (num_heads, -1))[:, j] for v in state))


SOLVES: list[tuple[Solver, Adjoint | None]] = [
    (Direct(), None),
    (Direct(), UnrolledAdjoint()),
    (Direct(), OneStepAdjoint()),
    (Picard(), None),
    (Picard(damping=0.8, patience=2), ImplicitAdjoint(Picard())),
    (Picard(rtol=0.1, stop_rule="paper"), OneStepAdjoint()),
    (Jacobi(), None),
    (Jacobi(), ImplicitAdjoint(Jacobi())),
    (Jacobi(), PhantomAdjoint()),
    (Anderson(), None),
]


@pytest.mark.parametrize(("solver", "adjoint"), SOLVES, ids=str)
@settings(max_examples=8)
@given(st.sampled_from([2, 4, 8]), st.integers(0, 2**16), st.integers(1, 3), st.integers(1, 5))
def test_heads_are_layers_of_one_head_on_the_slices(
    solver: Solver, adjoint: Adjoint | None, num_heads: int, seed: int, b: int, t: int
) -> None:
    options = {"solver": solver, "adjoint": adjoint, "max_steps": 20, "feedback_init": 0.1}
    layer, parts = make_heads(num_heads, seed, **options)
    x = torch.randn(b, t, M, dtype=torch.float64, requires_grad=True)
    ssm = 0.1 * torch.randn(b, D, layer.d_state, dtype=torch.float64)
    state = BedouinState(ssm.requires_grad_(), 0.1 * ssm.detach().sum(-1).requires_grad_())

    output, new = layer(x, state, return_state=True)
    found = [part(x, slice_state(state, num_heads, j), return_state=True)
             for j, part in enumerate(parts)]
    assert_close("output", output, sum(o for o, _ in found), 1e-12)
    for name in ("ssm", "y"):
        expected = torch.cat([getattr(s, name) for _, s in found], 1)
        assert_close(f"state.{name}", getattr(new, name), expected, 1e-12)
    every = [part.stats for part in parts]
    stats = layer.stats
    assert torch.equal(stats.num_steps, torch.stack([s.num_steps for s in every]).amax(0))
    assert torch.equal(stats.converged, torch.stack([s.converged for s in every]).all(0))

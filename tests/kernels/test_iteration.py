"""The fused iteration against the plain loop on the same map: values, statistics, frozen tokens.

With TRITON_INTERPRET=1, set before Triton is imported, small shapes run on a CPU. Without it, the
tests need a CUDA device and also cover a table of sizes that are not multiples of a block.
Letters: b batch, t time, p channels, n state per channel, k reflections, r raw values.
"""

import itertools
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from tests.kernels.sweeps import Case
from tests.kernels.table import BF16, DEVICE, F16, far_apart, needs_triton
from torch import Tensor

from bedouin import Bedouin, HouseholderProduct
from bedouin.kernels.backend import Backend
from bedouin.kernels.direct.layout import bind_by_layout
from bedouin.kernels.iteration import IterationRule, fuse_iteration
from bedouin.kernels.operands import Activation, Operands
from bedouin.kernels.scan import Eigenvalues, InputScale
from bedouin.layers.map import ScanInputs, StructuredMap
from bedouin.solvers import (
    Adjoint,
    ImplicitAdjoint,
    Jacobi,
    Picard,
    Result,
    Solution,
    UnrolledAdjoint,
    solve,
)
from bedouin.solvers.iterate import IterativeSolver
from bedouin.testing import assert_close

# numpy's, of rows of a program that have no sample
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SCALES = get_args(InputScale)
NEVER = Picard(0.0, 0.0)
"""Nothing but the cap stops it."""
ONE = Case(heads=1, b=1, p=6, has_axis=False)
TWO = replace(ONE, b=2)


def map_of(case: Case, inputs: Operands, backend: Backend) -> StructuredMap:
    """With everything that the layout says, in plain torch."""
    layout, size = case.layout(), case.k * (case.p + 1)

    def split(raw: Tensor) -> ScanInputs:
        delta, B, C, *_ = bind_by_layout(layout, raw.new_empty(case.p, case.n))(raw)
        return ScanInputs(delta, B, C, raw[..., raw.shape[-1] - size :])

    if backend == "reference":
        inputs = inputs._replace(x=inputs.x.float(), raw=inputs.raw.float())
    mixer = HouseholderProduct(case.k, case.beta_max)
    return StructuredMap(inputs, case.options(), mixer, split, backend)


def run(
    case: Case,
    solver: IterativeSolver,
    backend: Backend,
    max_steps: int = 2,
    inputs: Operands | None = None,
    y0: Tensor | None = None,
) -> Solution:
    """A solve, by default from a start that is not zero."""
    f = map_of(case, inputs or case.operands(DEVICE), backend)
    if y0 is None:
        y0 = case.operands(DEVICE).x.float().cos()
    start = y0.clone()
    with torch.no_grad():
        solution = solve(f, y0, solver, max_steps=max_steps, time_dim=1, on_unconverged="ignore")
    assert torch.equal(y0, start)
    return solution


def check(
    case: Case,
    solver: IterativeSolver,
    max_steps: int = 2,
    inputs: Operands | None = None,
    tolerance: float = 2e-5,
) -> Solution:
    """Equal values and statistics; returns the fused solution."""
    theirs = run(case, solver, "reference", max_steps, inputs)
    ours = run(case, solver, "triton", max_steps, inputs)
    tolerance = tolerance if case.low is None else 3e-2
    assert_close("value", ours.value, theirs.value, tolerance, atol=tolerance)
    assert torch.equal(ours.stats.num_steps, theirs.stats.num_steps)
    assert torch.equal(ours.stats.converged, theirs.stats.converged)
    for name in ("residual", "conditioning"):
        found, expected = getattr(ours.stats, name), getattr(theirs.stats, name)
        assert (found is None) == (expected is None)
        if found is not None:
            assert_close(name, found, expected, tolerance, atol=tolerance)
    return ours


def of_activations(**options: Any) -> list[Case]:
    return [
        replace(ONE, activation=a, k=1, beta_max=2.0 if a == "sigmoid" else 1.0, **options)
        for a in get_args(Activation)
    ]


REFLECTED = Case(heads=1, b=1, t=2, p=9, n=4, has_axis=False, activation="sigmoid", beta_max=2.0)
CASES = [
    *(replace(ONE, input_scale=s, eigenvalues=e) for e in get_args(Eigenvalues) for s in SCALES),
    *of_activations(),
    *of_activations(n=1, selective=False, input_scale="one_minus_decay"),
    *(replace(REFLECTED, k=k) for k in (1, 2, 3, 8)),
    replace(ONE, feedback=False),
    replace(ONE, norm_eps=None),
    *(replace(ONE, t=2, low=low) for low in (None, BF16, F16)),
    # in awkward sizes
    replace(ONE, t=1, p=1, n=1),
    replace(ONE, t=2, p=70, n=1),
    replace(ONE, t=7, p=3, n=17),
]
OF_MANY: list[tuple[int, int, int, InputScale]] = [
    *((1024, 16, 4, scale) for scale in SCALES),
    (2048, 16, 8, "bounded_delta"),
    (1000, 12, 3, "one_minus_decay"),
    (512, 64, 5, "delta"),
]
COUPLED: dict[str, Any] = {"t": 2, "input_scale": "one_minus_decay"}
OF_HEADS: list[tuple[int, int, Picard, dict[str, Any]]] = [
    (2, 2, Picard(0.05, 1e-6, damping=0.9), COUPLED),
    (2, 1, Picard(0.05, 0.0, stop_rule="paper"), COUPLED),
    (3, 1, Picard(0.05, 1e-6, damping=0.9), COUPLED | {"feedback": False}),
    (2, 1, Picard(0.05, 1e-6, damping=0.9), COUPLED | {"low": BF16}),
]
LARGE = [
    *(
        replace(ONE, b=3, t=t, p=p, n=16, low=low)
        for t, p in itertools.product((1, 63, 64, 300), (1, 63, 64, 100))
        for low in (None, BF16)
    ),
    *(replace(TWO, t=18, p=p, n=n, k=k, input_scale=scale) for p, n, k, scale in OF_MANY),
]


@pytest.mark.parametrize(
    ("case", "solver", "tolerance"),
    [
        *(pytest.param(case, NEVER, 2e-5, marks=needs_triton) for case in CASES),
        # a plain loop that calls the kernels of the scan
        pytest.param(ONE, Jacobi(0.0, 0.0), 2e-5, marks=needs_triton),
        # samples of several heads, each of which converges by itself; of a scale 1 - lambda near 0
        # float32 keeps three digits
        *(
            pytest.param(Case(heads, b, p=3, n=1, k=1, **of), solver, 1e-4, marks=needs_triton)
            for heads, b, solver, of in OF_HEADS
        ),
        *(pytest.param(case, NEVER, 1e-4, marks=pytest.mark.gpu) for case in LARGE),
    ],
    ids=str,
)
def test_values_and_statistics(case: Case, solver: IterativeSolver, tolerance: float) -> None:
    check(case, solver, tolerance=tolerance)


@needs_triton
def test_blocks_of_channels_and_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller blocks than a launch would have at these sizes change rounding only."""
    import bedouin.kernels.iteration as module
    import bedouin.kernels.scan as of_scan

    case = replace(ONE, p=9, n=4)
    f, rule = map_of(case, case.operands(DEVICE), "triton"), Picard(0.2, 0.0).rule()
    found = []
    for smaller in (False, True):
        if smaller:
            monkeypatch.setattr(module, "DECIDE_TOKENS", 2)
            monkeypatch.setattr(of_scan, "LANES", 2)
        steps: Any = f.fuse(case.operands(DEVICE).x.cos(), rule)
        for _ in range(3):
            steps.advance()
        found.append(steps.progress)
    ours, theirs = found
    for name in ("frozen", "failed", "num_steps"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for name in ("y", "defect", "scale"):
        assert_close(name, getattr(ours, name), getattr(theirs, name), 2e-6, atol=1e-7)


@needs_triton
@pytest.mark.parametrize(
    ("solver", "max_steps"),
    [
        (Picard(0.1, 1e-6), 12),
        (Picard(0.1, 1e-6, damping=0.6), 12),
        (Jacobi(0.2, 1e-6), 12),
        # whose value is the last evaluation, also of a sample that the cap stops
        (Picard(0.2, 0.0, stop_rule="paper"), 12),
        (Picard(0.05, 0.0, stop_rule="paper"), 1),
        (Picard(0.05, 0.0, damping=0.6, stop_rule="paper"), 3),
    ],
    ids=str,
)
def test_samples_that_converge_at_different_steps(solver: IterativeSolver, max_steps: int) -> None:
    case = replace(TWO, k=1)
    inputs = case.operands(DEVICE)
    inputs.x.mul_(torch.tensor([1e-6, 1.0], device=DEVICE)[:, None, None])
    inputs.raw[0].mul_(0.1)
    solution = check(case, solver, max_steps, inputs)
    assert bool(solution.stats.converged.all()) == (max_steps == 12)
    assert max_steps < 12 or len(set(solution.stats.num_steps.tolist())) > 1


@needs_triton
@pytest.mark.parametrize(
    ("solver", "input_scale"),
    [(Picard(0.1, 1e-6, damping=0.6), "delta"), (Jacobi(1e-3, 1e-6), "one_minus_decay")],
    ids=str,
)
def test_tokens_that_freeze_one_after_the_other_without_feedback(
    solver: IterativeSolver, input_scale: InputScale
) -> None:
    case = replace(ONE, t=5, k=1, feedback=False, input_scale=input_scale)
    inputs = case.operands(DEVICE)
    inputs.A.mul_(0.02)
    check(case, solver, 2, inputs)
    solution = check(case, solver, 20, inputs)
    assert bool(solution.stats.converged.all()) and int(solution.stats.num_steps) > 2


@needs_triton
@pytest.mark.parametrize("solver", [Picard(), Picard(stop_rule="paper")], ids=str)
def test_default_tolerances_at_small_scale_and_at_zero(solver: IterativeSolver) -> None:
    case = replace(TWO, t=2, feedback=False, starts=False)
    inputs = case.operands(DEVICE)
    inputs.x.mul_(torch.tensor([1e-10, 0.0], device=DEVICE)[:, None, None])
    y0 = torch.zeros_like(inputs.x)
    ours, theirs = (run(case, solver, b, 40, inputs, y0) for b in ("triton", "reference"))
    assert ours.stats.converged.tolist() == [True, True] and ours.stats.num_steps[1] == 1
    assert_close("value", ours.value, theirs.value, 1e-4)
    assert bool(ours.value[0].any()) and not bool(ours.value[1].any())


@needs_triton
@pytest.mark.parametrize(
    "solver", [Picard(0.1), Picard(0.1, damping=0.7, stop_rule="paper")], ids=str
)
def test_steps_after_convergence_change_nothing(solver: Any) -> None:
    """So it does not matter how often the host reads whether all have converged."""
    case = replace(TWO, k=1)
    inputs, rule = case.operands(DEVICE), solver.rule()
    with torch.no_grad():
        steps: Any = map_of(case, inputs, "triton").fuse(inputs.x, rule)
        while not steps.finished():
            steps.advance()
        before = [v if v is None else v.clone() for v in steps.progress]
        for _ in range(2):
            steps.advance()
    for ours, theirs in zip(steps.progress, before, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)  # type: ignore[arg-type]


@needs_triton
@pytest.mark.parametrize("solver", [Picard(0.1), Picard(0.1, stop_rule="paper")], ids=str)
def test_a_token_that_is_not_finite_spoils_its_own_sample_from_there_on(
    solver: IterativeSolver,
) -> None:
    case = replace(TWO, k=1)
    inputs = case.operands(DEVICE)
    clean = run(case, solver, "triton", 12, inputs)
    raw = inputs.raw.clone()
    raw[1, 1, 0] = torch.nan
    spoiled = check(case, solver, 12, inputs._replace(raw=raw))
    assert torch.equal(spoiled.value[0], clean.value[0])
    assert bool(spoiled.value[1, :1].isfinite().all()) and bool(spoiled.value[1, 1:].isnan().all())
    assert spoiled.stats.converged.tolist() == [True, False]
    assert spoiled.stats.residual.isnan().tolist() == [False, True]
    assert spoiled.result is Result.nonfinite


@needs_triton
def test_runs_repeat_to_the_bit_whatever_the_strides() -> None:
    case = replace(TWO, t=2)
    inputs = case.operands(DEVICE)
    wide = torch.cat([inputs.raw, inputs.x], -1)
    raw, x = wide.split([inputs.raw.shape[-1], inputs.x.shape[-1]], -1)
    scattered = torch.stack([inputs.x, inputs.x], -1)[..., 0]
    expected = run(case, Picard(1e-2), "triton", 3, inputs)
    for other in (inputs, inputs._replace(raw=raw, x=x), inputs._replace(x=scattered)):
        found = run(case, Picard(1e-2), "triton", 3, other)
        assert torch.equal(found.value, expected.value)
        assert torch.equal(found.stats.residual, expected.stats.residual)


@needs_triton
def test_tokens_may_be_too_far_apart_for_offsets_of_32_bits() -> None:
    case = replace(ONE, t=4, starts=False, low=BF16)
    operands = case.operands(DEVICE)

    def steps(given: Operands) -> list[Tensor]:
        start, rule = torch.zeros(1, 4, 6, device=DEVICE), IterationRule(1e-4, 1e-8)
        found: Any = fuse_iteration(given, start, case.options(), (), rule, backend="triton")
        found.advance()
        found.advance()
        return [v for v in found.progress if v is not None]

    expected = steps(operands)
    for name in ("x", "raw"):
        moved = operands._replace(**{name: far_apart(getattr(operands, name))})
        # sums depend on what the compiler knows of strides
        torch.testing.assert_close(steps(moved), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("method", [Picard, Jacobi])
def test_auto_on_a_gpu_freezes_like_the_plain_loop_and_fuses_picard(method: type[Any]) -> None:
    case = replace(ONE, b=5, t=100, p=40, n=16)
    solver = method(rtol=1e-3, atol=1e-6)
    rule, inputs = solver.rule(), case.operands("cuda")
    steps = None if rule is None else map_of(case, inputs, "auto").fuse(inputs.x, rule)
    assert (steps is not None) == (method is Picard)
    ours, theirs = (run(case, solver, b, 60) for b in ("auto", "reference"))
    assert torch.equal(ours.stats.converged, theirs.stats.converged)
    # a defect within rounding of its bound may be judged one step apart
    assert int((ours.stats.num_steps - theirs.stats.num_steps).abs().max()) <= 1
    assert_close("value", ours.value, theirs.value, 5e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("solver", [NEVER, Jacobi(0.0, 0.0)], ids=str)
def test_a_few_steps_never_wait_for_the_gpu(
    solver: IterativeSolver, no_synchronization: Any
) -> None:
    layer = Bedouin(8, solver=solver, max_steps=4, device="cuda", on_unconverged="ignore")
    x = torch.randn(2, 5, 8, device="cuda")
    layer(x)
    with no_synchronization():
        layer(x)
    assert layer.stats is not None and layer.stats.num_steps.tolist() == [4, 4]


@pytest.mark.gpu
def test_a_memory_of_more_than_32_bits() -> None:
    """2^31 states of all samples: numbers of elements that overflow are negative, and so below
    every size."""
    torch.manual_seed(0)
    options = {"expand": 2, "d_state": 16, "num_heads": 16, "num_householder": 1}
    layer = Bedouin(1024, device="cuda", dtype=torch.bfloat16, backend="triton", **options)  # type: ignore[arg-type]
    few = torch.randn(8, 1, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(few)
        found = layer(few.repeat(2**13 + 1, 1, 1))
    for part in (found[:8], found[-8:]):
        torch.testing.assert_close(part, expected, rtol=0.02, atol=0.02)


# -- how solvers request it, without the kernels


@pytest.mark.parametrize(
    ("adjoint", "fused"), [(ImplicitAdjoint(), True), (UnrolledAdjoint(), False)]
)
def test_unrolling_takes_the_plain_loop(
    adjoint: Adjoint, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[IterationRule] = []
    monkeypatch.setattr(StructuredMap, "fuse", lambda f, y, rule: asked.append(rule))
    Bedouin(4, solver=Picard(0.0, 1e-2), adjoint=adjoint)(torch.randn(1, 2, 4))
    assert asked == [IterationRule(0.0, 1e-2)] * fused


def test_on_a_cpu_auto_is_the_plain_loop() -> None:
    f: Any = Bedouin(4, solver=Picard()).map(torch.randn(1, 2, 4))
    assert f.fuse(torch.zeros(1, 2, 8), IterationRule(1e-4, 1e-8)) is None

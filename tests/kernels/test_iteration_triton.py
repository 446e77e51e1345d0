"""The fused iteration against the plain loop on the same map: values, statistics, frozen tokens.

With TRITON_INTERPRET=1, set before Triton is imported, small shapes run on a CPU. Without it, the
tests need a CUDA device and also cover a table of sizes that are not multiples of a block.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin import Bedouin, HouseholderProduct
from bedouin.kernels.backend import Backend, interpreter_is_on
from bedouin.kernels.direct.layout import bind_by_layout
from bedouin.kernels.operands import Activation, Operands, Parameterization, RawLayout
from bedouin.kernels.scan import Eigenvalues, InputScale
from bedouin.layers.map import ScanInputs, StructuredMap
from bedouin.solvers import Jacobi, Picard, Result, Solution, solve
from bedouin.solvers.iterate import IterativeSolver
from bedouin.testing import assert_close

DEVICE = "cpu" if interpreter_is_on() else "cuda"

needs_triton = pytest.mark.interpreter if interpreter_is_on() else pytest.mark.gpu
compiled = pytest.mark.gpu

SCALES: tuple[InputScale, ...] = ("delta", "bounded_delta", "one_minus_decay")
RANGES: tuple[Eigenvalues, ...] = ("positive", "full")
ACTIVATIONS: tuple[Activation, ...] = ("softplus", "softplus_of_minus", "sigmoid")
METHODS: list[type[IterativeSolver]] = [Picard, Jacobi]


@dataclass(frozen=True)
class Setting:
    """Shapes and options of a map; x, raw and W_y may have a lower dtype than the iterates."""

    b: int = 2
    t: int = 3
    d: int = 6
    n: int = 3
    layout: RawLayout = RawLayout("softplus", True, 2, 1.0)
    input_scale: InputScale = "bounded_delta"
    eigenvalues: Eigenvalues = "positive"
    norm_eps: float | None = 1e-5
    feedback: float = 0.3
    low: torch.dtype | None = None

    def split(self, raw: Tensor) -> ScanInputs:
        """What the layout says, in plain torch."""
        delta, B, C, *_ = bind_by_layout(self.layout, raw.new_empty(self.d, self.n))(raw)
        mixer = self.layout.num_householder * (self.d + 1)
        return ScanInputs(delta, B, C, raw[..., raw.shape[-1] - mixer :])

    def inputs(self) -> Operands:
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator)
            return values.to(DEVICE, torch.float32)

        b, t, d, n = self.b, self.t, self.d, self.n
        low, r = self.low or torch.float32, self.layout.size(d, n)
        W_y = (self.feedback * d**-0.5 * draw(r, d)).to(low) if self.feedback else None
        x, raw, A = draw(b, t, d).to(low), draw(b, t, r).to(low), -draw(d, n).exp()
        return Operands(x, raw, W_y, A, draw(b, d, n), draw(b, d))

    def map(self, inputs: Operands, backend: Backend) -> StructuredMap:
        if backend == "reference":
            x, raw = inputs.x.float(), inputs.raw.float()
            inputs = inputs._replace(x=x, raw=raw)
        return StructuredMap(
            inputs,
            Parameterization(self.layout, self.input_scale, self.eigenvalues, self.norm_eps),
            HouseholderProduct(self.layout.num_householder, self.layout.beta_max),
            self.split,
            backend,
        )


def run(
    setting: Setting,
    solver: IterativeSolver,
    backend: Backend,
    max_steps: int = 2,
    inputs: Operands | None = None,
    y0: Tensor | None = None,
) -> Solution:
    """A solve, by default from a start that is not zero."""
    f = setting.map(inputs or setting.inputs(), backend)
    if y0 is None:
        y0 = setting.inputs().x.float().cos()
    start = y0.clone()
    with torch.no_grad():
        solution = solve(f, y0, solver, max_steps=max_steps, time_dim=1, on_unconverged="ignore")
    assert torch.equal(y0, start)
    return solution


def check(
    setting: Setting,
    solver: IterativeSolver,
    max_steps: int = 2,
    inputs: Operands | None = None,
    tolerance: float = 2e-5,
) -> Solution:
    """Equal values and statistics; returns the fused solution."""
    theirs = run(setting, solver, "reference", max_steps, inputs)
    ours = run(setting, solver, "triton", max_steps, inputs)
    tolerance = tolerance if setting.low is None else 3e-2
    assert_close("value", ours.value, theirs.value, tolerance, atol=tolerance)
    assert torch.equal(ours.stats.num_steps, theirs.stats.num_steps)
    assert torch.equal(ours.stats.converged, theirs.stats.converged)
    residuals = ours.stats.residual, theirs.stats.residual
    assert_close("residual", *residuals, tolerance, atol=tolerance)
    if theirs.stats.conditioning is not None:
        assert ours.stats.conditioning is not None
        pivots = ours.stats.conditioning, theirs.stats.conditioning
        assert_close("conditioning", *pivots, tolerance, atol=tolerance)
    else:
        assert ours.stats.conditioning is None
    return ours


def never(method: type[Any]) -> IterativeSolver:
    """The solver that nothing stops but the cap."""
    solver: IterativeSolver = method(rtol=0.0, atol=0.0)
    return solver


def alternated(settings: list[Setting]) -> list[tuple[Setting, type[Any]]]:
    """The methods in turn: of two times three settings, each of the three meets both."""
    return [(setting, METHODS[i % 2]) for i, setting in enumerate(settings)]


def layout(k: int, activation: Activation = "softplus", *, selective: bool = True) -> RawLayout:
    return RawLayout(activation, selective, k, 2.0 if activation == "sigmoid" else 1.0)


CASES = [
    *alternated([Setting(b=1, input_scale=s, eigenvalues=e) for e in RANGES for s in SCALES]),
    *alternated(
        [
            *(Setting(b=1, layout=layout(1, a)) for a in ACTIVATIONS),
            *(
                Setting(b=1, n=1, layout=layout(1, a, selective=False), input_scale=SCALES[2])
                for a in ACTIVATIONS
            ),
        ]
    ),
    *(
        (Setting(b=1, t=2, d=9, n=4, layout=layout(k, "sigmoid")), method)
        for k, method in ((1, Picard), (2, Jacobi), (3, Picard), (8, Picard), (8, Jacobi))
    ),
    *(
        (Setting(b=1, feedback=feedback, norm_eps=eps), method)
        for feedback, eps in ((0.0, 1e-5), (0.3, None))
        for method in METHODS
    ),
    *(
        (Setting(b=1, t=2, low=low), method)
        for low, method in (
            (None, Picard),
            (torch.bfloat16, Picard),
            (torch.bfloat16, Jacobi),
            (torch.float16, Jacobi),
        )
    ),
]


AWKWARD = [(Setting(*sizes), method) for sizes in ((1,) * 4, (1, 2, 70, 1)) for method in METHODS]
AWKWARD.append((Setting(1, 7, 3, 17), Jacobi))
OF_MANY: list[tuple[int, int, int, InputScale]] = [
    *((1024, 16, 4, scale) for scale in SCALES),
    (2048, 16, 8, "bounded_delta"),
    (1000, 12, 3, "one_minus_decay"),
    (512, 64, 5, "delta"),
]
LARGE = [
    *(
        Setting(b=3, t=t, d=d, n=16, low=low)
        for t, d in itertools.product((1, 63, 64, 300), (1, 63, 64, 100))
        for low in (None, torch.bfloat16)
    ),
    *(Setting(t=18, d=d, n=n, layout=layout(k), input_scale=scale) for d, n, k, scale in OF_MANY),
]


@pytest.mark.parametrize(
    ("setting", "method", "max_steps", "tolerance"),
    [
        *(pytest.param(*case, 2, 2e-5, marks=needs_triton) for case in CASES),
        *(pytest.param(*case, 1, 2e-5, marks=needs_triton) for case in AWKWARD),
        *(pytest.param(one, of, 2, 1e-4, marks=compiled) for one in LARGE for of in METHODS),
    ],
    ids=str,
)
def test_values_and_statistics(
    setting: Setting, method: type[Any], max_steps: int, tolerance: float
) -> None:
    check(setting, never(method), max_steps, tolerance=tolerance)


@needs_triton
@pytest.mark.parametrize("method", METHODS)
def test_blocks_of_channels_and_of_tokens(
    method: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller blocks than a launch would have at these sizes change rounding only."""
    from bedouin.kernels.iteration import steps as module
    from bedouin.kernels.iteration.steps import FusedIteration

    setting = Setting(b=1, t=3, d=9, n=4)
    f, rule = setting.map(setting.inputs(), "triton"), method(rtol=0.2, atol=0.0).rule()
    found = []
    for smaller in (False, True):
        for name in ("STATES", "DECIDE_TILE", "DECIDE_TOKENS") if smaller else ():
            monkeypatch.setattr(module, name, 2)
        y = setting.inputs().x.cos()
        steps = FusedIteration(f.operands, y, f.parameterization, rule)
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
    "solver",
    [
        Picard(0.1, 1e-6),
        Picard(0.1, 1e-6, damping=0.6),
        Picard(0.2, 0.0, stop_rule="paper"),
        Jacobi(0.2, 1e-6),
    ],
    ids=["plain", "damped", "paper", "jacobi"],
)
def test_samples_that_converge_at_different_steps(solver: IterativeSolver) -> None:
    setting = Setting(layout=RawLayout("softplus", True, 1, 1.0))
    inputs = setting.inputs()
    inputs.x.mul_(torch.tensor([1e-6, 1.0], device=DEVICE)[:, None, None])
    inputs.raw[0].mul_(0.1)
    solution = check(setting, solver, 12, inputs)
    assert bool(solution.stats.converged.all())
    assert len(set(solution.stats.num_steps.tolist())) > 1


@needs_triton
@pytest.mark.parametrize(
    ("solver", "input_scale"),
    [
        (Picard(0.1, 1e-6, damping=0.6), "delta"),
        (Jacobi(1e-3, 1e-6), "delta"),
        (Jacobi(1e-3, 1e-6), "one_minus_decay"),
    ],
    ids=["damped", "jacobi", "jacobi-coupled"],
)
def test_tokens_that_freeze_one_after_the_other_without_feedback(
    solver: IterativeSolver, input_scale: InputScale
) -> None:
    """What the solve has mixed ahead is restored with what it has solved."""
    layout = RawLayout("softplus", True, 1, 1.0)
    setting = Setting(b=1, t=5, layout=layout, feedback=0.0, input_scale=input_scale)
    inputs = setting.inputs()
    inputs.A.mul_(0.02)
    check(setting, solver, 2, inputs)
    solution = check(setting, solver, 20, inputs)
    assert bool(solution.stats.converged.all()) and int(solution.stats.num_steps) > 2


@needs_triton
@pytest.mark.parametrize(
    ("max_steps", "damping", "feedback"),
    [(1, 1.0, 0.6), (3, 0.6, 0.0), (10, 1.0, 0.6)],
)
def test_the_papers_rule_returns_the_last_evaluation(
    max_steps: int, damping: float, feedback: float
) -> None:
    """Of samples that the tolerance stops at different steps, and of those that the cap cuts."""
    setting = Setting(b=3, t=3, layout=RawLayout("softplus", True, 1, 1.0), feedback=feedback)
    inputs = setting.inputs()
    inputs.x.mul_(torch.tensor([0.01, 1.0, 4.0], device=DEVICE)[:, None, None])
    inputs.raw[0].mul_(0.1)
    solver = Picard(0.05, 0.0, damping=damping, stop_rule="paper")
    ours = check(setting, solver, max_steps, inputs)
    f, y = setting.map(inputs, "reference"), setting.inputs().x.cos()
    evaluations = []
    for _ in range(max_steps):
        evaluations.append(f(y))
        y = torch.lerp(y, evaluations[-1], damping)
    for i, steps in enumerate(ours.stats.num_steps.tolist()):
        assert_close("value", ours.value[i], evaluations[steps - 1][i], 2e-6)


@needs_triton
@pytest.mark.parametrize(
    "solver", [Picard(), Picard(stop_rule="paper"), Jacobi()], ids=["picard", "paper", "jacobi"]
)
def test_default_tolerances_at_small_scale_and_at_zero(solver: IterativeSolver) -> None:
    setting = Setting(t=2, feedback=0.0)
    inputs = setting.inputs()
    inputs.x.mul_(torch.tensor([1e-10, 0.0], device=DEVICE)[:, None, None])
    inputs = inputs._replace(h0=None, y0=None)
    y0 = torch.zeros_like(inputs.x)
    ours, theirs = (run(setting, solver, b, 40, inputs, y0) for b in ("triton", "reference"))
    assert ours.stats.converged.tolist() == [True, True] and ours.stats.num_steps[1] == 1
    assert_close("value", ours.value, theirs.value, 1e-4)
    assert bool(ours.value[0].any()) and not bool(ours.value[1].any())


@needs_triton
@pytest.mark.parametrize("method", METHODS)
def test_a_cap_that_freezes_some_tokens_only(method: type[Any]) -> None:
    setting = Setting(b=1, t=4, feedback=1.0)
    solution = check(setting, method(1e-3, 0.0), 3)
    assert solution.stats.converged.tolist() == [False]


@needs_triton
@pytest.mark.parametrize(
    "solver",
    [Picard(0.1), Picard(0.1, damping=0.7, stop_rule="paper")],
    ids=["picard", "paper"],
)
def test_steps_after_convergence_change_nothing(solver: IterativeSolver) -> None:
    """So it does not matter how often the host reads whether all have converged."""
    setting = Setting(t=3, layout=RawLayout("softplus", True, 1, 1.0))
    f, y, rule = setting.map(setting.inputs(), "triton"), setting.inputs().x, solver.rule()
    assert rule is not None
    with torch.no_grad():
        steps = f.fuse(y, rule)
        assert steps is not None
        while not steps.finished():
            steps.advance()
        before = [v if v is None else v.clone() for v in steps.progress]
        for _ in range(2):
            steps.advance()
    for ours, theirs in zip(steps.progress, before, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)  # type: ignore[arg-type]


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "solver",
    [Picard(0.1), Picard(0.1, stop_rule="paper"), Jacobi(1e-2)],
    ids=["picard", "paper", "jacobi"],
)
def test_a_token_that_is_not_finite_spoils_its_own_sample_from_there_on(
    solver: IterativeSolver,
) -> None:
    setting = Setting(t=3, layout=RawLayout("softplus", True, 1, 1.0))
    inputs = setting.inputs()
    clean = run(setting, solver, "triton", 12, inputs)
    raw = inputs.raw.clone()
    raw[1, 1, 0] = torch.nan
    spoiled = run(setting, solver, "triton", 12, inputs._replace(raw=raw))
    assert torch.equal(spoiled.value[0], clean.value[0])
    assert bool(spoiled.value[1, :1].isfinite().all()) and bool(spoiled.value[1, 1:].isnan().all())
    assert spoiled.stats.converged.tolist() == [True, False]
    assert spoiled.stats.residual.isnan().tolist() == [False, True]
    assert spoiled.result is Result.nonfinite
    theirs = run(setting, solver, "reference", 12, inputs._replace(raw=raw))
    assert torch.equal(spoiled.stats.num_steps, theirs.stats.num_steps)


@needs_triton
def test_operands_need_not_be_contiguous() -> None:
    setting = Setting(t=2)
    inputs = setting.inputs()
    wide = torch.cat([inputs.raw, inputs.x], -1)
    raw, x = wide.split([inputs.raw.shape[-1], inputs.x.shape[-1]], -1)
    scattered = torch.stack([inputs.x, inputs.x], -1)[..., 0]
    y0 = torch.zeros_like(inputs.x)
    expected = run(setting, Picard(), "triton", 1, inputs, y0).value
    for other in (inputs._replace(raw=raw, x=x), inputs._replace(x=scattered)):
        assert torch.equal(run(setting, Picard(), "triton", 1, other, y0).value, expected)


@needs_triton
def test_runs_repeat_to_the_bit() -> None:
    setting = Setting(b=1, t=2)
    first, second = (run(setting, Picard(1e-2), "triton", 3) for _ in range(2))
    assert torch.equal(first.value, second.value)
    assert torch.equal(first.stats.residual, second.stats.residual)


@compiled
@pytest.mark.parametrize("method", METHODS)
def test_auto_on_a_gpu_freezes_like_the_plain_loop_and_fuses_picard(method: type[Any]) -> None:
    setting = Setting(b=5, t=100, d=40, n=16, feedback=0.1)
    solver = method(rtol=1e-3, atol=1e-6)
    f, y = setting.map(setting.inputs(), "auto"), setting.inputs().x
    assert (f.fuse(y, solver.rule()) is not None) == (method is Picard)
    ours, theirs = (run(setting, solver, b, 60) for b in ("auto", "reference"))
    assert torch.equal(ours.stats.converged, theirs.stats.converged)
    # a defect within rounding of its bound may be judged one step apart
    assert int((ours.stats.num_steps - theirs.stats.num_steps).abs().max()) <= 1
    assert_close("value", ours.value, theirs.value, 5e-3, atol=1e-5)


@compiled
@pytest.mark.parametrize("method", METHODS)
def test_a_few_steps_never_wait_for_the_gpu(
    method: type[Any], no_synchronization: Callable[[], AbstractContextManager[None]]
) -> None:
    layer = Bedouin(8, solver=never(method), max_steps=4, device="cuda", on_unconverged="ignore")
    x = torch.randn(2, 5, 8, device="cuda")
    layer(x)
    with no_synchronization():
        layer(x)
    assert layer.stats is not None and layer.stats.num_steps.tolist() == [4, 4]

"""The direct sweep of several heads in Triton against plain PyTorch: values and all gradients.

With TRITON_INTERPRET=1, set before Triton is imported, small shapes run on a CPU; without it the
tests need a CUDA device.
Letters: b samples of a head, t time, p channels of a head, n state per channel, k reflections,
r raw values, H heads.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, interpreter_is_on
from bedouin.kernels.direct import Sweep, direct_sweep, direct_sweep_reference
from bedouin.kernels.direct.buffers import (
    CHUNK,
    allocate_reverse,
    allocate_sweep,
    choose_chunk,
    collect_gradients,
)
from bedouin.kernels.direct.limits import MAX_HEAD_STATES, takes_heads_together
from bedouin.kernels.direct.registered import summarize
from bedouin.kernels.launch import Device, next_power_of_two
from bedouin.kernels.operands import Activation, Operands, Parameterization, RawLayout
from bedouin.kernels.scan import Eigenvalues, InputScale
from bedouin.testing import assert_close

DEVICE = "cpu" if interpreter_is_on() else "cuda"
# numpy's, of rows of a program that have no sample and of values that are not finite
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
needs_triton = pytest.mark.interpreter if interpreter_is_on() else pytest.mark.gpu

SCALES: tuple[InputScale, ...] = ("delta", "bounded_delta", "one_minus_decay")
# of the largest value; compiled, exponentials and quotients in float32 are approximations
TOLERANCE = {
    torch.float32: 2e-5 if interpreter_is_on() else 2e-3,
    torch.bfloat16: 1.5e-2 if interpreter_is_on() else 3e-2,
}
NAMES = ("x", "raw", "W_y", "A", "h0", "y0")


@dataclass(frozen=True)
class Case:
    """Shapes and options of a sweep; `low` is the dtype of x, raw and W_y."""

    heads: int = 2
    b: int = 2
    t: int = 3
    p: int = 7
    n: int = 3
    k: int = 2
    activation: Activation = "softplus"
    selective: bool = True
    input_scale: InputScale = "bounded_delta"
    eigenvalues: Eigenvalues = "positive"
    norm_eps: float | None = 1e-5
    feedback: bool = True
    fed: int | None = None  # raw values with feedback; None: all
    starts: bool = True
    dtype: torch.dtype = torch.float32
    low: torch.dtype | None = None

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.low or self.dtype]

    def options(self) -> Parameterization:
        layout = RawLayout(self.activation, self.selective, self.k, 1.0)
        return Parameterization(layout, self.input_scale, self.eigenvalues, self.norm_eps)

    def operands(self, at: str = DEVICE) -> Operands:
        generator = torch.Generator().manual_seed(self.b + 10 * self.t)

        def draw(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return values.to(self.dtype)

        H, t, p, n, low = self.heads, self.t, self.p, self.n, self.low or self.dtype
        b, r = H * self.b, self.options().known_layout().size(p, n)
        x, raw, W_y = draw(b, t, p), draw(b, t, r), 0.2 * p**-0.5 * draw(H, r, p)[:, : self.fed]
        A, h0, y0 = -draw(H, p, n).exp(), draw(b, p, n), draw(b, p)
        start = (h0, y0) if self.starts else (None, None)
        given = (x.to(low), raw.to(low), W_y.to(low) if self.feedback else None, A, *start)
        return Operands(*(v if v is None else v.to(at) for v in given))  # type: ignore[arg-type]


def cotangents(sweep: Sweep) -> list[Tensor]:
    """Of y and the last h."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(v.shape, generator=generator).to(v) for v in (sweep.y, sweep.h)]


def run(
    case: Case,
    backend: Backend,
    given: Operands | None = None,
    y_star: Tensor | None = None,
    weights: list[Tensor] | None = None,
) -> dict[str, Tensor]:
    """Values, statistics, gradients of a linear function of y and h, and the adjoint's report.

    `weights` of that function: of y and h, or of y alone.
    """
    leaves = [None if v is None else v.detach().requires_grad_() for v in given or case.operands()]
    reports: list[Tensor] = []
    sweep = direct_sweep(
        Operands(*leaves),  # type: ignore[arg-type]
        case.options(),
        y_star=y_star,
        report=lambda *report: reports.extend(report),
        backend=backend,
    )
    named = {name: v for name, v in zip(NAMES, leaves, strict=True) if v is not None}
    weights = weights or cotangents(sweep)
    outputs = (sweep.y, sweep.h)[: len(weights)]
    grads = torch.autograd.grad(outputs, list(named.values()), weights, materialize_grads=True)
    found = {name: v.detach() for name, v in sweep._asdict().items() if v is not None}
    found |= {f"gradient of {name}": v for name, v in zip(named, grads, strict=True)}
    return found | {f"report {i}": v for i, v in enumerate(reports)}


def launched(
    case: Case, samples: int, keep_every: int = CHUNK, parts: int | None = None
) -> dict[str, Tensor]:
    """What `run` returns, by the launches with so many samples of a program and parts of each."""
    from bedouin.kernels.direct.heads import launch

    operands, options = case.operands(), case.options()
    buffers = allocate_sweep(operands, options, keep_every, together=True)
    chosen = samples, parts or launch.choose_parts(max(16, next_power_of_two(case.p)), samples)
    with patch.object(launch, "choose_rows", return_value=chosen):
        launch.launch_head_sweep(buffers, options, keep_every)
    summary, converged = summarize(buffers.statistics)
    *statistics, _ = buffers.statistics
    values = (buffers.y, buffers.h.mT, *statistics, summary[1], summary[0], converged)
    sweep = Sweep(*values)
    grad_y, grad_h = cotangents(sweep)
    known, grads = allocate_reverse(grad_y, grad_h, sweep.y, buffers.kept, operands, options)
    assert operands.W_y is not None
    assert buffers.W_y is not None
    with patch.object(launch, "choose_rows", return_value=chosen):
        normed = launch.launch_head_reverse(known, grads, buffers.W_y, options, keep_every)
    every = collect_gradients(grads, normed, sweep.y, operands, options, wants_y0=True)
    found = dict(zip(Sweep._fields, values, strict=True))
    for name, v, operand in zip(NAMES, every, operands, strict=True):
        if operand is not None:
            found[f"gradient of {name}"] = v
    return found | {f"report {i}": v for i, v in enumerate(grads.statistics)}


H100, A100 = 232448, 166912
"""Bytes of shared memory that one program can have."""


def shared_memory(size: int) -> AbstractContextManager[Any]:
    """A context in which one program can have so many bytes of shared memory."""
    return patch.object(Device, "of", return_value=Device(None, size, False))


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, theirs in expected.items():
        if name.startswith(("defect", "report 0")):
            # both are rounding errors of values of the size of the scale, and below it
            scale = expected["scale" if name == "defect" else "report 1"].max().item()
            assert actual[name].max().item() <= tolerance * (1 + scale), name
        else:
            assert_close(name, actual[name], theirs, tolerance, atol=tolerance)


def expect(case: Case) -> dict[str, Tensor]:
    """The results of plain torch."""
    expected = run(case, "reference")
    with torch.no_grad():
        # the plain sweep bounds a scale with a state axis by 1
        found = direct_sweep_reference(case.operands(), case.options())
    return expected | {"magnitude": found.magnitude}


def check(case: Case, *, together: bool = True) -> None:
    """The kernels against plain torch; `together`: those of several heads, with feedback."""
    taken = takes_heads_together(case.operands(), case.options())
    assert taken == (together and case.feedback)
    actual = run(case, "triton")
    assert_same(actual, expect(case), case.tolerance)
    assert bool(actual["converged"].all()) and actual["residual"].max().item() < case.tolerance


@needs_triton
@pytest.mark.parametrize("eigenvalues", ["positive", "full"])
@pytest.mark.parametrize("input_scale", SCALES)
def test_every_discretization(input_scale: InputScale, eigenvalues: Eigenvalues) -> None:
    check(Case(b=1, t=2, n=2, k=1, input_scale=input_scale, eigenvalues=eigenvalues))


# in sizes that do not fill their blocks
CASES = [
    Case(b=1, t=1, p=1, n=1, k=1, input_scale="delta"),
    Case(b=3, t=2, p=16, n=5, k=3, activation="sigmoid", feedback=False, starts=False),
    Case(heads=3, b=1, t=2, p=20, n=1, k=4, eigenvalues="full", starts=False, low=torch.bfloat16),
    Case(b=1, t=1, k=8, n=1, selective=False, activation="sigmoid", input_scale="one_minus_decay"),
    Case(heads=3, b=1, t=2, p=5, n=9, k=1, activation="softplus_of_minus", norm_eps=None),
    Case(b=1, t=2, p=33, n=1, k=3, selective=False, norm_eps=None, low=torch.bfloat16),
    Case(b=1, t=2, k=2, input_scale="one_minus_decay", feedback=False, low=torch.bfloat16),
    # feedback of Delta, of some of it, and of Delta and some of B, which the phases do not take
    Case(heads=3, b=1, t=2, p=9, n=16, k=2, fed=4, activation="sigmoid", starts=False),
    Case(b=1, t=3, p=7, n=3, k=5, fed=7, norm_eps=None, low=torch.bfloat16),
    Case(heads=1, b=1, t=2, p=17, n=33, k=0, fed=17, input_scale="one_minus_decay"),
    Case(b=1, t=2, k=1, fed=9, starts=False),
    Case(b=1, t=2, p=4, n=1, k=3, selective=False, fed=4, input_scale="delta"),
    # without reflections
    Case(b=1, t=3, p=5, n=3, k=0, eigenvalues="full", norm_eps=None),
    Case(heads=1, b=2, t=2, p=20, n=18, k=0, input_scale="one_minus_decay", low=torch.bfloat16),
    Case(b=1, t=2, p=3, n=1, k=0, selective=False, starts=False),
    # states in two blocks that are held, in three and in four that are not
    Case(b=1, t=2, p=3, n=32, k=1, input_scale="one_minus_decay"),
    Case(heads=1, b=1, t=2, p=17, n=48, k=1, input_scale="one_minus_decay", eigenvalues="full"),
    Case(heads=1, b=1, t=2, p=17, n=64, k=1),
]


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option(case: Case) -> None:
    check(case)


@needs_triton
@pytest.mark.parametrize(
    ("case", "samples", "parts"),
    [
        (Case(b=3, t=2, n=1, k=1), 1, 1),
        (Case(heads=1, b=3, t=2, p=20, k=1, input_scale="one_minus_decay"), 2, 2),
        (Case(heads=1, b=1, t=2, p=33, n=2, k=3, norm_eps=None, low=torch.bfloat16), 1, 4),
        (Case(heads=1, b=1, t=2, p=9, n=1, k=4, selective=False), 1, 2),
        (Case(b=9, t=2, n=1, k=1), 8, 1),
        (Case(heads=1, b=1, t=2, p=33, n=34, k=1), 1, 2),
        (Case(heads=1, b=3, t=3, p=20, n=3, k=0, norm_eps=None), 2, 2),
        (Case(heads=1, b=2, t=3, p=33, n=2, k=0), 2, 4),
    ],
    ids=str,
)
def test_every_number_of_samples_and_their_parts(case: Case, samples: int, parts: int) -> None:
    assert_same(launched(case, samples, parts=parts), expect(case), case.tolerance)


@needs_triton
@pytest.mark.parametrize(
    ("channels", "samples", "parts"),
    [(128, 4, 2), (128, 2, 4), (128, 1, 4), (64, 8, 1), (64, 4, 2), (64, 1, 2), (16, 2, 1)],
)
def test_a_part_of_a_sample_fills_a_warp(channels: int, samples: int, parts: int) -> None:
    from bedouin.kernels.direct.heads.launch import choose_parts

    assert choose_parts(channels, samples) == parts


@needs_triton
@pytest.mark.parametrize(
    ("channels", "states", "samples"),
    [(64, 16, 8), (64, 32, 8), (64, 33, 4), (128, 16, 4), (128, 64, 2), (32, 64, 8)],
)
def test_fewer_samples_of_more_states(channels: int, states: int, samples: int) -> None:
    from bedouin.kernels.direct.heads.launch import choose_samples

    A = torch.empty(8, states, channels, device=DEVICE)
    assert choose_samples(4096, A) == samples


@needs_triton
@pytest.mark.parametrize("workspace", [1, 2**23])
@pytest.mark.parametrize(
    "case",
    [
        Case(b=1, t=5, p=2, n=2, k=1),
        Case(heads=1, b=3, t=4, p=3, n=17, k=1, input_scale="one_minus_decay"),
        Case(b=2, t=5, p=33, n=5, k=0, starts=False),
    ],
    ids=str,
)
def test_chunks_in_one_launch_of_the_reverse_sweep_and_in_several(
    workspace: int, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bedouin.kernels.direct.heads.launch.WORKSPACE", workspace)
    assert_same(launched(case, 2, keep_every=2), expect(case), case.tolerance)


@needs_triton
@pytest.mark.parametrize(
    "case",
    [
        Case(b=1, t=1, p=160, n=1, k=1, input_scale="one_minus_decay", feedback=False),
        Case(heads=2, b=1, t=18, n=2, k=5, feedback=False, low=torch.bfloat16),
        Case(b=1, t=2, p=3, n=65, k=1),
    ],
    ids=str,
)
def test_heads_that_one_program_cannot_hold_run_one_by_one(case: Case) -> None:
    check(case, together=False)


@pytest.mark.parametrize(
    ("case", "together"),
    [
        (Case(p=64, n=16, k=4, low=torch.bfloat16), True),
        (Case(p=128, n=64, k=4, low=torch.bfloat16), True),
        (Case(p=128, n=32, k=5, low=torch.bfloat16), True),
        (Case(p=128, n=64, k=5, low=torch.bfloat16), False),
        (Case(p=128, n=64, k=5, fed=128), False),
        (Case(p=128, n=16, k=8), False),
        (Case(p=128, n=16, k=4, feedback=False), False),
        (Case(p=129, n=1), False),
        (Case(p=64, n=65), False),
        (Case(heads=1), True),
    ],
    ids=str,
)
def test_which_heads_one_program_can_hold(case: Case, together: bool) -> None:
    operands = case.operands("meta")
    one = operands._replace(A=operands.A[0], W_y=None)
    with shared_memory(H100):
        assert takes_heads_together(operands, case.options()) == together
        assert not takes_heads_together(one, case.options())


def test_a_device_with_less_shared_memory_takes_large_heads_one_by_one() -> None:
    case = Case(p=128, n=16, k=4, low=torch.bfloat16)
    with shared_memory(A100):
        assert not takes_heads_together(case.operands("meta"), case.options())
        assert takes_heads_together(replace(case, p=64).operands("meta"), case.options())


@needs_triton
def test_one_call_is_a_call_of_one_head_for_each() -> None:
    case = Case(b=2, t=2, n=2, k=1)
    own = replace(case, heads=1)
    actual, given = run(case, "triton"), case.operands()
    weights = [v.chunk(2) for v in cotangents(Sweep(*(actual[name] for name in Sweep._fields)))]
    heads = []
    for j in range(2):
        one = [v[j] if i in (2, 3) else v.chunk(2)[j] for i, v in enumerate(given) if v is not None]
        heads.append(run(own, "triton", Operands(*one), weights=[v[j] for v in weights]))
    expected = {
        name: (torch.stack if name[-2:] in ("_y", " A") else torch.cat)([v[name] for v in heads])
        for name in actual
    }
    assert_same(actual, expected, case.tolerance)


@needs_triton
@pytest.mark.parametrize("n", [2, 65])
def test_operands_need_not_be_contiguous(n: int) -> None:
    """Of heads together and one by one. Nor does h need a cotangent."""
    case = Case(b=1, t=2, p=3, n=n, k=1)
    given = case.operands()
    x, raw, W_y, A, h0, y0 = given
    assert W_y is not None and h0 is not None and y0 is not None
    size = raw.shape[-1]
    wide = torch.cat([raw, torch.full_like(raw[..., :5], torch.nan)], -1)
    strided = [torch.stack([v, v], -1)[..., 0] for v in (x, W_y, A, h0, y0)]
    x, *rest = strided
    moved = Operands(x, wide[..., :size], *rest)
    assert not any(v.is_contiguous() for v in moved if v is not None)
    weights = [torch.ones(2, 2, 1, device=DEVICE).expand(2, 2, case.p)]
    expected = run(case, "triton", given, weights=weights)
    for name, v in run(case, "triton", moved, weights=weights).items():
        assert torch.equal(v, expected[name]), name
    assert_same(expected, run(case, "reference", given, weights=weights), case.tolerance)


@needs_triton
@pytest.mark.parametrize(("low", "feedback"), [(None, False), (torch.bfloat16, True)])
def test_a_given_fixed_point(low: torch.dtype | None, feedback: bool) -> None:
    case = Case(b=1, t=2, k=1, low=low, feedback=feedback)
    y_star = run(case, "reference")["y"]
    actual = run(case, "triton", y_star=y_star)
    assert torch.equal(actual["y"], y_star)
    assert_same(actual, run(case, "reference", y_star=y_star), case.tolerance)


@needs_triton
@pytest.mark.parametrize(
    ("inputs", "weights"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
)
def test_dtypes_of_inputs_and_weights(inputs: torch.dtype, weights: torch.dtype) -> None:
    case = Case(b=1, t=2, n=1, k=1, starts=False)
    given = case.operands()
    assert given.W_y is not None
    x, raw, W_y = given.x.to(inputs), given.raw.to(inputs), given.W_y.to(weights)
    given = given._replace(x=x, raw=raw, W_y=W_y)
    expected = run(case, "reference", given)
    assert_same(run(case, "triton", given), expected, TOLERANCE[torch.bfloat16])


@needs_triton
@pytest.mark.parametrize(("b", "t"), [(0, 2), (2, 0)])
def test_empty_batch_and_time(b: int, t: int) -> None:
    case = Case(b=b, t=t)
    actual = run(case, "triton")
    for name, theirs in run(case, "reference").items():
        assert torch.equal(actual[name], theirs), name


@needs_triton
def test_a_token_that_is_not_finite_spoils_its_own_sample_from_there_on() -> None:
    case = Case(b=4, t=2, n=2, k=1)
    clean, given = run(case, "triton"), case.operands()
    raw, d, n = given.raw.clone(), case.p, case.n
    for sample, column in enumerate((0, d, d + n, d + 2 * n, 2 * d + 2 * n)):
        raw[sample, 1, column] = torch.nan
    x = given.x.clone()
    x[5, 1, 0] = torch.inf
    spoiled = run(case, "triton", given._replace(x=x, raw=raw))
    for name in ("y", "gradient of x", "gradient of raw", "scale", "defect"):
        assert torch.equal(spoiled[name][6:], clean[name][6:]), name
    assert torch.equal(spoiled["y"][:, 0], clean["y"][:, 0])
    assert not bool(spoiled["y"][:6, 1].isfinite().all(-1).any())
    assert not bool(spoiled["scale"][:6, 1].isfinite().any())
    assert not bool(spoiled["report 1"][:6].isfinite().all(-1).any())
    assert not bool(spoiled["residual"][:6].isfinite().any())
    assert spoiled["converged"].tolist() == [False] * 6 + [True] * 2


@needs_triton
@pytest.mark.parametrize("eigenvalues", ["positive", "full"])
def test_saturated_raw_values(eigenvalues: Eigenvalues) -> None:
    case = Case(b=1, t=2, k=1, input_scale="one_minus_decay", eigenvalues=eigenvalues)
    given = case.operands()
    given = given._replace(raw=20 * given.raw)
    expected = run(case, "reference", given)
    del expected["magnitude"]
    assert_same(run(case, "triton", given), expected, case.tolerance)


@pytest.mark.parametrize(
    ("n", "plain", "k"),
    [
        pytest.param(2, False, 1, marks=needs_triton),
        pytest.param(2, False, 0, marks=needs_triton),
        pytest.param(65, False, 0, marks=needs_triton),
        pytest.param(65, False, 1, marks=needs_triton),
        (2, True, 1),
    ],
)
def test_opcheck(n: int, plain: bool, k: int) -> None:
    """Of heads together, one by one, and in plain torch."""
    case = Case(b=1, t=2, p=3, n=n, k=k)
    values: Any = case.operands("cpu" if plain else DEVICE)
    operands = [v.detach().requires_grad_() for v in values]
    fields = (*case.options().scalars(), plain, 1)  # a memory is kept
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    ops = torch.ops.bedouin
    torch.library.opcheck(ops.direct_sweep, (*operands, *fields), test_utils=utils)
    y, h, kept, *_ = ops.direct_sweep(*values, *fields)
    known = (torch.randn_like(y), *operands, *fields)
    torch.library.opcheck(ops.direct_sweep_known, known, test_utils=utils)
    backward = (y.clone(), h.clone(), y, kept, *values, True, *fields)
    torch.library.opcheck(ops.direct_sweep_backward, backward, test_utils=utils[:2])


@pytest.mark.parametrize(
    ("t", "together", "chunk"),
    [(16, False, CHUNK // 2), (16, True, CHUNK // 4), (17, True, CHUNK)],
)
def test_large_memories_are_kept_more_often(t: int, together: bool, chunk: int) -> None:
    x, A = torch.empty(2, t, 1, device="meta"), torch.empty(2, 2**20, 1, device="meta")
    assert choose_chunk(Operands(x, x, A, A, None, None), together=together) == chunk


@pytest.mark.gpu
@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize("p", [64, 128])
def test_heads_of_the_benchmark(p: int, low: torch.dtype | None) -> None:
    case = Case(heads=1024 // p, b=16, t=256, p=p, n=16, k=4, starts=False, low=low)
    check(case, together=p <= 64 or low is not None)


@pytest.mark.gpu
@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize("input_scale", SCALES)
@pytest.mark.parametrize(("p", "n", "k"), [(16, 1, 1), (100, 17, 3), (64, 64, 2), (33, 5, 8)])
def test_awkward_heads_compiled(
    p: int, n: int, k: int, input_scale: InputScale, low: torch.dtype | None
) -> None:
    case = Case(heads=3, b=5, t=35, p=p, n=n, k=k, input_scale=input_scale, low=low)
    check(case, together=n <= MAX_HEAD_STATES and (p <= 64 or low is not None))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("p", "samples", "parts"),
    [(64, 8, 1), (64, 4, 2), (64, 1, 2), (100, 4, 2), (128, 2, 4), (128, 1, 4), (128, 2, 1)],
)
def test_every_number_of_samples_and_their_parts_compiled(p: int, samples: int, parts: int) -> None:
    case = Case(heads=2, b=9, t=20, p=p, n=16, low=torch.bfloat16)
    assert_same(launched(case, samples, parts=parts), expect(case), case.tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize(("p", "n", "k"), [(64, 64, 1), (64, 64, 0), (100, 17, 0), (33, 40, 1)])
def test_feedback_of_delta_compiled(p: int, n: int, k: int, low: torch.dtype | None) -> None:
    """With an input scale that the phases do not take."""
    check(Case(heads=3, b=5, t=35, p=p, n=n, k=k, fed=p, input_scale="one_minus_decay", low=low))

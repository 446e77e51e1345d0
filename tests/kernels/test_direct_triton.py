"""The Triton kernels of the direct sweep against plain PyTorch: values and all gradients.

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
from torch.nn.functional import pad

from bedouin import Bedouin, FixedPointRNN, LowRank
from bedouin.kernels.backend import Backend, interpreter_is_on
from bedouin.kernels.direct import Sweep, direct_sweep, direct_sweep_reference
from bedouin.kernels.direct.layout import choose_bind
from bedouin.kernels.direct.limits import CHUNK, SCRATCH, choose_chunk, choose_sweep, head_blocks
from bedouin.kernels.householder import mix_channels
from bedouin.kernels.launch import Device, next_power_of_two
from bedouin.kernels.operands import Activation, Operands, Parameterization, RawLayout
from bedouin.kernels.scan import Eigenvalues, InputScale, selective_scan_reference
from bedouin.solvers.convergence import relative_residual
from bedouin.solvers.reporting import Measured
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
    dtype: torch.dtype = torch.float32
    low: torch.dtype | None = None

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.low or self.dtype]

    def options(self) -> Parameterization:
        layout = RawLayout(self.activation, self.selective, self.k, self.beta_max)
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
        if not self.has_axis:
            W_y, A = W_y.squeeze(0), A.squeeze(0)
        given = (x.to(low), raw.to(low), W_y.to(low) if self.feedback else None, A, *start)
        return Operands(*(v if v is None else v.to(at) for v in given))  # type: ignore[arg-type]


def cotangents(sweep: Sweep) -> list[Tensor]:
    """Of y and the last h."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(v.shape, generator=generator).to(v) for v in (sweep.y, sweep.h)]


def values_of(sweep: Sweep) -> dict[str, Tensor]:
    """The values of a sweep, with what a solver reports of it."""
    found = {name: v.detach() for name, v in sweep._asdict().items()}
    if not sweep.defect.numel():
        of_samples = sweep.pivot.unsqueeze(-1).flatten(1)  # of operations (b, t), else (b,)
        return found | {"pivot": pad(of_samples, (0, 1), value=torch.inf).amin(1)}
    norms = (found[name] for name in ("defect", "scale", "pivot", "magnitude"))
    stats = Measured(*norms).statistics()
    assert stats.conditioning is not None
    reported = {"residual": stats.residual, "converged": stats.converged}
    return found | reported | {"pivot": stats.conditioning}


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
    found = values_of(sweep)
    found |= {f"gradient of {name}": v for name, v in zip(named, grads, strict=True)}
    return found | {f"report {i}": v for i, v in enumerate(reports)}


def launched(
    case: Case, samples: int, keep_every: int = CHUNK, parts: int | None = None
) -> dict[str, Tensor]:
    """What `run` returns, by the launches with so many samples of a program and parts of each."""
    from bedouin.kernels.direct import launch

    operands, options = case.operands(), case.options()
    chosen = samples, parts or launch.choose_parts(max(16, next_power_of_two(case.p)), samples)
    with patch.object(launch, "choose_rows", return_value=chosen):
        y, h, kept, statistics = launch.launch_sweep(operands, options, keep_every)
        sweep = Sweep(y, h.mT, *statistics)
        grad_y, grad_h = cotangents(sweep)
        given = (grad_y, grad_h), y, kept, operands, options, keep_every
        *every, report = launch.launch_reverse(*given, wants_y0=True)
    found = values_of(sweep)
    for name, v, operand in zip(NAMES, every, operands, strict=True):
        if operand is not None:
            found[f"gradient of {name}"] = v
    return found | {f"report {i}": v for i, v in enumerate(report)}


H100, A100, L4 = 232448, 166912, 101376
"""Bytes of shared memory that one program can have."""


def shared_memory(size: int) -> AbstractContextManager[Any]:
    """A context in which one program can have so many bytes of shared memory."""
    return patch.object(Device, "of", return_value=Device(None, size))


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


def check(case: Case) -> dict[str, Tensor]:
    """The results of the kernels, compared with plain torch."""
    actual = run(case, "triton")
    assert_same(actual, expect(case), case.tolerance)
    assert bool(actual["converged"].all()) and actual["residual"].max().item() < case.tolerance
    return actual


def scale_of(i: int, n: int) -> InputScale:
    """One of the input scales that kernels have for n states."""
    return SCALES[i % (3 if n == 1 else 2)]


@needs_triton
@pytest.mark.parametrize(("input_scale", "n"), [(SCALES[0], 2), (SCALES[1], 2), (SCALES[2], 1)])
def test_every_discretization(input_scale: InputScale, n: int) -> None:
    check(Case(b=1, t=2, n=n, k=1, input_scale=input_scale))


# in sizes that do not fill their blocks
CASES = [
    Case(b=1, t=1, p=1, n=1, k=1, input_scale="delta"),
    Case(b=3, t=2, p=16, n=5, k=3, activation="sigmoid", feedback=False, starts=False),
    Case(heads=3, b=1, t=2, p=20, n=1, k=4, starts=False, low=torch.bfloat16),
    Case(b=1, t=1, k=4, n=1, selective=False, activation="sigmoid", input_scale="one_minus_decay"),
    Case(heads=3, b=1, t=2, p=5, n=9, k=1, activation="softplus_of_minus", norm_eps=None),
    Case(b=1, t=2, p=33, n=1, k=3, selective=False, norm_eps=None, low=torch.bfloat16),
    Case(b=1, t=2, k=2, input_scale="delta", feedback=False, low=torch.bfloat16),
    # feedback of Delta, of some of it, and of Delta and some of B
    Case(heads=3, b=1, t=2, p=9, n=16, k=2, fed=4, activation="sigmoid", starts=False),
    Case(b=1, t=3, p=7, n=3, k=4, fed=7, norm_eps=None, low=torch.bfloat16),
    Case(heads=1, b=1, t=2, p=17, n=33, k=0, fed=17, input_scale="delta"),
    Case(b=1, t=2, k=1, fed=9, starts=False),
    Case(b=1, t=2, p=4, n=1, k=3, selective=False, fed=4, input_scale="delta"),
    # without reflections
    Case(b=1, t=3, p=5, n=3, k=0, norm_eps=None),
    Case(heads=1, b=2, t=2, p=20, n=18, k=0, input_scale="delta", low=torch.bfloat16),
    Case(b=1, t=2, p=3, n=1, k=0, selective=False, starts=False),
    # a coupled scale, of one state
    Case(heads=1, b=1, t=2, p=20, n=1, k=0, input_scale="one_minus_decay", low=torch.bfloat16),
    Case(b=2, t=2, p=17, n=1, k=2, fed=17, input_scale="one_minus_decay"),
    # states in two blocks that are held, in three and in four that are not
    Case(b=1, t=2, p=3, n=32, k=1, input_scale="delta"),
    Case(heads=1, b=1, t=2, p=17, n=48, k=1, input_scale="delta"),
    Case(heads=1, b=1, t=2, p=17, n=64, k=1),
    # a single head
    Case(heads=1, b=2, t=2, p=33, k=2, has_axis=False),
    Case(heads=1, b=1, t=3, p=5, k=0, has_axis=False, starts=False, low=torch.bfloat16),
    Case(heads=1, b=1, t=2, fed=9, k=1, has_axis=False, input_scale="delta"),
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
        (Case(heads=1, b=3, t=2, p=20, k=1, input_scale="delta"), 2, 2),
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
    from bedouin.kernels.direct.launch import choose_parts

    assert choose_parts(channels, samples) == parts


@needs_triton
@pytest.mark.parametrize(
    ("channels", "states", "samples"),
    [(64, 16, 8), (64, 32, 8), (64, 33, 4), (128, 16, 4), (128, 64, 2), (32, 64, 8)],
)
def test_fewer_samples_of_more_states(channels: int, states: int, samples: int) -> None:
    from bedouin.kernels.direct.launch import choose_samples

    A = torch.empty(8, states, channels, device=DEVICE)
    assert choose_samples(4096, A) == samples


@needs_triton
@pytest.mark.parametrize("workspace", [1, 2**23])
@pytest.mark.parametrize(
    "case",
    [
        Case(b=1, t=5, p=2, n=2, k=1),
        Case(heads=1, b=3, t=4, p=3, n=17, k=1, input_scale="delta"),
        Case(b=2, t=5, p=33, n=5, k=0, starts=False),
    ],
    ids=str,
)
def test_chunks_in_one_launch_of_the_reverse_sweep_and_in_several(
    workspace: int, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bedouin.kernels.direct.launch.WORKSPACE", workspace)
    assert_same(launched(case, 2, keep_every=2), expect(case), case.tolerance)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(k=5), r"5 reflections in a sweep \(at most 4\)"),
        (Case(p=129, n=16, feedback=False), "heads of 129 channels with 16 states in a sweep"),
        (Case(p=129, n=1), r"heads of 129 .* \(at most 128 with 64; set num_heads\)"),
        (Case(p=64, n=65), "heads of 64 channels with 65 states"),
        (Case(input_scale="one_minus_decay"), "input_scale='one_minus_decay' with 3 states"),
        (Case(eigenvalues="full"), "eigenvalues='full' in a sweep"),
        (Case(dtype=torch.bfloat16), "x, raw and A of torch.bfloat16"),
        (Case(dtype=torch.float64), "x, raw and A of torch.float64"),
    ],
    ids=str,
)
def test_limits(case: Case, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    operands, options = case.operands("cpu"), case.options()
    with pytest.raises(ValueError, match=f"does not support {message}"):
        choose_sweep("triton", operands, options)
    assert choose_sweep("auto", operands, options) == "reference"


@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize("memory", [L4, A100, H100])
def test_every_head_of_128_channels_has_a_kernel(
    memory: int, low: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On sm_89, sm_80 and sm_90, with its W^y in shared memory or read anew for each token."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with shared_memory(memory):
        for k in range(5):
            for has_axis in (True, False):
                case = Case(heads=1, p=128, n=16, k=k, low=low, has_axis=has_axis)
                assert choose_sweep("triton", case.operands("cpu"), case.options()) == "triton"


def test_a_tile_of_feedback_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    case = Case(p=128)
    with (
        shared_memory(2**14),
        pytest.raises(ValueError, match="feedback of 128 channels with 16384 bytes"),
    ):
        choose_sweep("triton", case.operands("cpu"), case.options())


# tiles of all widths: of everything but the reflections, of two of them, of one, of many states
STREAMED = [
    Case(b=3, t=5, p=16, n=3, k=3, heads=2),
    Case(b=1, t=18, p=33, n=17, k=2, heads=1),
    Case(b=2, t=4, p=64, n=16, k=1),
    Case(b=2, t=3, p=64, n=40, k=4, low=torch.bfloat16),
    Case(b=2, t=3, p=100, n=5, k=0, fed=100),
    Case(b=9, t=3, p=128, n=16, k=2, heads=1),
]


@needs_triton
@pytest.mark.parametrize("case", STREAMED, ids=str)
def test_weights_that_are_read_anew_for_each_token(case: Case) -> None:
    layout = case.options().known_layout()
    itemsize = 4 if case.low is None else case.low.itemsize
    blocks = head_blocks(case.p, case.n, layout)
    least = SCRATCH + blocks.rows_of_tile * blocks.channels * itemsize
    assert blocks.streams(itemsize, least)
    with shared_memory(least):
        check(case)


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


def in_float64(case: Case) -> dict[str, Tensor]:
    """Values and gradients by autograd through the plain sweep in float64, from rounded inputs."""
    given = [None if v is None else v.double().requires_grad_() for v in case.operands()]
    operands = Operands(*given)  # type: ignore[arg-type]
    sweep = direct_sweep_reference(operands, case.options())
    named = {name: v for name, v in zip(NAMES, given, strict=True) if v is not None}
    grads = torch.autograd.grad(
        (sweep.y, sweep.h), list(named.values()), cotangents(sweep), materialize_grads=True
    )
    found = {name: getattr(sweep, name).detach() for name in ("y", "h", "pivot")}
    return found | {f"gradient of {name}": v for name, v in zip(named, grads, strict=True)}


def check_without_feedback(case: Case) -> None:
    """The kernels against float64, and what they report against plain torch."""
    case = replace(case, feedback=False)
    actual = check(case)
    for name, theirs in in_float64(case).items():
        assert_close(name, actual[name].double(), theirs, case.tolerance, atol=case.tolerance)


LENGTHS = [(65, k, n, scale_of(i, n)) for k in range(3) for i, n in enumerate((3, 3, 1))]
LENGTHS += [(t, k, n, scale_of(k, n)) for t in (1, 63, 64) for k, n in enumerate((3, 3, 1))]
"""Tokens, around a multiple of those between two kept h, with reflections, states and scales."""


@needs_triton
@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize(("t", "k", "n", "input_scale"), LENGTHS)
def test_lengths_without_feedback(
    t: int, k: int, n: int, input_scale: InputScale, low: torch.dtype | None
) -> None:
    check_without_feedback(Case(b=1, t=t, p=5, n=n, k=k, input_scale=input_scale, low=low))


# samples of several warps, and states in several blocks
@needs_triton
@pytest.mark.parametrize(
    "case",
    [
        Case(b=3, t=2, p=1, n=1, k=1, input_scale="delta", activation="sigmoid"),
        Case(heads=3, b=1, t=3, p=33, n=5, k=0, low=torch.bfloat16),
        Case(heads=1, b=2, t=3, p=33, n=5, k=2, starts=False),
        Case(heads=1, b=2, t=3, p=9, n=5, k=1, has_axis=False),
        Case(b=1, t=3, p=33, n=34, k=0),
        Case(heads=1, b=1, t=3, p=70, n=17, k=3, input_scale="delta"),
        Case(b=1, t=3, p=33, n=1, k=4, selective=False, activation="softplus_of_minus"),
        Case(b=1, t=3, p=5, n=1, k=0, selective=False, input_scale="one_minus_decay"),
        Case(b=1, t=3, p=9, n=16, k=4, input_scale="delta"),
        Case(heads=1, b=1, t=2, p=20, n=64, k=4, low=torch.bfloat16),
    ],
    ids=str,
)
def test_options_without_feedback(case: Case) -> None:
    check_without_feedback(case)


@needs_triton
@pytest.mark.parametrize("workspace", [1, 2**23])
@pytest.mark.parametrize(
    "case",
    [
        Case(b=2, t=5, p=33, n=5, k=0),
        Case(b=2, t=8, p=33, n=5, k=2),
        Case(b=5, t=7, p=5, n=17, k=1, input_scale="delta"),
        Case(heads=1, b=3, t=5, p=5, n=49, k=1, low=torch.bfloat16),
        Case(b=1, t=3, p=5, n=1, k=0, selective=False),
    ],
    ids=str,
)
def test_launches_without_feedback(
    workspace: int, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch of the reverse sweep, and one for each chunk."""
    case = replace(case, feedback=False)
    monkeypatch.setattr("bedouin.kernels.direct.launch.WORKSPACE", workspace)
    assert_same(launched(case, 1, keep_every=2), expect(case), case.tolerance)


@needs_triton
def test_a_token_without_feedback_that_is_not_finite_spoils_its_own_sample() -> None:
    case = Case(b=4, t=2, p=33, n=2, k=1, feedback=False)
    given, (d, n) = case.operands(), (case.p, case.n)
    raw = given.raw.clone()
    for sample, column in enumerate((0, d, d + n, d + 2 * n, 2 * d + 2 * n)):
        raw[sample, 1, column] = torch.nan
    clean, spoiled = run(case, "triton"), run(case, "triton", given._replace(raw=raw))
    for name in ("y", "gradient of x", "gradient of raw", "scale", "defect", "report 1"):
        assert torch.equal(spoiled[name][5:], clean[name][5:]), name
    for name in ("scale", "defect", "report 1"):
        assert not bool(spoiled[name][:5, 1].isfinite().any()), name
    assert torch.equal(spoiled["y"][:, 0], clean["y"][:, 0])
    assert spoiled["converged"].tolist() == [False] * 5 + [True] * 3


@needs_triton
def test_operands_need_not_be_contiguous() -> None:
    """Nor does h need a cotangent."""
    case = Case(b=1, t=2, p=3, n=2, k=1)
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
@pytest.mark.parametrize(
    "case",
    [
        Case(b=1, t=2, k=1, feedback=False),
        Case(b=1, t=2, k=1, low=torch.bfloat16),
        Case(heads=1, b=2, t=17, p=20, k=2, has_axis=False),
        Case(heads=3, b=1, t=2, p=5, n=1, k=0, selective=False, input_scale="one_minus_decay"),
        Case(b=1, t=33, p=33, n=17, k=4, starts=False),
    ],
    ids=str,
)
def test_a_given_fixed_point(case: Case) -> None:
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
@pytest.mark.parametrize(("input_scale", "n"), [("bounded_delta", 3), ("one_minus_decay", 1)])
def test_saturated_raw_values(input_scale: InputScale, n: int) -> None:
    case = Case(b=1, t=2, k=1, n=n, input_scale=input_scale)
    given = case.operands()
    given = given._replace(raw=20 * given.raw)
    expected = run(case, "reference", given)
    del expected["magnitude"]
    assert_same(run(case, "triton", given), expected, case.tolerance)


@pytest.mark.parametrize(
    ("case", "plain"),
    [
        *(
            pytest.param(case, False, marks=needs_triton)
            for case in (
                Case(k=0, low=torch.bfloat16),
                Case(k=1, heads=1, has_axis=False, low=torch.bfloat16),
                Case(k=1, t=0, low=torch.bfloat16),
            )
        ),
        (Case(k=1), True),
    ],
    ids=str,
)
def test_opcheck(case: Case, plain: bool) -> None:
    """Of the kernels with low dtypes, whose strides fake results have, too, and in plain torch."""
    values: Any = case.operands("cpu" if plain else DEVICE)
    operands = [v if v is None else v.detach().requires_grad_() for v in values]
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
    ("t", "states", "chunk"),
    [(16, 2**18, CHUNK), (16, 2**19, CHUNK // 2), (16, 2**20, CHUNK // 4), (17, 2**20, CHUNK)],
)
def test_large_memories_are_kept_more_often(t: int, states: int, chunk: int) -> None:
    x, A = torch.empty(2, t, 1, device="meta"), torch.empty(2, states, 1, device="meta")
    assert choose_chunk(Operands(x, x, A, A, None, None)) == chunk


def nearly_singular(k: int) -> tuple[Case, Operands]:
    """Tokens with small pivots."""
    case = Case(1, 6, 4, 10, 2, k, beta_max=2.0, input_scale="delta", feedback=False)
    operands = case.operands()
    operands.raw[..., : case.p] += 1.5
    operands.raw[..., -k:] += 1.5
    return case, operands


@needs_triton
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("k", [3, 4])
def test_nearly_singular_tokens_are_exact_up_to_their_pivots(k: int, backend: Backend) -> None:
    case, operands = nearly_singular(k)
    wide = Operands(*(None if v is None else v.double() for v in operands))  # type: ignore[arg-type]
    exact, found = run(case, "reference", wide), run(case, backend, operands)
    pivot = exact["pivot"].min().item()
    assert pivot < 0.1
    # what a backward stable solve leaves, in both: rounding, amplified by the condition
    bound = 10 * torch.finfo(torch.float32).eps / pivot
    for name in ("y", *(name for name in exact if name.startswith("gradient"))):
        if exact[name].any():
            error = (found[name] - exact[name]).abs().max() / exact[name].abs().max()
            assert error.item() < bound, name


@needs_triton
@pytest.mark.parametrize("k", [3, 4])
def test_the_residual_is_that_of_an_evaluation_of_the_map(k: int) -> None:
    case, operands = nearly_singular(k)
    sweep = direct_sweep(operands, case.options(), backend="triton")
    x, raw, _, A, h0, _ = (None if v is None else v.double() for v in operands)
    assert x is not None and raw is not None and A is not None and h0 is not None
    c = choose_bind(None, case.options(), A)(raw)
    mixed = mix_channels(x, sweep.y.double(), None, c.U, c.M)
    scan = (mixed, c.delta, A, c.B, c.C, h0)
    F, _ = selective_scan_reference(
        *scan, input_scale="delta", eigenvalues="positive", exclusive=False
    )
    defect, size = (F - sweep.y).abs().amax(-1), F.abs().amax(-1)
    expected = relative_residual(defect, size)
    stats = Measured(sweep.defect, sweep.scale, sweep.pivot, sweep.magnitude).statistics()
    ratio = stats.residual.double() / expected
    # both are roundings of one token or another
    assert bool((ratio > 0.1).all()) and bool((ratio < 10).all()), ratio
    assert bool((expected > 1e-8).all()) and bool(stats.converged.all())


@needs_triton
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Bedouin, {}),
        (Bedouin, {"decay": "griffin", "num_householder": 3, "feedback": ()}),
        (FixedPointRNN, {}),
        (FixedPointRNN, {"decay": "griffin", "beta_max": 2.0}),
    ],
)
def test_a_layer_with_the_kernels_is_the_layer_without(kind: Any, options: dict[str, Any]) -> None:
    outputs = []
    for backend in ("reference", "triton"):
        torch.manual_seed(0)
        layer = kind(5, device=DEVICE, backend=backend, **options)
        x = torch.randn(2, 2, 5, device=DEVICE)
        y = layer(x)
        grads = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
        assert bool(layer.stats.converged.all()) and bool(layer.stats.backward.converged.all())
        outputs.append([y, *grads])
    for actual, expected in zip(outputs[1], outputs[0], strict=True):
        assert_close("output or gradient", actual, expected, 2e-5, atol=2e-5)


@needs_triton
def test_what_the_kernels_do_not_cover_is_said() -> None:
    x = torch.randn(1, 2, 5, device=DEVICE)
    with pytest.raises(
        ValueError, match=r"does not support the mixer LowRank \(only HouseholderProduct"
    ):
        Bedouin(5, mixer=LowRank(2), device=DEVICE, backend="triton")(x)


@pytest.mark.gpu
@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize("p", [64, 128])
def test_heads_of_the_benchmark(p: int, low: torch.dtype | None) -> None:
    case = Case(heads=1024 // p, b=16, t=256, p=p, n=16, k=4, starts=False, low=low)
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize("i", range(3))
@pytest.mark.parametrize(("p", "n", "k"), [(16, 1, 1), (100, 17, 3), (64, 64, 2), (33, 5, 4)])
def test_awkward_heads_compiled(p: int, n: int, k: int, i: int, low: torch.dtype | None) -> None:
    check(Case(heads=3, b=5, t=35, p=p, n=n, k=k, input_scale=scale_of(i, n), low=low))


@pytest.mark.gpu
@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize("t", [1, 63, 64, 100])
@pytest.mark.parametrize("p", [1, 63, 64, 100])
def test_awkward_sizes_of_a_single_head_compiled(t: int, p: int, low: torch.dtype | None) -> None:
    check(Case(heads=1, b=3, t=t, p=p, n=16, low=low, has_axis=False))


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
@pytest.mark.parametrize("i", range(3))
@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize(("p", "n"), [(64, 16), (100, 17), (128, 64), (16, 1)])
def test_without_feedback_compiled(p: int, n: int, k: int, i: int, low: torch.dtype | None) -> None:
    for t in (1, 63, 64, 65):
        case = Case(heads=3, b=1, t=t, p=p, n=n, k=k, input_scale=scale_of(i, n), low=low)
        check_without_feedback(case)


@pytest.mark.gpu
@pytest.mark.parametrize("low", [None, torch.bfloat16])
@pytest.mark.parametrize(("p", "n", "k"), [(64, 64, 1), (64, 64, 0), (100, 17, 0), (33, 40, 1)])
def test_feedback_of_delta_compiled(p: int, n: int, k: int, low: torch.dtype | None) -> None:
    check(Case(heads=3, b=5, t=35, p=p, n=n, k=k, fed=p, input_scale="delta", low=low))


def test_the_precision_of_products_by_all_names_of_the_setting() -> None:
    """Also by the name whose use makes torch refuse to read the older one."""
    from bedouin.kernels.direct.launch import uses_tf32

    matmul = torch.backends.cuda.matmul
    before, older = matmul.fp32_precision, torch.get_float32_matmul_precision()
    rounds = not interpreter_is_on()
    try:
        assert not uses_tf32()
        torch.set_float32_matmul_precision("high")
        assert uses_tf32() == rounds
        torch.set_float32_matmul_precision("highest")
        for precision in ("tf32", "ieee", "tf32"):
            matmul.fp32_precision = precision
            assert uses_tf32() == (rounds and precision == "tf32")
    finally:
        matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision(older)
        matmul.fp32_precision = before

"""The Triton kernels of the direct sweep against plain PyTorch: values and all gradients.

With TRITON_INTERPRET=1, set before Triton is imported, small shapes run on a CPU. Without it, the
tests need a CUDA device and also cover a table of sizes that are not multiples of a block.
Letters: b batch, t time, d channels, n state per channel, k reflections, r raw values.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from bedouin import Bedouin, FixedPointRNN, LowRank
from bedouin.kernels.backend import interpreter_is_on
from bedouin.kernels.direct import Sweep, direct_sweep, direct_sweep_reference
from bedouin.kernels.direct.buffers import (
    CHUNK,
    allocate_reverse,
    allocate_sweep,
    choose_chunk,
    collect_gradients,
)
from bedouin.kernels.direct.layout import choose_bind
from bedouin.kernels.direct.limits import choose_sweep
from bedouin.kernels.direct.registered import summarize
from bedouin.kernels.householder import mix_channels, unit, wy_factor
from bedouin.kernels.operands import (
    Activation,
    Coefficients,
    Operands,
    Parameterization,
    RawLayout,
)
from bedouin.kernels.scan import Eigenvalues, InputScale, selective_scan_reference
from bedouin.solvers.convergence import relative_residual

DEVICE = "cpu" if interpreter_is_on() else "cuda"

needs_triton = pytest.mark.interpreter if interpreter_is_on() else pytest.mark.gpu
compiled = pytest.mark.gpu

SCALES: tuple[InputScale, ...] = ("delta", "bounded_delta", "one_minus_decay")
RANGES: tuple[Eigenvalues, ...] = ("positive", "full")
ACTIVATIONS: tuple[Activation, ...] = ("softplus", "softplus_of_minus", "sigmoid")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Setting:
    """Shapes and options of a sweep; the dtypes of W_y, and of x and raw, may be lower."""

    b: int = 2
    t: int = 4
    d: int = 6
    n: int = 3
    layout: RawLayout = RawLayout("softplus", True, 2, 1.0)
    input_scale: InputScale = "bounded_delta"
    eigenvalues: Eigenvalues = "positive"
    norm_eps: float | None = 1e-5
    feedback: bool = True
    dtype: torch.dtype = torch.float32
    low: torch.dtype | None = None
    inputs: torch.dtype | None = None

    @property
    def tolerance(self) -> float:
        """That of the lowest dtype."""
        return max(TOLERANCE[d] for d in (self.dtype, self.low, self.inputs) if d is not None)

    def options(self) -> Parameterization:
        return Parameterization(self.layout, self.input_scale, self.eigenvalues, self.norm_eps)

    def bind(self, raw: Tensor) -> Coefficients:
        """What the layout says, in plain torch."""
        k, d, n = self.layout.num_householder, self.d, self.n
        states = [n, n] if self.layout.selective else []
        delta, *BC, u, alpha = raw.split([d, *states, k * d, k], -1)
        B, C = (unit(v) for v in BC) if BC else [torch.ones_like(raw[..., :1])] * 2
        U = unit(u.unflatten(-1, (k, d)))
        T = wy_factor(U, self.layout.beta_max * torch.sigmoid(alpha))
        return Coefficients(
            self._activate(delta), B, C, torch.zeros_like(raw[..., :1]), U, T, raw[..., :0]
        )

    def _activate(self, raw: Tensor) -> Tensor:
        if self.layout.activation == "sigmoid":
            return torch.sigmoid(raw)
        return softplus(raw if self.layout.activation == "softplus" else -raw)

    def operands(self) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return values.to(DEVICE, self.dtype)

        b, t, d, n = self.b, self.t, self.d, self.n
        r = self.layout.size(d, n)
        W_y = (0.2 * d**-0.5 * draw(r, d)).to(self.low or self.dtype) if self.feedback else None
        A = -draw(d, n).exp()
        x, raw = (draw(b, t, size).to(self.inputs or self.dtype) for size in (d, r))
        return [x, raw, W_y, A, draw(b, d, n), draw(b, d)]


def _run(
    setting: Setting, backend: Any, y_star: Tensor | None = None, given: Operands | None = None
) -> tuple[Sweep, list[Tensor], list[Tensor]]:
    """Sweep, gradients of a fixed linear function of y and the last h, and the adjoint's report."""
    drawn = given or setting.operands()
    operands: Any = [None if v is None else v.detach().requires_grad_() for v in drawn]
    before = [None if v is None else v.detach().clone() for v in operands]
    reports: list[Tensor] = []
    sweep = direct_sweep(
        Operands(*operands),
        setting.options(),
        setting.bind,
        y_star=y_star,
        report=lambda *report: reports.extend(report),
        backend=backend,
    )
    inputs = [v for v in operands if v is not None]
    outputs = (sweep.y, sweep.h)
    grads = torch.autograd.grad(outputs, inputs, _cotangents(sweep), materialize_grads=True)
    for value, kept in zip(operands, before, strict=True):
        assert value is None or kept is not None and torch.equal(value, kept)
    return sweep, list(grads), reports


def _cotangents(sweep: Sweep) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    y, h = (
        torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v)
        for v in (sweep.y, sweep.h)
    )
    return y, h


def _launched(
    setting: Setting, operands: Operands, keep_every: int = CHUNK
) -> tuple[Sweep, list[Tensor], list[Tensor]]:
    """What `_run` returns, by the launches, with other chunks than the public operation has."""
    from bedouin.kernels.direct.triton_launch import launch_reverse, launch_sweep

    options = setting.options()
    before = [None if v is None else v.clone() for v in operands]
    buffers = allocate_sweep(operands, options, keep_every, together=False)
    launch_sweep(buffers, options, keep_every)
    (_, pivot), _ = summarize(buffers.statistics)
    defect, scale, magnitude, _ = buffers.statistics
    sweep = Sweep(buffers.y, buffers.h.mT, defect, scale, magnitude, pivot)
    cotangents = _cotangents(sweep)
    known, grads = allocate_reverse(*cotangents, buffers.y, buffers.kept, operands, options)
    grad_normed = launch_reverse(known, grads, operands.W_y, options, keep_every)
    found = collect_gradients(grads, grad_normed, sweep.y, operands, options, wants_y0=True)
    for value, kept in zip(operands, before, strict=True):
        if value is not None:
            torch.testing.assert_close(value, kept, rtol=0, atol=0, equal_nan=True)
    given = [v for v, operand in zip(found, operands, strict=True) if operand is not None]
    return sweep, given, list(grads.statistics.unbind())


def _magnitude(setting: Setting) -> Tensor:
    """Of the reference: forward.py bounds a scale with a state axis by 1."""
    with torch.no_grad():
        operands: Any = [v if v is None else v.to(setting.dtype) for v in setting.operands()]
        operands[2] = setting.operands()[2]
        options = setting.options()
        return direct_sweep_reference(Operands(*operands), options, setting.bind).magnitude


def _assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, name
    if expected.numel() and not torch.equal(actual, expected):
        scale = 1 + expected.abs().max().double().item()
        error = (actual.double() - expected.double()).abs().max().item()
        assert error <= tolerance * scale, f"{name}: error {error:.1e}, scale {scale:.1e}"


def _truth(setting: Setting) -> tuple[Sweep, list[Tensor], list[Tensor]]:
    """The plain sweep: in float64, but where some dtypes are lower in the same ones, because the
    rounding to them is a part of the definition."""
    if (setting.low, setting.inputs) != (None, None):
        return _run(setting, "reference")
    exact: Any = [None if v is None else v.double() for v in setting.operands()]
    sweep, grads, report = _run(setting, "reference", given=Operands(*exact))
    values: Any = [v if v is None or v.dtype == torch.bool else v.float() for v in sweep]
    return Sweep(*values), [v.float() for v in grads], [v.float() for v in report]


def _assert_like_the_plain_sweep(
    setting: Setting, keep_every: int | None = None, tolerance: float | None = None
) -> None:
    tolerance = setting.tolerance if tolerance is None else tolerance
    expected, expected_grads, expected_report = _truth(setting)
    if keep_every is None:
        actual, grads, report = _run(setting, "triton")
    else:
        operands: Any = setting.operands()
        actual, grads, report = _launched(setting, Operands(*operands), keep_every)
    for name in ("y", "h", "defect", "scale", "pivot"):
        _assert_close(name, getattr(actual, name), getattr(expected, name), tolerance)
    _assert_close("magnitude", actual.magnitude, _magnitude(setting), tolerance)
    for i, (a, e) in enumerate(zip(grads, expected_grads, strict=True)):
        _assert_close(f"gradient {i}", a, e, tolerance)
    for a, e in zip(report, expected_report, strict=True):
        _assert_close("report", a, e, tolerance)


def reflections(k: int, beta_max: float = 1.0) -> RawLayout:
    return RawLayout("softplus", True, k, beta_max)


CASES = [
    *(Setting(1, 2, input_scale=s, eigenvalues=e) for s, e in itertools.product(SCALES, RANGES)),
    *(
        Setting(1, 2, input_scale=s, eigenvalues=e, feedback=False)
        for s, e in zip(SCALES, (*RANGES, RANGES[0]), strict=True)
    ),
    *(Setting(1, 2, 6, 3, RawLayout(a, True, 2, 1.0), SCALES[1]) for a in ACTIVATIONS),
    *(Setting(1, 2, 6, 1, RawLayout(a, False, 2, 1.0), SCALES[2]) for a in ACTIVATIONS),
    *(
        Setting(1, 2, 9, 4, RawLayout("sigmoid", True, k, beta_max), "delta")
        for k, beta_max in ((1, 2.0), (3, 2.0), (4, 1.0), (8, 2.0))
    ),
    *(
        Setting(b=1, t=t, layout=reflections(1), feedback=feedback)
        for t, feedback in ((1, True), (17, True), (1, False), (16, False))
    ),
    *(
        Setting(1, 2, d, n)
        for d, n in ((1, 1), (1, 4), (7, 1), (16, 8), (20, 5), (17, 16), (63, 2), (64, 1), (100, 3))
    ),
    *(Setting(b, 2, 20, 5, input_scale="one_minus_decay") for b in (1, 3)),
    # without feedback, what the phases do not take
    Setting(1, 1, 9, 2, reflections(8, 2.0), "delta", "full", feedback=False),
    Setting(1, 2, 9, 64, reflections(3), "one_minus_decay", "full", feedback=False),
    Setting(2, 4, 5, 1, RawLayout("softplus", False, 1, 1.0), feedback=False),
    *(
        Setting(2, 3, 100, 5, reflections(4), SCALES[2], feedback=False, inputs=inputs)
        for inputs in (None, torch.bfloat16)
    ),
    # products by torch
    Setting(65, 2, 8, 1),
    # products in several sums, with columns that are no multiple of a part
    Setting(1, 2, 540, 1, low=torch.bfloat16),
    *(
        Setting(b=b, t=t, feedback=feedback)
        for b, t in ((0, 4), (2, 0), (0, 0))
        for feedback in (True, False)
    ),
    # lower dtypes in W^y, in x and raw, in all of them
    Setting(1, 2, norm_eps=None),
    *(
        Setting(1, 2, norm_eps=eps, low=low)
        for low, eps in ((torch.bfloat16, 1e-5), (torch.bfloat16, None), (torch.float16, 1e-5))
    ),
    *(
        Setting(t=2, feedback=low is not None, low=low, inputs=inputs)
        for inputs in (torch.bfloat16, torch.float16)
        for low in (inputs, None)
    ),
    Setting(t=2, low=torch.float32, inputs=torch.bfloat16),
    Setting(t=2, low=torch.bfloat16, inputs=torch.float32),
    # many states in low precision
    *(Setting(b, 2, d, n, low=torch.bfloat16) for b, d, n in ((2, 256, 32), (1, 512, 64))),
]


@needs_triton
@pytest.mark.parametrize("setting", CASES, ids=str)
def test_values_and_gradients(setting: Setting) -> None:
    _assert_like_the_plain_sweep(setting)


@needs_triton
@pytest.mark.parametrize(
    ("setting", "rows"),
    [
        # of 128 channels each, whose sums over channels are shared out among the lanes of a warp
        (Setting(1, 2, 257, 1, reflections(1), "one_minus_decay", norm_eps=None), 4),
        (Setting(1, 2, 300, 16, reflections(2), "one_minus_decay", "full"), 4),
        (Setting(1, 2, 260, 5, reflections(4), "delta", "full"), 4),
        (Setting(1, 2, 516, 3, reflections(8), "bounded_delta", norm_eps=None), 8),
        # of two in a thread or one, or with their states in other warps (rows is 0); the cotangents
        # of B and C take several tensors of 32 columns
        (Setting(2, 3, 100, 20, reflections(2)), 4),
        (Setting(1, 3, 257, 32, reflections(2), "bounded_delta", "full"), 8),
        (Setting(1, 3, 300, 17, reflections(3), "one_minus_decay", norm_eps=None), 8),
        (Setting(1, 3, 128, 64, reflections(1), "delta"), 4),
        (Setting(1, 3, 200, 63, reflections(2), "one_minus_decay", "full"), 8),
        (Setting(2, 3, 260, 33, reflections(2), "delta", "full"), 16),
        (Setting(1, 3, 130, 70, reflections(2), "delta"), 0),
        # without feedback
        (Setting(1, 3, 300, 16, reflections(5), "delta", "full", feedback=False), 4),
        (Setting(2, 3, 257, 32, reflections(2), "one_minus_decay", feedback=False), 8),
        (Setting(1, 3, 130, 70, reflections(2), "delta", feedback=False), 0),
    ],
    ids=str,
)
def test_warps_that_hold_some_channels(setting: Setting, rows: int) -> None:
    from bedouin.kernels.direct.triton_constants import rows_of_channels

    assert rows_of_channels(setting.d, setting.n) == rows
    _assert_like_the_plain_sweep(setting, keep_every=2)


@needs_triton
@pytest.mark.parametrize("feedback", [True, False])
def test_a_reverse_sweep_of_several_chunks(feedback: bool) -> None:
    _assert_like_the_plain_sweep(Setting(b=2, t=5, feedback=feedback), keep_every=2)


@pytest.mark.parametrize(("states", "chunk"), [(2**19, 16), (2**20, 8), (2**20 + 1, 4)])
def test_chunks_are_shorter_where_the_workspace_would_be_large(states: int, chunk: int) -> None:
    x, A = torch.empty(1, 1, 1, device="meta"), torch.empty(states, 1, device="meta")
    for W_y in (A, None):
        assert choose_chunk(Operands(x, x, W_y, A, None, None), together=False) == chunk


@needs_triton
@pytest.mark.parametrize(
    "setting",
    [
        Setting(b=1, t=17, layout=reflections(1)),
        *(Setting(t=2, low=low, inputs=low) for low in (torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_a_given_fixed_point(setting: Setting) -> None:
    y_star = _run(setting, "reference")[0].y.detach()
    expected, expected_grads, _ = _run(setting, "reference", y_star)
    actual, grads, _ = _run(setting, "triton", y_star)
    assert torch.equal(actual.y, y_star)
    _assert_close("h", actual.h, expected.h, setting.tolerance)
    for i, (a, e) in enumerate(zip(grads, expected_grads, strict=True)):
        _assert_close(f"gradient {i}", a, e, setting.tolerance)


@needs_triton
def test_runs_repeat_to_the_bit() -> None:
    first, second = (_run(Setting(1, 2), "triton") for _ in range(2))
    for a, b in zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def nearly_singular(k: int) -> tuple[Setting, Operands]:
    """Tokens with small pivots: of the phases, and with more than four reflections of one head."""
    layout = reflections(k, 2.0)
    setting = Setting(6, 4, 10, 2, layout, "delta", feedback=False)
    drawn: Any = setting.operands()
    operands = Operands(*drawn)
    operands.raw[..., : setting.d] += 1.5
    operands.raw[..., -k:] += 1.5
    return setting, operands


@needs_triton
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("k", [3, 5])
def test_nearly_singular_tokens_are_exact_up_to_their_pivots(k: int, backend: str) -> None:
    setting, operands = nearly_singular(k)
    wide = Operands(*(None if v is None else v.double() for v in operands))  # type: ignore[arg-type]
    exact, exact_grads, _ = _run(setting, "reference", given=wide)
    sweep, grads, _ = _run(setting, backend, given=operands)
    pairs = zip((sweep.y, *grads), (exact.y, *exact_grads), strict=True)
    errors = [((a - e).abs().max() / e.abs().max()).item() for a, e in pairs if e.any()]
    pivot = exact.pivot.min().item()
    assert pivot < 0.1
    # what a backward stable solve leaves, in both: rounding, amplified by the condition
    assert max(errors) < 10 * torch.finfo(torch.float32).eps / pivot, errors


@needs_triton
@pytest.mark.parametrize("k", [3, 5])
def test_the_residual_is_that_of_an_evaluation_of_the_map(k: int) -> None:
    setting, operands = nearly_singular(k)
    sweep = direct_sweep(operands, setting.options(), backend="triton")
    x, raw, _, A, h0, _ = (None if v is None else v.double() for v in operands)
    assert x is not None and raw is not None and A is not None and h0 is not None
    c = choose_bind(None, setting.options(), A)(raw)
    mixed = mix_channels(x, sweep.y.double(), None, c.U, c.M)
    scan = (mixed, c.delta, A, c.B, c.C, h0, c.erase)
    F, _ = selective_scan_reference(
        *scan, input_scale="delta", eigenvalues="positive", exclusive=False
    )
    defect, size = (F - sweep.y).abs().amax(-1), F.abs().amax(-1)
    expected = relative_residual(defect, size)
    assert sweep.residual is not None and sweep.converged is not None
    ratio = sweep.residual.double() / expected
    # both are roundings of one token or another
    assert bool((ratio > 0.1).all()) and bool((ratio < 10).all()), ratio
    assert bool((expected > 1e-8).all()) and bool(sweep.converged.all())


@needs_triton
def test_operands_need_not_be_contiguous() -> None:
    setting = Setting(feedback=False)
    x, raw, _, A, h0, y0 = setting.operands()
    assert x is not None and raw is not None
    strided: list[Any] = [torch.stack([v, v], -1)[..., 0] for v in (x, raw)]
    rest: tuple[Any, ...] = (None, A, h0, y0)
    options = setting.options()
    expected = direct_sweep(Operands(x, raw, *rest), options, backend="triton").y
    actual = direct_sweep(Operands(*strided, *rest), options, backend="triton").y
    assert torch.equal(actual, expected)


@needs_triton
@pytest.mark.parametrize(("feedback", "more"), [(True, 1), (False, 8)])
def test_raw_may_be_a_part_of_a_wider_tensor(feedback: bool, more: int) -> None:
    operands: list[Any] = Setting(t=2, feedback=feedback).operands()
    raw = operands[1]
    wide = torch.cat([raw, torch.full_like(raw[..., :more], torch.nan)], -1)
    results = []
    for part in (raw, wide.split([raw.shape[-1], more], -1)[0]):
        assert (part is raw) == part.is_contiguous()
        part.requires_grad_()
        given = Operands(operands[0], part, *operands[2:])
        sweep = direct_sweep(given, Setting().options(), backend="triton")
        results.append([sweep.y, *torch.autograd.grad(sweep.y.square().sum(), part)])
    for actual, expected in zip(*results, strict=True):
        _assert_close("y or gradient of raw", actual, expected, 1e-12)


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("feedback", [True, False])
def test_a_token_that_is_not_finite_spoils_its_own_sample_from_there_on(feedback: bool) -> None:
    setting = Setting(b=3, t=3, layout=RawLayout("softplus", True, 1, 1.0), feedback=feedback)
    drawn: Any = setting.operands()
    operands = Operands(*drawn)
    raw = operands.raw.clone()
    raw[1, 1, 0] = torch.nan
    clean, (clean_grad, *_), _ = _launched(setting, operands)
    swept, (grad, *_), _ = _launched(setting, operands._replace(raw=raw))
    assert torch.equal(swept.y[[0, 2]], clean.y[[0, 2]])
    assert torch.equal(grad[[0, 2]], clean_grad[[0, 2]])
    assert torch.equal(swept.y[1, :1], clean.y[1, :1])
    assert not bool(swept.y[1, 1:].isfinite().all(-1).any())
    assert not bool(swept.scale[1, 1:].isfinite().any())
    assert bool(swept.scale[[0, 2]].isfinite().all())


@needs_triton
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Bedouin, {}),
        (Bedouin, {"decay": "griffin", "num_householder": 3, "feedback": ()}),
        (FixedPointRNN, {}),
        (FixedPointRNN, {"decay": "griffin", "eigenvalues": "full", "beta_max": 2.0}),
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
        _assert_close("output or gradient", actual, expected, 2e-5)


@needs_triton
def test_what_the_kernels_do_not_cover_is_said() -> None:
    x = torch.randn(1, 2, 5, device=DEVICE)
    with pytest.raises(
        ValueError, match=r"does not support the mixer LowRank \(only HouseholderProduct"
    ):
        Bedouin(5, mixer=LowRank(2), device=DEVICE, backend="triton")(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": RawLayout("softplus", True, 9, 1.0)}, "9 reflections"),
        ({"dtype": torch.bfloat16}, "x, raw and A of torch.bfloat16"),
        ({"dtype": torch.float64}, "x, raw and A of torch.float64"),
        ({"n": 4097, "d": 6}, "6 channels with 4097 states"),
        ({"n": 1, "d": 4097, "layout": RawLayout("softplus", True, 4, 1.0)}, "4 reflections of"),
    ],
)
def test_limits_of_the_kernels(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    setting = replace(Setting(b=1, t=1, feedback=False), **change)
    x, raw, A = (torch.empty(1, 1, setting.d, dtype=setting.dtype) for _ in range(3))
    raw = torch.empty(1, 1, setting.layout.size(setting.d, setting.n), dtype=setting.dtype)
    A = torch.empty(setting.d, setting.n, dtype=setting.dtype)
    operands = Operands(x, raw, None, A, None, None)
    with pytest.raises(ValueError, match=f"does not support {message}"):
        choose_sweep("triton", operands, setting.options())
    assert choose_sweep("auto", operands, setting.options()) == "reference"


@compiled
@pytest.mark.parametrize(
    "setting",
    [
        *(
            Setting(3, t, d, 16, low=low)
            for t, d in itertools.product((1, 63, 64, 100), repeat=2)
            for low in (None, torch.bfloat16)
        ),
        *(
            Setting(b, 9, 1024, 16, reflections(4), low=low, inputs=low)
            for b in (17, 64, 130)
            for low in (torch.bfloat16,)
        ),
        *(
            Setting(2, 18, d, n, reflections(k), scale, feedback=fed)
            for d, n, k, scale, fed in (
                *((1024, 16, 4, scale, True) for scale in SCALES),
                (2048, 16, 4, "bounded_delta", True),
                (1000, 12, 3, "one_minus_decay", True),
                (512, 64, 2, "delta", True),
                *((1024, 16, 4, scale, False) for scale in SCALES),
                (2048, 16, 4, "one_minus_decay", False),
                (512, 64, 8, "bounded_delta", False),
            )
        ),
    ],
    ids=str,
)
def test_sizes_that_the_interpreter_is_too_slow_for(setting: Setting) -> None:
    # the equations of up to 2,048 channels amplify rounding
    tolerance = 2e-3 if setting.low is None else None
    _assert_like_the_plain_sweep(setting, tolerance=tolerance)

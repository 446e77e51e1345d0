"""The phases of the exact sweep in Triton against plain PyTorch: values and all gradients.

With TRITON_INTERPRET=1, set before Triton is imported, small shapes run on a CPU; without it the
tests need a CUDA device.
Letters: b samples of a head, t time, p channels of a head, n state per channel, r raw values,
H heads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bedouin import Bedouin
from bedouin.kernels.backend import Backend, interpreter_is_on
from bedouin.kernels.direct import direct_sweep
from bedouin.kernels.direct.limits import choose_sweep
from bedouin.kernels.direct.phases.limits import takes_phases
from bedouin.kernels.operands import Activation, Operands, Parameterization, RawLayout
from bedouin.kernels.scan import Eigenvalues, InputScale
from bedouin.parameterization import FeedbackScope
from bedouin.testing import assert_close

DEVICE = "cpu" if interpreter_is_on() else "cuda"
needs_triton = pytest.mark.interpreter if interpreter_is_on() else pytest.mark.gpu

# of the largest value; compiled, exponentials and quotients in float32 are approximations. In
# bfloat16 cotangents of x and raw are rounded, and B, C and q are kept in it.
TOLERANCE = {
    torch.float32: 5e-6 if interpreter_is_on() else 5e-4,
    torch.float16: 2e-3,
    torch.bfloat16: 3e-2,
}
NAMES = ("x", "raw", "W_y", "A", "h0", "y0")
BACKENDS: tuple[Backend, ...] = ("triton", "reference")


@dataclass(frozen=True)
class Case:
    """Shapes and options of a sweep; `dtype` is that of x, raw and W_y."""

    heads: int = 2
    b: int = 1
    t: int = 5
    p: int = 16
    n: int = 8
    fed: str = "dx"
    erase: float = 1.0
    k: int = 0
    beta_max: float = 1.0
    activation: Activation = "softplus"
    input_scale: InputScale = "delta"
    eigenvalues: Eigenvalues = "positive"
    norm_eps: float | None = 1e-5
    starts: bool = True
    dtype: torch.dtype = torch.float32
    scope: FeedbackScope = "head"
    bounded: bool = False

    def options(self) -> Parameterization:
        layout = RawLayout(self.activation, True, self.k, self.beta_max, self.erase)
        scales = self.input_scale, self.eigenvalues, self.norm_eps
        bounded_heads = self.heads if self.bounded else 0
        return Parameterization(
            layout, *scales, feeds_x="x" in self.fed, bounded_heads=bounded_heads
        )

    def operands(self, device: str = DEVICE) -> Operands:
        generator = torch.Generator().manual_seed(self.b + 10 * self.t)

        def draw(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        H, b, t, p, n = self.heads, self.heads * self.b, self.t, self.p, self.n
        x, raw = draw(b, t, p), draw(b, t, self.options().known_layout().size(p, n))
        read = p * (H if self.scope == "layer" else 1)
        W_y = 0.5 * read**-0.5 * draw(H, len(self.fed) * p, read) if self.fed else None
        A, wide = -draw(H, p, n, dtype=torch.float32).exp(), torch.float32
        if H == 1:
            A, W_y = A[0], None if W_y is None else W_y[0]
        start = (draw(b, p, n, dtype=wide), draw(b, p, dtype=wide)) if self.starts else (None, None)
        return Operands(x, raw, W_y, A, *start)


def run(case: Case, backend: Backend, operands: Operands | None = None) -> dict[str, Tensor]:
    """Values, statistics and the gradients of a linear function of y and h; those of the reference
    in float64."""
    given = case.operands() if operands is None else operands
    wide = torch.float64 if backend == "reference" else None
    leaves = [None if v is None else v.detach().to(wide or v.dtype) for v in given]
    named = {k: v.requires_grad_() for k, v in zip(NAMES, leaves, strict=True) if v is not None}
    reports: list[Tensor] = []
    sweep = direct_sweep(
        Operands(*leaves),  # type: ignore[arg-type]
        case.options(),
        report=lambda *report: reports.extend(report),
        backend=backend,
    )
    generator = torch.Generator().manual_seed(2)
    outputs = sweep.y, sweep.h
    weights = [torch.randn(v.shape, generator=generator).to(v) for v in outputs]
    grads = torch.autograd.grad(outputs, list(named.values()), weights, materialize_grads=True)
    found = {"y": sweep.y, "h": sweep.h, "scale": sweep.scale, "pivot": sweep.pivot}
    if reports:
        found["scale of w"] = reports[1]
    if sweep.y.numel():
        residual = max(sweep.defect.max() / sweep.scale.max(), reports[0].max() / reports[1].max())
        assert residual <= (1e-14 if wide else 1e-5)
    return found | {f"gradient of {name}": v for name, v in zip(named, grads, strict=True)}


def check(case: Case, operands: Operands | None = None) -> None:
    """The kernels against plain torch."""
    given = case.operands() if operands is None else operands
    assert takes_phases(given, case.options())
    actual, expected = run(case, "triton", given), run(case, "reference", given)
    for name, theirs in expected.items():
        # also of cotangents of size 1, where those of a norm of few channels cancel
        tolerance = TOLERANCE[case.dtype]
        assert_close(name, actual[name].to(theirs.dtype), theirs, tolerance, atol=tolerance)


CASES = [
    Case(),
    Case(heads=1, t=1, p=1, n=1),
    Case(heads=1, b=3, t=2, p=7, n=5, fed="d", erase=0.5, eigenvalues="full"),
    Case(fed="x", erase=0.0, activation="sigmoid", input_scale="bounded_delta"),
    Case(fed="", erase=2.0, t=3, activation="softplus_of_minus", eigenvalues="full"),
    Case(norm_eps=None, starts=False, input_scale="bounded_delta"),
    Case(fed="d", norm_eps=None, t=2, n=17),
    Case(fed="d", erase=0.0, t=3, p=7, n=3, norm_eps=None, input_scale="bounded_delta"),
    Case(heads=1, b=2, fed="d", erase=0.0, t=18, p=17, n=64, k=1, input_scale="bounded_delta"),
    Case(b=3, fed="d", erase=0.0, t=2, p=5, n=1, k=1, dtype=torch.bfloat16, starts=False),
    Case(fed="x", norm_eps=None, p=20, t=2, starts=False),
    # more tokens than a chunk has, and many more states than a warp has lanes for
    Case(heads=1, t=18),
    Case(heads=1, t=33, p=3, n=2, eigenvalues="full", erase=0.3),
    Case(heads=1, t=2, p=64, n=64),
    Case(heads=1, t=2, p=33, n=40, fed="x"),
    Case(heads=3, b=2, t=4, dtype=torch.bfloat16),
    Case(heads=1, t=17, p=24, n=18, dtype=torch.bfloat16, fed="d", eigenvalues="full"),
    Case(heads=1, t=2, p=64, n=64, dtype=torch.bfloat16),
    Case(t=3, n=4, dtype=torch.float16, starts=False),
    # a state without a partner in its word
    Case(t=4, n=5, dtype=torch.bfloat16),
    Case(heads=1, t=18, k=1, input_scale="bounded_delta"),
    Case(t=3, p=12, n=5, k=2, input_scale="bounded_delta", b=2),
    Case(heads=1, t=3, n=5, k=3, fed="d", beta_max=2.0, eigenvalues="full"),
    Case(heads=1, t=3, k=4, fed="x", norm_eps=None, activation="sigmoid", starts=False),
    Case(heads=1, t=3, p=24, k=2, fed="", input_scale="bounded_delta"),
    # without feedback
    Case(fed="", erase=0.0, t=18, b=2),
    Case(heads=1, fed="", erase=0.0, t=1, p=1, n=1, k=1, starts=False),
    Case(fed="", erase=0.0, t=3, k=2, beta_max=2.0, activation="sigmoid", eigenvalues="full"),
    Case(heads=1, b=2, fed="", erase=0.0, t=3, p=64, n=64, k=4, input_scale="bounded_delta"),
    Case(heads=1, b=2, fed="", erase=0.0, t=2, p=100, n=5, input_scale="bounded_delta"),
    Case(heads=1, fed="", erase=0.0, t=17, p=128, n=32, k=1, dtype=torch.bfloat16),
    Case(heads=1, fed="", t=2, p=100, n=20, k=4, eigenvalues="full", input_scale="bounded_delta"),
    Case(heads=1, fed="", erase=0.0, t=3, p=256, n=16, k=2, input_scale="bounded_delta"),
    Case(heads=3, fed="", erase=0.5, t=2, p=200, n=3, dtype=torch.bfloat16, starts=False),
    Case(heads=1, t=17, n=5, k=2, dtype=torch.bfloat16, input_scale="bounded_delta"),
    # W^y reads the outputs of all heads
    Case(scope="layer", t=18, b=2),
    Case(scope="layer", heads=2, b=17, t=2, p=7, n=5, fed="d", starts=False),
    Case(scope="layer", heads=17, t=2, b=1, p=7, n=5),
    Case(scope="layer", t=33, p=20, n=3, fed="x", erase=0.0, eigenvalues="full", norm_eps=None),
    Case(scope="layer", t=1, p=64, n=64, input_scale="bounded_delta"),
    Case(scope="layer", t=16, heads=4, dtype=torch.bfloat16),
    # more states for a channel than a thread holds
    Case(heads=1, t=2, p=64, n=128),
    Case(heads=1, t=17, p=20, n=100, dtype=torch.bfloat16),
    Case(t=2, p=33, n=128, fed="", erase=0.5, dtype=torch.bfloat16),
    Case(heads=1, t=18, p=12, n=70, k=1, fed="d", erase=0.0, input_scale="bounded_delta"),
    Case(scope="layer", t=2, p=20, n=128),
    # x with its feedback becomes its tanh
    Case(bounded=True),
    Case(heads=1, t=18, p=7, n=5, bounded=True, fed="x", erase=0.0, norm_eps=None),
    Case(heads=1, t=2, p=64, n=64, bounded=True, dtype=torch.bfloat16),
    Case(scope="layer", t=18, b=2, bounded=True, starts=False),
]


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case: Case) -> None:
    check(case)


@needs_triton
@pytest.mark.parametrize("fed", ["dx", ""])
@pytest.mark.parametrize("shape", [(0, 3), (1, 0)])
def test_without_tokens(shape: tuple[int, int], fed: str) -> None:
    check(Case(b=shape[0], t=shape[1], fed=fed))


@needs_triton
@pytest.mark.parametrize(("fed", "p"), [("dx", 16), ("", 70)])
def test_operands_that_are_not_contiguous(fed: str, p: int) -> None:
    case = Case(b=2, t=3, p=p, fed=fed)
    x, raw, W_y, A, h0, y0 = case.operands()
    assert h0 is not None and y0 is not None
    strided = [torch.stack([v, v], -1)[..., 0] for v in (x, raw, y0)]
    turned = [v.mT.contiguous().mT for v in (A, h0)]
    W_y = None if W_y is None else W_y.mT.contiguous().mT
    check(case, Operands(strided[0], strided[1], W_y, turned[0], turned[1], strided[2]))


@needs_triton
def test_a_sample_alone_is_the_same() -> None:
    case = Case(heads=1, b=3, t=3)
    whole = run(case, "triton")
    x, raw, W_y, A, h0, y0 = case.operands()
    assert h0 is not None and y0 is not None
    alone = direct_sweep(
        Operands(x[1:2], raw[1:2], W_y, A, h0[1:2], y0[1:2]), case.options(), backend="triton"
    )
    assert torch.equal(alone.y[0], whole["y"][1]) and torch.equal(alone.h[0], whole["h"][1])


@needs_triton
@pytest.mark.parametrize(("k", "fed"), [(0, "dx"), (1, "dx"), (0, ""), (1, "")])
def test_a_token_that_is_not_finite_is_reported_by_its_own_sample(k: int, fed: str) -> None:
    case = Case(heads=1, b=3, t=4, k=k, fed=fed, input_scale="bounded_delta")
    operands = case.operands()
    operands.x[1, 2, 3] = float("nan")
    sweep = direct_sweep(operands, case.options(), backend="triton")
    assert sweep.converged is not None
    assert sweep.converged.tolist() == [True, False, True]
    assert sweep.y[1, :2].isfinite().all() and sweep.y[[0, 2]].isfinite().all()


@needs_triton
@pytest.mark.parametrize("k", [0, 2])
def test_without_a_gradient(k: int) -> None:
    case = Case(t=18, k=k, input_scale="bounded_delta")
    with torch.no_grad():
        sweep = direct_sweep(case.operands(), case.options(), backend="triton")
    assert_close("y", sweep.y, run(case, "triton")["y"].detach(), 1e-6)
    assert sweep.converged is not None and sweep.converged.all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("p", "n", "k", "fed"),
    [
        *((p, n, k, "d") for p, n, k in ((64, 64, 1), (64, 64, 0), (64, 16, 2), (33, 40, 1))),
        *((p, n, 0, fed) for p, n in ((16, 1), (64, 128), (32, 100)) for fed in ("d", "")),
        *((p, n, k, "") for p, n in ((128, 32), (100, 17), (256, 16), (256, 1)) for k in (0, 2, 4)),
    ],
)
def test_many_samples_compiled(p: int, n: int, k: int, fed: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"input_scale": "bounded_delta", "fed": fed, "erase": 0.0}
    case = Case(heads=16, b=20, t=35, p=p, n=n, k=k, dtype=dtype, starts=False, **options)
    if dtype == torch.float32:
        check(case)
        return
    # By the sum of squares: in some of 320 samples feedback amplifies the rounding of B and C to
    # bfloat16, to 5 percent of the largest value in plain torch with rounded B and C.
    actual, expected = run(case, "triton"), run(case, "reference")
    for name, theirs in expected.items():
        error = torch.linalg.vector_norm(actual[name].to(theirs.dtype) - theirs)
        assert error <= TOLERANCE[dtype] * torch.linalg.vector_norm(theirs), name


def test_what_they_do_not_take() -> None:
    assert not takes_phases(*other(input_scale="one_minus_decay"))
    assert takes_phases(*other(scope="layer")) and not takes_phases(*other(scope="layer", k=1))
    assert not takes_phases(*other(p=65)) and not takes_phases(*other(n=129))
    assert not takes_phases(*other(k=5))
    given, options = other(fed="d", erase=0.0)
    assert given.W_y is not None and takes_phases(given, options)
    assert not takes_phases(given._replace(W_y=given.W_y[:, :-1]), options)
    # without W^y its registers are free for larger heads
    assert takes_phases(*other(fed="", p=256)) and takes_phases(*other(fed="", p=65, n=32))
    assert not takes_phases(*other(fed="", p=257)) and not takes_phases(*other(fed="", p=65, n=33))
    assert not takes_phases(*other(fed="", n=129)) and not takes_phases(*other(fed="", k=5))


def test_auto_takes_them_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bedouin.kernels.backend.is_cuda_device", lambda device: True)
    monkeypatch.setattr("bedouin.kernels.backend._TRITON", "3.6.0")
    monkeypatch.setattr("bedouin.kernels.backend._IS_OLD", False)
    assert choose_sweep("auto", *other()) == choose_sweep("auto", *other(fed="d")) == "triton"
    given, options = other()
    assert choose_sweep("auto", given._replace(A=given.A.double()), options) == "reference"
    wide = given._replace(raw=given.raw.double())
    # the last: they solve, and for a y that is given there are other kernels, but none for erase
    calls = (other(p=65), False), (other(n=129), False), ((wide, options), False), (other(), True)
    for call, is_solved in calls:
        monkeypatch.setattr("bedouin.kernels.backend._TOLD", set())
        with pytest.warns(UserWarning, match="which is slow: the Triton kernels do not support"):
            assert choose_sweep("auto", *call, is_solved=is_solved) == "reference"
        # once
        assert choose_sweep("auto", *call, is_solved=is_solved) == "reference"
        assert choose_sweep("reference", *call) == "reference"
    assert choose_sweep("auto", *other(fed="d", erase=0.0), is_solved=True) == "triton"


@needs_triton
def test_a_given_y_has_its_gradient_from_other_kernels() -> None:
    case = Case(fed="d", erase=0.0, k=1, t=3, input_scale="bounded_delta")
    y_star = run(case, "reference")["y"].detach().float()
    found = []
    for backend in BACKENDS:
        leaves = [v.detach().requires_grad_() for v in case.operands() if v is not None]
        y = direct_sweep(Operands(*leaves), case.options(), y_star=y_star, backend=backend).y
        assert torch.equal(y, y_star)
        found.append(torch.autograd.grad(y.square().sum(), leaves))
    for name, ours, theirs in zip(NAMES, *found, strict=True):
        assert_close(name, ours, theirs, TOLERANCE[case.dtype], atol=TOLERANCE[case.dtype])


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
    case = Case(fed="d", erase=0.0, k=1, t=2, n=1, p=7, starts=False, input_scale="bounded_delta")
    given = case.operands()
    assert given.W_y is not None
    x, raw, W_y = given.x.to(inputs), given.raw.to(inputs), given.W_y.to(weights)
    check(replace(case, dtype=torch.bfloat16), given._replace(x=x, raw=raw, W_y=W_y))


@needs_triton
@pytest.mark.parametrize("fed", ["d", ""])
def test_opcheck(fed: str) -> None:
    """Of the solve, of its gradient, and of the gradient of a y that was given."""
    case = Case(b=1, t=3, n=2, k=1, fed=fed, erase=0.0, input_scale="bounded_delta")
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    ops, fields = torch.ops.bedouin, (*case.options().scalars(), False, 16)
    values: Any = case.operands()
    operands = [v if v is None else v.detach().requires_grad_() for v in values]
    for keep_every in (0, 16):
        given = (*operands, *fields[:-1], keep_every)
        torch.library.opcheck(ops.direct_sweep, given, test_utils=utils)
    y, h, kept, *_ = ops.direct_sweep(*values, *fields)
    torch.library.opcheck(ops.direct_sweep_known, (y.clone(), *operands, *fields), test_utils=utils)
    known = ops.direct_sweep_known(y, *values, *fields)[2]
    for solved, memories in ((True, kept), (False, known)):
        backward = (y.clone(), h.clone(), y, memories, *values, True, *fields, solved)
        torch.library.opcheck(ops.direct_sweep_backward, backward, test_utils=utils[:2])


@needs_triton
def test_a_compiled_function_is_one_graph_with_the_same_results() -> None:
    case = Case(fed="d", erase=0.0, t=3, k=1, input_scale="bounded_delta")

    def solve(*given: Tensor) -> tuple[Tensor, Tensor]:
        sweep = direct_sweep(Operands(*given), case.options(), backend="triton")
        return sweep.y, sweep.h

    found = []
    for function in (torch.compile(solve, fullgraph=True, backend="aot_eager"), solve):
        leaves = [v.detach().requires_grad_() for v in case.operands() if v is not None]
        y, h = function(*leaves)
        found.append([y, h, *torch.autograd.grad(y.square().sum() + h.sum(), leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def other(**changes: Any) -> tuple[Operands, Parameterization]:
    case = replace(Case(), **changes)
    return case.operands("cpu"), case.options()


BY_HEAD = partial(Bedouin.recall, feedback_scope="head", feedback_heads=None)
"""A layer in which every head has feedback."""


@needs_triton
@pytest.mark.parametrize(
    ("make", "k", "dtype"),
    [
        (BY_HEAD, 1, torch.float32),
        (partial(Bedouin, feedback=("delta",)), 1, torch.bfloat16),
        (BY_HEAD, 0, torch.float32),
        (BY_HEAD, 0, torch.bfloat16),
        (partial(Bedouin.recall, feedback_heads=None), 0, torch.float32),
        (partial(Bedouin.recall, feedback_noise=0.0, num_groups=1), 0, torch.float32),
        (partial(Bedouin.recall, feedback_noise=0.0), 0, torch.float32),
    ],
)
def test_a_layer(make: Callable[..., Bedouin], k: int, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"d_state": 4, "num_heads": 2, "num_householder": k}
    options["input_scale"] = "bounded_delta" if k else "delta"
    layers = [make(8, backend=b, **options) for b in BACKENDS]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for layer, wide in zip(layers, (dtype, torch.float64), strict=True):
        layer.to(DEVICE, wide)
        given = x.detach().to(DEVICE, wide, copy=True).requires_grad_()
        y, state = layer(given, return_state=True)
        y.square().sum().backward()
        assert given.grad is not None
        found.append([y, *state, given.grad, *(v.grad for v in layer.parameters())])
    for i, (ours, theirs) in enumerate(zip(*found, strict=True)):
        assert_close(f"{i}", ours.to(theirs.dtype), theirs, TOLERANCE[dtype], atol=TOLERANCE[dtype])

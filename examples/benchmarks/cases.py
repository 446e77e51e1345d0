"""The rows of the benchmark: what is measured, at which shapes, and the comparison before it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bedouin.solvers import Anderson, Broyden, Jacobi, Picard
from benchmarks import agreement, special, subjects
from benchmarks.measure import Context, Numbers, Subject, measure_subject
from benchmarks.setting import Setting, Shape

Measure = Callable[[Context, Shape], Numbers]
Agreement = Callable[[Setting, Shape], None]

EVERY = ("128x16", "64x256", "16x1024", "8x4096")
TINY = ("2x4", "3x6")


def _always() -> str | None:
    return None


@dataclass(frozen=True)
class Case:
    """A row of the benchmark."""

    name: str
    title: str
    measure: Measure
    shapes: tuple[str, ...] = EVERY
    agrees: Agreement | None = None
    missing: Callable[[], str | None] = _always
    """Returns why it cannot be measured on this machine, or None if it can."""
    most_repeats: int | None = None
    """The largest number of timed calls, for slow rows that are only there for comparison."""
    compiles: bool = False
    """Whether every measurement calls torch.compile, so that running it before saves no time."""


def _subject(make: Callable[[Setting, Shape], Subject]) -> Measure:
    def measure(context: Context, shape: Shape) -> Numbers:
        return measure_subject(context, lambda: make(context.setting, shape))

    return measure


CASES = (
    Case(
        "direct",
        "Direct, feedback",
        _subject(subjects.direct),
        agrees=agreement.direct_agrees,
    ),
    Case(
        "direct-no-feedback",
        "Direct, no feedback",
        _subject(partial(subjects.direct, feedback=False)),
        agrees=agreement.linear_agrees,
    ),
    Case(
        "direct-recomputed",
        "Direct, feedback, run again in the backward",
        _subject(subjects.direct_recomputed),
        agrees=agreement.direct_agrees,
    ),
    Case("lstm", "LSTM (cuDNN on a GPU)", _subject(subjects.lstm)),
    Case("scan", "scan alone", _subject(subjects.scan), agrees=agreement.scan_agrees),
    Case(
        "mamba-scan",
        "scan of mamba-ssm",
        _subject(subjects.mamba_scan),
        missing=subjects.mamba_is_missing,
    ),
    Case(
        "gated-delta-product",
        "gated delta product of flash-linear-attention",
        _subject(subjects.gated_delta_product),
        missing=subjects.fla_is_missing,
    ),
    Case(
        "decode", "step, one token", special.decode, shapes=("1x1",), agrees=agreement.step_agrees
    ),
    Case(
        "jacobi-iteration",
        "one Jacobi iteration, no product",
        partial(special.one_iteration, kind=Jacobi),
        shapes=("64x256",),
        agrees=agreement.jacobi_agrees,
    ),
    Case(
        "picard-iteration",
        "one Picard iteration, no product",
        partial(special.one_iteration, kind=Picard),
        shapes=("64x256",),
        agrees=agreement.picard_agrees,
    ),
    Case(
        "jacobi-no-feedback",
        "Jacobi, no feedback, rtol 1e-5",
        _subject(subjects.jacobi_without_feedback),
        agrees=agreement.linear_jacobi_agrees,
    ),
    Case(
        "picard",
        f"Picard, {subjects.CAP} iterations, one-step gradient",
        _subject(subjects.picard),
        shapes=("64x256",),
        agrees=agreement.picard_agrees,
    ),
    Case(
        "jacobi",
        f"Jacobi, {subjects.CAP} iterations",
        _subject(subjects.jacobi),
        shapes=("64x256",),
        agrees=agreement.jacobi_agrees,
    ),
    Case(
        "anderson",
        f"Anderson, {subjects.CAP} iterations",
        _subject(partial(subjects.accelerated, kind=Anderson)),
        shapes=("64x256",),
    ),
    Case(
        "broyden",
        f"Broyden, {subjects.CAP} iterations",
        _subject(partial(subjects.accelerated, kind=Broyden)),
        shapes=("64x256",),
    ),
    Case(
        "reference",
        "Direct, plain torch",
        _subject(partial(subjects.direct, backend="reference")),
        shapes=("128x16",),
        most_repeats=3,
    ),
    Case(
        "compiled-map-step",
        "F(y) under torch.compile",
        special.compiled_map_step,
        shapes=("128x16",),
        compiles=True,
    ),
    Case(
        "compiled-direct",
        "Direct under torch.compile",
        special.compiled_direct,
        shapes=("128x16",),
        compiles=True,
    ),
)
"""In the order of measurement, the most important first, since the time budget may run out."""

QUICK = ("direct", "direct-no-feedback")


def select(names: tuple[str, ...], shapes: tuple[str, ...]) -> list[tuple[Case, Shape]]:
    """The cases with these names, each with its shape, at those of `shapes` that apply to it.

    A shape applies to a case if the case lists it or if no case does. Empty `names` or `shapes`
    mean all. Raises ValueError for an unknown name.
    """
    known = {case.name: case for case in CASES}
    for name in names:
        if name not in known:
            raise ValueError(f"rows must be among {tuple(known)}, got {name!r}")
    chosen = [known[name] for name in names] if names else list(CASES)
    return [
        (case, Shape.parse(shape))
        for case in chosen
        for shape in (case.shapes if not shapes else shapes)
        if shape in case.shapes or shape not in _KNOWN_SHAPES
    ]


_KNOWN_SHAPES = {shape for case in CASES for shape in case.shapes}

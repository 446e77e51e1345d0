"""The rows of the benchmark: what is measured, at which shapes, and the comparison before it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import nn

from bedouin import FixedPointRNN, GatedDeltaNet, Tracker, TrackingDeltaNet
from bedouin.baselines import Mamba
from bedouin.solvers import Adjoint, ImplicitAdjoint, Jacobi, OneStepAdjoint, Picard
from benchmarks import agreement, special, subjects
from benchmarks import packed as documents
from benchmarks.measure import Context, Numbers, Subject, layer_subject, measure_subject
from benchmarks.setting import Setting, Shape

Measure = Callable[[Context, Shape], Numbers]
Agreement = Callable[[Setting, Shape], None]

EVERY = ("128x16", "64x256", "16x1024", "8x4096")
TINY = ("2x4", "3x6")
D_MODEL = Setting.m
"""The width of the run; titles name the sizes that follow from it, which toy sizes differ from."""


@dataclass(frozen=True)
class Case:
    """A row of the benchmark."""

    name: str
    title: str
    measure: Measure
    shapes: tuple[str, ...] = EVERY
    agrees: Agreement | None = None
    needs: tuple[str, ...] = ()
    """Packages that it needs."""
    most_repeats: int | None = None
    """The largest number of timed calls, for slow rows that are only there for comparison."""
    heads: int = 1
    """Heads of the layer."""

    def adapt(self, setting: Setting) -> Setting:
        """The sizes of the run with the heads of this row."""
        return replace(setting, h=self.heads)

    def missing(self) -> str | None:
        """Why it cannot be measured, or None if it can."""
        left_out = [name for name in self.needs if find_spec(name) is None]
        return f"{left_out[0]} is not installed" if left_out else None


def _subject(make: Callable[[Setting, Shape], Subject]) -> Measure:
    def measure(context: Context, shape: Shape) -> Numbers:
        return measure_subject(context, lambda: make(context.setting, shape))

    return measure


def _heads(heads: int) -> Case:
    """The layer with heads: the exact sweep with feedback."""
    return Case(
        f"direct-heads{heads}",
        f"Direct, feedback, {heads} heads of {2 * D_MODEL // heads}",
        _subject(subjects.direct),
        agrees=agreement.direct_agrees,
        heads=heads,
    )


def _picard(suffix: str, adjoint: Adjoint) -> Case:
    """The paper's iteration with its gradient, or with the exact one."""
    return Case(
        f"picard{suffix}",
        f"Picard, {subjects.CAP} iterations, {type(adjoint).__name__}",
        _subject(partial(subjects.capped, solver=Picard(rtol=0.0, atol=0.0), adjoint=adjoint)),
        agrees=agreement.picard_agrees,
    )


def _explicit() -> tuple[Case, ...]:
    """Layers whose sizes follow from d_model alone."""
    kinds: dict[str, type[nn.Module]] = {
        "tracking": TrackingDeltaNet,
        "memory": GatedDeltaNet,
        "tracker": Tracker,
        "rnn": FixedPointRNN,
        "mamba": Mamba,
    }
    return tuple(
        Case(
            name,
            kind.__name__,
            _subject(partial(subjects.explicit, kind=kind)),
            agrees=partial(agreement.explicit_agrees, kind=kind),
        )
        for name, kind in kinds.items()
    )


def _decode(suffix: str, title: str, heads: int) -> Case:
    return Case(
        f"decode{suffix}",
        f"step, one token{title}",
        special.decode,
        shapes=("1x1",),
        agrees=agreement.step_agrees,
        heads=heads,
    )


def _packed(heads: int, *, even: bool, feedback: bool) -> Case:
    """Documents in one row beside the same documents as padded rows."""
    options: dict[str, Any] = {} if feedback else {"feedback": ()}
    names = ("packed" if even else "packed-random", "" if feedback else "-no-feedback")
    lengths = "equal lengths" if even else "random lengths"
    return Case(
        "".join(names) + (f"-heads{heads}" if heads > 1 else ""),
        f"documents of {lengths}, {'' if feedback else 'no '}feedback, heads: {heads}",
        partial(documents.packed, even=even, feedback=feedback),
        shapes=("64x256",) if even else ("64x1024",),
        agrees=partial(agreement.packed_agrees, even=even, **options),
        heads=heads,
    )


PACKED = tuple(
    _packed(heads, even=even, feedback=feedback)
    for even in (True, False)
    for feedback in (True, False)
    for heads in (1, 8, 16)
)
"""Documents in one row."""

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
        _subject(partial(subjects.direct, feedback=())),
        agrees=agreement.linear_agrees,
    ),
    _heads(8),
    _heads(16),
    Case("lstm", "LSTM (cuDNN on a GPU)", _subject(subjects.lstm)),
    *_explicit(),
    Case(
        "kimi-fla",
        "Kimi Delta Attention, kernels of FLA",
        _subject(lambda setting, shape: layer_subject(subjects.kimi(setting), setting, shape)),
        agrees=agreement.kimi_agrees,
        needs=("fla",),
    ),
    _picard("", OneStepAdjoint()),
    _picard("-exact", ImplicitAdjoint()),
    Case("scan", "scan alone", _subject(subjects.scan), agrees=agreement.scan_agrees),
    Case(
        "mamba-scan",
        "scan of mamba-ssm",
        _subject(subjects.mamba_scan),
        needs=("mamba_ssm", "selective_scan_cuda"),
    ),
    _decode("", "", 1),
    _decode("-heads8", ", 8 heads of 128", 8),
    _decode("-heads16", ", 16 heads of 64", 16),
    *PACKED,
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
        "jacobi",
        f"Jacobi, {subjects.CAP} iterations",
        _subject(
            partial(subjects.capped, solver=Jacobi(rtol=0.0, atol=0.0), adjoint=ImplicitAdjoint())
        ),
        shapes=("64x256",),
        agrees=agreement.jacobi_agrees,
    ),
    Case(
        "reference",
        "Direct, plain torch",
        _subject(partial(subjects.direct, backend="reference")),
        shapes=("128x16",),
        most_repeats=3,
    ),
)
"""In the order of measurement, the most important first, since the time budget may run out."""

SPEED = {
    "direct": "1 head",
    "direct-heads8": "8 heads",
    "direct-heads16": "16 heads",
    "direct-no-feedback": "no feedback",
    "tracking": "tracking",
    "memory": "memory",
    "tracker": "tracker",
    "rnn": "FixedPointRNN",
    "picard": "picard, one step",
    "picard-exact": "picard, exact",
    "mamba": "mamba",
    "lstm": "lstm",
}
"""The rows of --speed, each with the name of its layer there."""

QUICK = ("direct", "direct-no-feedback", "direct-heads8", "direct-heads16")


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

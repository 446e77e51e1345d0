"""The table of layers that obey the laws of test_every_layer.py and test_every_layer_in_torch.py,
and layers with random options.

Letters: b batch, t time, m d_model.
"""

import copy
import io
import os
import random
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bedouin import (
    Bedouin,
    BedouinState,
    FixedPointRNN,
    GatedDeltaNet,
    HouseholderProduct,
    Kronecker,
    LowRank,
    Monarch,
    NoMixing,
    SequenceModel,
    Tracker,
    TrackingDeltaNet,
)
from bedouin.baselines import LSTM, Attention, DeltaNet, DeltaProduct, Mamba
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.layers.heads import HeadLinear
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

EXACT: dict[str, Any] = {"rtol": 1e-13, "atol": 1e-300}


def tracked(kind: Any) -> Callable[..., Any]:
    """A layer with trackers, which are small if the layer is."""

    def make(m: int, **options: Any) -> Any:
        small = {"tracker_dim": 4, "tracker_state": 3} if m < 16 else {}
        return kind(m, **small | options)

    return make


FIXED_POINTS: dict[str, Callable[..., Any]] = {
    "one head": partial(Bedouin, d_state=2),
    "heads": partial(Bedouin, d_state=2, num_heads=2, num_householder=1, feedback=("delta",)),
    "no feedback": partial(Bedouin, d_state=2, num_heads=2, feedback=()),
    "coupled": partial(Bedouin, d_state=1, decay="griffin", input_scale="one_minus_decay"),
    "full": partial(
        Bedouin, d_state=2, num_householder=4, beta_max=2.0, eigenvalues="full", feedback_norm=False
    ),
    "no mixing": partial(Bedouin, d_state=2, num_heads=2, num_householder=0),
    "low rank": lambda m, **k: Bedouin(m, d_state=2, mixer=LowRank(2), **{"num_heads": 2} | k),
    "dense": lambda m, **k: Bedouin(m, d_state=2, num_heads=2, mixer=Kronecker(), **k),
    "convolution": partial(Bedouin, d_state=2, num_heads=2, d_conv=3),
    "paper": partial(Bedouin.from_paper, d_state=2, solver="auto", adjoint=ImplicitAdjoint()),
    "vector": FixedPointRNN,
    "vector, heads": partial(FixedPointRNN, num_heads=2, decay="griffin", d_conv=2),
    "picard": partial(Bedouin, d_state=2, solver=Picard(**EXACT), max_steps=200),
    "jacobi": partial(FixedPointRNN, solver=Jacobi(**EXACT)),
}
MEMORIES: dict[str, Callable[..., Any]] = {
    "tracking": tracked(TrackingDeltaNet),
    "two trackers": tracked(partial(Tracker, num_trackers=2)),
    "memory": partial(GatedDeltaNet, num_heads=3, head_dim=4, expand_v=1.5),
}
BASELINES: dict[str, Callable[..., Any]] = {
    "lstm": LSTM,
    "lstm, convolution": partial(LSTM, expand=1.5, d_conv=3),
    "mamba": Mamba,
    "mamba, full": partial(Mamba, d_conv=None, eigenvalues="full"),
    "delta net": partial(DeltaNet, num_heads=2),
    "delta net, gated": partial(DeltaNet, num_heads=2, gated=True, d_conv=None),
    "delta product": partial(DeltaProduct, num_heads=2, gated=True),
    "delta product, three": partial(
        DeltaProduct, gated=True, num_householder=3, head_dim=3, expand_v=1.5
    ),
    "attention": partial(Attention, num_heads=2, rope_base=100.0),
    "attention, convolution": partial(Attention, d_conv=4, rope_base=None, head_dim=3),
}
LAYERS = FIXED_POINTS | MEMORIES | BASELINES
ONE_STEP: dict[str, Any] = {"adjoint": OneStepAdjoint(), "max_steps": 1, "on_unconverged": "ignore"}
SOLVES: dict[str, Callable[..., Any]] = {
    "loose": partial(Bedouin, d_state=2, num_heads=2, solver=Picard(0.5)),
    "solver of the adjoint": partial(Bedouin, solver=Jacobi(), adjoint=ImplicitAdjoint(Picard())),
    "one step": partial(Bedouin, num_heads=2, solver=Picard(), adjoint=OneStepAdjoint()),
    "one picard step": partial(Bedouin, num_heads=2, solver=Picard(), **ONE_STEP),
    "phantom": partial(Bedouin, solver=Anderson(), adjoint=PhantomAdjoint()),
    "unrolled": partial(Bedouin, num_heads=2, adjoint=UnrolledAdjoint()),
    "unrolled picard": partial(Bedouin, solver=Picard(), adjoint=UnrolledAdjoint()),
    "unrolled jacobi": partial(Bedouin, solver=Jacobi(), adjoint=UnrolledAdjoint()),
    "gate alone": partial(Bedouin, feedback=("mixer",), mixer=NoMixing(), input_scale="delta"),
}
"""Layers with solvers and adjoints that are not exact enough for all laws."""
MODELS: dict[str, Callable[..., Any]] = {
    "model": lambda m, **k: SequenceModel(5, m, [Bedouin(m, **k), FixedPointRNN(m, **k)], **k)
}
PAIRS: list[tuple[Solver, Adjoint | None]] = [
    *((Direct(), adjoint) for adjoint in (None, UnrolledAdjoint(), OneStepAdjoint())),
    *((Picard(), adjoint) for adjoint in (None, ImplicitAdjoint(Picard()), UnrolledAdjoint())),
    *((Picard(), adjoint) for adjoint in (OneStepAdjoint(), PhantomAdjoint())),
    *((Jacobi(), adjoint) for adjoint in (None, ImplicitAdjoint(Jacobi()), PhantomAdjoint())),
    *((Anderson(), adjoint) for adjoint in (None, OneStepAdjoint())),
    (Picard(damping=0.8, patience=2), ImplicitAdjoint(Picard())),
    (Picard(rtol=0.1, stop_rule="paper"), OneStepAdjoint()),
    (Broyden(), ImplicitAdjoint(Broyden())),
]
"""Solvers with adjoints that go together."""
ITERATED = "picard", "jacobi"
WITHOUT_KERNELS = "full", "low rank", "dense", "paper"
"""Of the fixed points: kernels neither have all of these options, nor are they as exact."""
WITH_KERNELS = [n for n in FIXED_POINTS if n not in (*WITHOUT_KERNELS, *ITERATED)]

layers = pytest.mark.parametrize("name", LAYERS)
layers_and_solves = pytest.mark.parametrize("name", LAYERS | SOLVES)
fixed_points = pytest.mark.parametrize("name", FIXED_POINTS)


class Place(NamedTuple):
    """Where the laws are tested, and how exactly they hold there."""

    device: str
    dtype: torch.dtype
    m: int
    rtol: float


CPU = Place("cpu", torch.float64, 4, 1e-11)
GPU = Place("cuda", torch.float32, 64, 1e-3)
# the paper's map amplifies roundings of float32 a thousandfold, in plain torch on a CPU too
ON_GPU = [name for name in (*FIXED_POINTS, *MEMORIES) if name not in (*ITERATED, "paper")]
PLACES = [pytest.param(name, CPU, id=name) for name in LAYERS]
PLACES += [pytest.param(n, GPU, id=f"{n}, cuda", marks=pytest.mark.gpu) for n in ON_GPU]
places = pytest.mark.parametrize(("name", "place"), PLACES)


def make(name: str, place: Place = CPU, **options: Any) -> Any:
    """A layer of the table, in which weights that begin at zero, or small, do not."""
    torch.manual_seed(0)
    factory: dict[str, Any] = {"device": place.device, "dtype": place.dtype}
    layer = (LAYERS | SOLVES | MODELS)[name](place.m, **factory | options).eval()
    with torch.no_grad():
        for parameter_name, parameter in layer.named_parameters():
            if "read_proj" in parameter_name:
                parameter.normal_(std=0.1)
            if "y_proj" in parameter_name and name in MEMORIES:
                parameter.mul_(2)
    return layer


def draw(b: int, t: int, place: Place = CPU) -> Tensor:
    return torch.randn(b, t, place.m, dtype=place.dtype, device=place.device)


def earlier_state(layer: Any, b: int) -> Any:
    """The state after two tokens."""
    weight = next(layer.parameters())
    x = torch.randn(b, 2, layer.d_model, dtype=weight.dtype, device=weight.device)
    return layer(x, return_state=True)[1].detach()


def in_chunks(layer: Any, x: Tensor, before: Any, sizes: list[int]) -> list[Tensor]:
    """The output and the state, also of a model."""
    outputs, state = [], before
    for chunk in x.split(sizes, 1):
        output, state = layer(chunk, state, return_state=True)
        outputs.append(output)
    return [torch.cat(outputs, 1), *tree_leaves(state)]


def in_steps(layer: Any, x: Tensor, before: Any) -> list[Tensor]:
    outputs, state = [], before
    for x_t in x.unbind(1):
        output, state = layer.step(x_t, state)
        outputs.append(output)
    return [torch.stack(outputs, 1), *tree_leaves(state)]


class Whole(nn.Module):
    """A call with everything that it takes."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, state: Any, mask: Tensor | None) -> Any:
        return self.layer(x, state, True, mask=mask)


class OneToken(Whole):
    """The first token, from a state."""

    def forward(self, x: Tensor, state: Any, mask: Tensor | None) -> Any:
        return self.layer.step(x[:, 0], state)


def floats(values: Iterable[Tensor]) -> list[Tensor]:
    return [v for v in values if v.is_floating_point()]


def total(values: Iterable[Tensor]) -> Tensor:
    """A number with a different derivative for each value."""
    parts = []
    for v in floats(values):
        weights = torch.linspace(0, 5, v.numel(), dtype=torch.float64).cos().view(v.shape)
        parts.append((v.double() * weights.to(v.device)).sum())
    return torch.stack(parts).sum()


def gradients(of: Iterable[Tensor], inputs: Iterable[Tensor]) -> list[Tensor]:
    options: dict[str, Any] = {"retain_graph": True, "materialize_grads": True}
    return list(torch.autograd.grad(total(of), list(inputs), **options))


def results(layer: Any, x: Tensor, before: Any = None, **call: Any) -> list[Tensor]:
    """The output and the state, those of a token that follows, and the gradients of x, of the state
    before, and of all parameters."""
    x = x.detach().requires_grad_()
    inputs = [x]
    if before is not None:
        before = before._make(v.detach().clone() for v in before.tensors)
        inputs += [v.requires_grad_() for v in floats(before.tensors)]
    output, state = layer(x, before, return_state=True, **call)
    found = [output, *state.tensors]
    if state.tensors[0].shape[0] == len(x):
        step, after = layer.step(x[:, 0].detach().nan_to_num(), state)
        found += [step, *after.tensors]
    parameters = [p for p in layer.parameters() if p.requires_grad]
    return [*(v.detach() for v in found), *gradients(found, [*inputs, *parameters])]


def assert_all_close(
    actual: Iterable[Tensor], expected: Iterable[Tensor], rtol: float, atol: float = 1e-14
) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_close(f"result {i}", a.to(e.dtype), e, rtol, atol)


def rows_of(mask: Tensor) -> list[Tensor]:  # (b, t)
    own = torch.arange(len(mask), device=mask.device).unsqueeze(1)
    return [mask & (own == i) for i in range(len(mask))]


def check_alone(
    layer: Any,
    x: Tensor,  # (b, t, m)
    pieces: list[Tensor],  # l masks (b, t)
    before: Any,  # the state of l samples
    rtol: float,
    atol: float = 1e-14,
    **call: Tensor,
) -> None:
    """Values and every gradient are those of calls with the tokens of one piece after the other,
    and so is a token that follows."""
    parts = [v.requires_grad_() for v in floats(before.tensors)]
    inputs = [x.requires_grad_(), *parts, *layer.parameters()]
    output, state = layer(x, before, return_state=True, **call)
    x_next = torch.randn(len(pieces), x.shape[-1], dtype=x.dtype, device=x.device)
    following, _ = layer.step(x_next, state)
    stats = getattr(layer, "stats", None)
    outputs, followings = torch.zeros_like(output), []
    for i, piece in enumerate(pieces):
        y, after = layer(x[piece].unsqueeze(0), before[i : i + 1], return_state=True)
        outputs[piece] = y[0]
        followings.append(layer.step(x_next[i : i + 1], after)[0])
        kept = state[i : i + 1].tensors
        if [v.shape for v in kept] == [v.shape for v in after.tensors]:  # not of padded keys
            assert_all_close(kept, after.tensors, rtol, atol)
    found, expected = [output, following], [outputs, torch.cat(followings)]
    assert_all_close(found, expected, rtol, atol)
    grads = gradients(found, inputs), gradients(expected, inputs)
    assert_all_close(*grads, 10 * rtol, 10 * atol)
    if stats is not None:
        assert stats.converged.all() and stats.converged.shape == (len(pieces),)


def assert_owns_memory(layer: Any, x: Tensor) -> None:
    """A returned state has no more storage than elements, and writing into it does not change the
    gradients of the call."""
    found = []
    for writes in (False, True):
        output, state = layer(x, return_state=True)
        for v in (*state.tensors, *layer.step(x[:, 0], layer.init_state(len(x)))[1].tensors):
            assert v.untyped_storage().nbytes() == v.nbytes
        of = [output, *(v.clone() for v in state.tensors)]
        if writes:
            for v in state.detach().tensors:
                v.fill_(7)
        if output.requires_grad:
            found.append(gradients(of, layer.parameters()))
    assert not found or all(map(torch.equal, *found))


class LoRA(nn.Module):
    """W v + B A dropout(v) for a projection with the weight W, with A and B of rank 2."""

    def __init__(self, base: nn.Linear | HeadLinear, dropout: float) -> None:
        super().__init__()
        *heads, r, p = base.weight.shape
        self.base, self.dropout = base, nn.Dropout(dropout)
        dtype = base.weight.dtype
        self.A = nn.Parameter(0.3 * torch.randn(*heads, 2, p, dtype=dtype))
        self.B = nn.Parameter(0.3 * torch.randn(*heads, r, 2, dtype=dtype))

    @property
    def weight(self) -> Tensor:
        """As PEFT's adapters have it."""
        return self.base.weight

    def forward(self, v: Tensor) -> Any:  # (H b, ..., p) -> (H b, ..., r)
        update = self.B @ self.A
        if update.dim() == 2:
            return self.base(v) + nn.functional.linear(self.dropout(v), update)
        rows = self.dropout(v).reshape(len(update), -1, v.shape[-1])
        return self.base(v) + (rows @ update.mT).reshape(*v.shape[:-1], -1)

    def merged(self) -> nn.Linear | HeadLinear:
        base: nn.Linear | HeadLinear = copy.deepcopy(self.base)
        with torch.no_grad():
            base.weight.add_(self.B @ self.A)
        return base


def put(layer: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    setattr(layer.get_submodule(owner), name, module)


def wrap(layer: nn.Module, *names: str, dropout: float = 0.0) -> None:
    """Adapters of the projections with these names, or of all."""
    for path, module in list(layer.named_modules()):
        if isinstance(module, nn.Linear | HeadLinear) and (path in names or not names):
            put(layer, path, LoRA(module, dropout))


def merge(layer: nn.Module) -> Any:
    merged = copy.deepcopy(layer)
    for path, module in list(merged.named_modules()):
        if isinstance(module, LoRA):
            put(merged, path, module.merged())
    return merged


def saved(value: Any, weights_only: bool = False) -> Any:
    """As a file of torch.save has it."""
    torch.save(value, buffer := io.BytesIO())
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


MARKS = "_no_weight_decay", "_no_reinit"


def marks(module: nn.Module) -> set[tuple[str, str]]:
    """The names of marked parameters, with the marks."""
    named = module.named_parameters()
    return {(name, mark) for name, p in named for mark in MARKS if getattr(p, mark, False)}


RNGS = st.randoms(use_true_random=False)
CASES = int(os.environ.get("FUZZ_CASES", "0"))


def drawn(number: int, *strategies: Any) -> Callable[[Any], Any]:
    """A test of so many random cases; of FUZZ_CASES, if those are more."""

    number_of_cases: Any = settings(max_examples=max(number, CASES))
    cases: Any = given(*strategies)
    return lambda test: pytest.mark.fuzz(number_of_cases(cases(test)))


def random_solve(rng: random.Random) -> dict[str, Any]:
    """A solver and an adjoint of any kind that go together."""
    kinds: list[Callable[..., Any]] = [Picard, Jacobi, Anderson, Broyden]
    kinds += [partial(Picard, **of) for of in ({"damping": 0.7}, {"patience": 3})]
    kinds += [lambda rtol: Direct(), partial(Picard, stop_rule="paper")]
    solver, other = (rng.choice(kinds)(1e-6) for _ in range(2))
    adjoints: list[Any] = [None, ImplicitAdjoint(other), OneStepAdjoint(), PhantomAdjoint()]
    adjoints += [UnrolledAdjoint()] if solver.can_unroll else []
    return {"solver": solver, "adjoint": rng.choice(adjoints), "max_steps": 150}


def random_layer(rng: random.Random, **fixed: Any) -> Any:
    """A small float64 `Bedouin` or `FixedPointRNN` with every option drawn from `rng`.

    `fixed` contains the options that are not drawn; "kind" is the class. Drawn are decay, input
    scale, eigenvalue range, feedback, mixer, beta_max in {0.5, 1, 2}, 0 to 4 reflections, the
    number of heads, and the width of a convolution.
    """
    kind = fixed.pop("kind", None) or rng.choice((Bedouin, FixedPointRNN))
    products = [HouseholderProduct(k, beta) for k in (1, 2, 3, 4) for beta in (0.5, 1.0, 2.0)]
    mixers = [NoMixing(), *products, *(LowRank(k) for k in (1, 2, 3)), Kronecker(), Monarch()]
    options: dict[str, Any] = {
        "d_model": rng.randint(1, 5),
        "expand": rng.choice((1, 2)),
        "mixer": rng.choice(mixers),
        "eigenvalues": rng.choice(("positive", "full")),
        "feedback_norm": rng.choice((True, False)),
        "feedback_init": rng.choice((0.1, 1.0)),
        "d_conv": rng.choice((None, None, 2, 3)),
    }
    if kind is Bedouin:
        options |= {
            "d_state": rng.choice((1, 2, 4)),
            "decay": rng.choice(("mamba", "griffin")),
            "input_scale": rng.choice(("delta", "bounded_delta", "one_minus_decay")),
            "feedback": [v for v in ("delta", "B", "C", "mixer") if rng.choice((True, False))],
        }
    else:
        options["decay"] = rng.choice(("sigmoid", "griffin"))
        options["feedback"] = rng.choice((("mixer",), ()))
    options |= {"dtype": torch.float64, "on_unconverged": "ignore"} | fixed
    if "num_heads" not in options:
        d = int(options["d_model"] * options["expand"])
        options["num_heads"] = rng.choice([h for h in range(1, d + 1) if d % h == 0])
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # drawn, not chosen
        warnings.filterwarnings("ignore", "input_scale='delta'", UserWarning)
        torch.manual_seed(rng.randint(0, 2**16))
        return kind(options.pop("d_model"), **options)


def random_state(layer: FixedPointLayer, b: int, scale: float = 0.1) -> BedouinState:
    """A state of b samples with random numbers in all of its tensors."""
    return BedouinState(*(scale * torch.randn_like(v) for v in layer.init_state(b)))

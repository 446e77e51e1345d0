"""Laws of sequences that every layer obeys: chunks, tokens, padding, documents, states.

Letters: b batch, t time, m d_model.
"""

import contextlib
import copy
import pickle
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tests.layer_cases import (
    CPU,
    MEMORIES,
    PLACES,
    RNGS,
    SOLVES,
    Place,
    assert_all_close,
    assert_owns_memory,
    check_alone,
    draw,
    drawn,
    earlier_state,
    floats,
    gradients,
    in_chunks,
    in_steps,
    layers,
    layers_and_solves,
    make,
    places,
    random_layer,
    random_solve,
    random_state,
    results,
    rows_of,
    saved,
)
from tests.messages import Row, of, raises
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate, default_convert

from bedouin import Bidirectional
from bedouin.solvers import ConvergenceError
from bedouin.testing import assert_close, measure_growth


def on_places(name: str, place: Place, b: int, t: int) -> tuple[Any, Tensor, Any]:
    """A layer, an input, and a state before it."""
    layer = make(name, place)
    return layer, draw(b, t, place), earlier_state(layer, b)


def check_chunks(layer: Any, x: Tensor, before: Any, rtol: float) -> None:
    """Values, and gradients through the states."""
    whole, end = layer(x, before, return_state=True)
    expected = [whole, *end.tensors]
    inputs = list(layer.parameters())
    t = x.shape[1]
    for found in (in_chunks(layer, x, before, [t // 3, 0, t - t // 3]), in_steps(layer, x, before)):
        assert_all_close(found, expected, rtol)
        assert_all_close(gradients(found, inputs), gradients(expected, inputs), 10 * rtol)
    changed = torch.cat([x[:, : t // 2], torch.randn_like(x[:, t // 2 :])], 1)
    assert_close("the past", layer(changed, before)[:, : t // 2], whole[:, : t // 2], rtol)


@places
def test_chunks_and_steps_give_what_one_call_gives(name: str, place: Place) -> None:
    """And nothing looks ahead. A memory takes 64 tokens at once."""
    t = 9 if place is CPU and name not in MEMORIES else 70
    check_chunks(*on_places(name, place, 3, t), place.rtol)


ROWS = [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]


def check_padding(layer: Any, x: Tensor, mask: Tensor, before: Any, rtol: float) -> None:
    x = x.masked_fill(~mask.unsqueeze(-1), torch.nan)
    output, state = layer(x, before, return_state=True, mask=mask)
    assert not output[~mask].any()
    empty = ~mask.any(1)
    for actual, expected in zip(state[empty].tensors, before[empty].tensors, strict=False):
        assert actual.shape != expected.shape or torch.equal(actual, expected)
    check_alone(layer, x, rows_of(mask), before, rtol, mask=mask)
    check_alone(layer, x, rows_of(mask), state.detach(), rtol, mask=mask)


@places
def test_padded_rows_are_the_rows_without_padding(name: str, place: Place) -> None:
    """Padding on the left, on the right, in the middle and everywhere, and NaN in it."""
    mask = torch.tensor(ROWS, device=place.device).bool()
    layer, x, before = on_places(name, place, 5, 5)
    check_padding(layer, x, mask, before, place.rtol)


def check_documents(
    layer: Any, x: Tensor, mask: Tensor, ends: Tensor, before: Any, rtol: float
) -> None:
    place = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    pieces = [(start <= place) & (place < stop) & mask for start, stop in pairwise(ends)]
    x = x.masked_fill(~mask.unsqueeze(-1), torch.nan)
    padding: dict[str, Any] = {} if mask.all() else {"mask": mask}
    check_alone(layer, x, pieces, before, rtol, cu_seqlens=ends, **padding)


@places
@pytest.mark.parametrize("padded", [False, True])
def test_documents_are_what_each_is_alone(name: str, place: Place, padded: bool) -> None:
    """Also those with padding in them, and empty ones."""
    mask = torch.tensor([[1, 1, 0, 0, 0, 1, 0, 1, 1]], device=place.device).bool() | (not padded)
    ends = torch.tensor([0, 0, 3, 4, 4, 9], dtype=torch.int32, device=place.device)
    layer, x, _ = on_places(name, place, 1, 9)
    check_documents(layer, x, mask, ends, earlier_state(layer, 5), place.rtol)


@places
@pytest.mark.parametrize("padded", [False, True])
def test_indexed_documents_begin_anew(name: str, place: Place, padded: bool) -> None:
    """As documents with bounds, of which the first has the incoming state. Indices of padding begin
    no document."""
    layer, x, before = on_places(name, place, 3, 7)
    index = torch.tensor([[0, 0, 1, 7, 1, 0, 9], [4, 4, 4, 4, 4, 4, 4], [9, 8, 2, 2, 9, 2, 3]])
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 1]])
    index, mask = index.to(x.device), mask.bool().to(x.device) | (not padded)
    x = x.masked_fill(~mask.unsqueeze(-1), torch.nan)
    padding = {"mask": mask} if padded else {}
    output, state = layer(x, before, return_state=True, seq_idx=index, **padding)
    outputs, lasts = torch.zeros_like(output), []
    for i, row in enumerate(rows_of(mask)):
        _, counts = index[row].unique_consecutive(return_counts=True)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        incoming = type(before).cat([before[i : i + 1], layer.init_state(len(counts) - 1)])
        y, after = layer(x[row].unsqueeze(0), incoming, return_state=True, cu_seqlens=ends)
        outputs[row] = y[0]
        lasts.append(layer.step(x[row][:1], after[-1:])[0])
    first = torch.stack([x[row][0] for row in rows_of(mask)])
    found, expected = [output, layer.step(first, state)[0]], [outputs, torch.cat(lasts)]
    assert_all_close(found, expected, place.rtol)
    inputs = list(layer.parameters())
    assert_all_close(gradients(found, inputs), gradients(expected, inputs), 10 * place.rtol)


@drawn(
    40,
    RNGS,
    st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_layers_with_random_options(
    rng: random.Random, rows: list[list[bool]], lengths: list[int]
) -> None:
    layer = random_layer(rng)
    hypothesis.note(f"{layer} {layer.extra_repr()}")
    torch.manual_seed(rng.randint(0, 999))
    mask, ends = torch.tensor(rows), torch.tensor([0, *lengths]).cumsum(0)
    x = torch.randn(len(mask), 5, layer.d_model, dtype=torch.float64)
    row = torch.randn(1, int(ends[-1]), layer.d_model, dtype=torch.float64)
    before, of_documents = random_state(layer, len(x)), random_state(layer, len(lengths))
    growth = max(
        measure_growth(layer, u, state=state, num_directions=1)
        for u, state in ((x, before), (row, of_documents[:1]))
    )
    hypothesis.assume(growth < 1e4)
    check_chunks(layer, x, before, 1e-12 * growth)
    check_padding(layer, x, mask, before, 1e-12 * growth)
    every = torch.ones_like(row[..., 0], dtype=torch.bool)
    check_documents(layer, row, every, ends, of_documents, 1e-12 * growth)


DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


@drawn(40, RNGS, DTYPES, st.integers(0, 3), st.integers(0, 5), st.booleans())
def test_a_call_changes_nothing_and_says_what_failed(
    rng: random.Random, dtype: torch.dtype, b: int, t: int, autocast: bool
) -> None:
    """With any solver and adjoint, under autocast, of no samples or tokens: what has converged is
    finite, and so are its gradients; the same call gives the same bits; only what has not converged
    is an error."""
    layer = random_layer(rng, dtype=dtype, **random_solve(rng))
    hypothesis.note(f"{layer} {layer.extra_repr()}")
    size = rng.choice((1.0, 0.0, 1e-6, 1e2))
    x = (size * torch.randn(b, t, layer.d_model)).to(dtype)
    incoming, kept = random_state(layer, b), copy.deepcopy(layer.state_dict())
    generator, layer.record_history = torch.get_rng_state(), rng.choice((True, False))
    autocast &= dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output, state = layer(x.requires_grad_(), incoming, return_state=True)
    assert output.shape == x.shape and output.dtype == (torch.bfloat16 if autocast else dtype)
    assert [v.dtype for v in state.tensors] == [v.dtype for v in incoming.tensors]
    stats: Any = layer.stats
    good = stats.converged
    assert (stats.history is not None) == layer.record_history
    assert output[good].isfinite().all() and state.ssm[good].isfinite().all()
    (output.double().sum() + state.ssm.double().sum()).backward()
    # cotangents of float16 may overflow, where x is small or a convolution adds them up
    overflows = dtype == torch.float16 and (layer.conv is not None or size < 1)
    is_good = good.all() and (stats.backward is None or stats.backward.converged.all())
    if is_good and not overflows:
        grads = [v.grad for v in (x, *layer.parameters()) if v.grad is not None]
        assert not any(grad.isnan().any() for grad in grads)
    assert torch.equal(torch.get_rng_state(), generator)
    after = layer.state_dict()
    assert all(torch.equal(after[n], v) for n, v in kept.items() if n != "_extra_state")
    first, stats = layer(x), layer.stats
    assert torch.equal(layer(x)[stats.converged], first[stats.converged])
    layer.on_unconverged, is_error = "raise", not stats.converged.all()
    with pytest.raises(ConvergenceError) if is_error else contextlib.nullcontext():
        layer(x)


@layers_and_solves
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nothing_in_nothing_out(name: str, shape: tuple[int, int], device: str) -> None:
    """Every parameter gets a gradient, for which DDP waits on a rank without samples or tokens."""
    layer = make(name).to(device).train("lstm" in name)  # the only mode with gradients of cuDNN's
    x, before = draw(*shape).to(device).requires_grad_(), earlier_state(layer, shape[0])
    if shape[1]:
        before = layer.init_state(0)
    kept = [v.clone() for v in before.tensors]
    output, state = layer(x, before, return_state=True)
    assert output.shape == x.shape and all(map(torch.equal, state.tensors, kept))
    if hasattr(layer, "stats"):
        assert layer.stats.converged.all() and layer.stats.num_steps.shape == shape[:1]
    for v in state.detach().tensors:
        v.fill_(7)  # the state that is returned is another one
    assert all(map(torch.equal, before.tensors, kept))
    none = torch.zeros(2, device=device, dtype=torch.int32)
    ones = torch.ones(shape, dtype=torch.bool, device=device)
    for result in (
        output,
        layer(x, mask=ones),
        layer(x, seq_idx=ones.int()),
        layer(draw(1, 0).to(device), cu_seqlens=none),
        layer(draw(1, 0).to(device), cu_seqlens=none[:1]),
        layer.step(draw(0, 1).to(device)[:, 0], layer.init_state(0))[0],
    ):
        layer.zero_grad()
        result.sum().backward()
        for parameter_name, parameter in layer.named_parameters():
            assert parameter.grad is not None and not parameter.grad.any(), parameter_name
    assert x.grad is not None and x.grad.shape == x.shape


# -- states


@layers
def test_a_state_is_selected_joined_detached_and_converted(name: str) -> None:
    layer, x = make(name), draw(4, 1)[:, 0]
    state = layer(draw(4, 3), return_state=True)[1]
    kind = type(state)
    assert any(v.requires_grad for v in state.tensors)
    assert not any(v.requires_grad for v in state.detach().tensors)
    for joined in (
        kind.stack([state[i] for i in range(4)]),
        kind.cat([state[:1], state[[1, 2]], state[3:]]),
        state[[3, 2, 1, 0]][torch.tensor([3, 2, 1, 0])],
        state.clone(),
        state.cpu(),
    ):
        assert isinstance(joined, kind) and all(map(torch.equal, joined.tensors, state.tensors))
    whole, _ = layer.step(x, state)
    chosen = torch.tensor([True, False, False, True])
    assert_close("[mask]", layer.step(x[chosen], state[chosen])[0], whole[chosen], 1e-12)
    # a sample without batch axis is taken as a batch of one
    assert_close("[3]", layer.step(x[3:], state[3])[0], whole[3:], 1e-12)
    assert {v.dtype for v in floats(state.to(torch.float32).tensors)} == {torch.float32}
    assert all(v.is_meta for v in state.to("meta").tensors)
    if not name.startswith("attention"):  # whose state holds keys and values as they are
        low = make(name, dtype=torch.bfloat16).init_state(1)
        assert {v.dtype for v in low.tensors} == {torch.float32}
    zeros = layer.init_state(4)
    assert not any(v.any() for v in zeros.tensors)
    assert torch.equal(layer(x.unsqueeze(1), zeros), layer(x.unsqueeze(1)))


@layers
def test_wrong_states(name: str) -> None:
    layer, x = make(name, dtype=torch.float32), draw(2, 3).float()
    state = layer.init_state(2)
    kind, first = type(state).__name__, state._fields[0]
    rows: list[Row] = [
        (of(layer, x, tuple(state)), TypeError,
         f"state must be a {kind} or None, got tuple: make one with init_state(batch_size)"),
        (of(layer.step, x[:, 0], None), TypeError, "state must not be None"),
        (of(layer, x, layer.init_state(3)), ValueError,
         f"state.{first} must have shape (2, ...got (3, "),
        (of(layer, x, state.to(torch.float64)), ValueError,
         "must have dtype torch.float32 on cpu, got torch.float64 on cpu: use"),
        (of(layer, x, state.to("meta")), ValueError,
         "must have dtype torch.float32 on cpu, got torch.float32 on meta: use state.to"),
        (of(layer, x, state._replace(**{first: None})), TypeError,
         f"state.{first} must be a tensor (b, ...), got NoneType"),
        (of(layer.init_state, -1), ValueError, "batch_size must be an int >= 0, got -1"),
    ]  # fmt: skip
    for call, error, message in rows:
        with raises(error, message):
            call()


@pytest.mark.parametrize(("name", "place"), [*PLACES, *((name, CPU) for name in SOLVES)])
@pytest.mark.parametrize(("b", "recorded"), [(1, True), (2, True), (2, False)])
def test_a_returned_state_owns_its_memory(name: str, place: Place, b: int, recorded: bool) -> None:
    with torch.set_grad_enabled(recorded):
        assert_owns_memory(make(name, place), draw(b, 20, place))


def gathered(state: Any) -> Any:
    operations = pytest.importorskip("accelerate.utils.operations")
    assert operations.is_namedtuple(state)
    return operations.recursively_apply(torch.clone, state)


REBUILT: dict[str, Callable[[Any], Any]] = {
    "_make": lambda s: type(s)._make(map(torch.clone, s)),
    "positions": lambda s: type(s)(*[v.clone() for v in s]),
    "names": lambda s: type(s)(**{name: v.clone() for name, v in s._asdict().items()}),
    "_replace": lambda s: s._replace(**s._asdict()),
    "distributed": lambda s: _apply_to_tensors(torch.clone, s),
    "tree_map": lambda s: tree_map(torch.clone, s),
    "deepcopy": copy.deepcopy,
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "file": lambda s: saved({"state": (s,)}, weights_only=True)["state"][0],
    "convert": default_convert,
    "collate": lambda s: default_collate([s[0], s[1]]),
    "accelerate": gathered,
}


@layers
def test_generic_code_for_named_tuples_rebuilds_states(name: str) -> None:
    layer, mask = make(name), torch.tensor([[True, True], [True, False]])
    _, padded = layer(draw(2, 2), return_state=True, mask=mask)
    for state in (earlier_state(layer, 2), padded.detach()):
        for way, rebuild in REBUILT.items():
            found = rebuild(state)
            assert type(found) is type(state), way
            assert len(found) == len(list(found)) == len(state.tensors), way
            assert all(map(torch.equal, found, state)), way


@layers
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_state_of_a_lower_dtype_is_taken_up(name: str, low: torch.dtype) -> None:
    """As mixed precision of FSDP casts it."""
    options: dict[str, Any] = {"dtype": torch.float32}
    if name in ("picard", "jacobi"):
        options["solver"] = "auto"
    layer, x = make(name, **options), torch.randn(2, 4, 4)
    cast = earlier_state(layer, 2).to(low)
    expected = cast.to(torch.float32)
    index = torch.tensor([[0, 0, 1, 1]] * 2)
    assert torch.equal(layer(x, cast, seq_idx=index), layer(x, expected, seq_idx=index))
    assert all(map(torch.equal, results(layer, x, cast)[:4], results(layer, x, expected)[:4]))
    for x_t, one, other in ((x[:, 0], cast, expected), (x[:1, 0], cast[0], expected[0])):
        found, after = layer.step(x_t, one)
        assert torch.equal(found, layer.step(x_t, other)[0])
        assert {v.dtype for v in floats(after.tensors)} == {torch.float32}
    mask = torch.tensor([[True] * 4, [True, False, False, True]])
    padded = layer(x, return_state=True, mask=mask)[1].detach().to(low)
    assert torch.equal(layer(x, padded), layer(x, padded.to(torch.float32)))
    parts = [v.requires_grad_() for v in cast.tensors]
    assert any(v.any() for v in gradients([layer(x, cast)], parts))


# -- both directions


@layers
@torch.no_grad()
def test_both_directions_of_time(name: str) -> None:
    layer, x = Bidirectional(make(name), make(name)), draw(2, 6)

    def alone(u: Tensor) -> Any:  # (b, t, m)
        return layer.forwards(u) + layer.backwards(u.flip(1)).flip(1)

    assert_close("output", layer(x), alone(x), 1e-12)
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [1] * 6]).bool()
    padded = layer(x.masked_fill(~mask.unsqueeze(-1), torch.nan), mask=mask)
    assert not padded[~mask].any()
    for i in range(2):
        assert_close(f"row {i}", padded[i][mask[i]], alone(x[i : i + 1, mask[i]])[0], 1e-9)
    documents = torch.cat([alone(x[:1, :4]), alone(x[:1, 4:])], 1)
    packed = layer(x[:1], cu_seqlens=torch.tensor([0, 4, 4, 6], dtype=torch.int32))
    assert_close("documents", packed, documents, 1e-9)
    seq_idx = torch.tensor([[0, 1, 0, 2, 1, 2], [5, 4, 4, 4, 5, 5]])
    padded = layer(x, mask=mask, seq_idx=seq_idx)
    in_rows = [(0, [1]), (0, [2]), (0, [4]), (1, [0]), (1, [1, 2, 3]), (1, [4, 5])]
    for i, of_document in in_rows:
        expected = alone(x[i : i + 1, of_document])[0]
        assert_close("padded", padded[i, of_document], expected, 1e-9)

"""The recurrent state: chunks, single tokens, selection, conversion."""

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.random_layers import random_layer
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map
from torch.utils.data import default_collate, default_convert

from bedouin import Bedouin, BedouinState, FixedPointRNN, SequenceModel, Tracker, TrackingDeltaNet
from bedouin.baselines import (
    LSTM,
    Attention,
    DeltaProduct,
    Mamba,
    PaddedAttentionState,
)
from bedouin.decode import Decoder
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.solvers import Adjoint, Direct, Jacobi, OneStepAdjoint, Picard, Solver, UnrolledAdjoint
from bedouin.state import RecurrentState
from bedouin.testing import assert_close, decode_gap, measure_growth

RNGS = st.randoms(use_true_random=False)


def assert_state_close(actual: BedouinState, expected: BedouinState, rtol: float) -> None:
    for name, value, other in zip(("ssm", "y", "conv"), actual, expected, strict=False):
        assert_close(f"state.{name}", value, other, rtol)


def draw(rng: random.Random, b: int, t: int) -> tuple[FixedPointLayer, Tensor]:
    layer = random_layer(rng, solver=Direct())
    hypothesis.note(f"{layer} {layer.extra_repr()}")
    torch.manual_seed(rng.randint(0, 999))
    return layer, torch.randn(b, t, layer.d_model, dtype=torch.float64)


def feed(
    layer: FixedPointLayer, x: Tensor, cuts: list[int], state: BedouinState | None = None
) -> tuple[Tensor, BedouinState]:
    """x in the chunks between the cuts."""
    outputs = []
    for start, stop in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        output, state = layer(x[:, start:stop], state=state, return_state=True)
        outputs.append(output)
    assert state is not None
    return torch.cat(outputs, 1), state


@torch.no_grad()
@settings(max_examples=20)
@given(RNGS, st.integers(1, 3), st.lists(st.integers(0, 12), max_size=5), st.integers(0, 12))
def test_chunks_give_what_one_call_gives(
    rng: random.Random, b: int, cuts: list[int], t: int
) -> None:
    """Repeated cuts make empty chunks."""
    layer, x = draw(rng, b, t)
    growth = measure_growth(layer, x)
    whole, end = layer(x, return_state=True)
    output, state = feed(layer, x, sorted(min(cut, t) for cut in cuts))
    assert_close("output", output, whole, 1e-10 * growth)
    assert_state_close(state, end, 1e-10 * growth)


@torch.no_grad()
@settings(max_examples=20)
@given(RNGS, st.integers(1, 3), st.integers(1, 10))
def test_steps_give_what_one_call_gives(rng: random.Random, b: int, t: int) -> None:
    layer, x = draw(rng, b, t)
    assert decode_gap(layer, x) <= 1e-10 * measure_growth(layer, x)


@torch.no_grad()
@pytest.mark.parametrize(
    "solver", [Picard(rtol=1e-12, atol=1e-300), Jacobi(rtol=1e-12, atol=1e-300)], ids=str
)
def test_iterated_chunks_and_states(solver: Solver) -> None:
    layer = Bedouin(4, solver=solver, dtype=torch.float64)
    x = torch.randn(2, 9, 4, dtype=torch.float64)
    whole, end = layer(x, return_state=True)
    output, state = feed(layer, x, [2, 5, 5])
    assert_close("output", output, whole, 1e-9)
    assert_state_close(state, end, 1e-9)
    assert decode_gap(layer, x) < 1e-9


@torch.no_grad()
def test_a_step_is_exact_whatever_the_solver() -> None:
    loose = Bedouin(4, solver=Picard(rtol=0.5), dtype=torch.float64)
    exact = Bedouin(4, dtype=torch.float64)
    exact.load_state_dict(loose.state_dict())
    x_t, state = torch.randn(2, 4, dtype=torch.float64), loose.init_state(2)
    assert torch.equal(loose.step(x_t, state)[0], exact.step(x_t, state)[0])
    assert loose.stats is not None and loose.stats.residual.max() < 1e-14


@torch.no_grad()
def test_the_start_is_the_zero_state() -> None:
    layer = Bedouin(4, d_state=3, dtype=torch.float64)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    state = layer.init_state(2)
    assert state.ssm.shape == (2, 8, 3) and state.y.shape == (2, 8)
    assert not state.ssm.any() and not state.y.any()
    assert torch.equal(layer(x, state=state), layer(x))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_a_state_is_at_least_float32(dtype: torch.dtype, expected: torch.dtype) -> None:
    state = Bedouin(4, dtype=dtype).init_state(1)
    assert state.ssm.dtype == state.y.dtype == expected


@torch.no_grad()
def test_no_tokens_leave_the_state_alone() -> None:
    layer = Bedouin(4, dtype=torch.float64)
    _, state = layer(torch.randn(2, 3, 4, dtype=torch.float64), return_state=True)
    empty = torch.zeros(2, 0, 4, dtype=torch.float64)
    output, after = layer(empty, state=state, return_state=True)
    assert output.shape == (2, 0, 4)
    assert torch.equal(after.ssm, state.ssm) and torch.equal(after.y, state.y)
    assert after.y.data_ptr() != state.y.data_ptr()
    _, fresh = layer(empty, return_state=True)
    assert not fresh.ssm.any() and not fresh.y.any() and fresh.ssm.shape == state.ssm.shape


@torch.no_grad()
def test_selected_samples_go_on_alone() -> None:
    layer = Bedouin(4, dtype=torch.float64)
    x, x_next = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    # type checkers take an index of a NamedTuple for one of its fields
    state: Any = layer(x, return_state=True)[1]
    expected = layer(x_next, state=state)
    assert_close("[2:5]", layer(x_next[2:5], state=state[2:5]), expected[2:5], 1e-12)
    mask = torch.tensor([True, False, False, True, False, False])
    assert_close("[mask]", layer(x_next[mask], state=state[mask]), expected[mask], 1e-12)
    one = state[3]
    assert one.ssm.shape == state.ssm.shape[1:] and one.y.shape == state.y.shape[1:]
    assert_close("[3]", layer(x_next[3:4], state=one), expected[3:4], 1e-12)


def test_to_converts_both_tensors() -> None:
    state = Bedouin(4).init_state(2).to(torch.float64)
    assert state.ssm.dtype == state.y.dtype == torch.float64
    moved = state.to("meta")
    assert moved.ssm.device.type == moved.y.device.type == "meta"


def test_states_join_and_separate() -> None:
    """state[i] drops the batch axis, stack restores it; a list or slice keeps it, cat joins."""
    layer = Bedouin(4, d_state=3)
    state: Any = layer(torch.randn(4, 2, 4), return_state=True)[1]
    for joined in (
        BedouinState.stack([state[i] for i in range(4)]),
        BedouinState.cat([state[:1], state[[1, 2]], state[3:]]),
        state[[3, 2, 1, 0]][torch.tensor([3, 2, 1, 0])],
        BedouinState.cat([state]),
    ):
        assert isinstance(joined, BedouinState)
        assert torch.equal(joined.ssm, state.ssm) and torch.equal(joined.y, state.y)
    assert state[-1].ssm.shape == (8, 3) and state[[0]].ssm.shape == (1, 8, 3)
    (grad,) = torch.autograd.grad(BedouinState.stack([state[1]]).y.sum(), state.y)
    assert grad.sum() == 8


def test_errors_of_joins() -> None:
    state: Any = Bedouin(4).init_state(2)
    other: Any = (state.ssm, state.y)
    for join in (BedouinState.cat, BedouinState.stack):
        with pytest.raises(ValueError, match="must get a list of at least one BedouinState, got"):
            join([])
        with pytest.raises(ValueError, match="must get a list of at least one BedouinState, got"):
            join(state)
        with pytest.raises(TypeError, match="must get a list of BedouinState, got one of tuple"):
            join([other])
    with pytest.raises(ValueError, match="cat needs states with a batch axis, got one that has no"):
        BedouinState.cat([state[0]])
    with pytest.raises(ValueError, match=r"stack needs states of single samples.*: use cat"):
        BedouinState.stack([state])
    with pytest.raises(ValueError, match="an index needs states with a batch axis"):
        state[0][0]
    with pytest.raises(TypeError, match="index must select samples of the batch, got the tuple"):
        state[0, 1]
    wider: Any = Bedouin(8).init_state(2)
    with pytest.raises(ValueError, match=r"cat needs states of one layer, got .*8.* and .*16"):
        BedouinState.cat([state, wider])
    with pytest.raises(ValueError, match="stack needs states of one layer"):
        BedouinState.stack([state[0], wider[0]])


def test_a_clone_owns_its_memory() -> None:
    state = Bedouin(4).init_state(2)
    copy, same = state.clone(), state.cpu()
    copy.ssm.fill_(1.0)
    assert not state.ssm.any() and same.ssm.device.type == "cpu"
    assert isinstance(copy, BedouinState) and isinstance(same, BedouinState)
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            state.cuda()


STATES = [
    Bedouin(4).init_state(2),
    *(kind(8).init_state(2) for kind in (LSTM, Mamba, DeltaProduct, Attention)),
    PaddedAttentionState(*Attention(8).init_state(2), torch.tensor([0, 0])),
    Bedouin(4, d_conv=3).init_state(2),
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_files_of_states_load_without_code(state: RecurrentState) -> None:
    file = io.BytesIO()
    torch.save({"state": (state,)}, file)
    file.seek(0)
    (loaded,) = torch.load(file, weights_only=True)["state"]
    assert type(loaded) is type(state)
    for found, expected in zip(loaded.tensors, state.tensors, strict=True):
        assert torch.equal(found, expected)


def collated(state: Any) -> Any:
    """torch's batches of a data set of single samples."""
    return default_collate([state[0], state[1]])


def gathered(state: Any) -> Any:
    operations = pytest.importorskip("accelerate.utils.operations")
    assert operations.is_namedtuple(state)
    return operations.recursively_apply(torch.clone, state)


REBUILT: list[Callable[[Any], Any]] = [
    lambda s: type(s)._make(map(torch.clone, s)),
    lambda s: type(s)(*[v.clone() for v in s]),
    lambda s: type(s)(**{name: v.clone() for name, v in s._asdict().items()}),
    lambda s: s._replace(**s._asdict()),
    lambda s: _apply_to_tensors(torch.clone, s),
    lambda s: tree_map(torch.clone, s),
    copy.deepcopy,
    lambda s: pickle.loads(pickle.dumps(s)),
    default_convert,
    collated,
    gathered,
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
@pytest.mark.parametrize("rebuild", REBUILT)
def test_generic_code_for_named_tuples_rebuilds_states(
    state: Any, rebuild: Callable[[Any], Any]
) -> None:
    """In torch and accelerate."""
    found = rebuild(state)
    assert type(found) is type(state)
    assert len(found) == len(list(found)) == len(state.tensors)
    for actual, expected in zip(found, state, strict=True):
        assert torch.equal(actual, expected)


LAYERS: list[Callable[[], Any]] = [
    lambda: Bedouin(8),
    lambda: Bedouin(8, num_heads=2, d_conv=3),
    lambda: Bedouin(8, solver=Picard(rtol=1e-6)),
    lambda: FixedPointRNN(8),
    *(lambda kind=kind: kind(8) for kind in (LSTM, Mamba, DeltaProduct, Attention)),
    lambda: Tracker(8),
    lambda: TrackingDeltaNet(8),
]


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", LAYERS)
def test_a_state_of_a_lower_dtype_is_taken_up(make: Callable[[], Any], low: torch.dtype) -> None:
    """As mixed precision of FSDP casts it."""
    layer = make().eval()
    x, idx = torch.randn(2, 4, 8), torch.tensor([[0, 0, 1, 1]] * 2)
    state = layer(x, return_state=True)[1].detach()
    cast = state.to(low)
    expected = cast.to(torch.float32)
    output, after = layer(x, cast, return_state=True)
    assert torch.equal(output, layer(x, expected))
    assert {v.dtype for v in after} == {v.dtype for v in state}
    assert torch.equal(layer(x, cast, seq_idx=idx), layer(x, expected, seq_idx=idx))
    for x_t, one, other in ((x[:, 0], cast, expected), (x[:1, 0], cast[0], expected[0])):
        found, after = layer.step(x_t, one)
        assert torch.equal(found, layer.step(x_t, other)[0])
        assert {v.dtype for v in after} == {v.dtype for v in state}


def test_gradients_flow_through_a_state_that_is_taken_up() -> None:
    layer, x = Bedouin(4), torch.randn(2, 3, 4)
    cast = layer.init_state(2).to(torch.bfloat16)
    cast.ssm.requires_grad_()
    layer(x, cast).sum().backward()
    assert cast.ssm.grad is not None and cast.ssm.grad.abs().max() > 0


@torch.no_grad()
def test_the_places_of_a_padded_cache_keep_their_dtype() -> None:
    layer, x = Attention(8), torch.randn(2, 3, 8)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    _, state = layer(x, return_state=True, mask=mask)
    cast = state._replace(keys=state.keys.bfloat16(), values=state.values.bfloat16())
    expected = layer(x, cast._replace(keys=cast.keys.float(), values=cast.values.float()))
    assert torch.equal(layer(x, cast), expected)


@torch.no_grad()
def test_a_model_takes_up_the_states_of_its_layers() -> None:
    model = SequenceModel(5, 8, [make() for make in LAYERS]).eval()
    tokens, idx = torch.randint(5, (2, 4)), torch.tensor([[0, 0, 1, 1]] * 2)
    cast = tuple(s.to(torch.bfloat16) for s in model(tokens, return_state=True)[1])
    expected = tuple(state.to(torch.float32) for state in cast)
    assert torch.equal(model(tokens, cast), model(tokens, expected))
    documents = model(tokens, cast, seq_idx=idx), model(tokens, expected, seq_idx=idx)
    assert torch.equal(*documents)
    step, _ = model.step(tokens[:, 0], expected)
    assert torch.equal(model.step(tokens[:, 0], cast)[0], step)
    torch.testing.assert_close(Decoder(model, 2, state=cast)(tokens[:, 0]), step)


def test_rebuilding_needs_the_tensors_of_a_state() -> None:
    with pytest.raises(TypeError):
        BedouinState._make([torch.zeros(1, 2, 3)])


def test_a_state_is_a_node_with_its_fields_as_children() -> None:
    """Of torch's trees, in which a path names a field."""
    state = BedouinState(torch.randn(2, 3, 4), torch.randn(2, 3))
    paths = {keystr(path): leaf for path, leaf in tree_flatten_with_path((state,))[0]}
    assert list(paths) == ["[0].ssm", "[0].y"] and paths["[0].y"] is state.y
    doubled = tree_map(lambda v: 2 * v, state)
    assert isinstance(doubled, BedouinState) and torch.equal(doubled.ssm, 2 * state.ssm)
    assert list(state._asdict()) == ["ssm", "y"] and state._replace(y=state.y).ssm is state.ssm


def test_detach_truncates_backpropagation() -> None:
    layer = Bedouin(4, dtype=torch.float64)
    first = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    second = torch.randn(2, 3, 4, dtype=torch.float64)
    _, state = layer(first, return_state=True)
    assert state.ssm.requires_grad and state.y.requires_grad
    (through,) = torch.autograd.grad(layer(second, state=state).sum(), first)
    assert through.abs().max() > 0
    _, state = layer(first, return_state=True)
    layer(second, state=state.detach()).sum().backward()
    assert first.grad is None
    assert not state.detach().ssm.requires_grad


def test_gradients_flow_through_chunks_as_through_one_call() -> None:
    layer = Bedouin(4, dtype=torch.float64)
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    parameters = list(layer.parameters())
    expected = torch.autograd.grad(layer(x).square().sum(), parameters)
    actual = torch.autograd.grad(feed(layer, x, [2, 4])[0].square().sum(), parameters)
    for (name, _), a, e in zip(layer.named_parameters(), actual, expected, strict=True):
        assert_close(name, a, e, 1e-10)


OWNERS: list[tuple[Solver, Adjoint | None]] = [
    (Direct(), None),
    (Direct(), UnrolledAdjoint()),
    (Picard(0.5), OneStepAdjoint()),
    (Picard(0.5), None),
    (Jacobi(), UnrolledAdjoint()),
]


def assert_owns_memory(state: BedouinState) -> None:
    """No more storage behind a state than it has elements."""
    for tensor in state:
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        assert elements == tensor.numel()


@pytest.mark.parametrize(("solver", "adjoint"), OWNERS, ids=str)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("num_heads", "b"), [(1, 2), (2, 1), (2, 2)])
def test_a_returned_state_owns_its_memory(
    solver: Solver, adjoint: Adjoint | None, grad: bool, num_heads: int, b: int
) -> None:
    options: dict[str, Any] = {"num_heads": num_heads, "solver": solver, "adjoint": adjoint}
    layer = Bedouin(4, d_state=3, dtype=torch.float64, **options)
    x = torch.randn(b, 40, 4, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        _, state = layer(x, return_state=True)
        assert_owns_memory(state)
        _, state = layer.step(x[:, 0], state)
        assert_owns_memory(state)


@torch.no_grad()
def test_the_state_of_a_decoder_owns_its_memory() -> None:
    layer = Bedouin(4, d_state=3)
    _, state = layer(torch.randn(2, 40, 4), return_state=True)
    decoder = Decoder(layer, 2, state=state)
    decoder(torch.randn(2, 4))
    assert_owns_memory(decoder.state)


@pytest.mark.parametrize(("solver", "adjoint"), OWNERS, ids=str)
def test_writing_into_a_detached_state_leaves_the_backward_alone(
    solver: Solver, adjoint: Adjoint | None
) -> None:
    layer = Bedouin(4, d_state=3, solver=solver, adjoint=adjoint, dtype=torch.float64)
    check_writing(layer)


@pytest.mark.interpreter
@pytest.mark.parametrize("solver", [Direct(), Picard(0.5), Jacobi()], ids=str)
def test_states_of_the_kernels_own_their_memory(solver: Solver) -> None:
    layer = Bedouin(4, d_state=1, expand=1, num_householder=1, solver=solver, backend="triton")
    _, state = layer(torch.randn(1, 2, 4), return_state=True)
    assert_owns_memory(state)
    check_writing(layer, b=1, t=2)


def check_writing(layer: FixedPointLayer, b: int = 2, t: int = 3) -> None:
    """Writing into the returned state does not change the gradients of output and state."""
    x = torch.randn(b, t, 4, dtype=layer.D.dtype)

    def gradients(writes: bool) -> tuple[Tensor, ...]:
        output, state = layer(x, return_state=True)
        if writes:
            for tensor in state.detach():
                tensor.fill_(7.0)
        total = output.square().sum() + state.ssm.sum() + state.y.sum()
        return torch.autograd.grad(total, list(layer.parameters()))

    for changed, unchanged in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(changed, unchanged)

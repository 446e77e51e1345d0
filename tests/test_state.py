"""The recurrent state, padded rows and packed documents: what test_every_layer.py leaves out, what
type checkers say of states, and that no memory is kept after a call."""

import gc
from collections.abc import Iterator
from typing import Any, assert_type

import pytest
import torch
from tests.layer_cases import PAIRS, check_alone, random_state, rows_of
from tests.messages import Row, of, refused
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from bedouin import Bedouin, BedouinState, FixedPointRNN, SequenceModel
from bedouin.baselines import LSTM
from bedouin.baselines.lstm import LSTMState
from bedouin.solvers import (
    Adjoint,
    Anderson,
    Broyden,
    Solver,
)
from bedouin.testing import assert_close


def test_a_state_is_a_node_with_its_fields_as_children() -> None:
    """Of torch's trees, in which a path names a field."""
    state = BedouinState(torch.randn(2, 3, 4), torch.randn(2, 3))
    paths = {keystr(path): leaf for path, leaf in tree_flatten_with_path((state,))[0]}
    assert list(paths) == ["[0].ssm", "[0].y"] and paths["[0].y"] is state.y


def test_calls_without_and_with_a_state() -> None:
    """The runtime checks what a type checker was told."""
    x, mask = torch.zeros(1, 2, 4), torch.ones(1, 2, dtype=torch.bool)
    layer, rnn = Bedouin(4), FixedPointRNN(4)
    for output in (
        assert_type(layer(x), Tensor),
        assert_type(layer(x, mask=mask), Tensor),
        assert_type(rnn(x, rnn.init_state(1), cu_seqlens=torch.tensor([0, 2])), Tensor),
        assert_type(LSTM(4)(x, seq_idx=mask.int()), Tensor),
        assert_type(SequenceModel(5, 4, [layer])(mask.long()), Tensor),
    ):
        assert isinstance(output, Tensor) and output.shape[:2] == (1, 2)
    found = assert_type(layer(x, return_state=True), tuple[Tensor, BedouinState])
    lstm = assert_type(LSTM(4)(x, return_state=True, mask=mask), tuple[Tensor, LSTMState])
    assert type(found[1]) is BedouinState and type(lstm[1]) is LSTMState


def test_an_index_of_a_state_is_a_state() -> None:
    """Although the fields of a state are those of a named tuple."""
    state = Bedouin(4).init_state(3)
    sample = assert_type(state[0], BedouinState)
    assert_type(state[[1, 2]], BedouinState)
    assert_type(state[:2].ssm, Tensor)
    h, y = state
    assert_type(h, Tensor)
    assert sample.ssm.shape == h.shape[1:] and sample.y.shape == y.shape[1:]
    assert type(assert_type(BedouinState.stack([sample]), BedouinState)) is BedouinState


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Hides from the collector what exists already, of which there is a lot after other tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


@pytest.mark.parametrize(("solver", "adjoint"), PAIRS)
def test_no_tensor_outlives_a_call(solver: Solver, adjoint: Adjoint | None) -> None:
    layer = Bedouin(6, solver=solver, adjoint=adjoint, on_unconverged="ignore")
    x = torch.randn(2, 5, 6)

    def call(backward: bool) -> None:
        y, state = layer(x, return_state=True)
        if backward:
            (y.sum() + state.ssm.sum()).backward()

    call(True)
    before = _live_tensors()
    # a call without a backward follows, because a backward frees what the call before it kept
    for backward in (True, True, False, False):
        call(backward)
    assert _live_tensors() <= before


@pytest.mark.parametrize(("solver", "adjoint"), PAIRS, ids=str)
@pytest.mark.parametrize(("num_heads", "documents"), [(1, True), (2, False)])
def test_statistics_are_those_of_the_tokens(
    solver: Solver, adjoint: Adjoint | None, num_heads: int, documents: bool
) -> None:
    """Steps, residual and pivot, of the solve and of its adjoint, for every solver and adjoint."""
    options: dict[str, Any] = {"solver": solver, "adjoint": adjoint, "num_heads": num_heads}
    layer: Any = Bedouin(4, dtype=torch.float64, **options)
    x = torch.randn(4, 6, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 1, 1], [0] * 6, [1] * 6]).bool()
    before: Any = random_state(layer, 4)
    # quasi-Newton steps sum over all tokens, in another order if there is padding
    rough = isinstance(solver, Anderson | Broyden)
    places: dict[str, Any] = {"mask": mask}
    if documents:
        # one document in each row, as the padding has no index
        places["seq_idx"] = torch.where(mask, 7, torch.arange(6))
    pieces = rows_of(mask)
    check_alone(layer, x, pieces, before, 1e-7 if rough else 1e-11, 1e-13, **places)
    layer(x, before, **places).sum().backward()
    found = layer.stats
    assert found is not None and found.converged.all()
    for i, piece in enumerate(pieces):
        output = layer(x[piece].unsqueeze(0), before[i : i + 1])
        output.sum().backward()
        one = layer.stats
        if piece.any() and one.backward is not None:
            assert found.backward is not None and found.backward.converged.all()
            assert rough or found.backward.num_steps[i] == one.backward.num_steps[0]
            back = found.backward.residual[i], one.backward.residual[0]
            assert_close("residual of the adjoint", *back, 1e-2, 1e-9 if rough else 1e-12)
        assert found.num_steps[i] == one.num_steps[0]
        assert_close("residual", found.residual[i], one.residual[0], 1e-2, 1e-12)
        if one.conditioning is not None and found.conditioning is not None:
            assert_close("pivot", found.conditioning[i], one.conditioning[0], 1e-11)


def test_documents_under_the_compiler(caplog: pytest.LogCaptureFixture) -> None:
    """The graph breaks where the host reads them, without a word from the compiler."""
    layer = Bedouin(4, dtype=torch.float64)
    compiled = torch.compile(layer, backend="aot_eager")
    for t in (5, 7):
        x, bounds = torch.randn(1, t, 4, dtype=torch.float64), torch.tensor([0, 2, t])
        found = compiled(x, cu_seqlens=bounds)
        assert_close("output", found, layer(x, cu_seqlens=bounds), 1e-12)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [1, 8])
def test_masks_on_a_gpu(num_heads: int, no_synchronization: Any) -> None:
    """Without waiting for the GPU, and captured; documents are refused during a capture."""
    layer = Bedouin(64, num_heads=num_heads, device="cuda")
    x, mask = torch.randn(4, 32, 64, device="cuda"), torch.rand(4, 32, device="cuda") > 0.3
    layer(x, mask=mask).sum().backward()
    with no_synchronization():
        output, state = layer(x, return_state=True, mask=mask)
        output.sum().backward()
    for i in range(4):
        alone, after = layer(x[i][mask[i]].unsqueeze(0), return_state=True)
        # float32, in other sums: as many tokens in another batch
        assert_close(f"row {i}", output[i][mask[i]], alone[0], 1e-3)
        assert_close(f"ssm {i}", state.ssm[i], after.ssm[0], 1e-3)
    graph, bounds = torch.cuda.CUDAGraph(), torch.tensor([0, 32], device="cuda")
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = layer(x, mask=mask)
        with pytest.raises(ValueError, match="cu_seqlens must be None during the capture"):
            layer(x[:1], cu_seqlens=bounds)
    graph.replay()
    assert_close("captured", captured, output, 1e-4)


ERRORS: list[Row] = [
    ({"mask": [True]}, TypeError, "mask must be a tensor (b, t), got list"),
    ({"mask": torch.ones(1, 4)}, TypeError, "mask must have dtype torch.bool, got torch.float32"),
    ({"mask": torch.ones(1, 3).bool()}, ValueError,
     "mask must have shape (b, t) = (1, 4), got (1, 3)"),
    ({"mask": torch.ones(1, 4, device="meta").bool()}, ValueError,
     "mask must be on the device of x"),
    ({"seq_idx": torch.ones(1, 4)}, TypeError,
     "seq_idx must have dtype torch.int32 or torch.int64, got torch.float32"),
    ({"cu_seqlens": [0, 4]}, TypeError,
     "cu_seqlens must be a tensor (documents + 1,), got list: convert it with torch.as_tensor"),
    ({"cu_seqlens": torch.tensor([0.0, 4.0])}, TypeError, "cu_seqlens must have dtype torch.int32"),
    ({"cu_seqlens": torch.tensor(4)}, ValueError, "cu_seqlens must have shape (documents + 1,)"),
    ({"cu_seqlens": torch.tensor([0, 3])}, ValueError,
     "cu_seqlens must ascend from 0 to t = 4, got [0, 3]"),
    ({"cu_seqlens": torch.tensor([0, 3, 2, 4])}, ValueError, "cu_seqlens must ascend from 0"),
    ({"cu_seqlens": torch.tensor([1, 4])}, ValueError, "cu_seqlens must ascend from 0"),
    ({"cu_seqlens": torch.tensor([0, 4]), "seq_idx": torch.ones(1, 4).int()}, ValueError,
     "at most one of cu_seqlens and seq_idx says where documents begin, got both"),
    ({"cu_seqlens": torch.tensor([0, 2, 4]), "state": Bedouin(2).init_state(1)}, ValueError,
     "state.ssm must have shape (2, 4, 16), got (1, 4, 16)"),
]  # fmt: skip


test_errors = refused(ERRORS, of(Bedouin(2), torch.zeros(1, 4, 2)))

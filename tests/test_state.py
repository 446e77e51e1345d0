"""The recurrent state: what test_every_layer.py leaves out."""

from typing import Any

import pytest
import torch
from tests.layer_cases import CPU, LAYERS, assert_owns_memory, make
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from bedouin import Bedouin, BedouinState, SequenceModel
from bedouin.baselines import Attention
from bedouin.decode import Decoder
from bedouin.solvers import Direct, Jacobi, Picard, Solver


@torch.no_grad()
def test_a_step_is_exact_whatever_the_solver() -> None:
    loose = Bedouin(4, solver=Picard(rtol=0.5), dtype=torch.float64)
    exact = Bedouin(4, dtype=torch.float64)
    exact.load_state_dict(loose.state_dict())
    x_t, state = torch.randn(2, 4, dtype=torch.float64), loose.init_state(2)
    assert torch.equal(loose.step(x_t, state)[0], exact.step(x_t, state)[0])
    assert loose.stats is not None and loose.stats.residual.max() < 1e-14


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
    with pytest.raises(TypeError):
        BedouinState._make([torch.zeros(1, 2, 3)])


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
    place = CPU._replace(dtype=torch.float32)
    model = SequenceModel(5, 4, [make(n, place) for n in LAYERS if n not in ("picard", "jacobi")])
    tokens, idx = torch.randint(5, (2, 4)), torch.tensor([[0, 0, 1, 1]] * 2)
    cast = tuple(s.to(torch.bfloat16) for s in model.eval()(tokens, return_state=True)[1])
    expected = tuple(state.to(torch.float32) for state in cast)
    assert torch.equal(model(tokens, cast), model(tokens, expected))
    documents = model(tokens, cast, seq_idx=idx), model(tokens, expected, seq_idx=idx)
    assert torch.equal(*documents)
    step, _ = model.step(tokens[:, 0], expected)
    assert torch.equal(model.step(tokens[:, 0], cast)[0], step)
    torch.testing.assert_close(Decoder(model, 2, state=cast)(tokens[:, 0]), step)


def test_a_state_is_a_node_with_its_fields_as_children() -> None:
    """Of torch's trees, in which a path names a field."""
    state = BedouinState(torch.randn(2, 3, 4), torch.randn(2, 3))
    paths = {keystr(path): leaf for path, leaf in tree_flatten_with_path((state,))[0]}
    assert list(paths) == ["[0].ssm", "[0].y"] and paths["[0].y"] is state.y
    doubled = tree_map(lambda v: 2 * v, state)
    assert isinstance(doubled, BedouinState) and torch.equal(doubled.ssm, 2 * state.ssm)
    assert list(state._asdict()) == ["ssm", "y"] and state._replace(y=state.y).ssm is state.ssm


@pytest.mark.interpreter
@pytest.mark.parametrize("solver", [Direct(), Picard(0.5), Jacobi()], ids=str)
def test_states_of_the_kernels_own_their_memory(solver: Solver) -> None:
    layer = Bedouin(4, d_state=1, expand=1, num_householder=1, solver=solver, backend="triton")
    assert_owns_memory(layer, torch.randn(1, 2, 4))

"""SequenceModel around dummy mixers: shapes, causality, states, ensembles, messages."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.messages import of, of_kind, refused
from tests.modes import Watching
from torch import Tensor, nn

from bedouin import Bedouin, BedouinState
from bedouin.model import GatedMLP, SequenceModel
from bedouin.testing import assert_close

D_MODEL = 8
VOCAB = 11


class Leaky(nn.Module):
    """h_t = a ⊙ h_{t-1} + W x_t, a minimal layer with the interface of `Bedouin`."""

    def __init__(self, d_model: int = D_MODEL) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, d_model)
        self.raw_decay = nn.Parameter(torch.randn(d_model))
        self.stats: str | None = None

    def init_state(self, batch_size: int) -> Tensor:
        return self.raw_decay.new_zeros(batch_size, len(self.raw_decay))

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:  # (b, m), (b, m)
        state = self.raw_decay.sigmoid() * state + self.proj(x)
        return state, state

    def forward(self, x: Tensor, state: Tensor | None = None, return_state: bool = False) -> Any:
        h = self.init_state(len(x)) if state is None else state
        outputs = []
        for x_t in x.unbind(1):
            y_t, h = self.step(x_t, h)
            outputs.append(y_t)
        self.stats = "called"
        y = torch.stack(outputs, 1) if outputs else x
        return (y, h) if return_state else y


class Foreign(nn.Module):
    """A GRU that returns (output, None, cache), as flash-linear-attention's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(D_MODEL, D_MODEL, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, None, Tensor]:
        output, cache = self.gru(x)
        return output, None, cache


def make(num_layers: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    return SequenceModel(
        VOCAB, D_MODEL, [Leaky() for _ in range(num_layers)], **{"dtype": None, **options}
    )


def ids(b: int, t: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (b, t), generator=torch.Generator().manual_seed(seed))


def test_by_hand() -> None:
    """One block and an MLP, written out with functional calls."""
    model = make(1, mlp_expand=2.0, norm_eps=1e-3)
    (mixer,) = model.mixers
    (mlp,) = (module for module in model.modules() if isinstance(module, GatedMLP))

    def norm(x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt()

    x = model.embedding.weight[ids(2, 6)]
    x = x + mixer(norm(x))
    gate, value = F.linear(norm(x), mlp.in_proj.weight).chunk(2, -1)
    x = x + F.linear(F.silu(gate) * value, mlp.out_proj.weight)
    torch.testing.assert_close(model(ids(2, 6)), F.linear(norm(x), model.head.weight))


def test_mixers_from_a_function() -> None:
    asked: list[int] = []

    def make_mixer(index: int) -> nn.Module:
        asked.append(index)
        return Leaky()

    model = SequenceModel(VOCAB, D_MODEL, make_mixer, num_layers=3)
    assert asked == [0, 1, 2]
    assert len(model.mixers) == 3
    assert SequenceModel(VOCAB, D_MODEL, nn.ModuleList([Leaky()])).mixers[0].training


def test_embedding_std_and_tied_head() -> None:
    torch.manual_seed(0)
    model = SequenceModel(500, 64, [Leaky(64)], embedding_std=0.125, tie_embeddings=True)
    assert model.embedding.weight.std().item() == pytest.approx(0.125, rel=0.02)
    assert model.head.weight is model.embedding.weight
    assert SequenceModel(500, 64, [Leaky(64)]).embedding.weight.std().item() == pytest.approx(
        1.0, rel=0.02
    )


def test_dtype_and_device_are_everything_but_the_mixers() -> None:
    model = make(dtype=torch.float64, device="meta", mlp_expand=2.0)
    for name, parameter in model.named_parameters():
        own = ".mixer." not in name
        assert parameter.dtype == (torch.float64 if own else torch.float32)
        assert parameter.is_meta == own


def test_stats_are_those_of_the_mixers_that_have_any() -> None:
    model = SequenceModel(VOCAB, D_MODEL, [Leaky(), Foreign(), Leaky()])
    assert model.stats == []
    model(ids(1, 2))
    assert model.stats == ["called", "called"]


def making(mixers: Any = None, **options: Any) -> Callable[[], SequenceModel]:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "d_model": D_MODEL}
    return lambda: SequenceModel(**sizes | {"mixers": mixers or [Leaky()]} | options)


def returning(output: Callable[[Tensor], object]) -> Callable[[], Any]:
    mixer: Any = nn.Identity()
    mixer.forward = output
    return of(SequenceModel(VOCAB, D_MODEL, [mixer]), ids(2, 3))


NO_STATE, TWO = "mixer Foreign has no init_state()", "state must be a tuple with one entry for"
OTHER_WIDTH = "mixers must have the model's d_model=32, got Bedouin with d_model=16"
FOREIGN: Any = SequenceModel(VOCAB, D_MODEL, [Foreign()])
PLAIN: Any = SequenceModel(5, 4, [nn.Identity()])
NO_MASK, ONE_ROW = "mixer Identity takes no mask, which padding and doc", ids(1, 6) % 5
ONE_STATE = BedouinState(torch.zeros(2, 8, 3), torch.zeros(2, 8))
VALUES = of_kind(ValueError, [
    (making(vocab_size=0), "vocab_size must be at least 1, got 0"),
    (making(d_model=-1), "d_model must be at least 1, got -1"),
    (making(output_size=0), "output_size must be at least 1, got 0"),
    (making(mlp_expand=0.0), "mlp_expand must lie in (0, 1000.0], got 0.0"),
    (making(norm_eps="0"), "norm_eps must be a finite number, got '0'"),
    (making(embedding_std=-1.0), "embedding_std must lie in [0, 1000.0], got -1"),
    (lambda: SequenceModel(VOCAB, D_MODEL, []), "mixers must contain at least one layer"),
    (making(num_layers=1), "num_layers must be None ...got 1 and 1 mixers"),
    (making(output_size=3, tie_embeddings=True),
     "tie_embeddings needs output_size ... = 11, got 3"),
    (making([Bedouin(32), Bedouin(16)], d_model=32), OTHER_WIDTH),
    (making(lambda index: Bedouin(16), d_model=32, num_layers=2), OTHER_WIDTH),
    (returning(lambda x: x[:, :1]), "shape of its input, (2, 3, 8), got (2, 1, 8)"),
    (lambda: make()(ids(2, 3)[:, 0]), "tokens must have shape (b, t), got (2,)"),
    (of(make().step, ids(2, 3), make().init_state(2)), "tokens must have shape (b,), got (2, 3)"),
    (of(make(), ids(2, 3), state=make().init_state(2)[:1]),
     "each of the 2 layers, got 1: start from model.init"),
])  # fmt: skip
TYPES = of_kind(TypeError, [
    (making(tie_embeddings="no"), "tie_embeddings must be True or False, got 'no'"),
    (making(dtype=torch.int64), "dtype must be None or one of torch.float32, "),
    (making(3), "mixers must be a sequence of modules... got int"),
    (making(lambda i: Leaky(), num_layers=1.5), "num_layers must be an int"),
    (making(lambda i: Leaky()), "num_layers must be an int >= 1, got None"),
    (making(Leaky()), "sequence of modules, as [Bedouin...got Leaky"),
    (making(["mamba"]), "mixers must be nn.Modules, got str"),
    (returning(lambda x: None), "mixer Identity must return a tensor ... got NoneType"),
    (returning(lambda x: (None, x)), "a tuple that begins with one, got tuple"),
    (lambda: FOREIGN.init_state(2), f"{NO_STATE}, ...bedouin.Bedouin"),
    (lambda: FOREIGN.step(ids(2, 1)[:, 0], (None,)), "mixer Foreign has no step()"),
    (lambda: FOREIGN(ids(2, 3), return_state=True), NO_STATE),
    (lambda: make()(ids(2, 3).float()), "int64 or int32 ids, got torch.float32"),
    (of(make(), ids(2, 3).to_sparse()), "tokens must be a dense tensor (b, t), got a sparse"),
    *((of(make(), wrong), "tokens must be a tensor (b, t), got ")
      for wrong in ([[1, 2]], None, "ab")),
    *((of(make().step, torch.zeros(2, dtype=torch.int64), wrong), f"{TWO} each layer")
      for wrong in (None, torch.zeros(2), ONE_STATE)),
    # also documents of one length, which have no padding
    (lambda: PLAIN(ONE_ROW, cu_seqlens=torch.tensor([0, 3, 6])), NO_MASK),
    (lambda: PLAIN(ONE_ROW, mask=torch.ones(1, 6).bool()), NO_MASK),
])  # fmt: skip

test_errors = refused(VALUES + TYPES)


@pytest.mark.parametrize(("bounds", "gathers"), [([0, 3, 6], 0), ([0, 2, 6], 2)])
def test_a_model_gathers_tokens_once(bounds: list[int], gathers: int) -> None:
    """Its layers are told that padding follows the tokens."""
    model = SequenceModel(5, 4, lambda i: Bedouin(4), num_layers=2).double()
    tokens = torch.randint(5, (1, 6))
    seen: list[Any] = []
    with Watching(lambda func, args, results: seen.append(func.overloadpacket)):
        found = model(tokens, cu_seqlens=torch.tensor(bounds))
    assert sum(map(seen.count, (torch.ops.aten.index_select, torch.ops.aten.scatter))) == gathers
    parts = [model(tokens[:, a:b]) for a, b in pairwise(bounds)]
    assert_close("logits", found, torch.cat(parts, 1), 1e-12)

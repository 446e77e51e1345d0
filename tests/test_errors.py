"""Every public error path of layers, mixers and states, by its message."""

import warnings
from functools import partial
from inspect import signature
from itertools import product
from operator import getitem
from typing import Any

import pytest
import torch
from tests.messages import of, of_kind, raises, refused
from torch.nn.utils.rnn import pack_sequence

from bedouin import (
    Bedouin,
    BedouinState,
    Bidirectional,
    FixedPointRNN,
    GatedDeltaNet,
    HouseholderProduct,
    Initialization,
    Kronecker,
    LowRank,
    Monarch,
    Tracker,
    TrackingDeltaNet,
    param_groups,
)
from bedouin.baselines import LSTM, Attention, DeltaNet, DeltaProduct, Mamba
from bedouin.decode import Decoder
from bedouin.integrations.fla import BedouinLayer
from bedouin.layers.fixed_point import FixedPointLayer
from bedouin.model import SequenceModel
from bedouin.solvers import Anderson, Direct, FixedCap, GammaCap, ImplicitAdjoint, Picard

OPTIONS = of_kind(TypeError, [
    ({"feedback_norm": "no"}, "feedback_norm must be True or False, got 'no'"),
    ({"layer_idx": True}, "layer_idx must be None or an int, got True"),
    ({"mixer": "householder"},
     "mixer must be a ChannelMixer such as LowRank(2), got 'householder'"),
    ({"solver": "direct"},
     "solver must be 'auto' or a solver object such as Direct() or Picard(), got 'direct'"),
    ({"adjoint": "implicit"},
     "adjoint must be None or an adjoint object such as OneStepAdjoint(), got 'implicit'"),
]) + of_kind(ValueError, [
    ({"expand": 0}, "expand must lie in (0, 1000.0], got 0"),
    ({"expand": 0.1}, "must be a whole number of channels, at least 1, got 0.1 * 4"),
    ({"expand": 1.3}, "got 1.3 * 4 = 5.2: for 5 use expand=5 / 4"),
    ({"num_householder": -1}, "num_householder must be at least 1, got -1"),
    ({"num_householder": 0, "beta_max": 1.0},
     "beta_max is that of reflections, of which num_householder=0 has none, got 1.0"),
    ({"beta_max": 2.5}, "beta_max must lie in (0, 2], got 2.5"),
    ({"mixer": LowRank(1), "num_householder": 2},
     "num_householder is shorthand for mixer=HouseholderProduct(...): give it or mixer, not both"),
    ({"mixer": HouseholderProduct(1), "beta_max": 2.0}, "beta_max is shorthand for"),
    ({"decay": "mamba2"}, "decay must be one of ("),
    *(({"feedback": value}, "feedback must be a collection of names from (")
      for value in (None, True, "mixer", [["mixer"]], {"mixer": False}, ("delta", "z"))),
    ({"feedback_init": -1}, "feedback_init must lie in [0, 1000.0], got -1"),
    ({"norm_eps": 0.0}, "norm_eps must lie in (0, 1], got 0.0"),
    ({"on_unconverged": "print"},
     "on_unconverged must be one of ('warn', 'raise', 'ignore'), got 'print'"),
    ({"num_heads": 3}, "num_heads must divide d_inner = ... = 8, got 3: use one"),
])  # fmt: skip


test_options = refused(OPTIONS, of(Bedouin, 4), of(FixedPointRNN, 4))

EARLIER = (
    *("erase", "projection", "feedback_scope", "feedback_heads", "num_groups", "bounded_x"),
    "feedback_noise",
)
"""Options of version 0.2.0."""
BY_THE_PAPER = "decay", "input_scale", "feedback", "mixer", "beta_max", "output", "bias"
READ_ONCE: list[tuple[Any, tuple[str, ...]]] = [
    (Bedouin(4), ("norm_eps", "beta_max", "num_householder", "d_state", "decay", "dtype")),
    (FixedPointRNN(4), ("norm_eps", "beta_max", "expand", "eigenvalues", "d_conv")),
    (LSTM(4), ("expand", "d_conv")),
    (Mamba(4), ("d_state", "eigenvalues")),
    (TrackingDeltaNet(4), ("num_heads", "norm_eps", "backend", "feedback_noise")),
]
READING: list[dict[str, Any]] = [
    {"solver": Anderson()}, {"solver": Picard(), "adjoint": ImplicitAdjoint(Picard())},
]  # fmt: skip
"""Solves that read the device."""
LAYER, MODEL = Bedouin(4), SequenceModel(5, 4, [Bedouin(4)])
STATE, WIDER = LAYER.init_state(2), Bedouin(8).init_state(2)
WINDOWED, PACKED = Bedouin(4, d_conv=3), pack_sequence([torch.zeros(3, 4)])
JOINS = BedouinState.cat, BedouinState.stack
PLACED = HouseholderProduct(1)
PLACED.register_parameter("weight", torch.nn.Parameter(torch.ones(1)))
MIXED = Bedouin(4).bfloat16()
MIXED.D.data = MIXED.D.data.float()
HOOKED = Bedouin(4)
HOOKED.register_forward_hook(lambda module, args, output: None)
CALLS = of_kind(ValueError, [
    (of(setattr, LAYER, "max_steps", 0), "max_steps must be at least 1, got 0"),
    (of(setattr, LAYER, "mixer", LowRank(1)),
     "mixer must have 18 raw values a token and head, for which the layer's projections were "
     "made, got LowRank(rank=1) with 9: make a new layer, Bedouin(..., mixer=...)"),
    (of(Bedouin, 4, mixer=PLACED, device="meta"),
     "mixer must be on the layer's device meta, got weight on cpu: make"),
    (of(LAYER.step, torch.zeros(2, 3), STATE),
     "x must have shape (b, m) with m = d_model = 4, got (2, 3)"),
    *((call, f"batch_size must be an int >= 0, got {size!r}") for size in (-1, 2.0, "2", True)
      for call in (of(LAYER.init_state, size), of(Decoder, LAYER, size, state=STATE[:1]))),
    (of(Decoder(MODEL, 2), torch.zeros(3, dtype=torch.int64)),
     "tokens must have shape (batch_size,) = (2,), got (3,)"),
    (of(Decoder, MODEL, 2, state=STATE),
     "state must be a tuple with one entry for each of the 1 layers, got "),
    (of(LAYER.step, torch.zeros(2, 4), WINDOWED.init_state(2)),
     "state.conv must be None, since the layer has no conv"),
    (of(WINDOWED.step, torch.zeros(2, 4), STATE), "state.conv must be a tensor of shape (2, 2, 8)"),
    (of(BedouinState.cat, [STATE, WINDOWED.init_state(1)]),
     "states of one layer, got tensors of shapes [(8, 16), (8,)] and [(8, 16), (8,), (2, 8)]"),
    *((of(join, wrong), "must get a list of at least one BedouinState, got")
      for join in JOINS for wrong in (list[BedouinState](), STATE)),
    (of(BedouinState.cat, [STATE[0]]), "cat needs states with a batch axis, got one that has no"),
    (of(BedouinState.stack, [STATE]), "stack needs states of single samples...: use cat"),
    (of(getitem, STATE[0], 0), "an index needs states with a batch axis"),
    (of(BedouinState.cat, [STATE, WIDER]), "cat needs states of one layer, got ...8... and ...16"),
    (of(Bedouin, 4, d_state=0), "d_state must be at least 1, got 0"),
    (of(Bedouin, 4, input_scale="tau"),
     "input_scale must be one of ('delta', 'bounded_delta', 'one_minus_decay'), got 'tau'"),
    (of(Bedouin, 4, initialization=Initialization(rates=(1.0, 0.1)), decay="griffin"),
     "rates must be 1 with decay 'griffin', got (1.0, 0.1): use decay='mamba'"),
    *((of(Bedouin, 4, feedback=iter(("delta", name))),
       f"feedback must not contain '{name}', ... 0.2.0")
      for name in ("x", "erase")),
    (of(Initialization, delta_from_x=-1.0), "delta_from_x must lie in [0, 1000.0], got -1"),
    (of(Initialization, rates=(1.0, 0.1, 0.1)), "rates must be a number, or a pair (first"),
    (of(Initialization, rates=0.0), "rates must lie in (0, inf], got 0.0"),
    (of(Initialization, rates=(1.0, float("inf"))), "rates must be a finite number, got inf"),
    (of(FixedPointRNN, 4, feedback=("B",)),
     "feedback must be a collection of names from ('mixer',), got ('B',)"),
    (of(HouseholderProduct, 0), "num_householder must be at least 1, got 0"),
    (of(LowRank, 0), "rank must be at least 1, got 0"),
    (of(Bedouin, 4, num_heads=1, mixer=Monarch((2, 3))),
     "factors must have the product 8, ... got (2, 3)"),
    (of(param_groups, torch.nn.Linear(2, 2), weight_decay=-0.1), "weight_decay must"),
    (of(Bedouin(2), torch.zeros(2, 4, 2), cu_seqlens=torch.tensor([0, 4])),
     "cu_seqlens needs a single row, x (1, t, m)"),
    (of(SequenceModel(5, 4, [LAYER], output_size=3).generate, torch.ones(1, 2).long(), 1),
     "generate needs a model whose classes are its input ids"),
    (of(LAYER.graphed, torch.randn(1, 2, 4)), "CUDA device, got cpu...call the layer itself"),
    (of(Bidirectional, Bedouin(4), Bedouin(8)), "must have one d_model, got 4 and 8"),
    (of(Bedouin(4, backend="triton"), torch.zeros(1, 1, 4)),
     "backend='triton' needs tensors on a CUDA device, got cpu"),
]) + of_kind(TypeError, [
    *((call, "D must have the dtype of the layer's projections torch.bfloat16, got torch.float32")
      for call in (of(MIXED, torch.zeros(1, 2, 4).bfloat16()),
                   of(MIXED.step, torch.zeros(1, 4).bfloat16(), MIXED.init_state(1)))),
    (of(Bedouin, 4, foo=1), "feedback_norm...solver...layer_idx...dtype"),
    (of(FixedPointLayer, 4), "abstract..._A"),
    (of(setattr, LAYER, "cap", 5), "cap must be a Cap such as FixedCap(20)"),
    (of(setattr, LAYER, "solver", "best"),
     "solver must be 'auto' or a solver object ... got 'best'"),
    *((call, f"x must be a tensor (b, m), got {type(wrong).__name__}")
      for wrong in ([0.0], None, PACKED)
      for call in (of(LAYER.step, wrong, STATE), of(Decoder(LAYER, 2), wrong))),
    *((of(layer.step, torch.zeros(2, 4), None),
       "state must not be None: make one with init_state(batch_size)")
      for layer in (LAYER, HOOKED)),
    (of(Decoder, torch.nn.Linear(4, 4), 2),
     "layer must be a Bedouin, a FixedPointRNN, a TrackingDeltaNet or one of its parts, or "),
    (of(Decoder(MODEL, 2), [1, 2]), "tokens must be a tensor (b,), got list"),
    *((of(join, [tuple(STATE)]), "must get a list of BedouinState, got one of tuple")
      for join in JOINS),
    (of(getitem, STATE, (0, 1)), "index must select samples of the batch, got the tuple"),
    (of(BedouinState._make, [torch.zeros(1, 2, 3)]), "..."),
    (of(Bedouin, 4, initialization=0.1), "initialization must be None or an Initialization such"),
    *((of(Bedouin, 4, **{name: 1}),
       f"Bedouin has no option {name}: version 0.2.0 ... use TrackingDeltaNet")
      for name in EARLIER),
    (of(FixedPointRNN, 4, projection="input"), "FixedPointRNN has no option projection: ... 0.2.0"),
    (of(Bedouin, 4, output=None), "Bedouin has no option output: Bedouin.from_paper"),
    (of(Initialization, rate=1.0), "Initialization has no option 'rate'; did you mean 'rates'?"),
    *((of(Initialization, **{name: 1}), f"Initialization has no option {name}: ... 0.2.0")
      for name in ("memory_heads", "memory_rates", "memory_delta")),
    (of(HouseholderProduct, k=1), "HouseholderProduct has no option 'k'"),
    (of(LowRank, ranks=1), "LowRank has no option 'ranks'; did you mean 'rank'?"),
    (of(Kronecker, 4), "factors must be None or a pair of ints, got 4"),
    (of(SequenceModel, 3, 4, tie=1), "SequenceModel has no option 'tie'"),
    (of(BedouinLayer, 8, d_model=8), "d_model is hidden_size here, got d_model=8: give that alone"),
    *((of(Bedouin.from_paper, 4, **{name: None}), f"{name} of from_paper is fixed by the paper")
      for name in BY_THE_PAPER),
    (of(Bedouin.from_paper, 8, decay="mamba"),
     "decay of from_paper is fixed by the paper, here to 'griffin', got 'mamba': leave it "),
    (of(Bedouin.from_paper, 8, num_heads=2), "num_heads"),
    (of(param_groups, [], weight_decay=0.1), "model must be an nn.Module, got list"),
    (of(Bidirectional, Bedouin(4), None), "backwards must be a module, got NoneType"),
    (of(Bidirectional(Bedouin(4), torch.nn.Linear(4, 4)), torch.zeros(1, 2, 4),
        mask=torch.ones(1, 2).bool()), "mixer Linear takes no mask"),
]) + of_kind(RuntimeError, [
    (of(Bedouin(4, device="meta", **solve), torch.empty(2, 5, 4, device="meta")),
     "nor on the meta device: use")
    for solve in READING
]) + of_kind(AttributeError, [
    (of(getattr, Bedouin, "recall"), "Bedouin has no recall: version 0.2.0 ... Tracking"),
    *((of(setattr, layer, name, 7),
       f"{name} of a {type(layer).__name__} is read by its constructor alone, got 7: make a new ")
      for layer, names in READ_ONCE for name in names),
])  # fmt: skip


test_calls = refused(CALLS)

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype")
    ROWS = [torch.ones(3, 4), torch.ones(5, 4)]
    NESTED = [torch.nested.nested_tensor(ROWS, layout=v) for v in (torch.jagged, torch.strided)]
INPUTS = of_kind(ValueError, [
    (torch.zeros(2, 4), "x must have shape (b, t, m) with m = d_model = 4, got (2, 4)"),
    (torch.zeros(2, 3, 5), "x must have shape (b, t, m) with m = d_model = 4, got (2, 3, 5)"),
    (torch.zeros(2, 3, 4, device="meta"), "x must be on the layer's device cpu, got meta"),
]) + of_kind(TypeError, [
    (torch.zeros(2, 3, 4, dtype=torch.int64),
     "x must have a floating dtype, got torch.int64: embed tokens first"),
    (torch.zeros(2, 3, 4, dtype=torch.float64),
     "x must have the layer's dtype torch.float32, got torch.float64"),
    (list(torch.zeros(2, 3, 4)),
     "x must be a tensor (b, t, m), got list: join its tensors with torch.stack"),
    (torch.zeros(2, 3, 4).tolist(),
     "x must be a tensor (b, t, m), got list: convert it with torch.as_tensor"),
    (pack_sequence([torch.zeros(3, 4)]),
     "x must be a tensor (b, t, m), got PackedSequence: pad it with "
     "torch.nn.utils.rnn.pad_packed_sequence(..., batch_first=True)"),
    (None, "x must be a tensor (b, t, m), got NoneType"),
    *((nested, f"x must be a dense tensor (b, t, m), got a nested tensor of layout {nested.layout}"
       ": pad it ...give mask, or join its parts and give cu_seqlens") for nested in NESTED),
    (torch.ones(2, 3, 4).to_sparse(),
     "x must be a dense tensor (b, t, m), got a sparse tensor of layout torch.sparse_coo: use "
     "x.to_dense()"),
])  # fmt: skip


KINDS: tuple[Any, ...] = (
    *(Bedouin, FixedPointRNN, TrackingDeltaNet, Tracker, GatedDeltaNet),
    *(LSTM, Mamba, DeltaNet, DeltaProduct, partial(Attention, num_heads=2)),
)
DTYPES = "torch.float32, torch.bfloat16, torch.float16, torch.float64"
OF_EVERY_LAYER = of_kind(ValueError, [
    ({"d_model": 0}, "d_model must be at least 1, got 0"),
    ({"d_conv": 0}, "d_conv must be at least 1, got 0"),
    ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
    ({"eigenvalues": "negative"},
     "eigenvalues must be one of ('positive', 'full'), got 'negative'"),
    ({"backend": "cuda"}, "backend must be one of ('auto', ..., got 'cuda'"),
]) + of_kind(TypeError, [
    ({"d_model": 8.0}, "d_model must be an int >= 1, got 8.0"),
    ({"layer_idx": "0"}, "layer_idx must be None or an int, got '0'"),
    ({"dtype": torch.int64}, f"dtype must be None or one of {DTYPES}, got torch.int64"),
    ({"foo": 2}, "has no option 'foo'. Valid: d_model, "),
])  # fmt: skip
"""Options, each tested for all layers that have it, and an unknown one."""
test_options_of_every_layer = refused(
    [
        (of(layer, **{"d_model": 4} | options), kind, message)
        for layer, (options, kind, message) in product(KINDS, OF_EVERY_LAYER)
        if options.keys() <= signature(layer).parameters.keys() | {"foo"}
    ]
)
test_inputs = refused(INPUTS, *(kind(4) for kind in KINDS))


@pytest.mark.parametrize(
    ("x_dtype", "dtype"), [(torch.float64, torch.float32), (torch.float32, torch.float64)]
)
def test_autocast_casts_no_float64(x_dtype: torch.dtype, dtype: torch.dtype) -> None:
    layer, x = Bedouin(4, dtype=dtype), torch.zeros(2, 3, 4, dtype=x_dtype)
    message = f"x must have the layer's dtype {dtype}, got {x_dtype}: convert one of them (torch."
    with torch.autocast("cpu", dtype=torch.bfloat16), raises(TypeError, message):
        layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16), raises(TypeError, message):
        layer.step(x[:, 0], layer.init_state(2))


ssm, y = torch.zeros(2, 8, 3), torch.zeros(2, 8)
STATES = of_kind(TypeError, [
    ((ssm, y),
     "state must be a BedouinState or None, got tuple: make one with "
     "init_state(batch_size) or BedouinState(ssm, y)"),
    (BedouinState(1.0, y),  # type: ignore[arg-type]
     "state.ssm must be a tensor (b, d, n), got float"),
]) + of_kind(ValueError, [
    (BedouinState(ssm[0], y[0]), "state.ssm must have shape (2, 8, 3), got (1, 8, 3)"),
    (BedouinState(ssm, y[:, :4]), "state.y must have shape (2, 8), got (2, 4)"),
    (BedouinState(ssm[..., :2], y), "state.ssm must have shape (2, 8, 3), got (2, 8, 2)"),
    (BedouinState(ssm.double(), y),
     "state.ssm must have dtype torch.float32 on cpu, got torch.float64 on cpu: use state.to("),
    (BedouinState(ssm, y.to("meta")), "on cpu, got torch.float32 on meta"),
])  # fmt: skip


WITH_STATES = Bedouin(4, d_state=3)
test_states = refused(
    STATES,
    lambda state: WITH_STATES(torch.zeros(2, 1, 4), state=state),
    of(WITH_STATES.step, torch.zeros(2, 4)),
    lambda state: Decoder(WITH_STATES, 2, state=state),
)


def test_options_that_a_call_reads_are_set() -> None:
    layer: Any = Bedouin(4)
    x = torch.randn(2, 3, 4)
    layer.solver, layer.max_steps, layer.backend = Picard(), 200, "reference"
    layer.on_unconverged, layer.layer_idx = "ignore", 3
    assert layer.cap == layer.max_steps == FixedCap(200)
    layer.max_steps = GammaCap(2.0, limit=200)
    assert layer.cap == GammaCap(2.0, limit=200)
    layer.mixer = HouseholderProduct(2, beta_max=1.5)
    assert layer(x).isfinite().all() and layer.stats is not None
    assert layer.stats.conditioning is None
    layer.solver = "auto"
    assert layer.solver == FixedPointRNN(4, mixer=LowRank(2)).solver == Direct()


def test_a_state_prints_its_shapes() -> None:
    state = Bedouin(4, d_state=3, d_conv=2).init_state(5)
    of = "torch.float32 on cpu"
    assert repr(state) == f"BedouinState(ssm=(5, 8, 3) {of}, y=(5, 8) {of}, conv=(5, 1, 8) {of})"
    assert repr(Bedouin(4).init_state(1)).endswith("conv=None)")
    assert str(LSTM(4).init_state(2)).startswith("LSTMState(")

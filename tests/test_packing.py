"""Padded rows and packed documents: each sequence gives what it gives alone."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import hypothesis
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.random_layers import random_layer, random_state
from torch import Tensor

from bedouin import Bedouin, BedouinState, FixedPointRNN, LowRank
from bedouin.layers.fixed_point import FixedPointLayer
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
    UnrolledAdjoint,
)
from bedouin.testing import assert_close, measure_growth

RNGS = st.randoms(use_true_random=False)
ATOL = 1e-14
"""Fixed points may be small differences of terms that are not, and which are rounded."""


def draw(rng: random.Random) -> FixedPointLayer:
    layer = random_layer(rng)
    hypothesis.note(f"{layer} {layer.extra_repr()}")
    torch.manual_seed(rng.randint(0, 999))
    return layer


def total(output: Tensor, state: BedouinState) -> Tensor:
    """A number with a different derivative for each value of output and state."""
    return sum(
        (
            (v * torch.linspace(0.5, 1.5, v.shape[-1], dtype=v.dtype)).sum()
            for v in (output, *state)
        ),
        torch.zeros(()),
    )


def check_alone(
    layer: FixedPointLayer,
    x: Tensor,  # (b, t, m)
    pieces: list[Tensor],  # l masks (b, t)
    before: Any,  # the state of l samples
    result: tuple[Tensor, BedouinState],  # (b, t, m) and the state of l samples
    rtol: float,
) -> None:
    """Values and every gradient are those of calls with the tokens of one piece after the other."""
    output, state = result
    inputs = [x, *before, *layer.parameters()]
    found = torch.autograd.grad(total(output, state), inputs, allow_unused=True)
    alone = torch.zeros((), dtype=x.dtype)
    expected_output = torch.zeros_like(output)
    for i, piece in enumerate(pieces):
        y, after = layer(x[piece].unsqueeze(0), before[i : i + 1], return_state=True)
        expected_output[piece] = y[0]
        assert_close(f"ssm {i}", state.ssm[i], after.ssm[0], rtol, ATOL)
        assert_close(f"y {i}", state.y[i], after.y[0], rtol, ATOL)
        alone = alone + total(y, after)
    assert_close("output", output, expected_output, rtol, ATOL)
    expected = torch.autograd.grad(alone, inputs, allow_unused=True)
    for i, (a, e) in enumerate(zip(found, expected, strict=True)):
        assert (a is None or not a.any()) if e is None else a is not None
        if e is not None and a is not None:
            assert_close(f"gradient {i}", a, e, 10 * rtol, 1e-13)


def largest_growth(layer: FixedPointLayer, x: Tensor, pieces: list[Tensor], before: Any) -> float:
    """The growth of rounding errors, in examples where it leaves enough digits to compare."""
    with torch.no_grad():
        growth = max(
            (
                measure_growth(layer, x[p].unsqueeze(0), state=before[[i]], num_directions=1)
                for i, p in enumerate(pieces)
            ),
            default=1.0,
        )
    assume(growth < 1e4)
    return growth


def leaves(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.requires_grad_()


@settings(max_examples=40)
@given(RNGS, st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3))
def test_padded_rows_are_the_rows_without_padding(
    rng: random.Random, rows: list[list[bool]]
) -> None:
    """Padding on the left, on the right, in the middle and everywhere, and NaN in it."""
    layer, mask = draw(rng), torch.tensor(rows)
    b, t = mask.shape
    x = torch.randn(b, t, layer.d_model, dtype=torch.float64)
    before = random_state(layer, b)
    pieces = [mask & (torch.arange(b) == i).unsqueeze(1) for i in range(b)]
    growth = largest_growth(layer, x, pieces, before)
    x[~mask] = torch.nan
    leaves(x, *before)
    output, state = layer(x, before, return_state=True, mask=mask)
    assert not output[~mask].any()
    empty = ~mask.any(1)
    assert torch.equal(state.ssm[empty], before.ssm[empty])
    assert torch.equal(state.y[empty], before.y[empty])
    check_alone(layer, x, pieces, before, (output, state), 1e-12 * growth)


@settings(max_examples=25)
@given(
    RNGS,
    st.lists(st.lists(st.booleans(), max_size=4), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
)
def test_documents_are_what_each_is_alone(
    rng: random.Random, documents: list[list[bool]], padded: bool, narrow: bool
) -> None:
    """Also those with padding in them, which has NaN."""
    layer = draw(rng)
    ends = torch.tensor([0, *map(len, documents)]).cumsum(0)
    mask = torch.tensor([real or not padded for document in documents for real in document])
    mask = mask.bool().unsqueeze(0)
    x = torch.randn(*mask.shape, layer.d_model, dtype=torch.float64)
    before = random_state(layer, len(documents))
    place = torch.arange(mask.shape[1]).unsqueeze(0)
    pieces = [
        (start <= place) & (place < stop) & mask
        for start, stop in zip(ends, ends[1:], strict=False)
    ]
    growth = largest_growth(layer, x, pieces, before)
    x[~mask] = torch.nan
    leaves(x, *before)
    cu_seqlens = ends.to(torch.int32 if narrow else torch.int64)
    options = {"mask": mask} if padded else {}
    result = layer(x, before, return_state=True, cu_seqlens=cu_seqlens, **options)
    assert layer.stats is not None
    assert layer.stats.num_steps.tolist() == [int(piece.any()) for piece in pieces]
    assert not result[0][~mask].any()
    check_alone(layer, x, pieces, before, result, 1e-12 * growth)


@settings(max_examples=25)
@given(
    RNGS,
    st.lists(st.lists(st.integers(0, 4), min_size=5, max_size=5), min_size=1, max_size=3),
    st.booleans(),
)
def test_indexed_documents_begin_anew(
    rng: random.Random, rows: list[list[int]], padded: bool
) -> None:
    """The incoming state enters the first document of each row, the last one's is returned.

    Padding, where the drawn number is more than 2, has indices that begin no document, and NaN.
    """
    layer = draw(rng)
    numbers = torch.tensor(rows)
    seq_idx, mask = numbers % 3, numbers < 3
    mask = mask if padded else torch.ones_like(mask)
    x = torch.randn(*seq_idx.shape, layer.d_model, dtype=torch.float64)
    x[~mask] = torch.nan
    before = random_state(layer, len(x))
    options = {"mask": mask} if padded else {}
    with torch.no_grad():
        output, state = layer(x, before, return_state=True, seq_idx=seq_idx, **options)
        expected = torch.zeros_like(output)
        worst = 1.0
        for i, row in enumerate(mask):
            _, counts = seq_idx[i][row].unique_consecutive(return_counts=True)
            after: Any = before[[i]]
            places = row.nonzero().flatten().split(counts.tolist())
            for document in places:
                incoming = after if document is places[0] else layer.init_state(1)
                tokens = x[i : i + 1, document]
                growth = measure_growth(layer, tokens, state=incoming)
                assume(growth < 1e4)
                worst = max(worst, growth)
                y, after = layer(tokens, incoming, return_state=True)
                expected[i, document] = y[0]
            assert_close("ssm", state.ssm[i : i + 1], after.ssm, 1e-12 * worst, ATOL)
            assert_close("y", state.y[i : i + 1], after.y, 1e-12 * worst, ATOL)
        assert_close("output", output, expected, 1e-12 * worst, ATOL)


KINDS: list[dict[str, Any]] = [
    {"solver": Direct()},
    {"solver": Direct(), "adjoint": UnrolledAdjoint()},
    {"solver": Direct(), "mixer": LowRank(2), "input_scale": "one_minus_decay"},
    {"solver": Picard(rtol=1e-13, atol=0.0)},
    {"solver": Picard(rtol=1e-3), "adjoint": OneStepAdjoint()},
    {"solver": Picard(rtol=1e-9, patience=2), "adjoint": PhantomAdjoint(2)},
    {"solver": Picard(rtol=0.1, stop_rule="paper"), "adjoint": OneStepAdjoint()},
    {"solver": Picard(rtol=1e-9), "adjoint": UnrolledAdjoint()},
    {"solver": Jacobi(rtol=1e-13, atol=0.0), "mixer": LowRank(2)},
    {"solver": Jacobi(rtol=1e-9), "adjoint": ImplicitAdjoint(Jacobi(rtol=1e-9, atol=0.0))},
    {"solver": Jacobi(rtol=1e-9), "adjoint": ImplicitAdjoint(Picard(rtol=1e-9, atol=0.0))},
    {"solver": Anderson(rtol=1e-9), "adjoint": ImplicitAdjoint(Anderson(rtol=1e-9))},
    {"solver": Broyden(rtol=1e-9), "adjoint": ImplicitAdjoint(Broyden(rtol=1e-9, atol=0.0))},
]


@pytest.mark.parametrize("options", KINDS, ids=lambda o: "-".join(map(str, o.values()))[:60])
@pytest.mark.parametrize(("num_heads", "documents"), [(1, True), (2, False)])
def test_statistics_are_those_of_the_tokens(
    options: dict[str, Any], num_heads: int, documents: bool
) -> None:
    """Steps, residual and pivot, of the solve and of its adjoint, for every solver and adjoint."""
    layer = Bedouin(4, num_heads=num_heads, dtype=torch.float64, **options)
    x = torch.randn(4, 6, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 1, 1], [0] * 6, [1] * 6]).bool()
    before = random_state(layer, 4)
    leaves(*before)
    # quasi-Newton steps sum over all tokens, in another order if there is padding
    rough = isinstance(layer.solver, Anderson | Broyden)
    places: dict[str, Tensor] = {"mask": mask}
    if documents:
        # one document in each row, as the padding has no index
        places["seq_idx"] = torch.where(mask, 7, torch.arange(6))
    result = layer(x, before, return_state=True, **places)
    found = layer.stats
    pieces = [mask & (torch.arange(4) == i).unsqueeze(1) for i in range(4)]
    check_alone(layer, x, pieces, before, result, 1e-7 if rough else 1e-11)
    assert found is not None and found.converged.all()
    for i, piece in enumerate(pieces):
        output = layer(x[piece].unsqueeze(0), before[i : i + 1])
        output.sum().backward()
        alone, pairs = layer.stats, [(found, layer.stats)]
        assert alone is not None
        if piece.any() and alone.backward is not None:
            assert found.backward is not None
        for many, one in pairs:
            assert one is not None
            assert many.num_steps[i] == one.num_steps[0]
            assert_close("residual", many.residual[i], one.residual[0], 1e-2, 1e-12)
            if one.conditioning is not None and many.conditioning is not None:
                assert_close("pivot", many.conditioning[i], one.conditioning[0], 1e-11)


@pytest.mark.parametrize(
    "adjoint", [ImplicitAdjoint(Picard(1e-9)), ImplicitAdjoint(Jacobi(1e-9, 0.0)), None], ids=str
)
def test_statistics_of_the_adjoint(adjoint: Adjoint | None) -> None:
    layer = Bedouin(4, adjoint=adjoint, dtype=torch.float64)
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 0, 0, 0], [1] * 6]).bool()
    weight = torch.randn(2, 6, 4, dtype=torch.float64)
    (layer(x, mask=mask) * weight).sum().backward()
    assert layer.stats is not None
    found = layer.stats.backward
    (layer(x[:1, 1:3]) * weight[:1, 1:3]).sum().backward()
    expected = layer.stats.backward
    assert found is not None and expected is not None and found.converged.all()
    assert found.num_steps[0] == expected.num_steps[0]
    assert_close("residual", found.residual[0], expected.residual[0], 1e-2, 1e-12)


@torch.no_grad()
def test_a_failing_sample_is_the_only_one_that_fails() -> None:
    layer = Bedouin(4, solver=Jacobi(), on_unconverged="ignore")
    x = torch.randn(3, 5, 4)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[0, 3:] = False
    x[0, 3:] = torch.inf
    x[1, 2] = torch.nan
    output = layer(x, mask=mask)
    assert layer.stats is not None and layer.stats.converged.tolist() == [True, False, True]
    assert output[[0, 2]].isfinite().all() and output[1, :2].isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Bedouin, FixedPointRNN])
def test_low_precision(kind: Any, dtype: torch.dtype) -> None:
    """Delta is exactly 0 in the padding, whose raw values are close to the limits of the dtype."""
    layer = kind(4, dtype=dtype)
    x, mask = torch.randn(2, 6, 4, dtype=dtype), torch.ones(2, 6, dtype=torch.bool)
    mask[0, 3:] = False
    output, state = layer(x, return_state=True, mask=mask)
    expected, after = layer(x[:1, :3], return_state=True)
    assert_close("output", output[:1, :3], expected, 1e-2)
    assert_close("ssm", state.ssm[:1], after.ssm, 1e-2)


@torch.no_grad()
def test_the_host_reads_no_mask() -> None:
    """The meta device holds no values that it could read."""
    layer = Bedouin(4, num_heads=2, device="meta")
    mask = torch.ones(2, 3, dtype=torch.bool, device="meta")
    output, state = layer(torch.zeros(2, 3, 4, device="meta"), return_state=True, mask=mask)
    assert output.shape == (2, 3, 4) and state.ssm.shape == (2, 8, 16)


@torch.no_grad()
def test_masks_of_an_ensemble() -> None:
    """vmap over stacked parameters, and over masks."""
    layers = [Bedouin(4, dtype=torch.float64) for _ in range(2)]
    x, mask = torch.randn(3, 5, 4, dtype=torch.float64), torch.rand(3, 5) > 0.4
    parameters, _ = torch.func.stack_module_state(list(layers))

    def run(values: dict[str, Tensor], mask: Tensor) -> Any:
        return torch.func.functional_call(layers[0], values, (x,), {"mask": mask})

    found = torch.func.vmap(run)(parameters, torch.stack([mask, ~mask]))
    for output, layer, rows in zip(found, layers, (mask, ~mask), strict=True):
        assert_close("output", output, layer(x, mask=rows), 1e-12)


def test_masks_compile_to_whole_graphs() -> None:
    layer = Bedouin(4, dtype=torch.float64)
    x, mask = torch.randn(2, 5, 4, dtype=torch.float64), torch.rand(2, 5) > 0.4
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.enable_grad():
        assert_close("output", compiled(x, mask=mask), layer(x, mask=mask), 1e-12)


def test_documents_under_the_compiler(caplog: pytest.LogCaptureFixture) -> None:
    """The graph breaks where the host reads them, without a word from the compiler."""
    layer = Bedouin(4, dtype=torch.float64)
    compiled = torch.compile(layer, backend="aot_eager")
    for t in (5, 7):
        x, bounds = torch.randn(1, t, 4, dtype=torch.float64), torch.tensor([0, 2, t])
        found = compiled(x, cu_seqlens=bounds)
        assert_close("output", found, layer(x, cu_seqlens=bounds), 1e-12)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@torch.no_grad()
def test_no_tokens_at_all() -> None:
    layer = Bedouin(4)
    before = random_state(layer, 2)
    none, ends = torch.zeros(1, 0, 4), torch.zeros(3, dtype=torch.int32)
    output, state = layer(none, before, return_state=True, cu_seqlens=ends)
    assert output.shape == (1, 0, 4) and torch.equal(state.ssm, before.ssm)
    output, state = layer(none, return_state=True, cu_seqlens=ends[:1])
    assert state.ssm.shape == (0, 8, 16)
    wide = torch.zeros(2, 0, 4)
    for options in (
        {"mask": torch.zeros(2, 0, dtype=torch.bool)},
        {"seq_idx": torch.zeros(2, 0).int()},
    ):
        output, state = layer(wide, before, return_state=True, **options)
        assert output.shape == (2, 0, 4) and torch.equal(state.y, before.y)
    output, state = layer(torch.zeros(0, 3, 4), None, True, seq_idx=torch.zeros(0, 3).int())
    assert output.shape == (0, 3, 4) and state.y.shape == (0, 8)
    output = layer(torch.zeros(0, 3, 4), mask=torch.zeros(0, 3).bool())
    assert output.shape == (0, 3, 4)


@contextmanager
def recorded_kernels() -> Iterator[set[str]]:
    """The names of the Triton kernels that the interpreter runs."""
    from triton.runtime.interpreter import GridExecutor

    found: set[str] = set()
    run = GridExecutor.__call__

    def record(executor: Any, *args: Any, **options: Any) -> Any:
        found.add(executor.fn.__name__)
        return run(executor, *args, **options)

    with patch.object(GridExecutor, "__call__", record):
        yield found


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Bedouin, {"solver": Direct()}),
        (Bedouin, {"solver": Direct(), "feedback": (), "decay": "griffin"}),
        (FixedPointRNN, {"solver": Direct(), "num_heads": 2}),
        (Bedouin, {"solver": Jacobi(rtol=1e-3, atol=0.0), "max_steps": 4}),
        (FixedPointRNN, {"solver": Picard(0.1, 0.0, stop_rule="paper"), "max_steps": 4}),
    ],
    ids=lambda v: "-".join(map(str, v.values()))[:40] if isinstance(v, dict) else v.__name__,
)
def test_masked_calls_run_the_same_kernels(kind: Any, options: dict[str, Any]) -> None:
    """As a call of that shape without a mask, and give what plain torch gives."""
    if kind is Bedouin:
        options = options | {"d_state": 2}
    options = options | {"num_householder": 1}
    layers = [kind(2, backend=backend, **options) for backend in ("triton", "reference")]
    layers[1].load_state_dict(layers[0].state_dict())
    mask = torch.tensor([[False, True, True], [False, False, False]])
    x = torch.randn(2, 3, 2)
    x[~mask] = torch.nan
    results = []
    for layer in layers:
        before = random_state(layers[0], 2)
        u = x.clone().requires_grad_()
        before = BedouinState(*(torch.full_like(v, 0.1).requires_grad_() for v in before))
        with recorded_kernels() as masked:
            output, state = layer(u, before, return_state=True, mask=mask)
            stats, inputs = layer.stats, [u, *before, *layer.parameters()]
            grads = torch.autograd.grad(total(output, state), inputs)
        results.append((output, *state, *grads))
        assert stats.converged.all()
        counts = stats.num_steps.tolist()
        if layer is layers[0]:
            kernels, steps = masked, counts
    assert counts == steps and counts[1] == 0
    for i, (found, expected) in enumerate(zip(*results, strict=True)):
        # the rounding of float32, which feedback amplifies
        assert_close(f"result {i}", found, expected, 2e-4, 1e-6)
    with recorded_kernels() as plain:
        output, state = layers[0](torch.randn(2, 3, 2).requires_grad_(), None, True)
        torch.autograd.grad(total(output, state), list(layers[0].parameters()))
    assert kernels == plain and kernels


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


ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
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
    ({"cu_seqlens": torch.tensor([0, 9]), "mask": torch.ones(1, 4).bool()}, ValueError,
     "cu_seqlens must ascend from 0 to t = 4, got [0, 9]"),
    ({"seq_idx": torch.ones(1, 4).int(), "mask": torch.ones(1, 4)}, TypeError,
     "mask must have dtype torch.bool"),
    ({"cu_seqlens": torch.tensor([0, 2, 4]), "state": Bedouin(2).init_state(1)}, ValueError,
     "state.ssm must have shape (2, 4, 16), got (1, 4, 16)"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), ERRORS, ids=lambda v: str(v)[:50])
def test_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        Bedouin(2)(torch.zeros(1, 4, 2), **options)
    assert message in str(caught.value)


def test_documents_need_a_single_row() -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens needs a single row, x \(1, t, m\)"):
        Bedouin(2)(torch.zeros(2, 4, 2), cu_seqlens=torch.tensor([0, 4]))
